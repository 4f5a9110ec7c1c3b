"""The worker's mirror of the running batch: the same rows as the core's, changed by the ops of each plan.

One row per request: its tokens, block table, counters and sampling parameters, all numpy, all persistent; a step
touches what changed. A MOVE copies a row over another, so rows stay dense and a decode step needs no indirection. Knows
no tensors and no model. `apply` makes no check that the core makes: it trusts the plan.
"""
from __future__ import annotations

import numpy as np

from ipc.messages import SchedulerOutput
from worker.sampling.penalties import PenaltyCounts
from worker.sampling.row_options import RowOptions

I32, I64 = np.int32, np.int64


class Unread:
    """Sampled tokens of one step whose values are not here yet: entry i belongs to row rows[i], -1 once that has left,
    at positions[i]. Follows the rows as they move."""

    __slots__ = ("rows", "positions")

    def __init__(self, rows: np.ndarray, positions: np.ndarray) -> None:
        self.rows, self.positions = rows, positions

    def move(self, row: int, last: int) -> None:
        """`row` leaves, `last` takes its place."""
        self.rows[self.rows == row] = -1
        if row != last:
            self.rows[self.rows == last] = row


class RequestState:
    """`seats` rows of up to `max_model_len` tokens. Memory of unused tails is never touched, so it costs nothing."""

    def __init__(self, seats: int, max_model_len: int, block_size: int) -> None:
        self.seats, self.block_size = seats, block_size
        self.n = 0
        self.stride = max_model_len + 1         # one more: the token after the last, never computed
        self.width = -(-max_model_len // block_size) + 1
        self.tokens = np.zeros((seats, self.stride), I32)
        self.block_table = np.zeros((seats, self.width), I32)
        self.flat_tokens, self.flat_table = self.tokens.reshape(-1), self.block_table.reshape(-1)
        self.token_base = np.arange(seats, dtype=I64) * self.stride
        self.table_base = np.arange(seats, dtype=I64) * self.width
        self.request_id = np.zeros(seats, I64)
        self.computed = np.zeros(seats, I64)    # tokens with KV in the pool once this step is done
        self.known = np.zeros(seats, I64)       # tokens in `tokens`
        self.num_blocks = np.zeros(seats, I64)
        self.num_prompt = np.zeros(seats, I64)
        self.floor = np.zeros(seats, I64)       # total tokens below which stop tokens are masked
        self.temperature = np.zeros(seats, np.float32)
        self.top_p = np.ones(seats, np.float32)
        self.min_p = np.zeros(seats, np.float32)
        self.top_k = np.zeros(seats, I64)
        self.seed = np.zeros(seats, np.uint64)
        self.choice = np.zeros(seats, I32)
        self.masks_eos = np.zeros(seats, bool)  # EOS may not be sampled below floor
        self.is_reusable = np.zeros(seats, bool)    # a later core may give its blocks to others of its salt
        self.num_drafts = np.zeros(seats, I64)  # of this step; they stand in `tokens` from `known` on
        self.stop_ids: list[list[int]] = [[] for _ in range(seats)]
        self._columns = (self.request_id, self.computed, self.known, self.num_blocks, self.num_prompt, self.floor,
                         self.temperature, self.top_p, self.min_p, self.top_k, self.seed, self.choice, self.masks_eos,
                         self.is_reusable)
        self.num_with_floor = 0                 # rows that have a floor above their prompt
        self.options: list[RowOptions | None] = [None] * seats
        self.num_with_options = 0
        self.penalties = PenaltyCounts()
        self.unread: Unread | None = None       # of the last step, until its result is here

    def clear(self) -> None:
        """Drop all rows."""
        self.block_table[:self.n, :int(self.num_blocks[:self.n].max(initial=0))] = 0
        for row in range(self.n):
            self._drop_options(row)
        self.n = 0
        self.num_with_floor = 0
        if self.unread is not None:
            self.unread.rows[:] = -1

    def apply(self, plan: SchedulerOutput) -> None:
        """The row ops of a plan: moves, new, extend, advance."""
        if plan.reset:
            self.clear()
        if plan.moves:
            pairs = np.frombuffer(plan.moves, I32).tolist()
            for row, last in zip(pairs[::2], pairs[1::2]):
                self._remove(row, last)
        if plan.stale:
            self.is_reusable[:self.n] = False
        if plan.new:
            self._append(plan)
        if plan.extend:
            pairs_array = np.frombuffer(plan.extend, I32)
            rows, blocks = pairs_array[::2], pairs_array[1::2]
            if not plan.counts and not plan.advance:        # each row at most once
                self.block_table[rows, self.num_blocks[rows]] = blocks
                self.num_blocks[rows] += 1
            else:
                for row, block in zip(rows.tolist(), blocks.tolist()):
                    self.block_table[row, self.num_blocks[row]] = block
                    self.num_blocks[row] += 1
        if plan.advance:
            pairs_array = np.frombuffer(plan.advance, I32)
            self.computed[pairs_array[::2]] += pairs_array[1::2]
        if plan.spec_token_ids:
            self._set_drafts(np.frombuffer(plan.spec_token_ids, I32))
        if self.n != plan.num_rows:
            raise RuntimeError(f"step {plan.step}: {self.n} rows here, {plan.num_rows} in the plan")

    def _set_drafts(self, pairs: np.ndarray) -> None:
        """Pairs (row, token), a row's together and in order."""
        rows, tokens = pairs[::2], pairs[1::2]
        begins = np.flatnonzero(np.diff(rows, prepend=-1))
        counts = np.diff(begins, append=len(rows))
        self.num_drafts[rows[begins]] = counts
        nth = np.arange(len(rows)) - np.repeat(begins, counts)
        self.flat_tokens[self.token_base[rows] + self.known[rows] + nth] = tokens

    def trim_blocks(self, rows: np.ndarray) -> None:
        """Rows whose drafts are verified keep the blocks of their known tokens, as the core does."""
        keep = -(-self.known[rows] // self.block_size)
        for row, count in zip(rows.tolist(), keep.tolist()):
            self.block_table[row, count:int(self.num_blocks[row])] = 0
        self.num_blocks[rows] = np.minimum(self.num_blocks[rows], keep)

    def _remove(self, row: int, last: int) -> None:
        if self.unread is not None:
            self.unread.move(row, last)
        self.num_with_floor -= bool(self.floor[row] > self.num_prompt[row])
        self._drop_options(row)
        self.options[row], self.options[last] = self.options[last], None
        if row != last:
            known, blocks = int(self.known[last]), int(self.num_blocks[last])
            self.tokens[row, :known] = self.tokens[last, :known]
            self.block_table[row, :blocks] = self.block_table[last, :blocks]
            self.block_table[row, blocks:max(blocks, int(self.num_blocks[row]))] = 0
            for column in self._columns:
                column[row] = column[last]
            self.stop_ids[row] = self.stop_ids[last]
        self.block_table[last, :int(self.num_blocks[last])] = 0
        self.n = last

    def _append(self, plan: SchedulerOutput) -> None:
        tokens, blocks = np.frombuffer(plan.new_tokens, I32), np.frombuffer(plan.new_blocks, I32)
        token_at = block_at = 0
        for new in plan.new:
            row, params = self.n, new.sampling_params
            self.n += 1
            self.tokens[row, :new.num_tokens] = tokens[token_at:token_at + new.num_tokens]
            self.block_table[row, :new.num_blocks] = blocks[block_at:block_at + new.num_blocks]
            token_at += new.num_tokens
            block_at += new.num_blocks
            self.request_id[row] = new.request_id
            self.computed[row] = new.num_computed_tokens
            self.known[row] = new.num_tokens
            self.num_blocks[row] = new.num_blocks
            self.num_prompt[row] = new.num_prompt_tokens
            self.floor[row] = new.num_prompt_tokens + params.min_tokens
            self.num_with_floor += params.min_tokens > 0
            self.temperature[row] = params.temperature
            self.top_p[row], self.min_p[row], self.top_k[row] = params.top_p, params.min_p, params.top_k
            self.seed[row] = params.seed or 0
            self.choice[row] = new.choice
            self.masks_eos[row] = not params.ignore_eos
            self.is_reusable[row] = new.is_reusable
            self.stop_ids[row] = params.stop_token_ids
            self.num_drafts[row] = 0
            options = self.options[row] = RowOptions.of(params, self.penalties)
            self.num_with_options += options is not None

    def count(self, counts: np.ndarray | None, sample_rows: np.ndarray) -> Unread:
        """A step is under way: its tokens (`counts` per row; None: one each) are computed, and each of `sample_rows`
        has one more, whose value `fill` enters later."""
        self.computed[:self.n] += 1 if counts is None else counts
        self.unread = Unread(sample_rows.copy(), self.known[sample_rows])
        self.known[sample_rows] += 1
        return self.unread

    def fill(self, unread: Unread, tokens: np.ndarray) -> None:
        """Enter what a step sampled, int32 [L]; -1: the row's logits were bad. Values of rows that left are dropped."""
        if self.unread is unread:
            self.unread = None
        is_here = unread.rows >= 0
        # A bad row goes on until the core ends it, and a step in flight may read its token: -1 is no id.
        self.flat_tokens[self.token_base[unread.rows[is_here]] + unread.positions[is_here]] = np.maximum(
            tokens[is_here], 0)

    def _drop_options(self, row: int) -> None:
        options, self.options[row] = self.options[row], None
        if options is not None:
            options.release(self.penalties)
            self.num_with_options -= 1

    def options_of(self, rows: np.ndarray) -> list[tuple[int, RowOptions]]:
        """(index into rows, options) of the rows that have any."""
        found = self.options
        return [(i, options) for i, row in enumerate(rows.tolist()) if (options := found[row]) is not None]

    def masked_tokens(self, rows: np.ndarray, offsets: np.ndarray | int,
                      eos_token_ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """(index into rows, token id) pairs that may not be sampled: EOS and stop ids below min_tokens. `offsets`: how
        many drafts come before the token."""
        index: list[int] = []
        ids: list[int] = []
        if self.num_with_floor:
            for i in (self.known[rows] + offsets < self.floor[rows] - 1).nonzero()[0].tolist():
                row = int(rows[i])
                banned = self.stop_ids[row] + (eos_token_ids if self.masks_eos[row] else [])
                index += [i] * len(banned)
                ids += banned
        return np.array(index, I64), np.array(ids, I64)
