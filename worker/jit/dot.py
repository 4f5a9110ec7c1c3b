"""Sums of four byte products into int32 lanes, in the three forms of features.DOT_FORMS, and the tile kernels on top:
R rows of activations times 32 outputs, for weights in every packed format.

    acc[row, output] over one block of 32 k:   int8 formats, 8 byte dots, exact in int32 (64 k and 16: INT8_WIDE)
    total[row, output] += acc * (weight scale * activation scale)      one float step a block, always in block order

All variants (1 to 6 rows) do the same float operations in the same order for a given row and output, so which variant
computes a row changes no bit of it. Register use at 6 rows x 2 vectors: 12 int + 12 float accumulators of 32. AVX2 has
half as many registers of half the size: dot_avx2.py.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from worker.jit import dot_avx2, features
from worker.jit.registers import passes
from worker.jit.tile_layout import (BLOCK, F32_WEIGHTS, INT4_MIN, INT8, INT8_WIDE, SIDE_INT4, SIDE_INT8, SIDE_MIN,
                                    SIDE_SCALE, TILE, UNROLL, WIDE_BLOCK)
from worker.jit.vector import (F32, I16, I32, I64, LANES, VF, VI, call, constant, fma, from_f16, keep_order, make,
                               offset, prefetch, read, read_bf16, spread, write)


def dot4(builder: Any, form: str, acc: Any, unsigned: Any, signed: Any) -> Any:
    """acc + sum of the four products of each lane's bytes; unsigned and signed are VI holding bytes. (AVX2 has tiles of
    its own.)"""
    if form == "vnni512":
        return call(builder, "llvm.x86.avx512.vpdpbusd.512", VI, [acc, unsigned, signed])
    # Bytes 0 and 2 of a lane, then 1 and 3, widened in place to int16; their products are summed in pairs, exactly.
    wide, eight = ir.VectorType(I16, 2 * LANES), constant(ir.VectorType(I16, 2 * LANES), 8)
    u, s = builder.bitcast(unsigned, wide), builder.bitcast(signed, wide)
    even = _pairs(builder, builder.lshr(builder.shl(u, eight), eight), builder.ashr(builder.shl(s, eight), eight))
    odd = _pairs(builder, builder.lshr(u, eight), builder.ashr(s, eight))
    return builder.add(acc, builder.add(even, odd))


def _pairs(builder: Any, x: Any, y: Any) -> Any:
    """32 int16 products -> 16 int32 sums of neighbours."""
    def part(value: Any, indices: list[int]) -> Any:
        return builder.shuffle_vector(value, value, ir.Constant(ir.VectorType(I32, len(indices)), indices))
    products = [builder.mul(builder.sext(part(x, lanes), VI), builder.sext(part(y, lanes), VI))
                for lanes in (list(range(0, 32, 2)), list(range(1, 32, 2)))]
    return builder.add(products[0], products[1])


def make_int_tile(kind: int, rows: int, form: str) -> Any:
    """tile(x, ldx, side, ld_side, w, scales, minima, num_blocks, soon, soon_step, soon_scales, out, ld_out): all intp.

    x int8, a row every ldx bytes; side as SIDE_*, a row every ld_side bytes; w the tile's packed weights (see
    worker/linear/pack.py), scales and minima float16 [num_blocks, 32]; out float32, a row every ld_out bytes. A block
    is WIDE_BLOCK k of INT8_WIDE, else BLOCK. Meanwhile asks for the weights at soon, a block's bytes every soon_step,
    and for scales so many bytes behind those it reads.
    """
    if form == "avx2":
        return dot_avx2.make_int_tile(kind, rows)

    def generate(b: Any, x: Any, ldx: Any, side: Any, ld_side: Any, w: Any, scales: Any, minima: Any, num_blocks: Any,
                 soon: Any, soon_step: Any, soon_scales: Any, out: Any, ld_out: Any) -> None:
        cells = [[_float_cell(b) for _ in range(2)] for _ in range(rows)]
        column = b.mul(num_blocks, constant(I64, 4))
        x_rows = [b.add(x, b.mul(ldx, constant(I64, m))) for m in range(rows)]
        side_rows = [b.add(side, b.mul(ld_side, constant(I64, m))) for m in range(rows)]
        is_int8, block = kind in (INT8, INT8_WIDE), WIDE_BLOCK if kind == INT8_WIDE else BLOCK
        weight_bytes = TILE * block if is_int8 else TILE * block // 2
        with cgutils.for_range(b, num_blocks, intp=I64) as loop:
            k = loop.index
            at_w, at_x = b.add(w, b.mul(k, constant(I64, weight_bytes))), b.mul(k, constant(I64, block))
            at_side = b.mul(k, constant(I64, 4))

            def side_value(m: int, which: int, scalar: Any) -> Any:
                address = b.add(b.add(side_rows[m], b.mul(column, constant(I64, which))), at_side)
                return spread(b, read(b, address, scalar, 4), ir.VectorType(scalar, LANES))

            if kind == INT4_MIN:
                start = [[constant(VI, 0)] * 2 for _ in range(rows)]
            else:
                firsts = [side_value(m, SIDE_INT8 if is_int8 else SIDE_INT4, I32) for m in range(rows)]
                start = [[first, first] for first in firsts]
            acc = start
            half_block = b.mul(k, constant(I64, 2 * TILE))
            at_soon = b.add(soon, b.mul(k, soon_step))
            for column_at in (scales, minima)[:1 + (kind == INT4_MIN)]:
                prefetch(b, b.add(b.add(column_at, half_block), soon_scales))
            for number in range(weight_bytes // 128):
                keep_order(b)                   # fetches are spread out, or they wait for each other
                for line in (0, 64):
                    prefetch(b, offset(b, at_soon, 128 * number + line), 2)
                for q in (number,) if is_int8 else (number, number + 4):    # of the same bytes
                    weights = [_quad(b, kind, at_w, q, v) for v in range(2)]
                    for m in range(rows):
                        four = read(b, offset(b, b.add(x_rows[m], at_x), 4 * q), I32)
                        signed = spread(b, four, VI)
                        acc[m] = [dot4(b, form, acc[m][v], weights[v], signed) for v in range(2)]
            factors = [_halves(b, offset(b, b.add(scales, half_block), 2 * LANES * v)) for v in range(2)]
            lows = [_halves(b, offset(b, b.add(minima, half_block), 2 * LANES * v)) for v in range(2)] \
                if kind == INT4_MIN else []
            for m in range(rows):
                scale = side_value(m, SIDE_SCALE, F32)
                low = side_value(m, SIDE_MIN, F32) if kind == INT4_MIN else None
                for v in range(2):
                    total = fma(b, b.sitofp(acc[m][v], VF), b.fmul(factors[v], scale), b.load(cells[m][v]))
                    if low is not None:
                        total = fma(b, lows[v], low, total)
                    b.store(total, cells[m][v])
        _store_tile(b, cells, out, ld_out)
    return make(types.void, (types.intp,) * 13, generate)


def _quad(b: Any, kind: int, at_w: Any, q: int, v: int) -> Any:
    """Four k of sixteen outputs as unsigned bytes. int4 keeps quads 0-3 in the low halves, 4-7 in the high ones."""
    if kind in (INT8, INT8_WIDE):
        return read(b, offset(b, at_w, 128 * q + 64 * v), VI)
    packed = read(b, offset(b, at_w, 128 * (q % 4) + 64 * v), VI)
    if q >= 4:
        packed = b.lshr(packed, constant(VI, 4))
    return b.and_(packed, constant(VI, 0x0F0F0F0F))


def _halves(b: Any, address: Any) -> Any:
    return from_f16(b, read(b, address, ir.VectorType(I16, LANES), 2))


def make_float_tile(kind: int, rows: int, has_many: bool | None = None) -> Any:
    """tile(x, ldx, w, num_k, soon, soon_step, out, ld_out): x float32, a row every ldx bytes; w [num_k, 32] float32 or
    bfloat16. One chain of multiply-adds per row and output, in order of k. Meanwhile asks for the weights at soon,
    those of UNROLL k every soon_step. has_many: of registers.passes."""
    size = 4 if kind == F32_WEIGHTS else 2

    def generate(b: Any, x: Any, ldx: Any, w: Any, num_k: Any, soon: Any, soon_step: Any, out: Any,
                 ld_out: Any) -> None:
        x_rows = [b.add(x, b.mul(ldx, constant(I64, m))) for m in range(rows)]
        for part, columns in passes(rows, 2, has_many):
            cells = [[_float_cell(b) for _ in columns] for _ in part]
            with cgutils.for_range(b, b.udiv(num_k, constant(I64, UNROLL)), intp=I64) as loop:
                at_w = b.add(w, b.mul(loop.index, constant(I64, UNROLL * TILE * size)))
                at_x, at_soon = b.mul(loop.index, constant(I64, UNROLL * 4)), b.add(soon, b.mul(loop.index, soon_step))
                totals = [[b.load(cell) for cell in row] for row in cells]
                for line in range(0, UNROLL * TILE * size if part[0] == columns[0] == 0 else 0, 64):
                    prefetch(b, offset(b, at_soon, line))
                for u in range(UNROLL):
                    weights = []
                    for v in columns:
                        address = offset(b, at_w, (u * TILE + v * LANES) * size)
                        weights.append(read(b, address, VF, 4) if kind == F32_WEIGHTS else read_bf16(b, address))
                    for m, row in enumerate(totals):
                        value = spread(b, read(b, offset(b, b.add(x_rows[part[m]], at_x), 4 * u), F32, 4), VF)
                        totals[m] = [fma(b, weight, value, total) for weight, total in zip(weights, row)]
                for row, places in zip(totals, cells):
                    for total, cell in zip(row, places):
                        b.store(total, cell)
            start = b.add(out, b.add(b.mul(ld_out, constant(I64, part[0])), constant(I64, 64 * columns[0])))
            _store_tile(b, cells, start, ld_out)
    return make(types.void, (types.intp,) * 8, generate)


def _float_cell(b: Any) -> Any:
    cell = cgutils.alloca_once(b, VF)
    b.store(constant(VF, 0.0), cell)
    return cell


def _store_tile(b: Any, cells: list[list[Any]], out: Any, ld_out: Any) -> None:
    for m, row in enumerate(cells):
        for v, cell in enumerate(row):
            write(b, offset(b, b.add(out, b.mul(ld_out, constant(I64, m))), 64 * v), b.load(cell), 4)


def int_tiles(kind: int, form: str | None = None) -> dict[int, Callable[..., None]]:
    """Tile kernels by number of rows."""
    return {rows: make_int_tile(kind, rows, form or features.dot_form()) for rows in (1, 2, 3, 4, 6)}


def float_tiles(kind: int) -> dict[int, Callable[..., None]]:
    return {rows: make_float_tile(kind, rows) for rows in (1, 2, 4, 8, 12)}

