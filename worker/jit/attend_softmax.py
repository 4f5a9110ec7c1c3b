"""The running softmax of attention: a state per row, of its maximum, its sum and its weighted values.

Scores are in units of log2, so that a weight is 2**(score - maximum). 64 scores of every row are taken in at a time, in
three passes: `take_scores` scales and masks them and raises the maxima, `rescale` says what the old states are worth
now, `weigh` turns the scores into weights. So no row waits for the one before, and the first pass has no branch that
nobody can predict. Does not know where keys and values lie.
Source: Milakov and Gimelshein 2018 (online softmax).
"""
from __future__ import annotations

from numba import types

from worker.jit.lanes import exp2_below_0
from worker.jit.vector import (add, device, div, get_f32, get_i64, keep_between, lane_numbers, load_f32, max_lanes,
                               maximum, mul, set_f32, splat, splat_i32, store_f32, sub, sum_lanes)

_f32, _i32 = types.float32, types.int32
HEADER = 16                                 # floats before a row's weighted values: maximum, sum
CHUNK = 64                                  # scores of one call
LOG2_E = 1.4426950408889634
_NEG_INF = float("-inf")


@device
def clear(rows, state, ld):  # type: ignore[no-untyped-def]
    zero = splat(_f32(0.0))
    for m in range(rows):
        at = state + m * ld
        for i in range(0, ld, 64):
            store_f32(at + i, zero)
        set_f32(at, 0, _f32(_NEG_INF))


@device
def merge(total, part, ld):  # type: ignore[no-untyped-def]
    """Fold one row's split into its total. Both may be empty (maximum -inf)."""
    old, new = get_f32(total, 0), get_f32(part, 0)
    top = old if old > new else new
    base = _f32(0.0) if top == _f32(_NEG_INF) else top
    keep, take = exp2_below_0(splat(old - base)), exp2_below_0(splat(new - base))
    for i in range(HEADER * 4, ld, 64):
        store_f32(total + i, add(mul(load_f32(total + i), keep), mul(load_f32(part + i), take)))
    both = add(mul(splat(get_f32(total, 1)), keep), mul(splat(get_f32(part, 1)), take))
    set_f32(total, 1, max_lanes(both))
    set_f32(total, 0, top)


@device
def finish(state, dim, out):  # type: ignore[no-untyped-def]
    """out [dim] = weighted values / sum."""
    divisor, whole = splat(get_f32(state, 1)), dim // 16 * 16
    for i in range(0, whole * 4, 64):
        store_f32(out + i, div(load_f32(state + HEADER * 4 + i), divisor))
    for i in range(whole, dim):
        set_f32(out, i, get_f32(state, HEADER + i) / get_f32(state, 1))


@device
def take_scores(rows, scores, states, ld, limits, chunk, counts, factors, bases, keeps):  # type: ignore[no-untyped-def]
    """scores [rows, 64] *= factors, -inf for keys outside a row's limits and for those that do not exist; counts: how
    many of each sixteen do. bases: the maxima so far; keeps: the old ones minus those."""
    n0, n1, n2, n3 = counts
    is_full = n0 + n1 + n2 + n3 == CHUNK
    f0, f1, f2, f3 = factors
    for m in range(rows):
        at, state = scores + m * (CHUNK * 4), states + m * ld
        s0, s1 = mul(load_f32(at), f0), mul(load_f32(at + 64), f1)
        s2, s3 = mul(load_f32(at + 128), f2), mul(load_f32(at + 192), f3)
        low, high = get_i64(limits, 2 * m) - chunk, get_i64(limits, 2 * m + 1) - chunk
        if not (is_full and high >= CHUNK - 1 and low <= 0):
            lanes, minus = lane_numbers(), splat(_f32(_NEG_INF))
            s0 = keep_between(s0, lanes, splat_i32(_i32(low)), splat_i32(_i32(min(high, n0 - 1))), minus)
            s1 = keep_between(s1, lanes, splat_i32(_i32(low - 16)), splat_i32(_i32(min(high - 16, n1 - 1))), minus)
            s2 = keep_between(s2, lanes, splat_i32(_i32(low - 32)), splat_i32(_i32(min(high - 32, n2 - 1))), minus)
            s3 = keep_between(s3, lanes, splat_i32(_i32(low - 48)), splat_i32(_i32(min(high - 48, n3 - 1))), minus)
        store_f32(at, s0)
        store_f32(at + 64, s1)
        store_f32(at + 128, s2)
        store_f32(at + 192, s3)
        old, new = get_f32(state, 0), max_lanes(maximum(maximum(s0, s1), maximum(s2, s3)))
        top = old if old > new else new
        base = _f32(0.0) if top == _f32(_NEG_INF) else top
        set_f32(state, 0, top)
        set_f32(bases, m, base)
        set_f32(keeps, m, old - base)


@device
def rescale(rows, keeps):  # type: ignore[no-untyped-def]
    """keeps -> 2**keeps."""
    for m in range(0, rows, 16):
        store_f32(keeps + 4 * m, exp2_below_0(load_f32(keeps + 4 * m)))


@device
def weigh(rows, scores, states, ld, factors, bases, keeps):  # type: ignore[no-untyped-def]
    """scores [rows, 64] -> weights times factors, those of their values; updates sums, rescales weighted values."""
    w0, w1, w2, w3 = factors
    for m in range(rows):
        at, state = scores + m * (CHUNK * 4), states + m * ld
        s0, s1, s2, s3 = raw_weights(at, splat(get_f32(bases, m)))
        store_f32(at, mul(s0, w0))
        store_f32(at + 64, mul(s1, w1))
        store_f32(at + 128, mul(s2, w2))
        store_f32(at + 192, mul(s3, w3))
        keep_weights(state, ld, get_f32(keeps, m), s0, s1, s2, s3)


@device
def raw_weights(at, base):  # type: ignore[no-untyped-def]
    """2**(score - base) of 64 scores."""
    return (exp2_below_0(sub(load_f32(at), base)), exp2_below_0(sub(load_f32(at + 64), base)),
            exp2_below_0(sub(load_f32(at + 128), base)), exp2_below_0(sub(load_f32(at + 192), base)))


@device
def keep_weights(state, ld, keep, s0, s1, s2, s3):  # type: ignore[no-untyped-def]
    """Take 64 weights into a state's sum; what it had before is worth `keep` now."""
    set_f32(state, 1, get_f32(state, 1) * keep + sum_lanes(add(add(s0, s1), add(s2, s3))))
    if keep != _f32(1.0):
        factor = splat(keep)
        for i in range(HEADER * 4, ld, 64):
            store_f32(state + i, mul(load_f32(state + i), factor))
