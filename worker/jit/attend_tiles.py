"""The two products of attention over the pool's layout: queries times transposed keys, weights times values.

Each for 1, 2, 3 or 6 rows at once, and for pools of float32, bfloat16 and e4m3 (whose scales are applied outside,
kv_codes.py; for int8 see attend_codes.py); one chain of multiply-adds per result, so the number of rows changes no bit.
Knows addresses, not requests (attend.py).
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from numba import types
from numba.core import cgutils

from worker.jit import step as st
from worker.jit.attend_softmax import CHUNK
from worker.jit.registers import passes
from worker.jit.vector import (F32, I64, LANES, VF, constant, device, fma, make, merged, offset, prefetch, read,
                               read_bf16, read_e4m3, spread, write)

# Fields of a group: addresses of its keys and values and, where there are any, of their scales; how many keys exist;
# keys and values that are wanted next.
GROUP_K, GROUP_V, GROUP_K_SCALES, GROUP_V_SCALES, GROUP_COUNT, GROUP_NEXT_K, GROUP_NEXT_V, GROUP_FIELDS = range(8)
ITEM_BYTES = {st.POOL_F32: 4, st.POOL_BF16: 2, st.POOL_FP8: 1}
FEW_ROWS = 3                                # up to so many rows a kernel fetches ahead


def _read_pool(b: Any, kind: int, address: Any) -> Any:
    if kind == st.POOL_F32:
        return read(b, address, VF, 4)
    return read_bf16(b, address) if kind == st.POOL_BF16 else read_e4m3(b, address)


def _cell(b: Any, value: Any) -> Any:
    cell = cgutils.alloca_once(b, value.type)
    b.store(value, cell)
    return cell


def make_scores(kind: int, rows: int) -> Any:
    """scores(q, ld_q, dim, groups, ld_k, out, ld_out): rows of q [dim] times four groups of 16 keys, each a column of
    vectors ld_k bytes apart -> out [rows, 64]. groups: four records of GROUP_FIELDS.

    With few rows memory is what counts, and a block is too short for the hardware to see a stream: the next four groups
    are asked for meanwhile.
    """
    def generate(b: Any, q: Any, ld_q: Any, dim: Any, groups: Any, ld_k: Any, out: Any, ld_out: Any) -> None:
        q_rows = [b.add(q, b.mul(ld_q, constant(I64, m))) for m in range(rows)]
        here = [read(b, offset(b, groups, 8 * (GROUP_FIELDS * g + GROUP_K)), I64, 8) for g in range(4)]
        sharing = 4 // ITEM_BYTES[kind]
        for part, columns in passes(rows, 4):
            cells = [[_cell(b, constant(VF, 0.0)) for _ in columns] for _ in part]
            with cgutils.for_range(b, dim, intp=I64) as loop:
                at_k, at_q = b.mul(loop.index, ld_k), b.mul(loop.index, constant(I64, 4))
                keys = [_read_pool(b, kind, b.add(here[g], at_k)) for g in columns]
                if rows <= FEW_ROWS and columns[0] == 0:
                    # As many dimensions of a group as share a line: a group's line once.
                    which = b.and_(loop.index, constant(I64, sharing - 1))
                    line = b.mul(b.sub(loop.index, which), ld_k)
                    for g in range(0, 4, sharing):
                        soon = b.add(groups, b.mul(which, constant(I64, 8 * GROUP_FIELDS)))
                        soon = read(b, offset(b, soon, 8 * (GROUP_FIELDS * g + GROUP_NEXT_K)), I64, 8)
                        prefetch(b, b.add(soon, line), 2)
                for m, row in zip(part, cells):
                    value = spread(b, read(b, b.add(q_rows[m], at_q), F32, 4), VF)
                    for key, cell in zip(keys, row):
                        b.store(fma(b, key, value, b.load(cell)), cell)
            for m, row in zip(part, cells):
                for g, cell in zip(columns, row):
                    write(b, offset(b, b.add(out, b.mul(ld_out, constant(I64, m))), 64 * g), b.load(cell), 4)
    return make(types.void, (types.intp,) * 7, generate)


def make_values(kind: int, rows: int, vectors: int) -> Any:
    """values(p, ld_p, groups, first, column, ld_v, acc, ld_acc): acc[row] += sum over the keys of four groups, from the
    first-th on, of p[row, key] * v[key], for `vectors` vectors of dimensions from byte `column` of a value on. With few
    rows the values that are wanted soon are asked for."""
    def generate(b: Any, p: Any, ld_p: Any, groups: Any, first: Any, column: Any, ld_v: Any, acc: Any,
                 ld_acc: Any) -> None:
        rows_at = [b.add(acc, b.mul(ld_acc, constant(I64, m))) for m in range(rows)]
        for part, columns in passes(rows, vectors):
            add_values(b, p, ld_p, groups, first, column, ld_v, rows_at, part, columns)

    def add_values(b: Any, p: Any, ld_p: Any, groups: Any, first: Any, column: Any, ld_v: Any, rows_at: list[Any],
                   part: range, columns: range) -> None:
        cells = [[_cell(b, read(b, offset(b, rows_at[m], 64 * i), VF, 4)) for i in columns] for m in part]
        size = LANES * ITEM_BYTES[kind]
        with cgutils.for_range(b, I64(4), intp=I64) as outer:
            group = b.add(groups, b.mul(outer.index, constant(I64, 8 * GROUP_FIELDS)))
            v = b.add(read(b, offset(b, group, 8 * GROUP_V), I64, 8), column)
            skip = b.sub(first, b.mul(outer.index, constant(I64, LANES)))
            skip = b.select(b.icmp_signed(">", skip, I64(0)), skip, I64(0))
            at_group = b.mul(outer.index, constant(I64, 4 * LANES))
            count = read(b, offset(b, group, 8 * GROUP_COUNT), I64, 8)
            with cgutils.for_range_slice(b, skip, count, I64(1), intp=I64) as (key, _):
                at_v, at_p = b.mul(key, ld_v), b.add(at_group, b.mul(key, constant(I64, 4)))
                values = [_read_pool(b, kind, offset(b, b.add(v, at_v), size * i)) for i in columns]
                if rows <= FEW_ROWS and columns[0] == 0:
                    number = b.add(b.mul(outer.index, constant(I64, LANES)), key)
                    _fetch_values(b, groups, number, column, size * vectors)
                for m, row in zip(part, cells):
                    weight = spread(b, read(b, b.add(b.add(p, b.mul(ld_p, constant(I64, m))), at_p), F32, 4), VF)
                    for value, cell in zip(values, row):
                        b.store(fma(b, value, weight, b.load(cell)), cell)
        for m, row in zip(part, cells):
            for i, cell in zip(columns, row):
                write(b, offset(b, rows_at[m], 64 * i), b.load(cell), 4)
    return make(types.void, (types.intp,) * 8, generate)


def _fetch_values(b: Any, groups: Any, key: Any, column: Any, size: int) -> None:
    """While one of 64 values is read, ask for as much of those that are wanted next: `size` bytes, of the four groups
    in turn, because memory serves several streams faster than one."""
    lines = max(1, size // 64)
    for i in range(lines):
        number = b.add(b.mul(key, constant(I64, lines)), constant(I64, i))
        group = b.add(groups, b.mul(b.and_(number, constant(I64, 3)), constant(I64, 8 * GROUP_FIELDS)))
        line = b.mul(b.lshr(number, constant(I64, 2)), constant(I64, min(64, size)))
        start = b.add(read(b, offset(b, group, 8 * GROUP_NEXT_V), I64, 8), b.mul(column, constant(I64, LANES)))
        prefetch(b, b.add(start, line), 2)


Function = Callable[..., Any]


def _scores_of(kind: int) -> Function:
    """scores_rows for pools of one kind."""
    one, two, three, six = (make_scores(kind, rows) for rows in (1, 2, 3, 6))

    @device
    def run(rows, q, ld_q, dim, groups, ld_k, out):  # type: ignore[no-untyped-def]
        m, ldo = 0, CHUNK * 4
        while m < rows:
            left = rows - m
            n = 6 if left >= 6 else 3 if left >= 3 else left
            at, to = q + m * ld_q, out + m * ldo
            if n == 6:
                six(at, ld_q, dim, groups, ld_k, to, ldo)
            elif n == 3:
                three(at, ld_q, dim, groups, ld_k, to, ldo)
            elif n == 2:
                two(at, ld_q, dim, groups, ld_k, to, ldo)
            else:
                one(at, ld_q, dim, groups, ld_k, to, ldo)
            m += n
    return cast(Function, run)


def _values_of(kind: int) -> Function:
    """values_rows for pools of one kind."""
    one, two, three, six = (make_values(kind, rows, 4) for rows in (1, 2, 3, 6))
    narrow, item = make_values(kind, 1, 1), ITEM_BYTES[kind]

    @device
    def run(rows, p, groups, first, dim, acc, ld_acc):  # type: ignore[no-untyped-def]
        ldp, ld_v, column = CHUNK * 4, dim * item, 0
        while column < dim:
            wide, m = dim - column >= 64, 0
            while m < rows:
                left = rows - m
                n = 1 if not wide else 6 if left >= 6 else 3 if left >= 3 else left
                at, to = p + m * ldp, acc + m * ld_acc + column * 4
                if not wide:
                    narrow(at, ldp, groups, first, column * item, ld_v, to, ld_acc)
                elif n == 6:
                    six(at, ldp, groups, first, column * item, ld_v, to, ld_acc)
                elif n == 3:
                    three(at, ldp, groups, first, column * item, ld_v, to, ld_acc)
                elif n == 2:
                    two(at, ldp, groups, first, column * item, ld_v, to, ld_acc)
                else:
                    one(at, ldp, groups, first, column * item, ld_v, to, ld_acc)
                m += n
            column += 64 if wide else 16
    return cast(Function, run)


_scores_f32, _scores_bf16, _scores_fp8 = (_scores_of(kind) for kind in ITEM_BYTES)
_values_f32, _values_bf16, _values_fp8 = (_values_of(kind) for kind in ITEM_BYTES)


@merged
def scores_rows(kind, rows, q, ld_q, dim, groups, ld_k, out):  # type: ignore[no-untyped-def]
    if kind == st.POOL_F32:
        _scores_f32(rows, q, ld_q, dim, groups, ld_k, out)
    elif kind == st.POOL_BF16:
        _scores_bf16(rows, q, ld_q, dim, groups, ld_k, out)
    else:
        _scores_fp8(rows, q, ld_q, dim, groups, ld_k, out)


@merged
def values_rows(kind, rows, p, groups, first, dim, acc, ld_acc):  # type: ignore[no-untyped-def]
    """dim here is D', a multiple of 16."""
    if kind == st.POOL_F32:
        _values_f32(rows, p, groups, first, dim, acc, ld_acc)
    elif kind == st.POOL_BF16:
        _values_bf16(rows, p, groups, first, dim, acc, ld_acc)
    else:
        _values_fp8(rows, p, groups, first, dim, acc, ld_acc)
