"""One row of logits at a time, compiled: arg-max and draw. The CPU form of filters.py and noise.py.

A row of 150,000 logits fits in a core's cache, so a row is read from memory once, however many passes it takes. min_p,
top-k and top-p are one threshold, found without a sort: a list of the logits that can matter, then the cut in it. For
top-p alone the list begins where a sample of the row says that too little weight lies below; whether it was right is
checked by weight, so it changes no result. A row depends on nothing else: it gives the same token in any batch and by
any thread. A row with a bit mask is read through it (jit_masked.py). Does not know requests. Threads: jit_threads.py.
"""
from __future__ import annotations

import numpy as np
from numba import njit, types

from worker.jit.lanes import CHUNK
from worker.jit.vector import device, entry, get_f32, set_f32
from worker.sampling.jit_chunks import copy_allowed, fill_tail, first_of, num_chunks, scan, scan_allowed, weigh
from worker.sampling.jit_cut import cut, list_ones, rough_cut, weight_from
from worker.sampling.jit_draw import draw, draw_from_list, uniform
from worker.sampling.jit_lists import (SAMPLED, collect, list_sums, list_weights, pad_list, sample_list,
                                       split_list, weigh_and_collect)
from worker.sampling.jit_masked import largest_allowed

LOG2E = 1.4426950408889634
SMALLEST_T = 1e-30                              # a float32 that may divide; below it only the maximum has any weight
LESS, MORE = 0.9, 1.1                           # how far the sample's weight below a cut is trusted
_F32, _MINUS_INF = types.float32, np.float32(-np.inf)
_LOWEST = np.finfo(np.float32).min


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
def kth_bound(chunk_max, chunks, largest, k, values, weights, room_values, room_weights):  # type: ignore[no-untyped-def]
    """A limit that at least k logits reach: so many chunks have one as large; else the lowest float."""
    if k > chunks:
        return _F32(_LOWEST)
    for c in range(chunks):
        set_f32(values, c, get_f32(chunk_max, c))
    n = pad_list(values, chunks)
    list_ones(values, n, weights)
    limit = cut(values, weights, n, _LOWEST, largest, np.float64(k), room_values, room_weights)
    # Fewer chunks may have a finite logit at all: then a chunk may hold several of the first k.
    return limit if weight_from(values, weights, n, limit) >= k else _F32(_LOWEST)


@device
def _log2_share(top_p, total, width):  # type: ignore[no-untyped-def]
    """Tokens that are all lighter than this, as a power of two, weigh less than the top-p leaves out: the cut is not
    among them."""
    share = (1.0 - top_p) * total / width
    return np.log2(share) if share > 1e-37 else -np.inf


@device
def _guess_top_p(x, width, chunk_max, largest, scale, top_p, found, mass):  # type: ignore[no-untyped-def]
    """(a limit that is likely below the cut, a guess at the cut)."""
    n, above, total = sample_list(x, width, chunk_max, largest, scale, found, mass)
    below = (1.0 - top_p) * total / SAMPLED
    low = _F32(max(np.float64(_LOWEST), largest + _log2_share(top_p, total, width) / scale))
    low = rough_cut(found, mass, n, low, largest, max(above - LESS * below, 1e-30), 8)
    end = _F32(0.75) * low + _F32(0.25) * largest
    return low, rough_cut(found, mass, n, low, end, max(above - MORE * below, 1e-30), 5)


@device
def _list_of_top_p(x, width, tail, chunk_max, largest, scale, top_p, found, mass, starts, room_values, room_weights):  # type: ignore[no-untyped-def]
    """(length of a list of logits with the weights, the cut in it)."""
    guess = hint = _F32(_LOWEST)
    if width >= SAMPLED * CHUNK:
        guess, hint = _guess_top_p(x, width, chunk_max, largest, scale, top_p, found, mass)
    n, total = weigh_and_collect(x, width, tail, chunk_max, largest, scale, guess, found, starts)
    target = top_p * total
    bound = _F32(max(np.float64(_LOWEST),
                     largest + (_log2_share(top_p, total, width) - 1e-3) / scale - 1e-6 * abs(largest)))
    listed, above, rest = split_list(found, n, largest, scale, mass, hint, room_values, room_weights)
    if guess > bound and listed < target:
        guess = bound
        n = collect(x, width, tail, chunk_max, guess, found, starts)
        _, above, rest = split_list(found, n, largest, scale, mass, hint, room_values, room_weights)
    low = max(guess, bound)
    if above >= target:
        return n, cut(found, mass, n, max(low, hint), largest, target, room_values, room_weights)
    return n, cut(room_values, room_weights, rest, low, hint, target - above, room_values, room_weights)


@device
def _scan(x, width, bits, tail, chunk_max):  # type: ignore[no-untyped-def]
    fill_tail(x, width, bits, tail)
    return scan(x, width, tail, chunk_max) if bits == 0 else scan_allowed(x, width, bits, tail, chunk_max)


@device
def _greedy(x, width, bits, scratch):  # type: ignore[no-untyped-def]
    """The token of one row; -1 or -2 (empty) for a bad row."""
    chunk_max, _, _, tail, _, _, words, _, _, _ = rooms(scratch, width)
    if bits != 0:
        token, largest = largest_allowed(x, width, bits, tail, words)
    else:
        chunk, largest = _scan(x, width, bits, tail, chunk_max)
        token = first_of(x, chunk, width, bits, tail, largest)
    if not np.isfinite(largest):
        return -2 if largest == _MINUS_INF else -1
    return token


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
        limit = max(limit, cut(found, mass, n, bound, largest, np.float64(top_k), room_values, room_weights))
    elif limit > _MINUS_INF:
        n = collect(x, width, tail, chunk_max, limit, found, starts)
    if n > 0:
        list_weights(found, n, largest, scale, mass)
        if top_p < 1.0:
            total = weight_from(found, mass, n, limit)
            limit = cut(found, mass, n, limit, largest, top_p * total, room_values, room_weights)
    elif top_p < 1.0:
        n, limit = _list_of_top_p(x, width, tail, chunk_max, largest, scale, top_p, found, mass, starts, room_values,
                                  room_weights)
    else:
        total = weigh(x, width, tail, chunk_max, largest, scale, sums)
        return draw(x, width, tail, tile, sums, total, largest, scale, noise)
    total = list_sums(found, mass, n, limit, sums)
    return draw_from_list(x, width, tail, tile, found, mass, n, starts, sums, total, limit, noise)


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
    for r in range(begin, end):
        token = _greedy(base + 4 * stride * r, width, _bits_of(words, index, r), room)
        _enter(token, r, tokens, bad, empty)


@entry
def sample_rows(x, stride, width, begin, end, words, index, temperature, top_k, top_p, min_p, seed, child, output_index,  # type: ignore[no-untyped-def]
                scratch, tokens, bad, empty):
    """tokens[r], bad[r], empty[r] for rows begin to end; row r is x[r * stride:][:width], float32. Temperature 0: the
    arg-max. A row whose largest is not finite is bad and gets token 0; if it is -inf, the row is empty.
    words int32 [n, >= ceil(V / 32)], index int32 [L] (or [0]: no masks): row r may take the tokens whose bits in
    words[index[r]] are 1; -1: all. scratch: scratch_floats."""
    base, room = x.ctypes.data, scratch.ctypes.data
    for r in range(begin, end):
        row, bits = base + 4 * stride * r, _bits_of(words, index, r)
        if temperature[r] <= 0.0:
            token = _greedy(row, width, bits, room)
        else:
            token = _sample(row, width, bits, room, np.float64(temperature[r]), np.int64(top_k[r]),
                            np.float64(top_p[r]), np.float64(min_p[r]),
                            uniform(seed[r], child[r], output_index[r]))
        _enter(token, r, tokens, bad, empty)
