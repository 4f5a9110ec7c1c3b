"""Activations as int8 in blocks of 32 along K, one scale a block: what the integer tiles of dot.py multiply.

    q = round(x / scale), scale = max|x| / 127       the error of Q8_0 files, here on activations

Beside the scale, the side table keeps the sums that undo the unsigned storage of weights (dot.py, SIDE_*). A block that
holds a NaN or an infinity gets the scale NaN, so that the row's logits show it.
"""
from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from worker.jit.dot import BLOCK, SIDE_INT4, SIDE_INT8, SIDE_MIN, SIDE_SCALE
from worker.jit.vector import (I1, I8, I64, LANES, VF, VI, add_i32, bits_to_f32, call, constant, device, load_f32,
                               magnitude, make, max_lanes_i32, maximum_i32, mul, nearest, offset, read, set_f32,
                               set_i32, splat, store_bytes, sum_lanes_i32, to_i32, transposed_tree, write)

_f32, _i32 = types.float32, types.int32
_INFINITY_BITS = 0x7F800000
_SMALLEST = 1e-36                           # below, a reciprocal overflows; such a block is zero for all that follows
GROUP = LANES                               # blocks at once: one lane each for what there is one of per block


@device
def quantize_row(x, num_k, q, side):  # type: ignore[no-untyped-def]
    """x float32 [num_k] -> q int8 [num_k], side [4, num_k / 32]; addresses."""
    num_blocks, block = num_k // BLOCK, types.int64(0)
    while block + GROUP <= num_blocks:
        if not _quantize_group(x + block * (4 * BLOCK), q + block * BLOCK, side + block * 4, num_blocks * 4):
            for b in range(block, block + GROUP):
                _quantize_block(x, q, side, b, num_blocks)
        block += GROUP
    for b in range(block, num_blocks):
        _quantize_block(x, q, side, b, num_blocks)


@device
def _quantize_block(x, q, side, block, num_blocks):  # type: ignore[no-untyped-def]
    at = x + block * (4 * BLOCK)
    v0, v1 = load_f32(at), load_f32(at + 64)
    bits = max_lanes_i32(maximum_i32(magnitude(v0), magnitude(v1)))
    scale, inverse, total = _f32(0.0), _f32(0.0), _i32(0)
    if bits >= _INFINITY_BITS:
        scale = _f32(float("nan"))
    elif bits > 0:
        largest = bits_to_f32(bits)
        scale = largest / _f32(127.0)
        if largest > _f32(_SMALLEST):
            inverse = _f32(127.0) / largest
    factor = splat(inverse)
    if bits >= _INFINITY_BITS:
        zero = to_i32(splat(_f32(0.0)))
        q0, q1 = zero, zero
    else:
        q0, q1 = to_i32(nearest(mul(v0, factor))), to_i32(nearest(mul(v1, factor)))
    store_bytes(q + block * BLOCK, q0)
    store_bytes(q + block * BLOCK + 16, q1)
    total = sum_lanes_i32(add_i32(q0, q1))
    set_f32(side, SIDE_SCALE * num_blocks + block, scale)
    set_i32(side, SIDE_INT8 * num_blocks + block, _i32(-128) * total)
    set_i32(side, SIDE_INT4 * num_blocks + block, _i32(-8) * total)
    set_f32(side, SIDE_MIN * num_blocks + block, scale * _f32(total))


def _emit_group(b: Any, x: Any, q: Any, side: Any, ld_side: Any) -> Any:
    """The same for GROUP blocks; false, with nothing of use written, when one of them holds a NaN or an infinity."""
    def vectors(block: int) -> list[Any]:
        return [read(b, offset(b, x, 4 * (BLOCK * block + LANES * half)), VF, 4) for half in range(2)]

    def largest_of(x: Any, y: Any) -> Any:
        return b.select(b.icmp_signed(">", x, y), x, y)

    mask = constant(VI, 0x7FFFFFFF)
    tops = [largest_of(*(b.and_(b.bitcast(v, VI), mask) for v in vectors(block))) for block in range(GROUP)]
    bits = transposed_tree(b, tops, largest_of)
    finite = b.icmp_signed("<", bits, constant(VI, _INFINITY_BITS))
    largest = b.bitcast(bits, VF)
    scale = b.fdiv(largest, constant(VF, 127.0))
    inverse = b.select(b.fcmp_ordered(">", largest, constant(VF, _SMALLEST)), b.fdiv(constant(VF, 127.0), largest),
                       constant(VF, 0.0))
    inverse = b.select(finite, inverse, constant(VF, 0.0))
    sums = []
    for block in range(GROUP):
        factor = b.shuffle_vector(inverse, inverse, constant(VI, block))
        codes = [b.fptosi(call(b, "llvm.rint.v16f32", VF, [b.fmul(v, factor)]), VI) for v in vectors(block)]
        for half, code in enumerate(codes):
            write(b, offset(b, q, BLOCK * block + LANES * half), b.trunc(code, ir.VectorType(I8, LANES)))
        sums.append(b.add(*codes))
    total = transposed_tree(b, sums, b.add)
    for row, value in ((SIDE_SCALE, scale), (SIDE_INT8, b.mul(total, constant(VI, -128))),
                       (SIDE_INT4, b.mul(total, constant(VI, -8))), (SIDE_MIN, b.fmul(scale, b.sitofp(total, VF)))):
        write(b, b.add(side, b.mul(ld_side, constant(I64, row))), value, 4)
    return call(b, "llvm.vector.reduce.and.v16i1", I1, [finite])


_quantize_group = make(types.boolean, (types.intp,) * 4, _emit_group)
