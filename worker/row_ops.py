"""Rows that move or enter, and the batch of a step made from rows: in torch, the reference of worker/kernels/rows.py,
whose comments draw the packed numbers. Does not know plans: worker/device_rows.py packs them.
"""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

JOB = 4                                         # numbers of a job of `move`


class Columns(NamedTuple):
    """Per seat: newest token and tokens computed, int32 [seats]; block table int32 [seats, W]."""

    newest: Tensor
    computed: Tensor
    table: Tensor


class StepBuffers(NamedTuple):
    """What a step reads: ids, positions, slots int64 [capacity]; lengths int32 [seats], starts int32 [seats + 1]."""

    ids: Tensor
    positions: Tensor
    slots: Tensor
    lengths: Tensor
    starts: Tensor


class RowOps:
    """Stateless; each is one launch on a device."""

    def move(self, columns: Columns, jobs: Tensor, num_jobs: int, used: int) -> None:
        """jobs int32: num_jobs times (seat, row its content moves to or -1, blocks of the row that enters it or -1,
        where they begin), then the list of blocks. `used`: columns of the table that any row has used."""
        blocks = jobs[num_jobs * JOB:]
        for seat, target, num_new, first in jobs[:num_jobs * JOB].view(-1, JOB).tolist():
            if target >= 0:
                columns.newest[target] = columns.newest[seat]
                columns.table[target, :used] = columns.table[seat, :used]
            columns.table[seat, :used] = 0
            if num_new > 0:
                columns.table[seat, :num_new] = blocks[first:first + num_new]

    def decode(self, columns: Columns, out: StepBuffers, packed: Tensor | None, num_rows: int, padded: int,
               block_size: int) -> None:
        """The first `padded` entries of `out` are the step's. packed None: nothing has changed but newest tokens."""
        n, tokens = num_rows, columns.newest[:num_rows]
        if packed is not None:
            columns.computed[:n] = packed[:n]
            tokens = torch.where(packed[n:2 * n] >= 0, packed[n:2 * n], tokens)
            _extend(columns.table, packed[2 * n:3 * n], packed[3 * n:4 * n + 1], packed[4 * n + 1:])
        position = columns.computed[:n].long()
        for buffer, value in zip(out[:4], (0, 0, -1, 0)):
            buffer[n:padded] = value
        out.ids[:n], out.positions[:n], out.lengths[:n] = tokens, position, position + 1
        blocks = columns.table[:n].gather(1, (position // block_size)[:, None])[:, 0]
        out.slots[:n] = blocks.long() * block_size + position % block_size
        columns.computed[:n] += 1

    def ragged(self, columns: Columns, out: StepBuffers, packed: Tensor, num_rows: int, num_tokens: int,
               num_active: int, block_size: int) -> None:
        """`num_active` rows compute `num_tokens` tokens; as many entries of `out` are the step's."""
        n, known = num_rows, packed[6 * num_rows + 1:]
        computed, index, begins = packed[:n], packed[n:2 * n], packed[2 * n:3 * n + 1]
        count, first = packed[3 * n + 1:4 * n + 1], packed[4 * n + 1:5 * n + 1]
        _extend(columns.table, index, begins, known[num_tokens:])
        rows = torch.repeat_interleave(torch.arange(n, device=packed.device), count)
        position = (computed[rows] + torch.arange(num_tokens, device=packed.device) - first[rows]).long()
        known = known[:num_tokens]
        out.ids[:num_tokens] = torch.where(known >= 0, known, columns.newest[rows])
        out.positions[:num_tokens] = position
        out.slots[:num_tokens] = columns.table[rows, position // block_size].long() * block_size + position % block_size
        active = count > 0
        out.lengths[:num_active] = (computed + count)[active]
        out.starts[:num_active] = first[active]
        out.starts[num_active] = num_tokens
        columns.computed[:n] = computed + count


def _extend(table: Tensor, index: Tensor, begins: Tensor, blocks: Tensor) -> None:
    counts = begins.diff()
    rows = torch.repeat_interleave(torch.arange(len(counts), device=table.device), counts)
    at = torch.arange(len(rows), device=table.device)
    table[rows, index[rows] + at - begins[rows]] = blocks[:len(rows)]


TORCH_ROW_OPS = RowOps()
