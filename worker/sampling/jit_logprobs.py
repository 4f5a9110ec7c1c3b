"""Log-probabilities of one row at a time, compiled: log-softmax of the raw logits, ranks, the likeliest tokens."""
from __future__ import annotations

import numpy as np
from numba import types

from worker.jit.lanes import CHUNK, ones_above
from worker.jit.vector import add_i32, device, entry, get_f32, load_f32, splat, splat_i32, sum_lanes_i32
from worker.sampling.jit_chunks import chunk_at, fill_tail, num_chunks, scan, weigh
from worker.sampling.jit_cut import cut, list_ones
from worker.sampling.jit_lists import collect
from worker.sampling.jit_rows import LOG2E, kth_bound, rooms

_F32, _MINUS_INF = types.float32, np.float32(-np.inf)


@device
def _num_above(address, value):  # type: ignore[no-untyped-def]
    count, limit = splat_i32(np.int32(0)), splat(value)
    for i in range(CHUNK // 16):
        count = add_i32(count, ones_above(load_f32(address + 64 * i), limit))
    return np.int64(sum_lanes_i32(count))


@device
def _insert(ids, x, token, value, n, count):  # type: ignore[no-untyped-def]
    """Keep ids[1:] in falling order of logit, equal ones by id; the new number."""
    if n == count and value <= get_f32(x, ids[count]):
        return n
    j = n if n < count else count - 1
    while j > 0 and get_f32(x, ids[j]) < value:
        ids[j + 1] = ids[j]
        j -= 1
    ids[j + 1] = token
    return min(n + 1, count)


@device
def _likeliest(x, width, tail, chunk_max, limit, count, ids):  # type: ignore[no-untyped-def]
    """ids[1:1 + count] from the logits >= limit; their number."""
    n = 0
    for c in range(num_chunks(width)):
        if get_f32(chunk_max, c) >= limit:
            address = chunk_at(x, c, width, tail)
            for i in range(min(CHUNK, width - c * CHUNK)):
                value = get_f32(address, i)
                if value >= limit:
                    n = _insert(ids, x, c * CHUNK + i, value, n, count)
    return n


@entry
def logprob_rows(x, stride, width, begin, end, targets, num_top, scratch, ids, values, ranks):  # type: ignore[no-untyped-def]
    """For rows begin to end: ids[r] = target, then the num_top[r] likeliest tokens (equal ones by id); values[r]:
    their log-probabilities; ranks[r]: 1 + the number of tokens above the target. NaN rows give NaN."""
    chunk_max, sums, starts, tail, _, _, found, mass, room_values, room_weights = rooms(scratch.ctypes.data, width)
    chunks = num_chunks(width)
    for r in range(begin, end):
        row = x.ctypes.data + 4 * stride * r
        fill_tail(row, width, 0, tail)
        _, top = scan(row, width, tail, chunk_max)
        ids[r, :], values[r, :] = 0, -np.inf
        if not np.isfinite(top):
            ids[r, 0], values[r, 0], ranks[r] = targets[r], np.nan, 1
            continue
        total = np.log(weigh(row, width, tail, chunk_max, top, _F32(LOG2E), sums))
        value = get_f32(row, targets[r])
        ids[r, 0], values[r, 0] = targets[r], np.float64(value) - top - total
        rank = 1
        for c in range(chunks):
            if get_f32(chunk_max, c) > value:
                rank += _num_above(chunk_at(row, c, width, tail), value)
        ranks[r] = rank
        count = min(np.int64(num_top[r]), width)
        if count <= 0:
            continue
        bound = kth_bound(chunk_max, chunks, top, count, found, mass, room_values, room_weights)
        n = collect(row, width, tail, chunk_max, bound, found, starts)
        list_ones(found, n, mass)
        limit = cut(found, mass, n, bound, top, np.float64(count), room_values, room_weights)
        n = _likeliest(row, width, tail, chunk_max, limit, count, ids[r])
        for j in range(1, n + 1):
            values[r, j] = np.float64(get_f32(row, ids[r, j])) - top - total
