"""The running batch kept on the device: only what a plan changes is sent, and one launch makes the next step's batch.

    host (RequestState)      rows, tokens, tables, counters: complete, one step behind in token values
    device (this file)       newest token, tokens computed and block table of each row, and the buffers a step reads
    a plan                   rows that move or enter (a list of jobs), then new blocks and the ids the host knows: one
                             packed copy; a decode step that extends no row sends nothing at all

So a step is launched while the one before still runs: its input tokens are read where the sampler left them. Buffers
have fixed addresses, which captured graphs need; a decode batch may be padded with rows of slot -1 and length 0.
Builds the same batches as worker/batch.py. Does not know the model, or when results are read.
"""
from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ipc.messages import SchedulerOutput
from worker.attention.base import BatchMeta, LastRows
from worker.batch import Batch, RowResults, is_worth_parting, sample_layout
from worker.decode_graphs import ladder
from worker.pinned import StagingRing
from worker.request_state import I32, I64, RequestState
from worker.row_ops import Columns, RowOps, StepBuffers


class ResidentBuilder(RowResults):
    """See BatchBuilder, whose place it takes. `pad`: rows of a decode batch -> rows of the padded one, None: as it is.
    """

    def __init__(self, state: RequestState, max_tokens: int, device: str, kernels: RowOps) -> None:
        self.state, self.kernels = state, kernels
        self.pad: Callable[[int], int | None] = lambda num_rows: None
        self.ring = StagingRing(device)
        rows = ladder(state.seats)[-1]

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)
        self.columns = Columns(zeros(rows), zeros(rows), zeros(rows, state.width))
        size = max(max_tokens, rows)
        ids, positions, slots = (zeros(size, dtype=torch.int64) for _ in range(3))
        self.buffers = StepBuffers(ids, positions, slots, zeros(rows), zeros(rows + 1))
        self.decode_starts = torch.arange(size + 1, dtype=torch.int32, device=device)
        self._iota, self._iota32 = np.arange(size + 1, dtype=I64), np.arange(size + 1, dtype=I32)
        self._used = 0                          # columns of the table that any row has used
        self._held = np.zeros(state.seats, I64) # blocks of each row's table
        self._is_changed = True                 # the rows differ from the last step's by more than one token each

    # ------------------------------------------------------------ rows

    def apply(self, plan: SchedulerOutput) -> None:
        """The row ops of a plan, on the host and, where rows move or enter, on the device."""
        state, before = self.state, self.state.n
        if plan.reset:
            self.columns.table[:before].zero_()
            before = 0
        self._trim(min(before, state.n))
        jobs, blocks = self._jobs(plan, before) if plan.moves or plan.new else ([], np.empty(0, I32))
        state.apply(plan)
        n = state.n
        self._held[:n] = state.num_blocks[:n]
        self._used = max(self._used, int(state.num_blocks[:n].max(initial=0)))
        if jobs:
            packed = self.ring.send([np.array(jobs, I32), blocks])
            self.kernels.move(self.columns, packed, len(jobs), self._used)
        self._is_changed = bool(plan.reset or plan.moves or plan.new or plan.advance or plan.extend)
        self._extend(plan)

    def _trim(self, num_rows: int) -> None:
        """Rows whose drafts were refused gave blocks back: the null block takes their place."""
        kept, held = self.state.num_blocks[:num_rows], self._held[:num_rows]
        counts = np.maximum(held - kept, 0)
        if not counts.any():
            return
        rows = np.repeat(self._iota[:num_rows], counts)
        index = kept[rows] + self._iota[:rows.size] - np.repeat(np.cumsum(counts) - counts, counts)
        at_row, at_index = self.ring.send([rows.astype(I32), index.astype(I32)]).long().view(2, -1)
        self.columns.table.index_put_((at_row, at_index), self.columns.table.new_zeros(()))

    def _jobs(self, plan: SchedulerOutput, before: int) -> tuple[list[tuple[int, int, int, int]], np.ndarray]:
        """(seat, row its content goes to or -1, new blocks or -1, their first) of each seat that is left or entered.

        A row that stays below the new end is never the source of a move, so every source is such a seat.
        """
        source: dict[int, int] = {}             # row -> seat whose content it has
        moves = np.frombuffer(plan.moves, I32).tolist()
        for row, last in zip(moves[::2], moves[1::2]):
            seat = source.pop(last, last)
            if row != last:
                source[row] = seat
        target = {seat: row for row, seat in source.items()}    # seat that is left -> row that has its content
        first_new = before - len(moves) // 2
        end = max(before, first_new + len(plan.new))
        jobs, first = [], 0
        for seat in range(first_new, end):
            index = seat - first_new
            num_new = plan.new[index].num_blocks if index < len(plan.new) else -1
            jobs.append((seat, target.get(seat, -1), num_new, first))
            first += max(num_new, 0)
        return jobs, np.frombuffer(plan.new_blocks, I32)

    def _extend(self, plan: SchedulerOutput) -> None:
        """Keep the plan's new blocks by row, in order, for the launch that makes the batch."""
        n = self.state.n
        pairs = np.frombuffer(plan.extend, I32)
        rows = pairs[::2]
        counts = np.bincount(rows, minlength=n) if rows.size else np.zeros(n, I64)
        self._begins = np.zeros(n + 1, I32)
        np.cumsum(counts, out=self._begins[1:])
        self._first = (self.state.num_blocks[:n] - counts).astype(I32)
        self._blocks = pairs[1::2][np.argsort(rows, kind="stable")]

    # ------------------------------------------------------------ batches

    def build(self, plan: SchedulerOutput) -> Batch | None:
        """The step of a plan whose row ops are applied. None when no row computes anything."""
        if self.state.n == 0:
            return None
        if not plan.counts:
            return self._build_decode(self.pad(self.state.n) or self.state.n)
        counts = np.ones(self.state.n, I64)
        pairs = np.frombuffer(plan.counts, I32)
        counts[pairs[::2]] = pairs[1::2]
        return self._build_ragged(counts, bool(plan.spec_token_ids))

    def _build_decode(self, padded: int) -> Batch:
        state, n, size = self.state, self.state.n, self.state.block_size
        known = self._known_ids(self._iota[:n], state.computed[:n])
        packed = None
        if self._is_changed or (known >= 0).any():
            packed = self.ring.send([state.computed[:n].astype(I32), known, self._first, self._begins, self._blocks])
        self.kernels.decode(self.columns, self.buffers, packed, n, padded, size)
        lengths = np.zeros(padded, I32)
        np.add(state.computed[:n], 1, out=lengths[:n], casting="unsafe")
        meta = self._meta(self.decode_starts[:padded + 1], self._iota32[:padded + 1], lengths,
                          self.columns.table[:padded], padded, 1)
        return Batch(self.buffers.ids[:padded], self.buffers.positions[:padded], meta, None, self._iota[:n], None, n)

    def _build_ragged(self, counts: np.ndarray, has_drafts: bool) -> Batch | None:
        """Rows compute different numbers of tokens. When none computes any, new blocks are entered all the same."""
        state, n, size = self.state, self.state.n, self.state.block_size
        active = counts.nonzero()[0]
        firsts = np.zeros(n + 1, I64)
        np.cumsum(counts, out=firsts[1:])
        total = int(firsts[-1])
        rows = np.repeat(self._iota[:n], counts)
        positions = state.computed[rows] + self._iota[:total] - firsts[rows]
        place = np.cumsum(counts > 0) - 1
        starts = np.append(firsts[active], total).astype(I32)
        lengths = (state.computed[active] + counts[active]).astype(I32)
        samples = lengths >= state.known[active]
        sample_rows, sample_tokens, offsets = sample_layout(state, active[samples], starts[1:][samples] - 1, has_drafts)
        num_samples = sample_rows.size
        parts = [state.computed[:n].astype(I32), self._first, self._begins, counts.astype(I32),
                 firsts[:n].astype(I32), place.astype(I32), self._known_ids(rows, positions), self._blocks]
        extra = [sample_rows.astype(I32), sample_tokens.astype(I32), active.astype(I32)]
        packed = self.ring.send(parts + extra)
        self.kernels.ragged(self.columns, self.buffers, packed, n, total, active.size, size)
        if total == 0:
            return None
        at = packed.numel() - active.size
        table = self.columns.table[:n] if active.size == n else self.columns.table.index_select(0, packed[at:])
        meta = self._meta(self.buffers.starts[:active.size + 1], starts, lengths, table, total, int(counts.max()))
        device_rows, index = packed[at - 2 * num_samples:at].long().view(2, -1)
        last = None
        if is_worth_parting(num_samples, total):
            places, slots = self.buffers.positions.index_select(0, index), self.buffers.slots.index_select(0, index)
            seen = (positions[sample_tokens] + 1).astype(I32)
            longest = int(seen.max(initial=0))
            own = self.columns.table.index_select(0, device_rows)[:, :-(-longest // size)]
            last = LastRows(index, BatchMeta(self.decode_starts[:num_samples + 1], (places + 1).int(), own, slots, size,
                                             self._iota32[:num_samples + 1], seen, 1, longest))
        return Batch(self.buffers.ids[:total], self.buffers.positions[:total], meta, index, sample_rows, counts, total,
                     offsets, device_rows, last)

    def blank(self, size: int) -> Batch:
        """A decode batch of padding rows only, with tables wide enough for any request: what is captured."""
        for buffer, value in zip(self.buffers[:4], (0, 0, -1, 0)):
            buffer[:size].fill_(value)
        meta = self._meta(self.decode_starts[:size + 1], self._iota32[:size + 1], np.zeros(size, I32),
                          self.columns.table[:size], size, 1, self.state.stride - 1)
        return Batch(self.buffers.ids[:size], self.buffers.positions[:size], meta, None, self._iota[:0], None, 0)

    def warm_up(self) -> None:
        """Launch each kernel once, on a row that is empty."""
        device = self.columns.table.device
        zeros = torch.zeros(16, dtype=torch.int32, device=device)
        self.kernels.move(self.columns, torch.tensor([0, -1, -1, -1, *[0] * 16], dtype=torch.int32).to(device), 1, 1)
        for packed in (None, zeros):
            self.kernels.decode(self.columns, self.buffers, packed, 0, 1, self.state.block_size)
        self.kernels.ragged(self.columns, self.buffers, zeros, 1, 0, 0, self.state.block_size)

    def sampled(self, batch: Batch, tokens: Tensor) -> None:
        """Keep the step's tokens, int32 [L] on the device, as the newest of their rows. -1, of a bad row, is no id."""
        if batch.logits_index is None:
            torch.clamp(tokens, min=0, out=self.columns.newest[:len(tokens)])
        elif batch.device_rows is not None:
            self.columns.newest.index_copy_(0, batch.device_rows, tokens.clamp_min(0))

    def _known_ids(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Token ids of these positions as the host has them, int32; -1 where a result is still on its way."""
        state = self.state
        ids = state.flat_tokens.take(state.token_base[rows] + positions)
        if state.unread is not None:
            newest = np.full(state.n, -1, I64)
            at = state.unread.rows >= 0
            newest[state.unread.rows[at]] = state.unread.positions[at]
            ids[newest[rows] == positions] = -1
        return ids

    def _meta(self, starts: Tensor, starts_cpu: np.ndarray, lengths_cpu: np.ndarray, table: Tensor, num_tokens: int,
              max_query_len: int, longest: int = 0) -> BatchMeta:
        longest = longest or int(lengths_cpu.max())
        used = -(-longest // self.state.block_size)
        return BatchMeta(starts, self.buffers.lengths[:len(lengths_cpu)], table[:, :used],
                         self.buffers.slots[:num_tokens], self.state.block_size, starts_cpu, lengths_cpu, max_query_len,
                         longest)
