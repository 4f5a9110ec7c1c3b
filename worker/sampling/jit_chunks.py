"""A row of logits in chunks, compiled: its largest, the weights of a chunk, a list of the logits above a limit.

A row is read in chunks of CHUNK logits from an address; the last, if it is short, from a copy that is filled up with
-inf. The largest of every chunk tells which chunks can matter later. All of a row's numbers come from that row alone,
in an order that depends on nothing else. Does not know temperatures or filters.

    list of logits >= a limit       chunk 0: 5 of them ...... -inf -inf | chunk 1: none | chunk 2: 17 of them ...... |
                                    starts[0] (a multiple of 16)        starts[1] = starts[2]               starts[3]
"""
from __future__ import annotations

import numpy as np
from numba import types

from worker.jit.lanes import (AHEAD, CHUNK, copy_at_least, exp2_below_0, is_zero_256, lanes_of_chunk,
                              lanes_of_masked_chunk, largest_lane, load_where, prefetch_chunk, zero_below)
from worker.jit.vector import (add, device, get_f32, get_i32, get_i64, load_f32, mul, set_f32, set_i64, splat,
                               store_f32, sub, sum_lanes)

_F32 = types.float32
STEP = 4 * CHUNK                                # bytes
BLOCK = 32                                      # vectors that are summed in float32
_MINUS_INF, _NAN = float("-inf"), float("nan")


@device
def num_chunks(width):  # type: ignore[no-untyped-def]
    return (width + CHUNK - 1) // CHUNK


@device
def is_allowed(bits, token):  # type: ignore[no-untyped-def]
    """Bit `token` of the words at an address; address 0: every token."""
    if bits == 0:
        return True
    return (np.int64(get_i32(bits, token >> 5)) >> (token & 31)) & 1 != 0


@device
def fill_tail(x, width, bits, tail):  # type: ignore[no-untyped-def]
    """Copy the row's short last chunk, where it has one, to `tail`."""
    first = width // CHUNK * CHUNK
    for i in range(CHUNK):
        is_there = first + i < width and is_allowed(bits, first + i)
        set_f32(tail, i, get_f32(x, first + i) if is_there else _F32(_MINUS_INF))


@device
def chunk_at(x, c, width, tail):  # type: ignore[no-untyped-def]
    return x + STEP * c if c < width // CHUNK else tail


@device
def scan(x, width, tail, chunk_max):  # type: ignore[no-untyped-def]
    """Fill chunk_max; (chunk of the first largest, largest). NaN anywhere: the largest is NaN."""
    best, chunk = _F32(_MINUS_INF), 0
    for c in range(num_chunks(width)):
        largest = largest_lane(lanes_of_chunk(chunk_at(x, c, width, tail)))
        set_f32(chunk_max, c, largest)
        if not largest <= best:
            best, chunk = largest, c
            if best != best:
                return 0, _F32(_NAN)
    return chunk, best


@device
def scan_allowed(x, width, bits, tail, chunk_max):  # type: ignore[no-untyped-def]
    """As scan, of the logits whose bit is 1; chunks without any are not read. `tail` is masked already."""
    best, chunk, whole = _F32(_MINUS_INF), 0, width // CHUNK
    for c in range(num_chunks(width)):
        largest = _F32(_MINUS_INF)
        if c >= whole:
            largest = largest_lane(lanes_of_chunk(tail))
        elif not is_zero_256(bits + CHUNK // 8 * c):
            largest = largest_lane(lanes_of_masked_chunk(x + STEP * c, bits + CHUNK // 8 * c))
        ahead = c + AHEAD // STEP
        if ahead < whole and not is_zero_256(bits + CHUNK // 8 * ahead):
            prefetch_chunk(x + STEP * ahead)
        set_f32(chunk_max, c, largest)
        if not largest <= best:
            best, chunk = largest, c
            if best != best:
                return 0, _F32(_NAN)
    return chunk, best


@device
def copy_allowed(x, width, bits, chunk_max, copy):  # type: ignore[no-untyped-def]
    """The whole chunks of the row that have an allowed logit, -inf where the bit is 0."""
    for c in range(width // CHUNK):
        if get_f32(chunk_max, c) > _F32(_MINUS_INF):
            for i in range(CHUNK // 16):
                at = CHUNK * c + 16 * i
                store_f32(copy + 4 * at, load_where(x + 4 * at, bits + at // 8))


@device
def first_of(x, chunk, width, bits, tail, value):  # type: ignore[no-untyped-def]
    """The first allowed token of the chunk with this logit."""
    address = chunk_at(x, chunk, width, tail)
    for i in range(CHUNK):
        if get_f32(address, i) == value and (address == tail or is_allowed(bits, CHUNK * chunk + i)):
            return CHUNK * chunk + i
    return 0


@device
def chunk_weight(address, largest, scale):  # type: ignore[no-untyped-def]
    """The sum of 2**((x - largest) * scale)."""
    top, factor = splat(largest), splat(scale)
    even = odd = splat(_F32(0.0))
    for i in range(0, CHUNK // 16, 2):
        even = add(even, exp2_below_0(mul(sub(load_f32(address + 64 * i), top), factor)))
        odd = add(odd, exp2_below_0(mul(sub(load_f32(address + 64 * i + 64), top), factor)))
    return sum_lanes(add(even, odd))


@device
def weigh(x, width, tail, chunk_max, largest, scale, sums):  # type: ignore[no-untyped-def]
    """Fill sums float32 with each chunk's weight; their total."""
    total = 0.0
    for c in range(num_chunks(width)):
        part = _F32(0.0)
        if get_f32(chunk_max, c) > _F32(_MINUS_INF):
            part = chunk_weight(chunk_at(x, c, width, tail), largest, scale)
        set_f32(sums, c, part)
        total += part
    return total


@device
def collect(x, width, tail, chunk_max, limit, found, starts):  # type: ignore[no-untyped-def]
    """List the logits >= limit, which is finite, as drawn above; the list's length."""
    n, at_least, nothing = 0, splat(limit), splat(_F32(_MINUS_INF))
    for c in range(num_chunks(width)):
        set_i64(starts, c, n)
        if get_f32(chunk_max, c) >= limit:
            address = chunk_at(x, c, width, tail)
            for i in range(CHUNK // 16):
                v = load_f32(address + 64 * i)
                n += copy_at_least(found + 4 * n, v, v, at_least)
            store_f32(found + 4 * n, nothing)
            n = (n + 15) // 16 * 16
    set_i64(starts, num_chunks(width), n)
    return n


@device
def sample_list(x, width, found):  # type: ignore[no-untyped-def]
    """One vector of every second whole chunk, another lane group from chunk to chunk; the list's length."""
    count = width // (2 * CHUNK)
    for c in range(count):
        store_f32(found + 64 * c, load_f32(x + 2 * STEP * c + 64 * (5 * c % (CHUNK // 16))))
    return 16 * count


@device
def list_weights(found, n, largest, scale, mass):  # type: ignore[no-untyped-def]
    """Fill the weights of a list of length n, a multiple of 16; their sum."""
    top, factor, total = splat(largest), splat(scale), 0.0
    for begin in range(0, n // 16, BLOCK):
        part = splat(_F32(0.0))
        for i in range(begin, min(n // 16, begin + BLOCK)):
            weights = exp2_below_0(mul(sub(load_f32(found + 64 * i), top), factor))
            store_f32(mass + 64 * i, weights)
            part = add(part, weights)
        total += sum_lanes(part)
    return total


@device
def list_sums(found, mass, starts, chunks, limit, sums):  # type: ignore[no-untyped-def]
    """Fill sums with each chunk's weight of the logits >= limit; their total."""
    total, at_least = 0.0, splat(limit)
    for c in range(chunks):
        part = splat(_F32(0.0))
        for i in range(get_i64(starts, c) // 16, get_i64(starts, c + 1) // 16):
            part = add(part, zero_below(load_f32(mass + 64 * i), load_f32(found + 64 * i), at_least))
        weight = sum_lanes(part)
        set_f32(sums, c, weight)
        total += weight
    return total
