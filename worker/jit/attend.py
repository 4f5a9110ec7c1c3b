"""Paged attention over a flat batch: one kernel for decodes, drafts and prefill chunks.

A unit of work is a *task* (up to MAX_ROWS / G consecutive queries of one request, or one split of a decode's context)
with one KV head or with all of them (attend_plan.py). The G query heads of a KV head go together:

    scores [rows, 64] = q [rows, D] x K^T, 64 keys at a time: four groups of 16 keys, one vector each, because the pool
                        stores a block's keys transposed; no sums across lanes
                        (of int8 and e4m3 pools: codes; the scores then take the scales, kv_codes.py; int8 codes are
                        multiplied as such, four dimensions together, attend_codes.py)
    online softmax    over 64 keys (attend_softmax.py); after each SPLIT keys the running state of the split is merged
                        into the row's total

Chunks and splits begin at fixed positions, and every row takes the same float steps whether its split was computed by
the same unit or another: a row's result does not depend on the batch, on chunking or on the number of threads. Keys
that no row may see are masked by selection and their values are not read, so a NaN there cannot leak.
Keys are counted in *pool order*: position p is v = p // S * S' + p % S with S' the block size rounded up to 16.
Source: Dao et al. 2023 (splits).
"""
from __future__ import annotations

from numba import types

from worker.jit import step as st
from worker.jit.attend_codes import code_scores_rows, code_values_rows, quantize_query, weigh_codes
from worker.jit.attend_plan import (BEGIN, COUNT, DONE, END, FIRST, MAX_ROWS, PADDING, PARTIAL, POSITION, REQUEST,
                                    SPLIT, SPLIT_QUERIES, TASK_FIELDS, TOKEN_FIELDS, lowest_key, pool_order)
from worker.jit.attend_softmax import CHUNK, HEADER, LOG2_E, clear, finish, merge, rescale, take_scores, weigh
from worker.jit.attend_tiles import (GROUP_COUNT, GROUP_FIELDS, GROUP_K, GROUP_K_SCALES, GROUP_NEXT_K, GROUP_NEXT_V,
                                     GROUP_V, GROUP_V_SCALES, scores_rows, values_rows)
from worker.jit.kv_codes import key_place, load_scales, times
from worker.jit.vector import (device, get_f32, get_i32, get_i64, load_f32, merged, prefetch_line, set_f32, set_i64,
                               splat, store_f32)

_f32 = types.float32
Q, LD_Q, K_POOL, V_POOL, OUT, LD_OUT, OUT_Q, SIDE, LD_SIDE, K_SCALES, V_SCALES = range(8, 19)
POOL_FIELDS = (K_POOL, V_POOL, K_SCALES, V_SCALES)   # of the tensors of a cache, in order


@merged
def attend_unit(op, step, unit, thread, scale):  # type: ignore[no-untyped-def]
    whole, kv_heads = get_i64(step, st.NUM_WHOLE), get_i64(step, st.KV_HEADS)
    number, first_head, num_heads = _place(unit, whole, kv_heads)
    next_task, next_head, _ = _place(unit + 1, whole, kv_heads)   # what this thread takes next, probably
    if next_task >= get_i64(step, st.NUM_TASKS):
        next_task = types.int64(-1)
    _attend(op, step, number, first_head, num_heads, next_task, next_head, thread, scale)


@device
def _place(unit, whole, kv_heads):  # type: ignore[no-untyped-def]
    """(task, first head, heads) of a unit."""
    if unit < whole:
        return unit, types.int64(0), kv_heads
    return whole + (unit - whole) // kv_heads, (unit - whole) % kv_heads, types.int64(1)


@merged
def _attend(op, step, number, first_head, num_heads, next_task, next_head,  # type: ignore[no-untyped-def]
            thread, scale):
    """A task with some KV heads: chunk by chunk, and in each the heads in turn, as they lie in a block. next_task: what
    will be wanted after it, -1 if nothing."""
    heads, kv_heads, dim = get_i64(step, st.HEADS), get_i64(step, st.KV_HEADS), get_i64(step, st.HEAD_DIM)
    size, kind, window = get_i64(step, st.BLOCK_SIZE), get_i64(step, st.POOL_KIND), get_i64(step, st.WINDOW)
    group = heads // kv_heads
    task = get_i64(step, st.TASKS) + number * (8 * TASK_FIELDS)
    request, first, count = get_i64(task, REQUEST), get_i64(task, FIRST), get_i64(task, COUNT)
    position, partial = get_i64(task, POSITION), get_i64(task, PARTIAL)
    padded, padded_dim = (size + 15) // 16 * 16, (dim + 15) // 16 * 16
    rows, ld = count * group, (HEADER + padded_dim) * 4
    item = 4 if kind == st.POOL_F32 else 2 if kind == st.POOL_BF16 else 1
    has_scales, is_int8 = kind != st.POOL_F32 and kind != st.POOL_BF16, kind == st.POOL_INT8
    key_bytes, key_item = key_place(kind, dim, item)

    scratch = get_i64(step, st.SCRATCH) + thread * get_i64(step, st.SCRATCH_BYTES)
    most = (max(MAX_ROWS, group * SPLIT_QUERIES) + 15) // 16 * 16
    q_tile, total, part = scratch, scratch + most * padded_dim * 4, scratch + most * (padded_dim * 4 + ld)
    scores = part + most * ld
    limits = scores + most * (CHUNK * 4)
    bases, keeps = limits + most * 16, limits + most * 20
    here = limits + most * 24                # groups: the first head's, here and next, and the current head's
    ahead, groups = here + 4 * 8 * GROUP_FIELDS, here + 8 * 8 * GROUP_FIELDS
    for t in range(count):
        at = position + t
        high = pool_order(at, size, padded)
        low = lowest_key(at, window, size, padded)
        for g in range(group):
            m = t * group + g
            set_i64(limits, 2 * m, low)
            set_i64(limits, 2 * m + 1, high)
            for h in range(num_heads):
                source = get_i64(op, Q) + (first + t) * get_i64(op, LD_Q) + ((first_head + h) * group + g) * dim * 4
                target = q_tile + (h * rows + m) * padded_dim * 4
                if is_int8:
                    quantize_query(source, dim, padded_dim, target)
                else:
                    _copy(source, target, dim)
    tile_low, tile_high = get_i64(limits, 0), get_i64(limits, 2 * rows - 1)

    table = get_i64(step, st.TABLE) + request * get_i64(step, st.TABLE_STRIDE) * 4
    total_ld = rows * ld                        # of a head
    if partial >= 0:
        total_ld = group * SPLIT_QUERIES * ld
        total = get_i64(step, st.PARTIALS) + (partial * kv_heads + first_head) * total_ld
    for h in range(num_heads):
        clear(rows, total + h * total_ld, ld)
    first_key = max(get_i64(task, BEGIN) * SPLIT, tile_low // CHUNK * CHUNK)
    last_key = min(get_i64(task, END) * SPLIT - 1, tile_high)
    # Walks the groups of 16 keys, one chunk ahead: which block of the table, and where in it.
    index, within = first_key // padded, first_key % padded
    index, within = _locate(ahead, first_key, tile_high, index, within, table, op, first_head, kv_heads, size, padded,
                            key_bytes, padded_dim * item, key_item)
    one, factor = splat(_f32(1.0)), splat(_f32(scale * LOG2_E))
    ones, fresh = (one, one, one, one), True
    for chunk in range(first_key, last_key + 1, CHUNK):
        if fresh or chunk % SPLIT == 0:
            clear(num_heads * rows, part, ld)
            fresh = False
        for i in range(4 * GROUP_FIELDS):
            set_i64(here, i, get_i64(ahead, i))
        if chunk + CHUNK <= last_key:
            index, within = _locate(ahead, chunk + CHUNK, tile_high, index, within, table, op, first_head, kv_heads,
                                    size, padded, key_bytes, padded_dim * item, key_item)
        elif next_task >= 0:
            _locate_first(ahead, op, step, next_task, next_head, size, padded, key_bytes, padded_dim * item, key_item)
        counts = (get_i64(here, GROUP_COUNT), get_i64(here, GROUP_FIELDS + GROUP_COUNT),
                  get_i64(here, 2 * GROUP_FIELDS + GROUP_COUNT), get_i64(here, 3 * GROUP_FIELDS + GROUP_COUNT))
        for h in range(num_heads):
            queries, state = q_tile + h * rows * padded_dim * 4, part + h * rows * ld
            _point(groups, here, ahead, h, num_heads, key_bytes * padded, padded * padded_dim * item, padded * 2)
            if has_scales:
                for g in range(4):
                    prefetch_line(get_i64(ahead, g * GROUP_FIELDS + GROUP_K_SCALES) + h * padded * 2)
                    prefetch_line(get_i64(ahead, g * GROUP_FIELDS + GROUP_V_SCALES) + h * padded * 2)
            if is_int8:
                code_scores_rows(rows, queries, padded_dim, dim, groups, padded * key_item, scores)
            else:
                scores_rows(kind, rows, queries, padded_dim * 4, dim, groups, padded * key_item, scores)
            factors = times(_scales(kind, groups + 8 * GROUP_K_SCALES) if has_scales else ones, factor)
            take_scores(rows, scores, state, ld, limits, chunk, counts, factors, bases, keeps)
            rescale(rows, keeps)
            factors = _scales(kind, groups + 8 * GROUP_V_SCALES) if has_scales else ones
            if is_int8:
                weigh_codes(rows, scores, state, ld, factors, bases, keeps)
                code_values_rows(rows, scores, groups, padded_dim, state + HEADER * 4, ld)
                continue
            weigh(rows, scores, state, ld, factors, bases, keeps)
            # Values before the lowest window are not read: they may hold anything.
            values_rows(kind, rows, scores, groups, max(0, tile_low - chunk), padded_dim, state + HEADER * 4, ld)
        if (chunk + CHUNK) % SPLIT == 0 or chunk + CHUNK > last_key:
            for h in range(num_heads):
                for m in range(rows):
                    merge(total + h * total_ld + m * ld, part + (h * rows + m) * ld, ld)
    if partial < 0:
        for h in range(num_heads):
            for m in range(rows):
                out = (get_i64(op, OUT) + (first + m // group) * get_i64(op, LD_OUT)
                       + ((first_head + h) * group + m % group) * dim * 4)
                finish(total + h * total_ld + m * ld, dim, out)


@device
def _point(groups, here, ahead, h, num_heads, k_ld, v_ld, scales_ld):  # type: ignore[no-untyped-def]
    """The four groups of the h-th head from those of the first. While its keys and values are read those of the next
    head are asked for, or of the next chunk's first."""
    for at in range(0, 4 * GROUP_FIELDS, GROUP_FIELDS):
        set_i64(groups, at + GROUP_K, get_i64(here, at + GROUP_K) + h * k_ld)
        set_i64(groups, at + GROUP_V, get_i64(here, at + GROUP_V) + h * v_ld)
        set_i64(groups, at + GROUP_K_SCALES, get_i64(here, at + GROUP_K_SCALES) + h * scales_ld)
        set_i64(groups, at + GROUP_V_SCALES, get_i64(here, at + GROUP_V_SCALES) + h * scales_ld)
        set_i64(groups, at + GROUP_COUNT, get_i64(here, at + GROUP_COUNT))
        if h + 1 < num_heads:
            set_i64(groups, at + GROUP_NEXT_K, get_i64(here, at + GROUP_K) + (h + 1) * k_ld)
            set_i64(groups, at + GROUP_NEXT_V, get_i64(here, at + GROUP_V) + (h + 1) * v_ld)
        else:
            set_i64(groups, at + GROUP_NEXT_K, get_i64(ahead, at + GROUP_K))
            set_i64(groups, at + GROUP_NEXT_V, get_i64(ahead, at + GROUP_V))


@device
def _scales(kind, field):  # type: ignore[no-untyped-def]
    """The scales of 64 keys, whose addresses the four groups have in this field."""
    return load_scales(kind, get_i64(field, 0), get_i64(field, GROUP_FIELDS), get_i64(field, 2 * GROUP_FIELDS),
                       get_i64(field, 3 * GROUP_FIELDS))


@device
def _copy(source, target, count):  # type: ignore[no-untyped-def]
    whole = count // 16 * 16
    for i in range(0, whole * 4, 64):
        store_f32(target + i, load_f32(source + i))
    for i in range(whole, count):
        set_f32(target, i, get_f32(source, i))


@device
def _locate(groups, key, last, index, within, table, op, head, kv_heads, size, padded,  # type: ignore[no-untyped-def]
            dim_bytes, row_bytes, item):
    """Fill four groups from `key` on; `index` and `within` say where that is. Behind the last key a group has no keys
    and the address of one that has. Returns (index, within) of what follows."""
    k_pool, v_pool = get_i64(op, K_POOL), get_i64(op, V_POOL)
    k_scales, v_scales = get_i64(op, K_SCALES), get_i64(op, V_SCALES)
    k, v, scale = k_pool, v_pool, types.int64(0)
    for g in range(4):
        count = 0
        if key + 16 * g <= last:
            block = types.int64(get_i32(table, index)) * kv_heads + head
            k = k_pool + block * dim_bytes * padded + within * item
            v = v_pool + (block * padded + within) * row_bytes
            scale = (block * padded + within) * 2
            count = min(16, last - key - 16 * g + 1, size - within)
        set_i64(groups, g * GROUP_FIELDS + GROUP_K, k)
        set_i64(groups, g * GROUP_FIELDS + GROUP_V, v)
        set_i64(groups, g * GROUP_FIELDS + GROUP_K_SCALES, k_scales + scale)
        set_i64(groups, g * GROUP_FIELDS + GROUP_V_SCALES, v_scales + scale)
        set_i64(groups, g * GROUP_FIELDS + GROUP_COUNT, count)
        within += 16
        if within >= padded:
            index, within = index + 1, 0
    return index, within


@device
def _locate_first(groups, op, step, number, head, size, padded, dim_bytes, row_bytes,  # type: ignore[no-untyped-def]
                  item):
    """Fill four groups with the first keys of a task, to be asked for."""
    task = get_i64(step, st.TASKS) + number * (8 * TASK_FIELDS)
    position = get_i64(task, POSITION)
    low = lowest_key(position, get_i64(step, st.WINDOW), size, padded)
    high = pool_order(position + get_i64(task, COUNT) - 1, size, padded)
    key = max(get_i64(task, BEGIN) * SPLIT, low // CHUNK * CHUNK)
    table = get_i64(step, st.TABLE) + get_i64(task, REQUEST) * get_i64(step, st.TABLE_STRIDE) * 4
    _locate(groups, key, high, key // padded, key % padded, table, op, head, get_i64(step, st.KV_HEADS), size, padded,
            dim_bytes, row_bytes, item)


@device
def merge_row(op, step, n):  # type: ignore[no-untyped-def]
    """Row n's partial results, in the order of their splits -> its output; zeros for a padding row."""
    token = get_i64(step, st.TOKENS) + n * (8 * TOKEN_FIELDS)
    first, count, index = get_i64(token, 0), get_i64(token, 1), get_i64(token, 2)
    if first == DONE:
        return
    heads, kv_heads, dim = get_i64(step, st.HEADS), get_i64(step, st.KV_HEADS), get_i64(step, st.HEAD_DIM)
    out = get_i64(op, OUT) + n * get_i64(op, LD_OUT)
    if first == PADDING:
        for i in range(heads * dim):
            set_f32(out, i, _f32(0.0))
        return
    group, ld = heads // kv_heads, (HEADER + (dim + 15) // 16 * 16) * 4
    for h in range(heads):
        row = (index * group + h % group) * ld
        at = get_i64(step, st.PARTIALS) + (first * kv_heads + h // group) * (group * SPLIT_QUERIES * ld) + row
        stride = kv_heads * group * SPLIT_QUERIES * ld
        # An empty total that takes the first partial is that partial, bit for bit; so it is the total already.
        for i in range(1, count):
            merge(at, at + i * stride, ld)
        finish(at, dim, out + h * dim * 4)
