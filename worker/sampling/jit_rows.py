"""One row of logits at a time, compiled: arg-max and draw. The CPU form of filters.py and noise.py.

A row of 150,000 logits fits in a core's cache, so a row is read from memory once, however many passes it takes. min_p,
top-k and top-p are one threshold, found without a sort: a list of the logits that can matter, then the cut in it. For
top-p alone the list begins where a sample of the row says that too little weight lies below; whether it was right is
checked by weight, so it changes no result. A row depends on nothing else: it gives the same token in any batch and by
any thread. A row with a bit mask is read through it. Does not know requests. Threads: jit_threads.py.
"""
from __future__ import annotations

import numpy as np
from numba import njit, types

from worker.jit.lanes import CHUNK, exp2_below_0, zero_below
from worker.jit.vector import device, entry, get_f32, load_f32, mul, set_f32, splat, store_f32, sub
from worker.sampling.jit_chunks import (chunk_at, collect, copy_allowed, fill_tail, first_of, list_sums, list_weights,
                                        num_chunks, sample_list, scan, scan_allowed, weigh)
from worker.sampling.jit_cut import cut, list_ones, rough_cut, weight_from

LOG2E = 1.4426950408889634
SMALLEST_T = 1e-30                              # a float32 that may divide; below it only the maximum has any weight
LESS, MORE = 0.9, 1.1                           # how far the sample's weight below a cut is trusted
_F32, _MINUS_INF = types.float32, np.float32(-np.inf)
_LOWEST = np.finfo(np.float32).min
SAMPLED = 32                                    # one logit in so many


@njit
def scratch_floats(width):  # type: ignore[no-untyped-def]
    """float32 of room:  chunk maxima | sums | starts (int64) | tail | tile | copy | list | weights | 2 rooms"""
    return 4 * _part(width) + 2 * CHUNK + 5 * _long(width)


@njit
def _part(width):  # type: ignore[no-untyped-def]
    """One entry a chunk, and sixteen."""
    return (width + CHUNK - 1) // CHUNK + 32


@njit
def _long(width):  # type: ignore[no-untyped-def]
    """A list of all logits, every chunk's part filled up to sixteen."""
    return width + 16 * ((width + CHUNK - 1) // CHUNK) + 32


@device
def rooms(scratch, width):  # type: ignore[no-untyped-def]
    """Addresses, in the order of scratch_floats."""
    part, long = 4 * _part(width), 4 * _long(width)
    tail = scratch + 4 * part
    copy = tail + 8 * CHUNK
    return (scratch, scratch + part, scratch + 2 * part, tail, tail + 4 * CHUNK, copy, copy + long, copy + 2 * long,
            copy + 3 * long, copy + 4 * long)


@device
def pad_list(values, n):  # type: ignore[no-untyped-def]
    """Fill up to a multiple of sixteen; that length."""
    store_f32(values + 4 * n, splat(_MINUS_INF))
    return (n + 15) // 16 * 16


@device
def kth_bound(chunk_max, chunks, largest, k, values, weights, room_values, room_weights):  # type: ignore[no-untyped-def]
    """A limit that at least k logits reach: so many chunks have one as large; else the lowest float."""
    if k > chunks:
        return _F32(_LOWEST)
    for c in range(chunks):
        set_f32(values, c, get_f32(chunk_max, c))
    n = pad_list(values, chunks)
    list_ones(values, n, weights)
    limit = cut(values, weights, n, _LOWEST, _MINUS_INF, largest, np.float64(k), room_values, room_weights)
    # Fewer chunks may have a finite logit at all: then a chunk may hold several of the first k.
    return limit if weight_from(values, weights, n, limit) >= k else _F32(_LOWEST)


@device
def _list_of_top_p(x, width, tail, chunk_max, largest, scale, top_p, total, found, mass, starts):  # type: ignore[no-untyped-def]
    """(length of the list of logits that contains the cut, its lower end, a guess at the cut). Fills the weights."""
    # Tokens that are all lighter than this weigh less than 1 - top_p together: the cut is not among them.
    bound, share = np.float64(_LOWEST), (1.0 - top_p) * total / width
    if share > 1e-37:
        bound = max(bound, largest + (np.log2(share) - 1e-3) / scale - 1e-6 * abs(largest))
    lowest = guess = hint = _F32(bound)
    if width >= SAMPLED * CHUNK:
        n = sample_list(x, width, found)
        above, below = list_weights(found, n, largest, scale, mass), (1.0 - top_p) * total / SAMPLED
        guess = rough_cut(found, mass, n, lowest, largest, max(above - LESS * below, 1e-30), 8)
        end = _F32(0.75) * guess + _F32(0.25) * largest
        hint = rough_cut(found, mass, n, guess, end, max(above - MORE * below, 1e-30), 5)
    n = collect(x, width, tail, chunk_max, guess, found, starts)
    listed = list_weights(found, n, largest, scale, mass)
    if guess > lowest and listed < top_p * total:
        guess = lowest
        n = collect(x, width, tail, chunk_max, guess, found, starts)
        list_weights(found, n, largest, scale, mass)
    return n, guess, hint


@device
def _draw(x, width, tail, tile, sums, total, largest, scale, limit, noise):  # type: ignore[no-untyped-def]
    """The first token, by id, whose cumulative weight exceeds noise * total."""
    target, before = noise * total, 0.0
    chunk = last = -1
    for c in range(num_chunks(width)):
        weight = get_f32(sums, c)
        if weight > _F32(0.0):
            last = c
            if before + weight > target:
                chunk = c
                break
            before += weight
    if chunk < 0:                               # cannot be: target < total, summed in the same order
        chunk = last
    address, top, factor, at_least = chunk_at(x, chunk, width, tail), splat(largest), splat(scale), splat(limit)
    for i in range(CHUNK // 16):
        v = load_f32(address + 64 * i)
        store_f32(tile + 64 * i, zero_below(exp2_below_0(mul(sub(v, top), factor)), v, at_least))
    token = 0
    for i in range(CHUNK):
        weight = get_f32(tile, i)
        if weight > _F32(0.0):
            token = chunk * CHUNK + i
            before += weight
            if before > target:
                break
    return token


@device
def _uniform(seed, child, index):  # type: ignore[no-untyped-def]
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


@device
def _scan(x, width, bits, tail, chunk_max):  # type: ignore[no-untyped-def]
    fill_tail(x, width, bits, tail)
    return scan(x, width, tail, chunk_max) if bits == 0 else scan_allowed(x, width, bits, tail, chunk_max)


@device
def _greedy(x, width, bits, tail, chunk_max):  # type: ignore[no-untyped-def]
    """The token of one row; -1 or -2 (empty) for a bad row."""
    chunk, largest = _scan(x, width, bits, tail, chunk_max)
    if not np.isfinite(largest):
        return -2 if largest == _MINUS_INF else -1
    return first_of(x, chunk, width, bits, tail, largest)


@device
def _sample(x, width, bits, scratch, temperature, top_k, top_p, min_p, noise):  # type: ignore[no-untyped-def]
    """The token of one row with a temperature; -1 or -2 (empty) for a bad row."""
    chunk_max, sums, starts, tail, tile, copy, found, mass, room_values, room_weights = rooms(scratch, width)
    _, largest = _scan(x, width, bits, tail, chunk_max)
    if not np.isfinite(largest):
        return -2 if largest == _MINUS_INF else -1
    if bits != 0:
        copy_allowed(x, width, bits, chunk_max, copy)
        x = copy
    scale, chunks = np.float32(LOG2E / max(temperature, SMALLEST_T)), num_chunks(width)
    limit, n, total = _MINUS_INF, 0, 0.0
    if min_p > 0.0:
        limit = _F32(largest + temperature * np.log(min_p))
    if 0 < top_k < width:
        bound = max(limit, kth_bound(chunk_max, chunks, largest, top_k, found, mass, room_values, room_weights))
        n = collect(x, width, tail, chunk_max, bound, found, starts)
        list_ones(found, n, mass)
        limit = max(limit, cut(found, mass, n, bound, _MINUS_INF, largest, np.float64(top_k), room_values,
                               room_weights))
    elif limit > _MINUS_INF:
        n = collect(x, width, tail, chunk_max, limit, found, starts)
    if n > 0:
        list_weights(found, n, largest, scale, mass)
        if top_p < 1.0:
            total = weight_from(found, mass, n, limit)
            limit = cut(found, mass, n, limit, _MINUS_INF, largest, top_p * total, room_values, room_weights)
    else:
        total = weigh(x, width, tail, chunk_max, largest, scale, sums)
        if top_p < 1.0:
            n, limit, hint = _list_of_top_p(x, width, tail, chunk_max, largest, scale, top_p, total, found, mass,
                                            starts)
            limit = cut(found, mass, n, limit, hint, largest, top_p * total, room_values, room_weights)
    if n > 0:
        total = list_sums(found, mass, starts, chunks, limit, sums)
    return _draw(x, width, tail, tile, sums, total, largest, scale, limit, noise)


@device
def _bits_of(words, index, r):  # type: ignore[no-untyped-def]
    """Address of row r's mask; 0: none."""
    if len(index) == 0 or index[r] < 0:
        return 0
    return words.ctypes.data + 4 * words.shape[1] * index[r]


@device
def _enter(token, r, tokens, bad, empty):  # type: ignore[no-untyped-def]
    tokens[r], bad[r], empty[r] = max(token, 0), token < 0, token == -2


@entry
def greedy_rows(x, stride, width, begin, end, words, index, scratch, tokens, bad, empty):  # type: ignore[no-untyped-def]
    """The arg-max of rows begin to end, as in sample_rows."""
    base, room = x.ctypes.data, scratch.ctypes.data
    chunk_max, _, _, tail, _, _, _, _, _, _ = rooms(room, width)
    for r in range(begin, end):
        token = _greedy(base + 4 * stride * r, width, _bits_of(words, index, r), tail, chunk_max)
        _enter(token, r, tokens, bad, empty)


@entry
def sample_rows(x, stride, width, begin, end, words, index, temperature, top_k, top_p, min_p, seed, child, output_index,  # type: ignore[no-untyped-def]
                scratch, tokens, bad, empty):
    """tokens[r], bad[r], empty[r] for rows begin to end; row r is x[r * stride:][:width], float32. Temperature 0: the
    arg-max. A row whose largest is not finite is bad and gets token 0; if it is -inf, the row is empty.
    words int32 [n, >= ceil(V / 32)], index int32 [L] (or [0]: no masks): row r may take the tokens whose bits in
    words[index[r]] are 1; -1: all. scratch: scratch_floats."""
    base, room = x.ctypes.data, scratch.ctypes.data
    chunk_max, _, _, tail, _, _, _, _, _, _ = rooms(room, width)
    for r in range(begin, end):
        row, bits = base + 4 * stride * r, _bits_of(words, index, r)
        if temperature[r] <= 0.0:
            token = _greedy(row, width, bits, tail, chunk_max)
        else:
            token = _sample(row, width, bits, room, np.float64(temperature[r]), np.int64(top_k[r]),
                            np.float64(top_p[r]), np.float64(min_p[r]),
                            _uniform(seed[r], child[r], output_index[r]))
        _enter(token, r, tokens, bad, empty)
