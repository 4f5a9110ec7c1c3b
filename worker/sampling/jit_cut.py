"""Where a list of values has to be cut so that the weights above reach a target, compiled: without a sort.

The range is halved by the weight of its upper half, a vectorised sum each; now and then the list shrinks to what lies
in the range, and the last few are sorted. Lists are float32 at addresses, their length a multiple of sixteen, filled
up with values of -inf, whose weight is 0. Does not know what is weighed.
"""
from __future__ import annotations

import numpy as np
from numba import types

from worker.jit.lanes import copy_at_least, inf_below, minus_inf_from, zero_below
from worker.jit.vector import (add, bits_to_f32, device, f32_to_bits, get_f32, load_f32, max_lanes, maximum, min_lanes,
                               minimum, set_f32, splat, store_f32, sum_lanes)

FEW = 32                                        # sorted outright
ROUNDS = 4                                      # halvings before the list shrinks
BY_VALUE = 40                                   # halvings of the distance; then of the number of floats in between
BLOCK = 64                                      # vectors that are summed in float32
_LOWEST = np.finfo(np.float32).min
_F32, _MINUS_INF, _INF = types.float32, float("-inf"), float("inf")


@device
def _key(value):  # type: ignore[no-untyped-def]
    """An int64 that orders as floats do."""
    bits = np.int64(f32_to_bits(value))
    return bits if bits >= 0 else np.int64(-2147483648) - bits


@device
def _value(key):  # type: ignore[no-untyped-def]
    return bits_to_f32(np.int32(key if key >= 0 else np.int64(-2147483648) - key))


@device
def list_ones(values, n, weights):  # type: ignore[no-untyped-def]
    """Weight 1 for every finite value."""
    one, lowest = splat(_F32(1.0)), splat(_F32(_LOWEST))
    for i in range(n // 16):
        store_f32(weights + 64 * i, zero_below(one, load_f32(values + 64 * i), lowest))


@device
def weight_from(values, weights, n, limit):  # type: ignore[no-untyped-def]
    """The weight of the values >= limit, float64."""
    total, at_least = 0.0, splat(limit)
    for begin in range(0, n // 16, BLOCK):
        even = odd = splat(_F32(0.0))
        end = min(n // 16, begin + BLOCK)
        for i in range(begin, end - 1, 2):
            even = add(even, zero_below(load_f32(weights + 64 * i), load_f32(values + 64 * i), at_least))
            odd = add(odd, zero_below(load_f32(weights + 64 * i + 64), load_f32(values + 64 * i + 64), at_least))
        if (end - begin) % 2:
            even = add(even, zero_below(load_f32(weights + 64 * end - 64), load_f32(values + 64 * end - 64), at_least))
        total += sum_lanes(add(even, odd))
    return total


@device
def _range(values, n, limit):  # type: ignore[no-untyped-def]
    """(smallest, largest) of the values >= limit."""
    low, high, at_least = splat(_F32(_INF)), splat(_F32(_MINUS_INF)), splat(limit)
    for i in range(n // 16):
        v = load_f32(values + 64 * i)
        low = minimum(low, inf_below(v, at_least))
        high = maximum(high, v)
    return min_lanes(low), max_lanes(high)


@device
def _shrink(values, weights, n, low, end, out_values, out_weights):  # type: ignore[no-untyped-def]
    """Copy what lies in [low, end), also onto the list itself; how many."""
    kept, at_least, below = 0, splat(low), splat(end)
    for i in range(n // 16):
        v, w = load_f32(values + 64 * i), load_f32(weights + 64 * i)
        inside = minus_inf_from(v, below)
        copy_at_least(out_values + 4 * kept, v, inside, at_least)
        kept += copy_at_least(out_weights + 4 * kept, w, inside, at_least)
    store_f32(out_values + 4 * kept, splat(_F32(_MINUS_INF)))
    store_f32(out_weights + 4 * kept, splat(_F32(0.0)))
    return kept


@device
def _sort(values, weights, n):  # type: ignore[no-untyped-def]
    """Falling order, in place."""
    for i in range(1, n):
        v, w = get_f32(values, i), get_f32(weights, i)
        j = i
        while j > 0 and get_f32(values, j - 1) < v:
            set_f32(values, j, get_f32(values, j - 1))
            set_f32(weights, j, get_f32(weights, j - 1))
            j -= 1
        set_f32(values, j, v)
        set_f32(weights, j, w)


@device
def _middle(low, end, halvings):  # type: ignore[no-untyped-def]
    """Above low, below end; low if there is nothing between. Far apart values are halved as floats are stored."""
    middle = _F32(0.5) * low + _F32(0.5) * end
    if halvings > BY_VALUE or not low < middle < end:
        middle = _value((_key(low) + _key(end)) >> 1)
    return middle


@device
def cut(values, weights, n, low, high, target, room_values, room_weights):  # type: ignore[no-untyped-def]
    """The largest value for which the weights of all values >= it reach the target; else low, or the smallest value
    above it. Values below low are not looked at, none is above high; both are finite. The rooms are of n + 16; the list
    stays as it is, if it is not in the rooms."""
    removed, halvings = 0.0, 0                  # weight of the values that the list has lost at its upper end
    if low <= _F32(_LOWEST):                    # no real bound: look for one
        low, high = _range(values, n, low)
    while low < high:
        end, upper = _value(_key(high) + 1), 0.0        # weight of the list's values >= end
        for _ in range(ROUNDS):
            middle = _middle(low, end, halvings)
            if middle <= low:
                return low
            weight = weight_from(values, weights, n, middle)
            halvings += 1
            if removed + weight >= target:
                low = middle
            else:
                end, upper = middle, weight
        kept = _shrink(values, weights, n, low, end, room_values, room_weights)
        removed += upper
        values, weights, n = room_values, room_weights, (kept + 15) // 16 * 16
        if kept == 0:                           # all together do not reach the target, and none is left to be cut off
            return low
        if kept <= FEW:
            _sort(values, weights, kept)
            for i in range(kept):
                removed += get_f32(weights, i)
                if removed >= target:
                    return get_f32(values, i)
            return get_f32(values, kept - 1)
        low, high = _range(values, n, low)
    return low


@device
def rough_cut(values, weights, n, low, end, target, halvings):  # type: ignore[no-untyped-def]
    """Somewhat below where `cut` would cut: the weights above it reach the target."""
    for _ in range(halvings):
        middle = _middle(low, end, 0)
        if weight_from(values, weights, n, middle) >= target:
            low = middle
        else:
            end = middle
    return low
