"""silu(gate) * up of one row, and its quantization for the projection that follows."""
from __future__ import annotations

from numba import types

from worker.jit.quantize import quantize_row
from worker.jit.vector import add, device, div, exp, get_i64, load_f32, mul, splat, store_f32, sub

_f32 = types.float32

GATE_UP, LD_GATE_UP, SIZE, OUT, Q, SIDE, LD_SIDE = range(8, 15)


@device
def silu_row(op, n):  # type: ignore[no-untyped-def]
    """gate_up [2 * SIZE] -> out [SIZE]: x / (1 + e^-x) * y."""
    size = get_i64(op, SIZE)
    gate = get_i64(op, GATE_UP) + n * get_i64(op, LD_GATE_UP)
    out = get_i64(op, OUT) + n * size * 4
    one, zero = splat(_f32(1.0)), splat(_f32(0.0))
    for i in range(0, size * 4, 64):
        x = load_f32(gate + i)
        value = div(x, add(one, exp(sub(zero, x))))
        store_f32(out + i, mul(value, load_f32(gate + size * 4 + i)))
    if get_i64(op, Q) != 0:
        ld_side = get_i64(op, LD_SIDE)
        quantize_row(out, size, get_i64(op, Q) + n * size, get_i64(op, SIDE) + n * ld_side, ld_side)
