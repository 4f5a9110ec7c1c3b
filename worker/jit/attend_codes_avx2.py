"""The products of attend_codes.py for AVX2, which multiplies int16 but sums no four bytes. The numbers are the same.

    q  int16, of every four dimensions the even two, then the odd two: keys are widened in place, even and odd apart
    w  int16, less 32768; the sums of the values, times 32768, undo that

pmaddwd sums two products in an int32, in which the sums over 256 dimensions or 64 keys have room. Few sums at a time
are in registers: two groups of keys, or sixteen dimensions.
"""
from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from worker.jit.attend_tiles import GROUP_COUNT, GROUP_FIELDS, GROUP_K, GROUP_NEXT_K, GROUP_NEXT_V, GROUP_V
from worker.jit.registers import keep
from worker.jit.vector import (F32, I8, I16, I32, I64, LANES, call, constant, i32x16, make, offset, prefetch, read,
                               spread, write)

_HALF = 8
_F, _I, _SHORTS = ir.VectorType(F32, _HALF), ir.VectorType(I32, _HALF), ir.VectorType(I16, 2 * _HALF)


def _emit_query(b: Any, address: Any, codes: Any) -> None:
    order = [4 * quad + at for quad in range(4) for at in (0, 2, 1, 3)]
    moved = b.shuffle_vector(codes, codes, ir.Constant(ir.VectorType(I32, LANES), order))
    write(b, address, b.trunc(moved, _SHORTS), 2)


def _emit_weights(b: Any, address: Any, codes: Any) -> None:
    write(b, address, b.trunc(b.sub(codes, constant(codes.type, 1 << 15)), _SHORTS), 2)


# Codes of sixteen dimensions of a query, or of sixteen keys' weights.
store_query = make(types.void, (types.intp, i32x16), _emit_query)
store_weights = make(types.void, (types.intp, i32x16), _emit_weights)


def _cells(b: Any, rows: int, columns: int) -> list[list[Any]]:
    cells = [[cgutils.alloca_once(b, _I) for _ in range(columns)] for _ in range(rows)]
    for row in cells:
        for cell in row:
            b.store(constant(_I, 0), cell)
    return cells


def _pair(b: Any, address: Any) -> Any:
    """Two int16 in every lane."""
    return b.bitcast(spread(b, read(b, address, I32, 2), _I), _SHORTS)


def _products(b: Any, x: Any, y: Any) -> Any:
    """Of sixteen int16 each, summed in pairs."""
    return call(b, "llvm.x86.avx2.pmadd.wd", _I, [x, y])


def _add_products(b: Any, totals: list[list[Any]], values: list[Any], pairs: list[Any]) -> list[list[Any]]:
    """totals[m][v] += products of values[v] and of the pair at pairs[m]."""
    sums = []
    for row, at in zip(totals, pairs):
        pair = _pair(b, at)
        sums.append([b.add(total, _products(b, value, pair)) for total, value in zip(row, values)])
    return keep(b, sums)


def make_scores(rows: int, scale_at: int) -> Any:
    """As attend_codes.make_scores."""
    def generate(b: Any, q: Any, ld_q: Any, padded_dim: Any, num_quads: Any, groups: Any, ld_k: Any, fetches: Any,
                 out: Any, ld_out: Any) -> None:
        q_rows = [b.add(q, b.mul(ld_q, constant(I64, m))) for m in range(rows)]
        scales = [b.add(row, b.add(b.mul(padded_dim, constant(I64, 2)), I64(scale_at))) for row in q_rows]
        here, soon = ([read(b, offset(b, groups, 8 * (GROUP_FIELDS * g + field)), I64, 8) for g in range(4)]
                      for field in (GROUP_K, GROUP_NEXT_K))
        for first in (0, 2):
            cells = _cells(b, rows, 4)
            with cgutils.for_range(b, num_quads, intp=I64) as loop:
                at_k = b.mul(loop.index, ld_k)
                at_q = [b.add(row, b.mul(loop.index, constant(I64, 8))) for row in q_rows]
                line = b.mul(loop.index, constant(I64, 64))
                with b.if_then(b.icmp_signed("!=", fetches, I64(0))):
                    for group in soon[first:first + 2]:
                        prefetch(b, b.add(group, line), 2)
                totals = [[b.load(cell) for cell in row] for row in cells]
                for g in range(2):
                    keys = [read(b, offset(b, b.add(here[first + g], at_k), 32 * v), _SHORTS) for v in range(2)]
                    for odd in range(2):
                        eight = constant(_SHORTS, 8)
                        wide = [b.ashr(key if odd else b.shl(key, eight), eight) for key in keys]
                        sums = _add_products(b, [row[2 * g:2 * g + 2] for row in totals], wide,
                                             [offset(b, at, 4 * odd) for at in at_q])
                        for row, new in zip(totals, sums):
                            row[2 * g:2 * g + 2] = new
                for row, places in zip(totals, cells):
                    for total, cell in zip(row, places):
                        b.store(total, cell)
            for m, row in enumerate(cells):
                scale = spread(b, read(b, scales[m], F32, 4), _F)
                at = b.add(out, b.mul(ld_out, constant(I64, m)))
                for v, cell in enumerate(row):
                    write(b, offset(b, at, 64 * first + 32 * v), b.fmul(b.sitofp(b.load(cell), _F), scale), 4)
    return make(types.void, (types.intp,) * 9, generate)


def make_values(rows: int, vectors: int, scale_at: int) -> Any:
    """As attend_codes.make_values."""
    def generate(b: Any, p: Any, ld_p: Any, groups: Any, column: Any, ld_v: Any, fetches: Any, acc: Any,
                 ld_acc: Any) -> None:
        p_rows = [b.add(p, b.mul(ld_p, constant(I64, m))) for m in range(rows)]
        soon = [read(b, offset(b, groups, 8 * (GROUP_FIELDS * g + GROUP_NEXT_V)), I64, 8) for g in range(4)]
        for part in range(vectors):
            cells, sum_cells = _cells(b, rows, 2), _cells(b, 1, 2)[0]
            with cgutils.for_range(b, I64(4), intp=I64) as outer:
                group = b.add(groups, b.mul(outer.index, constant(I64, 8 * GROUP_FIELDS)))
                v = b.add(read(b, offset(b, group, 8 * GROUP_V), I64, 8), b.add(column, I64(LANES * part)))
                with b.if_then(b.icmp_signed(">", read(b, offset(b, group, 8 * GROUP_COUNT), I64, 8), I64(0))):
                    with cgutils.for_range(b, I64(4), intp=I64) as inner:
                        number = b.add(b.mul(outer.index, constant(I64, 4)), inner.index)
                        if part == 0:
                            with b.if_then(b.icmp_signed("!=", fetches, I64(0))):
                                line = b.add(b.mul(column, constant(I64, LANES)),
                                             b.mul(number, constant(I64, LANES * vectors)))
                                for address in soon:
                                    prefetch(b, b.add(address, line), 2)
                        totals = [[b.load(cell) for cell in row] for row in cells]
                        sums = [b.bitcast(b.load(cell), _SHORTS) for cell in sum_cells]
                        first = b.mul(inner.index, b.mul(ld_v, constant(I64, 4)))
                        for two in range(2):
                            keys = [b.add(v, b.add(first, b.mul(ld_v, constant(I64, 2 * two + key))))
                                    for key in range(2)]
                            values = _interleaved(b, keys)
                            sums = [b.add(total, value) for total, value in zip(sums, values)]
                            at_p = b.add(b.mul(number, constant(I64, 8)), I64(4 * two))
                            totals = _add_products(b, totals, values, [b.add(row, at_p) for row in p_rows])
                        sums = [b.bitcast(total, _I) for total in sums]
                        for row, places in zip([*totals, sums], [*cells, sum_cells]):
                            for total, cell in zip(row, places):
                                b.store(total, cell)
            shorts = [b.bitcast(b.load(cell), _SHORTS) for cell in sum_cells]
            undo = [b.shl(_products(b, value, constant(_SHORTS, 1)), constant(_I, 15)) for value in shorts]
            for m, row in enumerate(cells):
                scale = spread(b, read(b, offset(b, p_rows[m], scale_at), F32, 4), _F)
                low, high = (b.add(b.load(cell), total) for cell, total in zip(row, undo))
                at = offset(b, b.add(acc, b.mul(ld_acc, constant(I64, m))), 64 * part)
                for half in range(2):
                    lanes = ir.Constant(_I, [4 * half + i + side for side in (0, _HALF) for i in range(4)])
                    value = b.fmul(b.sitofp(b.shuffle_vector(low, high, lanes), _F), scale)
                    to = offset(b, at, 32 * half)
                    write(b, to, b.fadd(read(b, to, _F, 4), value), 4)
    return make(types.void, (types.intp,) * 8, generate)


def _interleaved(b: Any, keys: list[Any]) -> list[Any]:
    """Sixteen int8 of each of two keys -> both keys' side by side in int16: dimensions 0 to 3 and 8 to 11, the others;
    halves of a register need not be exchanged."""
    first, second = (b.sext(read(b, key, ir.VectorType(I8, LANES)), _SHORTS) for key in keys)
    return [b.shuffle_vector(first, second, ir.Constant(ir.VectorType(I32, LANES), [
        8 * lane + 4 * upper + i + side for lane in range(2) for i in range(4) for side in (0, LANES)]))
        for upper in range(2)]
