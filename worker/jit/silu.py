"""silu(gate) * up, and its quantization for the projection that follows: of a whole row, or of some columns of some
rows as soon as a product has them (matmul.py). Gates and ups come in turn, PAIR of each."""
from __future__ import annotations

from numba import types

from worker.jit.quantize import quantize_columns, quantize_row
from worker.jit.vector import add, device, div, exp, get_i64, load_f32, mul, splat, store_f32, sub

_f32 = types.float32

GATE_UP, LD_GATE_UP, SIZE, PAIR, OUT, Q, SIDE, LD_SIDE = range(8, 16)


@device
def silu_row(op, n):  # type: ignore[no-untyped-def]
    """gate_up [2 * SIZE] -> out [SIZE]: x / (1 + e^-x) * y."""
    size, pair = get_i64(op, SIZE), get_i64(op, PAIR)
    gate = get_i64(op, GATE_UP) + n * get_i64(op, LD_GATE_UP)
    out = get_i64(op, OUT) + n * size * 4
    for start in range(0, size, pair):
        _activate(gate + 8 * start, pair, out + 4 * start)
    if get_i64(op, Q) != 0:
        ld_side = get_i64(op, LD_SIDE)
        quantize_row(out, size, get_i64(op, Q) + n * size, get_i64(op, SIDE) + n * ld_side, ld_side)


@device
def _activate(gate, pair, out):  # type: ignore[no-untyped-def]
    one, zero = splat(_f32(1.0)), splat(_f32(0.0))
    for i in range(0, pair * 4, 64):
        x = load_f32(gate + i)
        value = div(x, add(one, exp(sub(zero, x))))
        store_f32(out + i, mul(value, load_f32(gate + pair * 4 + i)))


@device
def silu_columns(first, count, pairs, pair, start, size, out, q, side, ld_side):  # type: ignore[no-untyped-def]
    """The same of `count` rows from the first on, for `pair` columns from the start-th on. pairs [count, 2 * pair],
    which it overwrites; out, q, side: addresses of rows of `size`; q 0: floats are wanted."""
    ld = 8 * pair
    for m in range(count):
        at = pairs + m * ld
        _activate(at, pair, at if q != 0 else out + ((first + m) * size + start) * 4)
    if q != 0:
        quantize_columns(count, pairs, ld, pair, size, start, q + first * size, side + first * ld_side, ld_side)
