"""From rows and a plan to one flat batch: ids, positions, slots and attention's metadata.

    row:              0 (chunk of 3)   1 (decode)   2 (decode)   3 (new, 4 tokens)
    ids:              t6 t7 t8         t41          t9           t0 t1 t2 t3
    positions:        6  7  8          41           9            0  1  2  3
    query_start_loc:  0                3            4            5             9
    seq_lens:         9                42           10           4
    logits_index:           2          3            4                       8

A row with d drafts computes its newest token and the drafts, and has logits at each of these 1 + d tokens.

A decode step is about a dozen numpy calls over persistent buffers. Position p of a row is slot
table[p // block_size] * block_size + p % block_size. Does not know the model.
"""
from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from ipc.messages import SchedulerOutput
from worker.attention.base import BatchMeta, LastRows
from worker.request_state import I32, I64, RequestState
from worker.spec_decode.verify import accept

NO_PAIRS = np.empty(0, I32)


@dataclasses.dataclass(slots=True)
class Batch:
    """One step. Arrays are views of the builder's buffers: valid until the next build."""
    input_ids: Tensor                           # [N] int64
    positions: Tensor                           # [N] int64
    meta: BatchMeta
    logits_index: Tensor | None                 # [L] int64, rows of [N] to sample from; None: all of them
    sample_rows: np.ndarray                     # [L] rows whose next token these logits choose
    counts: np.ndarray | None                   # [R] tokens per row; None: one each
    num_tokens: int
    offsets: np.ndarray | None = None           # [L] drafts before the token; None: no row has drafts
    device_rows: Tensor | None = None           # sample_rows on the device, where the batch was made there
    # Of logits_index, when there are other tokens than those and nobody reads their hidden states.
    last: LastRows | None = None

    def with_logits(self, hidden: Tensor) -> Tensor:
        """What the model gave for this batch -> hidden [L, E] of the rows that have logits."""
        if self.logits_index is None or self.last is not None:
            return hidden
        return hidden.index_select(0, self.logits_index)


def sample_layout(state: RequestState, sampling: np.ndarray, last: np.ndarray,
                  has_drafts: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """(rows, tokens of the step that have logits, drafts before each) for rows that sample, each after its token
    `last`. A row with drafts has logits at each of its tokens."""
    if not has_drafts:
        return sampling, last, None
    num = state.num_drafts[sampling] + 1
    ends = np.cumsum(num)
    offsets = np.arange(int(ends[-1]) if ends.size else 0) - np.repeat(ends - num, num)
    return np.repeat(sampling, num), np.repeat(last - num + 1, num) + offsets, offsets


def is_worth_parting(num_logits: int, num_tokens: int) -> bool:
    """Whether the last layer should go on with the rows that have logits alone: they must be brought together."""
    return 2 * num_logits <= num_tokens


class RowResults:
    """Enters what a step gave into the rows; what both builders share."""

    state: RequestState

    def advance(self, batch: Batch | None, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Enter the step's result: `tokens` int32 [L] for batch.sample_rows (-1: the row's logits were bad).

        Returns the result's columns: one token per row, -1 where nothing was sampled; and pairs (row, token) of tokens
        after a row's first one.
        """
        state, n = self.state, self.state.n
        if batch is None:
            return np.full(n, -1, I32), NO_PAIRS
        if batch.offsets is not None:
            return self._advance_drafted(batch, tokens, batch.offsets)
        state.fill(state.count(batch.counts, batch.sample_rows), tokens)
        return result_column(batch, tokens, n), NO_PAIRS

    def _advance_drafted(self, batch: Batch, tokens: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As advance, when rows have drafts: the right ones stand, and the token after them."""
        state, n = self.state, self.state.n
        stands = accept(state, batch.sample_rows, offsets, tokens)
        rows, offsets, tokens = batch.sample_rows[stands], offsets[stands], tokens[stands]
        is_first = offsets == 0
        drafted = rows[is_first & (state.num_drafts[rows] > 0)]
        if batch.counts is None:
            raise RuntimeError("a step with drafts computes one token a row")
        state.computed[:n] += batch.counts
        state.flat_tokens[state.token_base[rows] + state.known[rows] + offsets] = np.maximum(tokens, 0)
        state.known[:n] += np.bincount(rows, minlength=n)
        state.computed[drafted] = state.known[drafted] - 1
        state.num_drafts[drafted] = 0
        state.trim_blocks(drafted)
        column = np.full(n, -1, I32)
        column[rows[is_first]] = tokens[is_first]
        more = np.stack([rows[~is_first].astype(I32), tokens[~is_first]], axis=1).reshape(-1)
        return column, more


class BatchBuilder(RowResults):
    """Buffers for up to `max_tokens` tokens a step."""

    def __init__(self, state: RequestState, max_tokens: int, device: str = "cpu") -> None:
        self.state, self.device = state, device
        size = max(max_tokens, state.seats) + 1
        self._iota = np.arange(size, dtype=I64)
        self._iota32 = self._iota.astype(I32)
        self._ids = np.zeros(size, I64)
        self._ids32 = np.zeros(size, I32)
        self._positions = np.zeros(size, I64)
        self._slots = np.zeros(size, I64)
        self._scratch = np.zeros(size, I64)
        self._lengths = np.zeros(state.seats, I32)

    def apply(self, plan: SchedulerOutput) -> None:
        """The row ops of a plan."""
        self.state.apply(plan)

    def build(self, plan: SchedulerOutput) -> Batch | None:
        """Lay out the step of a plan whose row ops are applied. None when no row computes anything."""
        if self.state.n == 0:
            return None
        if not plan.counts:
            return self._build_decode()
        counts = np.ones(self.state.n, I64)
        pairs = np.frombuffer(plan.counts, I32)
        counts[pairs[::2]] = pairs[1::2]
        return self._build_ragged(counts, bool(plan.spec_token_ids)) if counts.any() else None

    def _build_decode(self) -> Batch:
        """Every row computes its newest token."""
        state, n, size = self.state, self.state.n, self.state.block_size
        computed = state.computed[:n]
        ids, positions, slots, scratch = self._ids[:n], self._positions[:n], self._slots[:n], self._scratch[:n]
        positions[:] = computed
        np.add(state.token_base[:n], computed, out=scratch)
        state.flat_tokens.take(scratch, out=self._ids32[:n], mode="clip")
        ids[:] = self._ids32[:n]
        np.floor_divide(computed, size, out=scratch)
        scratch += state.table_base[:n]
        np.multiply(state.flat_table.take(scratch, mode="clip"), size, out=slots)
        np.remainder(computed, size, out=scratch)
        slots += scratch
        lengths = self._lengths[:n]
        np.add(computed, 1, out=lengths, casting="unsafe")
        meta = self._meta(self._iota32[:n + 1], lengths, state.block_table[:n], slots, 1)
        return Batch(self._tensor(ids), self._tensor(positions), meta, None, self._iota[:n], None, n)

    def _build_ragged(self, counts: np.ndarray, has_drafts: bool) -> Batch:
        """Rows compute different numbers of tokens, some none."""
        state, size = self.state, self.state.block_size
        active = counts.nonzero()[0]
        n, some = counts[active], active.size != counts.size
        computed = state.computed[active]
        starts = np.zeros(active.size + 1, I32)
        np.cumsum(n, out=starts[1:])
        total = int(starts[-1])
        index = np.repeat(self._iota[:active.size], n)      # entry of `active` for each token
        row = active[index]
        positions, slots, ids = self._positions[:total], self._slots[:total], self._ids[:total]
        np.subtract(self._iota[:total], starts[index], out=positions)
        positions += computed[index]
        ids[:] = state.flat_tokens.take(state.token_base[row] + positions)
        np.multiply(state.flat_table.take(state.table_base[row] + positions // size), size, out=slots)
        slots += positions % size
        lengths = (computed + n).astype(I32)
        table = state.block_table[active] if some else state.block_table[:active.size]
        meta = self._meta(starts, lengths, table, slots, int(n.max()))
        samples = lengths >= state.known[active]
        sampling, last = active[samples], (starts[1:][samples] - 1).astype(I64)
        rows, index, offsets = sample_layout(state, sampling, last, has_drafts)
        logits_index = self._tensor(index)
        batch = Batch(self._tensor(ids), self._tensor(positions), meta, logits_index, rows, counts, total, offsets)
        if is_worth_parting(index.size, total):
            own = self._meta(self._iota32[:index.size + 1], (positions[index] + 1).astype(I32),
                             state.block_table[rows], slots[index], 1)
            batch.last = LastRows(logits_index, own)
        return batch

    def _meta(self, starts: np.ndarray, lengths: np.ndarray, table: np.ndarray, slots: np.ndarray,
              max_query_len: int) -> BatchMeta:
        longest = int(lengths.max(initial=0))
        used = -(-longest // self.state.block_size)
        return BatchMeta(query_start_loc=self._tensor(starts), seq_lens=self._tensor(lengths),
                         block_table=self._tensor(table[:, :used]), slot_mapping=self._tensor(slots),
                         block_size=self.state.block_size, query_start_loc_cpu=starts, seq_lens_cpu=lengths,
                         max_query_len=max_query_len, max_seq_len=longest)

    def _tensor(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self.device == "cpu" else tensor.to(self.device)


def result_column(batch: Batch | None, tokens: np.ndarray, num_rows: int) -> np.ndarray:
    """One entry per row of the plan, -1 where nothing was sampled."""
    if batch is not None and batch.counts is None:
        return tokens
    column = np.full(num_rows, -1, I32)
    if batch is not None:
        column[batch.sample_rows] = tokens
    return column
