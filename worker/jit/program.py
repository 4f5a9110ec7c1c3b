"""A program: a list of operations over fixed buffers, run by a team of threads for one step.

One operation is a row of 40 int64: what to do, and the addresses and sizes it needs. The list is made once; a step only
changes the step record (step.py). Adding an operation: a kernel file with its field numbers, a code here, a branch in
`prepare` (how many units) and in `run_unit`.

    0 code   1 units of this step   2 enabled for rows up to (0: any)   8.. fields of the operation
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from worker.jit import attend, embed, matmul, norm, rope, silu
from worker.jit import step as st
from worker.jit.quantize import quantize_row
from worker.jit.vector import bits_to_f32, device, get_i64, merged

CODE, NUM_UNITS = 0, 1
OP_FIELDS = 40
OP_BYTES = 8 * OP_FIELDS
EMBED, NORM, MATMUL, ROPE, ATTEND, MERGE, SILU, QUANTIZE = range(1, 9)
# Fields of QUANTIZE.
X, LDX, SIZE, Q, SIDE, LD_SIDE = range(8, 14)
_ROWS_PER_UNIT = 8


@device
def prepare(op, step, num_threads):  # type: ignore[no-untyped-def]
    """Units of the operation in this step. Runs in the calling thread before the step is open."""
    code, rows = get_i64(op, CODE), get_i64(step, st.NUM_ROWS)
    if code == MATMUL:
        return matmul.matmul_units(op, rows, num_threads)
    if code == ATTEND:
        whole = get_i64(step, st.NUM_WHOLE)
        return whole + (get_i64(step, st.NUM_TASKS) - whole) * get_i64(step, st.KV_HEADS)
    per_unit = _rows_per_unit(rows, num_threads)
    return (rows + per_unit - 1) // per_unit


@device
def _rows_per_unit(rows, num_threads):  # type: ignore[no-untyped-def]
    return max(1, min(_ROWS_PER_UNIT, rows // (4 * num_threads)))


@merged
def run_unit(op, step, unit, thread):  # type: ignore[no-untyped-def]
    code, rows = get_i64(op, CODE), get_i64(step, st.NUM_ROWS)
    if code == MATMUL:
        matmul.matmul_unit(op, unit, rows, thread)
        return
    if code == ATTEND:
        attend.attend_unit(op, step, unit, thread, _float(step, st.SCALE_BITS))
        return
    per_unit = _rows_per_unit(rows, get_i64(step, st.NUM_THREADS))
    for n in range(unit * per_unit, min(rows, unit * per_unit + per_unit)):
        if code == NORM:
            norm.norm_row(op, n, thread, _float(op, norm.EPS_BITS))
        elif code == SILU:
            silu.silu_row(op, n)
        elif code == ROPE:
            rope.rope_row(op, step, n, _float(op, rope.EPS_BITS))
        elif code == MERGE:
            attend.merge_row(op, step, n)
            _quantize(op, n, get_i64(op, attend.OUT), get_i64(op, attend.LD_OUT), get_i64(op, attend.LD_OUT) // 4,
                      attend.OUT_Q, attend.SIDE, attend.LD_SIDE)
        elif code == EMBED:
            embed.embed_row(op, get_i64(get_i64(step, st.IDS), n), n)
        else:
            _quantize(op, n, get_i64(op, X), get_i64(op, LDX), get_i64(op, SIZE), Q, SIDE, LD_SIDE)


@device
def _quantize(op, n, x, ldx, size, q, side, ld_side):  # type: ignore[no-untyped-def]
    if get_i64(op, q) != 0:
        stride = get_i64(op, ld_side)
        quantize_row(x + n * ldx, size, get_i64(op, q) + n * size, get_i64(op, side) + n * stride, stride)


@device
def _float(record, field):  # type: ignore[no-untyped-def]
    """A float32 kept as the low half of a field."""
    return bits_to_f32(np.int32(get_i64(record, field)))


def float_bits(value: float) -> int:
    """For a field that holds a float."""
    return int(np.float32(value).view(np.int32))


class Program:
    """Operations in order. Addresses are borrowed: `keep` holds whatever they point at."""

    def __init__(self) -> None:
        self._rows: list[np.ndarray] = []
        self._keep: list[Any] = []
        self._table: np.ndarray | None = None

    def add(self, code: int, fields: Mapping[int, int]) -> np.ndarray:
        """Append an operation; returns its row before the program is sealed."""
        row = np.zeros(OP_FIELDS, np.int64)
        row[CODE] = code
        for field, value in fields.items():
            row[field] = value
        self._rows.append(row)
        self._table = None
        return row

    def keep(self, *objects: Any) -> None:
        self._keep.extend(objects)

    @property
    def num_ops(self) -> int:
        return len(self._rows)

    @property
    def table(self) -> np.ndarray:
        """All operations, [num_ops, OP_FIELDS]; fields may be changed between steps."""
        if self._table is None:
            self._table = np.array(self._rows, np.int64).reshape(-1, OP_FIELDS)
        return self._table

    @property
    def address(self) -> int:
        return int(self.table.ctypes.data)


def new_step() -> np.ndarray:
    return np.zeros(st.SIZE, np.int64)
