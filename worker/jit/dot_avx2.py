"""The integer tiles of dot.py for AVX2: sixteen registers of eight lanes, and no instruction that sums four products.

Within a block of k, a few rows times sixteen outputs are computed at a time, so that their sums stay in registers:

    int8     even and odd k of the weights apart, widened to int16, and those of the activations too: pmaddwd sums two
             products in an int32. A row's activations are widened once a block, and read back one pair at a time.
    int4     pmaddubsw sums two products of bytes in an int16, which has room for those of a whole block of 32 k.

Sums of integers are exact, and the float operations are those of dot.py in its order: all forms give the same bits.
"""
from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from worker.jit.registers import keep, opaque
from worker.jit.tile_layout import (BLOCK, INT4_MIN, INT8, INT8_WIDE, SIDE_INT4, SIDE_INT8, SIDE_MIN, SIDE_SCALE, TILE,
                                    WIDE_BLOCK)
from worker.jit.vector import (F32, I8, I16, I32, I64, call, constant, from_f16, keep_order, make, offset, prefetch,
                               read, spread, write)

_LANES = 8
_F, _I = ir.VectorType(F32, _LANES), ir.VectorType(I32, _LANES)
_BYTES, _SHORTS = ir.VectorType(I8, 4 * _LANES), ir.VectorType(I16, 2 * _LANES)
# Rows whose sums are in registers at once, of so many rows of a tile.
_GROUPS = {1: (1,), 2: (2,), 3: (3,), 4: (4,), 6: (3, 3)}
_INT4_GROUPS = {1: (1,), 2: (2,), 3: (3,), 4: (4,), 6: (6,)}


def make_int_tile(kind: int, rows: int) -> Any:
    """As dot.make_int_tile."""
    is_int8, block = kind in (INT8, INT8_WIDE), WIDE_BLOCK if kind == INT8_WIDE else BLOCK
    weight_bytes = TILE * block if is_int8 else TILE * block // 2

    def generate(b: Any, x: Any, ldx: Any, side: Any, ld_side: Any, w: Any, scales: Any, minima: Any, num_blocks: Any,
                 soon: Any, soon_step: Any, soon_scales: Any, out: Any, ld_out: Any) -> None:
        totals = [[_cell(b, _F, 0.0) for _ in range(TILE // _LANES)] for _ in range(rows)]
        room = [cgutils.alloca_once(b, ir.ArrayType(_SHORTS, 2 * block // BLOCK)) for _ in range(rows)] \
            if is_int8 else []
        for at in room:
            at.align = 32
        room = [opaque(b, at) for at in room]
        column = b.mul(num_blocks, constant(I64, 4))
        x_rows = [b.add(x, b.mul(ldx, constant(I64, m))) for m in range(rows)]
        side_rows = [b.add(side, b.mul(ld_side, constant(I64, m))) for m in range(rows)]
        with cgutils.for_range(b, num_blocks, intp=I64) as loop:
            k = loop.index
            at_w, at_x = b.add(w, b.mul(k, constant(I64, weight_bytes))), b.mul(k, constant(I64, block))
            at_side, half_block = b.mul(k, constant(I64, 4)), b.mul(k, constant(I64, 2 * TILE))
            at_soon = b.add(soon, b.mul(k, soon_step))
            for column_at in (scales, minima)[:1 + (kind == INT4_MIN)]:
                prefetch(b, b.add(b.add(column_at, half_block), soon_scales))

            def side_value(m: int, which: int, scalar: Any) -> Any:
                return read(b, b.add(b.add(side_rows[m], b.mul(column, constant(I64, which))), at_side), scalar, 4)

            lines = iter(range(0, weight_bytes, 64))
            first = 0
            for count in (_GROUPS if is_int8 else _INT4_GROUPS)[rows]:
                group = range(first, first + count)
                first += count
                if is_int8:
                    for m in group:
                        _widen(b, b.add(x_rows[m], at_x), room[m], block)
                for half in range(2):
                    keep_order(b)
                    weights = offset(b, at_w, 64 * half)
                    if is_int8:
                        sums = _int8_sums(b, weights, [room[m] for m in group], block, at_soon, lines)
                    else:
                        sums = _int4_sums(b, weights, [b.add(x_rows[m], at_x) for m in group], at_soon, lines)
                    outputs = range(2 * half, 2 * half + 2)
                    factors = [_halves(b, offset(b, b.add(scales, half_block), 2 * _LANES * v)) for v in outputs]
                    for m, row in zip(group, sums):
                        scale = spread(b, side_value(m, SIDE_SCALE, F32), _F)
                        start = None if kind == INT4_MIN else spread(
                            b, side_value(m, SIDE_INT8 if is_int8 else SIDE_INT4, I32), _I)
                        low = spread(b, side_value(m, SIDE_MIN, F32), _F) if kind == INT4_MIN else None
                        for v, total, factor in zip(outputs, row, factors):
                            total = total if start is None else b.add(total, start)
                            value = _fma(b, b.sitofp(total, _F), b.fmul(factor, scale), b.load(totals[m][v]))
                            if low is not None:
                                lows = _halves(b, offset(b, b.add(minima, half_block), 2 * _LANES * v))
                                value = _fma(b, lows, low, value)
                            b.store(value, totals[m][v])
            for line in lines:
                prefetch(b, offset(b, at_soon, line), 2)
        for m in range(rows):
            to = b.add(out, b.mul(ld_out, constant(I64, m)))
            for v, cell in enumerate(totals[m]):
                write(b, offset(b, to, 4 * _LANES * v), b.load(cell), 4)
    return make(types.void, (types.intp,) * 13, generate)


def _cell(b: Any, kind: Any, value: Any) -> Any:
    cell = cgutils.alloca_once(b, kind)
    b.store(constant(kind, value), cell)
    return cell


def _fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    return call(b, "llvm.fma.v8f32", _F, [x, y, z])


def _halves(b: Any, address: Any) -> Any:
    return from_f16(b, read(b, address, ir.VectorType(I16, _LANES), 2))


def _widen(b: Any, x: Any, room: Any, block: int) -> None:
    """int8 [block] -> int16: of every 32 the even ones, sign-extended, then the odd ones."""
    eight = constant(_SHORTS, 8)
    for part in range(block // BLOCK):
        shorts = read(b, offset(b, x, BLOCK * part), _SHORTS)
        even = b.ashr(b.shl(shorts, eight), eight)
        for at, value in ((2 * part, even), (2 * part + 1, b.ashr(shorts, eight))):
            b.store(value, b.gep(room, [I32(0), I32(at)]))


def _pair(b: Any, room: Any, q: int, odd: int) -> Any:
    """The even or odd two of the four activations of quad q, in every lane."""
    start = b.bitcast(room, I32.as_pointer())
    return b.bitcast(spread(b, b.load(b.gep(start, [I32(16 * (q // 8) + 8 * odd + q % 8)])), _I), _SHORTS)


def _prefetch_next(b: Any, at_soon: Any, lines: Iterator[int]) -> None:
    """Fetches are spread out, or they wait for each other."""
    for line in itertools.islice(lines, 1):
        prefetch(b, offset(b, at_soon, line), 2)


def _int8_sums(b: Any, at_w: Any, room: list[Any], block: int, at_soon: Any, lines: Iterator[int]) -> list[list[Any]]:
    """[rows][2] sums of eight outputs each over a block, of weights as they are stored."""
    acc: list[list[Any]] = [[None, None] for _ in room]
    low = constant(_SHORTS, 0xFF)
    for q in range(block // 4):
        keep_order(b)
        _prefetch_next(b, at_soon, lines)
        weights = [read(b, offset(b, at_w, 128 * q + 32 * v), _SHORTS) for v in range(2)]
        for odd in range(2):
            parts = [b.lshr(x, constant(_SHORTS, 8)) if odd else b.and_(x, low) for x in weights]
            for m, at in enumerate(room):
                pair = _pair(b, at, q, odd)
                for v in range(2):
                    product = call(b, "llvm.x86.avx2.pmadd.wd", _I, [parts[v], pair])
                    acc[m][v] = product if acc[m][v] is None else b.add(acc[m][v], product)
            acc = keep(b, acc)
    return acc


def _int4_sums(b: Any, at_w: Any, x: list[Any], at_soon: Any, lines: Iterator[int]) -> list[list[Any]]:
    """The same of weights of four bits, 0 to 15. A sum in int16 is of 16 products: at most 16 x 15 x 127."""
    acc: list[list[Any]] = [[None, None] for _ in x]
    for number in range(4):
        keep_order(b)
        _prefetch_next(b, at_soon, lines)
        for q in (number, number + 4):
            weights = []
            for v in range(2):
                packed = read(b, offset(b, at_w, 128 * number + 32 * v), _SHORTS)
                packed = b.lshr(packed, constant(_SHORTS, 4)) if q >= 4 else packed
                weights.append(b.bitcast(b.and_(packed, constant(_SHORTS, 0x0F0F)), _BYTES))
            for m, at in enumerate(x):
                four = b.bitcast(spread(b, read(b, offset(b, at, 4 * q), I32), _I), _BYTES)
                for v in range(2):
                    product = call(b, "llvm.x86.avx2.pmadd.ub.sw", _SHORTS, [weights[v], four])
                    acc[m][v] = product if acc[m][v] is None else b.add(acc[m][v], product)
            acc = keep(b, acc)
    ones = constant(_SHORTS, 1)
    return [[call(b, "llvm.x86.avx2.pmadd.wd", _I, [value, ones]) for value in row] for row in acc]
