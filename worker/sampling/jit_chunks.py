"""A row of logits in chunks, compiled: its largest, also under a mask, and the weights of a chunk.

A row is read in chunks of CHUNK logits from an address; the last, if it is short, from a copy that is filled up with
-inf. The largest of every chunk tells which chunks can matter later. All of a row's numbers come from that row alone,
in an order that depends on nothing else. Does not know temperatures or filters.
"""
from __future__ import annotations

import numpy as np
from numba import types

from worker.jit.lanes import (AHEAD, CHUNK, is_zero_256, lanes_of_chunk, lanes_of_masked_chunk, largest_lane,
                              least_difference, load_where, prefetch_chunk, weight_of)
from worker.jit.vector import add, device, get_f32, get_i32, inlined, load_f32, set_f32, splat, store_f32, sum_lanes

_F32 = types.float32
STEP = 4 * CHUNK                                # bytes
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
    whole = (width - first) // 16 * 16
    for i in range(0, whole, 16):
        at = first + i
        if bits == 0:
            store_f32(tail + 4 * i, load_f32(x + 4 * at))
        else:
            store_f32(tail + 4 * i, load_where(x + 4 * at, bits + at // 8))
    for i in range(whole, CHUNK, 16):
        store_f32(tail + 4 * i, splat(_F32(_MINUS_INF)))
    for i in range(whole, width - first):
        if is_allowed(bits, first + i):
            set_f32(tail, i, get_f32(x, first + i))


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


@inlined
def chunk_weight(address, largest, scale):  # type: ignore[no-untyped-def]
    """The sum of 2**((x - largest) * scale)."""
    top, factor, least = splat(largest), splat(scale), splat(least_difference(scale))
    even = odd = splat(_F32(0.0))
    for i in range(0, CHUNK // 16, 2):
        even = add(even, weight_of(load_f32(address + 64 * i), top, factor, least))
        odd = add(odd, weight_of(load_f32(address + 64 * i + 64), top, factor, least))
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
