"""Activations as int8 in blocks of 32 along K, one scale a block: what the integer tiles of dot.py multiply.

    q = round(x / scale), scale = max|x| / 127       the error of Q8_0 files, here on activations

Beside the scale, the side table keeps the sums that undo the unsigned storage of weights (dot.py, SIDE_*). A block that
holds a NaN or an infinity gets the scale NaN, so that the row's logits show it.
"""
from __future__ import annotations

from numba import types

from worker.jit.dot import BLOCK, SIDE_INT4, SIDE_INT8, SIDE_MIN, SIDE_SCALE
from worker.jit.vector import (add_i32, bits_to_f32, device, load_f32, magnitude, max_lanes_i32, maximum_i32, mul,
                               nearest, set_f32, set_i32, splat, store_bytes, sum_lanes_i32, to_i32)

_f32, _i32 = types.float32, types.int32
_INFINITY_BITS = 0x7F800000


@device
def quantize_row(x, num_k, q, side):  # type: ignore[no-untyped-def]
    """x float32 [num_k] -> q int8 [num_k], side [4, num_k / 32]; addresses."""
    num_blocks = num_k // BLOCK
    for block in range(num_blocks):
        at = x + block * (4 * BLOCK)
        v0, v1 = load_f32(at), load_f32(at + 64)
        bits = max_lanes_i32(maximum_i32(magnitude(v0), magnitude(v1)))
        scale, inverse, total = _f32(0.0), _f32(0.0), _i32(0)
        if bits >= _INFINITY_BITS:
            scale = _f32(float("nan"))
        elif bits > 0:
            largest = bits_to_f32(bits)
            scale = largest / _f32(127.0)
            # The reciprocal of a denormal overflows; such a block is zero for all that follows.
            if largest > _f32(1e-36):
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
