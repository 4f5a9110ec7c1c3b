"""Keys and values as int8 or e4m3 codes with a bfloat16 scale per token and head: the writing half, and the scales.

Codes and scales are those of worker/kv_quant.py, bit for bit. Reading is part of the attention kernel: its products run
over the codes, then the scores take the scales of their keys and the weights those of their values, one multiplication
for sixteen keys. e4m3 is read through half precision, which holds its values times 2^-8 exactly; that
factor is taken back with the scale.
"""
from __future__ import annotations

from numba import types

from worker.jit import step as st
from worker.jit.vector import (add, bits_to_f32, device, div, e4m3_codes, f32_to_bits, floor, get_f32, lane_i32,
                               load_bf16, load_f32, magnitude, max_lanes_i32, maximum, maximum_i32, minimum, mul,
                               scatter_bytes, scatter_quads, set_u8, set_u16, splat, splat_i32, store_bytes, to_i32,
                               with_lane)

_f32, _i32 = types.float32, types.int32
_INFINITY_BITS = 0x7F800000
_SMALLEST_SCALE = 2.0**-100


@device
def to_bf16(value):  # type: ignore[no-untyped-def]
    """Round to nearest even; NaN stays NaN."""
    bits = types.int64(f32_to_bits(value)) & 0xFFFFFFFF
    if value != value:
        return types.uint16(0x7FC0)
    return types.uint16((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)


@device
def key_place(kind, dim, item):  # type: ignore[no-untyped-def]
    """Bytes of a key in a block, and between neighbours there, of items of so many bytes. Of int8, four dimensions lie
    together (worker/attention/jit_layout.py)."""
    return ((dim + 3) // 4 * 4, 4) if kind == st.POOL_INT8 else (dim * item, item)


@device
def write_codes(x, dim, codes, stride, scale_at, kind):  # type: ignore[no-untyped-def]
    """x: dim floats -> their codes and their scale, at these addresses. stride: bytes between codes, or between fours
    of them where they are int8; with 1 they are side by side and whole vectors are written: the row must be as wide."""
    largest = _f32(127.0) if kind == st.POOL_INT8 else _f32(448.0)
    bits = largest_bits(x, dim)
    if bits >= _INFINITY_BITS:
        set_u16(scale_at, 0, types.uint16(0x7FC0))
        return
    half = to_bf16(max(bits_to_f32(bits) / largest, _f32(_SMALLEST_SCALE)))
    set_u16(scale_at, 0, half)
    scale, low, high = splat(bits_to_f32(_i32(types.int64(half) << 16))), splat(-largest), splat(largest)
    for i in range(0, dim, 16):
        value = minimum(maximum(div(load_some(x + 4 * i, dim - i), scale), low), high)
        if kind == st.POOL_INT8:
            packed = to_i32(floor(add(value, splat(_f32(0.5)))))
        else:
            packed = e4m3_codes(value)
        if stride == 1:
            store_bytes(codes + i, packed)
        elif kind == st.POOL_INT8:
            if dim - i >= 16:
                scatter_quads(codes + i // 4 * stride, stride, packed)
            else:
                for j in range(i, dim):
                    set_u8(codes, j // 4 * stride + j % 4, types.uint8(lane_i32(packed, j - i)))
        elif dim - i >= 16:
            scatter_bytes(codes + i * stride, stride, packed)
        else:
            for j in range(i, dim):
                set_u8(codes, j * stride, types.uint8(lane_i32(packed, j - i)))


@device
def load_some(x, count):  # type: ignore[no-untyped-def]
    """Sixteen floats, zeros behind the first `count`."""
    if count >= 16:
        return load_f32(x)
    value = splat(_f32(0.0))
    for i in range(count):
        value = with_lane(value, i, get_f32(x, i))
    return value


@device
def largest_bits(x, dim):  # type: ignore[no-untyped-def]
    """The largest magnitude as an integer, which puts infinity and NaN on top."""
    top = splat_i32(_i32(0))
    for i in range(0, dim, 16):
        top = maximum_i32(top, magnitude(load_some(x + 4 * i, dim - i)))
    return max_lanes_i32(top)


@device
def times(vectors, factor):  # type: ignore[no-untyped-def]
    a, b, c, d = vectors
    return mul(a, factor), mul(b, factor), mul(c, factor), mul(d, factor)


@device
def load_scales(kind, s0, s1, s2, s3):  # type: ignore[no-untyped-def]
    """The scales of 64 keys, given as four addresses of 16: four vectors."""
    factor = splat(_f32(1.0) if kind == st.POOL_INT8 else _f32(256.0))
    return times((load_bf16(s0), load_bf16(s1), load_bf16(s2), load_bf16(s3)), factor)
