"""Activations as int8 in blocks along K, one scale a block: what the integer tiles of dot.py multiply.

    q = round(x / scale), scale = max|x| / 127       the error of Q8_0 files, here on activations

Blocks are of 32; or of 64 and rotated (worker/linear/formats.py): sums and differences of sixteen numbers, a quarter of
which the scale then stands for. Beside the scale, the side table keeps the sums that undo the unsigned storage of
weights (dot.py, SIDE_*). A block that holds a NaN or an infinity gets the scale NaN, so that the row's logits show it.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from llvmlite import ir
from numba import types

from worker.jit.tile_layout import BLOCK, SIDE_COLUMNS, SIDE_INT4, SIDE_INT8, SIDE_MIN, SIDE_SCALE, WIDE_BLOCK
from worker.jit.vector import (F32, I1, I8, I32, LANES, VF, VI, call, constant, device, fma, make, offset, read, spread,
                               transposed_tree, write)

_INFINITY_BITS = 0x7F800000
_SMALLEST = 1e-36                           # below, a reciprocal overflows; such a block is zero for all that follows
_ROTATED = 0.25                             # what a number is worth that `rotate` made
_PIECE = 2 * LANES                          # inputs that give one lane of a group
_PIECES = LANES


def rotate(b: Any, vectors: Sequence[Any]) -> list[Any]:
    """The four vectors of a block of 64, times formats.ROTATION and times 4: sums and differences across the vectors,
    then across the quarters of each."""
    v0, v1, v2, v3 = vectors
    plus, minus = (b.fadd(v0, v1), b.fadd(v2, v3)), (b.fsub(v0, v1), b.fsub(v2, v3))
    result = [b.fadd(*plus), b.fadd(*minus), b.fsub(*plus), b.fsub(*minus)]
    for distance in (4, 8):
        order = ir.Constant(VI, [lane ^ distance for lane in range(LANES)])
        signs = ir.Constant(VF, [-1.0 if lane & distance else 1.0 for lane in range(LANES)])
        result = [fma(b, v, signs, b.shuffle_vector(v, v, order)) for v in result]
    return result


def _emit_rotate(b: Any, address: Any) -> None:
    for at, vector in enumerate(rotate(b, [read(b, offset(b, address, 64 * i), VF, 4) for i in range(4)])):
        write(b, offset(b, address, 64 * at), b.fmul(vector, constant(VF, _ROTATED)), 4)


# 64 float32 at an address times formats.ROTATION, in place.
rotate_block = make(types.void, (types.intp,), _emit_rotate)


def _read_block(b: Any, x: Any, block: int) -> list[Any]:
    vectors = [read(b, offset(b, x, 64 * i), VF, 4) for i in range(block // LANES)]
    return rotate(b, vectors) if block == WIDE_BLOCK else vectors


def _largest(b: Any, vectors: Sequence[Any]) -> Any:
    """Magnitudes as integers, which order like the floats and put infinity and NaN on top."""
    mask = constant(VI, 0x7FFFFFFF)
    best, *others = (b.and_(b.bitcast(v, VI), mask) for v in vectors)
    for other in others:
        best = _larger(b, best, other)
    return best


def _larger(b: Any, x: Any, y: Any) -> Any:
    return b.select(b.icmp_signed(">", x, y), x, y)


def _steps(b: Any, bits: Any, kind: Any) -> tuple[Any, Any, Any]:
    """From the bits of max|x|: (whether they are finite, scale, its reciprocal); kind: a float or a vector of them."""
    finite = b.icmp_signed("<", bits, constant(bits.type, _INFINITY_BITS))
    largest = b.bitcast(bits, kind)
    inverse = b.select(b.fcmp_ordered(">", largest, constant(kind, _SMALLEST)),
                       b.fdiv(constant(kind, 127.0), largest), constant(kind, 0.0))
    return finite, b.fdiv(largest, constant(kind, 127.0)), b.select(finite, inverse, constant(kind, 0.0))


def _code(b: Any, vector: Any, factor: Any) -> Any:
    return b.fptosi(call(b, "llvm.rint.v16f32", VF, [b.fmul(vector, factor)]), VI)


def _side_values(b: Any, block: int, scale: Any, total: Any) -> list[tuple[int, Any]]:
    """Columns of the side table that weights of such blocks ask for."""
    kind, sums = scale.type, total.type
    if block == WIDE_BLOCK:
        return [(SIDE_SCALE, b.fmul(scale, constant(kind, _ROTATED))), (SIDE_INT8, b.mul(total, constant(sums, -128)))]
    return [(SIDE_SCALE, scale), (SIDE_INT8, b.mul(total, constant(sums, -128))),
            (SIDE_INT4, b.mul(total, constant(sums, -8))), (SIDE_MIN, b.fmul(scale, b.sitofp(total, kind)))]


def _block_of(block: int) -> Callable[..., None]:
    """quantize(x, q, side, column): one block; column: bytes of a column of the side table."""
    def generate(b: Any, x: Any, q: Any, side: Any, column: Any) -> None:
        vectors = _read_block(b, x, block)
        bits = call(b, "llvm.vector.reduce.smax.v16i32", I32, [_largest(b, vectors)])
        finite, scale, inverse = _steps(b, bits, F32)
        scale = b.select(finite, scale, constant(F32, float("nan")))
        factor, total = spread(b, inverse, VF), constant(VI, 0)
        for at, vector in enumerate(vectors):
            code = b.select(finite, _code(b, vector, factor), constant(VI, 0))
            write(b, offset(b, q, LANES * at), b.trunc(code, ir.VectorType(I8, LANES)))
            total = b.add(total, code)
        total = call(b, "llvm.vector.reduce.add.v16i32", I32, [total])
        for row, value in _side_values(b, block, scale, total):
            write(b, b.add(side, b.mul(column, constant(column.type, row))), value, 4)
    return make(types.void, (types.intp,) * 4, generate)


def _group_of(block: int, rows: bool = False) -> Callable[..., bool]:
    """The same for so many blocks as sixteen pieces of 32 inputs are; false, with nothing of use written, when one of
    them holds a NaN or an infinity. The blocks follow each other in a row or are one each of as many rows:
    quantize(x, ldx, q, ldq, side, ld_side, column), ld*: bytes from row to row."""
    per_block = block // _PIECE
    neighbours = ir.Constant(VI, [lane ^ 1 for lane in range(LANES)])

    def joined(b: Any, value: Any, combine: Callable[[Any, Any], Any]) -> Any:
        """One lane a piece -> the same of its block, in each lane."""
        return value if per_block == 1 else combine(value, b.shuffle_vector(value, value, neighbours))

    def emit(b: Any, x: list[Any], q: list[Any], put: Callable[[int, Any], None]) -> Any:
        """x, q: addresses of the blocks; put(column of the side table, a lane a block)."""
        blocks = [_read_block(b, address, block) for address in x]
        pieces = [vectors[i:i + 2] for vectors in blocks for i in range(0, len(vectors), 2)]
        bits = joined(b, transposed_tree(b, [_largest(b, piece) for piece in pieces], lambda u, v: _larger(b, u, v)),
                      lambda u, v: _larger(b, u, v))
        finite, scale, inverse = _steps(b, bits, VF)
        sums = []
        for at, piece in enumerate(pieces):
            factor = b.shuffle_vector(inverse, inverse, constant(VI, at))
            codes = [_code(b, vector, factor) for vector in piece]
            for half, code in enumerate(codes):
                target = offset(b, q[at // per_block], at % per_block * _PIECE + LANES * half)
                write(b, target, b.trunc(code, ir.VectorType(I8, LANES)))
            sums.append(b.add(*codes))
        total = joined(b, transposed_tree(b, sums, b.add), b.add)
        firsts = ir.Constant(ir.VectorType(I32, LANES // per_block), list(range(0, LANES, per_block)))
        for which, value in _side_values(b, block, scale, total):
            put(which, b.shuffle_vector(value, value, firsts))
        return call(b, "llvm.vector.reduce.and.v16i1", I1, [finite])

    count = _PIECES // per_block

    def one_row(b: Any, x: Any, q: Any, side: Any, column: Any) -> Any:
        def put(which: int, values: Any) -> None:
            write(b, b.add(side, b.mul(column, constant(column.type, which))), values, 4)
        return emit(b, [offset(b, x, 4 * block * i) for i in range(count)],
                    [offset(b, q, block * i) for i in range(count)], put)

    def many_rows(b: Any, x: Any, ldx: Any, q: Any, ldq: Any, side: Any, ld_side: Any, column: Any) -> Any:
        def places(start: Any, ld: Any) -> list[Any]:
            return [b.add(start, b.mul(ld, constant(ld.type, i))) for i in range(count)]

        def put(which: int, values: Any) -> None:
            for i, row in enumerate(places(side, ld_side)):
                write(b, b.add(row, b.mul(column, constant(column.type, which))),
                      b.extract_element(values, ir.Constant(I32, i)), 4)
        return emit(b, places(x, ldx), places(q, ldq), put)

    if rows:
        return make(types.boolean, (types.intp,) * 7, many_rows)
    return make(types.boolean, (types.intp,) * 4, one_row)


def _row_of(block: int) -> Callable[..., None]:
    """quantize(x, q, side, num_blocks): a row of such blocks."""
    quantize_block, quantize_group, at_once = _block_of(block), _group_of(block), _PIECES * _PIECE // block

    @device
    def run(x, q, side, num_blocks):  # type: ignore[no-untyped-def]
        column, done = 4 * num_blocks, types.int64(0)
        while done + at_once <= num_blocks:
            if not quantize_group(x + done * (4 * block), q + done * block, side + done * 4, column):
                for b in range(done, done + at_once):
                    quantize_block(x + b * (4 * block), q + b * block, side + b * 4, column)
            done += at_once
        for b in range(done, num_blocks):
            quantize_block(x + b * (4 * block), q + b * block, side + b * 4, column)
    return cast(Callable[..., None], run)


def _column_of(block: int) -> Callable[..., None]:
    """quantize(rows, x, ldx, q, ldq, side, ld_side): one block of each of `rows` rows."""
    quantize_block, quantize_group, at_once = _block_of(block), _group_of(block, rows=True), _PIECES * _PIECE // block

    @device
    def run(rows, x, ldx, q, ldq, side, ld_side):  # type: ignore[no-untyped-def]
        column, m = ld_side // SIDE_COLUMNS, types.int64(0)
        while m < rows:
            last = m + at_once
            if last <= rows and quantize_group(x + m * ldx, ldx, q + m * ldq, ldq, side + m * ld_side, ld_side, column):
                m = last
                continue
            last = min(last, rows)
            while m < last:
                quantize_block(x + m * ldx, q + m * ldq, side + m * ld_side, column)
                m += 1
    return cast(Callable[..., None], run)


_quantize_narrow, _quantize_wide = (_row_of(block) for block in (BLOCK, WIDE_BLOCK))
_narrow_column, _wide_column = (_column_of(block) for block in (BLOCK, WIDE_BLOCK))


@device
def quantize_row(x, num_k, q, side, ld_side):  # type: ignore[no-untyped-def]
    """x float32 [num_k] -> q int8 [num_k], side [4, blocks]; addresses. ld_side, bytes of a row of the side table, says
    how many blocks there are, and so which kind."""
    num_blocks = ld_side // (4 * SIDE_COLUMNS)
    if num_k == num_blocks * WIDE_BLOCK:
        _quantize_wide(x, q, side, num_blocks)
    else:
        _quantize_narrow(x, q, side, num_blocks)


@device
def quantize_columns(rows, x, ldx, width, num_k, start, q, side, ld_side):  # type: ignore[no-untyped-def]
    """Of each of `rows` rows the `width` inputs from the start-th on, whole blocks: x, every ldx bytes, -> q and side,
    addresses of rows of num_k inputs; ld_side as above."""
    num_blocks = ld_side // (4 * SIDE_COLUMNS)
    is_wide = num_k == num_blocks * WIDE_BLOCK
    block = WIDE_BLOCK if is_wide else BLOCK
    for at in range(0, width, block):
        from_x, to_q, to_side = x + 4 * at, q + start + at, side + (start + at) // block * 4
        if is_wide:
            _wide_column(rows, from_x, ldx, to_q, num_k, to_side, ld_side)
        else:
            _narrow_column(rows, from_x, ldx, to_q, num_k, to_side, ld_side)
