"""Residual add, RMSNorm and quantization of one row in one pass over it."""
from __future__ import annotations

import math

from numba import types

from worker.jit.quantize import quantize_row
from worker.jit.vector import add, device, get_i64, load_f32, mul, muladd, splat, store_f32, sum_lanes

_f32 = types.float32

# Fields of the operation, after the common ones of program.py.
# OUT: the first row; rows are LD_OUT bytes apart. Where only the quantized rows are wanted LD_OUT is 0, and each thread
# has a row of its own, THREAD_BYTES apart.
RESIDUAL, DELTA, LD_DELTA, WEIGHT, SIZE, EPS_BITS, OUT, LD_OUT, THREAD_BYTES, Q, SIDE, LD_SIDE = range(8, 20)


@device
def norm_row(op, n, thread, eps):  # type: ignore[no-untyped-def]
    """residual += delta (where there is one); out = residual / rms(residual) * weight; q, side = quantized out (where
    wanted). The sum of squares is kept in sixteen partial sums, added as a tree."""
    size = get_i64(op, SIZE)
    residual, delta = get_i64(op, RESIDUAL) + n * size * 4, get_i64(op, DELTA)
    total = splat(_f32(0.0))
    if delta != 0:
        delta += n * get_i64(op, LD_DELTA)
        for i in range(0, size * 4, 64):
            value = add(load_f32(residual + i), load_f32(delta + i))
            store_f32(residual + i, value)
            total = muladd(value, value, total)
    else:
        for i in range(0, size * 4, 64):
            value = load_f32(residual + i)
            total = muladd(value, value, total)
    factor = splat(_f32(1.0) / _f32(math.sqrt(sum_lanes(total) / _f32(size) + eps)))
    out = get_i64(op, OUT) + n * get_i64(op, LD_OUT) + thread * get_i64(op, THREAD_BYTES)
    weight = get_i64(op, WEIGHT)
    for i in range(0, size * 4, 64):
        store_f32(out + i, mul(mul(load_f32(residual + i), factor), load_f32(weight + i)))
    if get_i64(op, Q) != 0:
        ld_side = get_i64(op, LD_SIDE)
        quantize_row(out, size, get_i64(op, Q) + n * size, get_i64(op, SIDE) + n * ld_side, ld_side)
