"""The running batch on the device: rows that move or enter, and the batch of the next step, made from them.

    move_rows      a plan's rows that leave, move and enter: one program a seat, so that a seat is read before it is
                   written. Only when there are such rows.
    decode_rows    every row computes its newest token: ids, positions, slots, lengths; rows past the last are padding
    ragged_rows    rows compute different numbers of tokens

Each is one launch over columns that stay on the device; what the host knows better travels in one packed int32 copy.
Newest tokens are read where the sampler left them, so a step can be launched before the last one's result is known.
Does not know plans: worker/device_rows.py packs them. References: worker/row_ops.py.
"""

# mypy: allow-untyped-defs
# (kernels: their parameters are Triton's, not Python's)
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from worker.row_ops import JOB, Columns, RowOps, StepBuffers

_BLOCK = 128


@triton.jit(do_not_specialize=["used", "num_jobs"], do_not_specialize_on_alignment=["jobs_ptr"])
def move_rows_kernel(newest_ptr, table_ptr, jobs_ptr, used, num_jobs, stride_table, JOB: tl.constexpr,
                     BLOCK: tl.constexpr):
    """Grid (jobs,)."""
    job = jobs_ptr + tl.program_id(0) * JOB
    blocks_ptr = jobs_ptr + num_jobs * JOB
    seat = tl.load(job).to(tl.int64)
    target = tl.load(job + 1).to(tl.int64)
    num_new = tl.load(job + 2)
    first = tl.load(job + 3)
    if target >= 0:
        tl.store(newest_ptr + target, tl.load(newest_ptr + seat))
    for begin in range(0, used, BLOCK):
        index = begin + tl.arange(0, BLOCK)
        mask = index < used
        if target >= 0:
            moved = tl.load(table_ptr + seat * stride_table + index, mask=mask, other=0)
            tl.store(table_ptr + target * stride_table + index, moved, mask=mask)
        fresh = tl.load(blocks_ptr + first + index, mask=mask & (index < num_new), other=0)
        tl.store(table_ptr + seat * stride_table + index, fresh, mask=mask)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["packed_ptr"])
def decode_rows_kernel(ids_ptr, positions_ptr, slots_ptr, lengths_ptr, newest_ptr, computed_ptr, table_ptr, packed_ptr,
                       num_rows, stride_table, block_size, HAS_CHANGES: tl.constexpr):
    """Grid (rows and padding,). packed: computed | host id or -1 | first index of new blocks | their begin [n + 1] |
    new blocks."""
    row = tl.program_id(0)
    if row >= num_rows:
        tl.store(ids_ptr + row, 0)
        tl.store(positions_ptr + row, 0)
        tl.store(slots_ptr + row, -1)
        tl.store(lengths_ptr + row, 0)
        return
    token = tl.load(newest_ptr + row)
    table = table_ptr + row.to(tl.int64) * stride_table
    if HAS_CHANGES:
        position = tl.load(packed_ptr + row)
        known = tl.load(packed_ptr + num_rows + row)
        token = tl.where(known >= 0, known, token)
        index = tl.load(packed_ptr + 2 * num_rows + row)
        begin = tl.load(packed_ptr + 3 * num_rows + row)
        end = tl.load(packed_ptr + 3 * num_rows + row + 1)
        for at in range(begin, end):
            tl.store(table + index + at - begin, tl.load(packed_ptr + 4 * num_rows + 1 + at))
        tl.debug_barrier()
    else:
        position = tl.load(computed_ptr + row)
    block = tl.load(table + position // block_size).to(tl.int64)
    tl.store(ids_ptr + row, token.to(tl.int64))
    tl.store(positions_ptr + row, position.to(tl.int64))
    tl.store(slots_ptr + row, block * block_size + position % block_size)
    tl.store(lengths_ptr + row, position + 1)
    tl.store(computed_ptr + row, position + 1)


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "num_active"], do_not_specialize_on_alignment=["packed_ptr"])
def ragged_rows_kernel(ids_ptr, positions_ptr, slots_ptr, lengths_ptr, starts_ptr, newest_ptr, computed_ptr, table_ptr,
                       packed_ptr, num_rows, num_tokens, num_active, stride_table, block_size, BLOCK: tl.constexpr):
    """Grid (rows,). packed: computed | first index of new blocks | their begin [n + 1] | count | first token |
    place among rows that compute | host id or -1 of each token | new blocks."""
    row = tl.program_id(0)
    table = table_ptr + row.to(tl.int64) * stride_table
    computed = tl.load(packed_ptr + row)
    index = tl.load(packed_ptr + num_rows + row)
    begin = tl.load(packed_ptr + 2 * num_rows + row)
    end = tl.load(packed_ptr + 2 * num_rows + row + 1)
    count = tl.load(packed_ptr + 3 * num_rows + 1 + row)
    first = tl.load(packed_ptr + 4 * num_rows + 1 + row)
    place = tl.load(packed_ptr + 5 * num_rows + 1 + row)
    known_ptr = packed_ptr + 6 * num_rows + 1
    for at in range(begin, end):
        tl.store(table + index + at - begin, tl.load(known_ptr + num_tokens + at))
    tl.debug_barrier()
    newest = tl.load(newest_ptr + row)
    for done in range(0, count, BLOCK):
        offsets = done + tl.arange(0, BLOCK)
        mask = offsets < count
        known = tl.load(known_ptr + first + offsets, mask=mask, other=0)
        position = computed + offsets
        block = tl.load(table + position // block_size, mask=mask, other=0).to(tl.int64)
        tl.store(ids_ptr + first + offsets, tl.where(known >= 0, known, newest).to(tl.int64), mask=mask)
        tl.store(positions_ptr + first + offsets, position.to(tl.int64), mask=mask)
        tl.store(slots_ptr + first + offsets, block * block_size + position % block_size, mask=mask)
    if count > 0:
        tl.store(lengths_ptr + place, computed + count)
        tl.store(starts_ptr + place, first)
        if place == num_active - 1:
            tl.store(starts_ptr + num_active, num_tokens)
    tl.store(computed_ptr + row, computed + count)


class TritonRowOps(RowOps):
    """The three launches."""

    def move(self, columns: Columns, jobs: Tensor, num_jobs: int, used: int) -> None:
        move_rows_kernel[(num_jobs,)](columns.newest, columns.table, jobs, used, num_jobs, columns.table.stride(0),
                                      JOB=JOB, BLOCK=_BLOCK, num_warps=1)

    def decode(self, columns: Columns, out: StepBuffers, packed: Tensor | None, num_rows: int, padded: int,
               block_size: int) -> None:
        decode_rows_kernel[(padded,)](
            out.ids, out.positions, out.slots, out.lengths, columns.newest, columns.computed, columns.table,
            columns.computed if packed is None else packed, num_rows, columns.table.stride(0), block_size,
            HAS_CHANGES=packed is not None, num_warps=1)

    def ragged(self, columns: Columns, out: StepBuffers, packed: Tensor, num_rows: int, num_tokens: int,
               num_active: int, block_size: int) -> None:
        ragged_rows_kernel[(num_rows,)](
            out.ids, out.positions, out.slots, out.lengths, out.starts, columns.newest, columns.computed, columns.table,
            packed, num_rows, num_tokens, num_active, columns.table.stride(0), block_size, BLOCK=_BLOCK, num_warps=4)


TRITON_ROW_OPS: RowOps = TritonRowOps()
