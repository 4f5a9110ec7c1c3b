"""The logits of a row that can matter, side by side, compiled: those above a limit, a sample, their weights.

    list of logits >= a limit       chunk 0: 5 of them ...... -inf -inf | chunk 1: none | chunk 2: 17 of them ...... |
                                    starts[0] (a multiple of 16)        starts[1] = starts[2]               starts[3]

A list is in the order of token ids; its length is a multiple of sixteen. The numbers of a list come from it alone, in
an order that depends on nothing else. Does not know filters.
"""
from __future__ import annotations

import numpy as np
from numba import types

from worker.jit.lanes import (CHUNK, copy_at_least, least_difference, minus_inf_above, minus_inf_from, weight_of,
                              zero_below)
from worker.jit.vector import (add, device, get_f32, get_i64, inlined, load_f32, set_f32, set_i64, splat, store_f32,
                               sum_lanes, zero_unless_above)
from worker.sampling.jit_chunks import chunk_at, chunk_weight, num_chunks

_F32 = types.float32
BLOCK = 32                                      # vectors that are summed in float32
SAMPLED = 32                                    # one logit in so many
_MINUS_INF, _LOWEST = float("-inf"), np.finfo(np.float32).min


@device
def pad_list(values, n):  # type: ignore[no-untyped-def]
    """Fill up to a multiple of sixteen; that length."""
    store_f32(values + 4 * n, splat(_F32(_MINUS_INF)))
    return (n + 15) // 16 * 16


@inlined
def _append(address, at_least, found, n):  # type: ignore[no-untyped-def]
    """Put a chunk's logits >= a limit behind the first n of the list; its new length."""
    for i in range(CHUNK // 16):
        v = load_f32(address + 64 * i)
        n += copy_at_least(found + 4 * n, v, v, at_least)
    return pad_list(found, n)


@device
def collect(x, width, tail, chunk_max, limit, found, starts):  # type: ignore[no-untyped-def]
    """List the logits >= limit, which is finite, as drawn above; the list's length."""
    n, at_least = 0, splat(limit)
    for c in range(num_chunks(width)):
        set_i64(starts, c, n)
        if get_f32(chunk_max, c) >= limit:
            n = _append(chunk_at(x, c, width, tail), at_least, found, n)
    set_i64(starts, num_chunks(width), n)
    return n


@device
def weigh_and_collect(x, width, tail, chunk_max, largest, scale, limit, found, starts):  # type: ignore[no-untyped-def]
    """As collect, in one pass with the weight of all logits; (the list's length, that weight)."""
    n, total, at_least = 0, 0.0, splat(limit)
    for c in range(num_chunks(width)):
        set_i64(starts, c, n)
        highest = get_f32(chunk_max, c)
        if highest > _F32(_MINUS_INF):
            address = chunk_at(x, c, width, tail)
            total += chunk_weight(address, largest, scale)
            if highest >= limit:
                n = _append(address, at_least, found, n)
    set_i64(starts, num_chunks(width), n)
    return n, total


@device
def sample_list(x, width, chunk_max, largest, scale, found, mass):  # type: ignore[no-untyped-def]
    """List one vector of every second whole chunk, another from chunk to chunk, and the weights; (the list's length,
    its weight, that of the row as far as one can tell: the largest of every chunk are known, the others estimated)."""
    top, factor, least = splat(largest), splat(scale), splat(least_difference(scale))
    count, chunks, total, others, known = width // (2 * CHUNK), num_chunks(width), 0.0, 0.0, splat(_F32(0.0))
    for begin in range(0, count, BLOCK):
        part = rest = splat(_F32(0.0))
        for c in range(begin, min(count, begin + BLOCK)):
            highest = splat(get_f32(chunk_max, 2 * c))
            v = load_f32(x + 8 * CHUNK * c + 64 * (5 * c % (CHUNK // 16)))
            v = minus_inf_above(v, highest)     # chunks of which nothing is allowed hold anything
            weights = weight_of(v, top, factor, least)
            store_f32(found + 64 * c, v)
            store_f32(mass + 64 * c, weights)
            part = add(part, weights)
            rest = add(rest, zero_unless_above(weights, highest, v))
        total += sum_lanes(part)
        others += sum_lanes(rest)
    for i in range(pad_list(chunk_max, chunks) // 16):
        known = add(known, weight_of(load_f32(chunk_max + 64 * i), top, factor, least))
    return 16 * count, total, sum_lanes(known) + SAMPLED * others


@device
def list_weights(found, n, largest, scale, mass):  # type: ignore[no-untyped-def]
    """Fill the weights of a list of length n; their sum."""
    top, factor, least, total = splat(largest), splat(scale), splat(least_difference(scale)), 0.0
    for begin in range(0, n // 16, BLOCK):
        part = splat(_F32(0.0))
        for i in range(begin, min(n // 16, begin + BLOCK)):
            weights = weight_of(load_f32(found + 64 * i), top, factor, least)
            store_f32(mass + 64 * i, weights)
            part = add(part, weights)
        total += sum_lanes(part)
    return total


@device
def split_list(found, n, largest, scale, mass, end, below, below_mass):  # type: ignore[no-untyped-def]
    """As list_weights; also copy the logits < end and their weights. (the weight of all, that of the logits >= end,
    the copy's length)"""
    top, factor, least = splat(largest), splat(scale), splat(least_difference(scale))
    total, above, kept, split, lowest = 0.0, 0.0, 0, splat(end), splat(_F32(_LOWEST))
    for begin in range(0, n // 16, BLOCK):
        part = upper = splat(_F32(0.0))
        for i in range(begin, min(n // 16, begin + BLOCK)):
            v = load_f32(found + 64 * i)
            weights = weight_of(v, top, factor, least)
            store_f32(mass + 64 * i, weights)
            part = add(part, weights)
            upper = add(upper, zero_below(weights, v, split))
            inside = minus_inf_from(v, split)
            copy_at_least(below + 4 * kept, v, inside, lowest)
            kept += copy_at_least(below_mass + 4 * kept, weights, inside, lowest)
        total += sum_lanes(part)
        above += sum_lanes(upper)
    store_f32(below_mass + 4 * kept, splat(_F32(0.0)))
    return total, above, pad_list(below, kept)


@device
def list_sums(found, mass, n, limit, sums):  # type: ignore[no-untyped-def]
    """Fill sums with the weight of the logits >= limit in every CHUNK places of the list; their total."""
    total, at_least = 0.0, splat(limit)
    for begin in range(0, n, CHUNK):
        part = splat(_F32(0.0))
        for i in range(begin, min(n, begin + CHUNK), 16):
            part = add(part, zero_below(load_f32(mass + 4 * i), load_f32(found + 4 * i), at_least))
        weight = sum_lanes(part)
        set_f32(sums, begin // CHUNK, weight)
        total += weight
    return total


@device
def token_at(x, width, tail, found, starts, place):  # type: ignore[no-untyped-def]
    """The token whose logit is at a place of the list."""
    chunk, end = 0, num_chunks(width)
    while end - chunk > 1:
        middle = (chunk + end) // 2
        if get_i64(starts, middle) <= place:
            chunk = middle
        else:
            end = middle
    value, equal = get_f32(found, place), 0     # so many of the chunk's equal logits are before it
    for i in range(get_i64(starts, chunk), place):
        equal += get_f32(found, i) == value
    address = chunk_at(x, chunk, width, tail)
    for i in range(CHUNK):
        if get_f32(address, i) == value:
            if equal == 0:
                return chunk * CHUNK + i
            equal -= 1
    return 0
