"""The draw of one row, compiled: the first token, by id, whose cumulative weight exceeds noise * total.

The weights come in blocks of CHUNK whose sums are known: of the row, or of the list of its logits that can matter.
"""
from __future__ import annotations

import numpy as np
from numba import types

from worker.jit.lanes import CHUNK, least_difference, weight_of, zero_below
from worker.jit.vector import device, get_f32, load_f32, splat, store_f32
from worker.sampling.jit_chunks import chunk_at, num_chunks
from worker.sampling.jit_lists import token_at

_F32, _MINUS_INF = types.float32, float("-inf")


@device
def _block_of(sums, count, target):  # type: ignore[no-untyped-def]
    """(the block in which the target is passed, the weight before it)."""
    before, last = 0.0, 0
    for b in range(count):
        weight = get_f32(sums, b)
        if weight > _F32(0.0):
            last = b
            if before + weight > target:
                return b, before
            before += weight
    return last, before                         # cannot be: target < total, summed in the same order


@device
def _place_of(tile, before, target):  # type: ignore[no-untyped-def]
    """The first of a block's weights with which the target is passed; else the last that is not 0."""
    place = 0
    for i in range(CHUNK):
        weight = get_f32(tile, i)
        if weight > _F32(0.0):
            place = i
            before += weight
            if before > target:
                break
    return place


@device
def draw(x, width, tail, tile, sums, total, largest, scale, noise):  # type: ignore[no-untyped-def]
    """From all logits of the row. sums: of its chunks."""
    chunk, before = _block_of(sums, num_chunks(width), noise * total)
    address = chunk_at(x, chunk, width, tail)
    top, factor, least = splat(largest), splat(scale), splat(least_difference(scale))
    for i in range(CHUNK // 16):
        store_f32(tile + 64 * i, weight_of(load_f32(address + 64 * i), top, factor, least))
    return chunk * CHUNK + _place_of(tile, before, noise * total)


@device
def draw_from_list(x, width, tail, tile, found, mass, n, starts, sums, total, limit, noise):  # type: ignore[no-untyped-def]
    """From the logits >= limit of a list of length n. sums: list_sums."""
    block, before = _block_of(sums, (n + CHUNK - 1) // CHUNK, noise * total)
    at_least = splat(limit)
    for i in range(CHUNK // 16):
        at = CHUNK * block + 16 * i
        weights = splat(_F32(0.0))
        if at < n:
            weights = zero_below(load_f32(mass + 4 * at), load_f32(found + 4 * at), at_least)
        store_f32(tile + 64 * i, weights)
    return token_at(x, width, tail, found, starts, CHUNK * block + _place_of(tile, before, noise * total))


@device
def uniform(seed, child, index):  # type: ignore[no-untyped-def]
    """Lane 0 of ipc.counter_rng.uniform, bit for bit: Philox4x32-10."""
    mask, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    place, choice = np.uint64(index), np.uint64(child)
    c0, c1, c2, c3 = place & mask, place >> shift, choice & mask, np.uint64(0)
    k0, k1 = seed & mask, seed >> shift
    for i in range(10):
        if i:
            k0, k1 = (k0 + np.uint64(0x9E3779B9)) & mask, (k1 + np.uint64(0xBB67AE85)) & mask
        first, second = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (second >> shift) ^ c1 ^ k0, second & mask, (first >> shift) ^ c3 ^ k1, first & mask
    return np.float64(np.int64((c0 >> np.uint64(9)) * np.uint64(2) + np.uint64(1))) * 2.0 ** -24
