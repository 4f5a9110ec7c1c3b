"""Paged attention over a flat batch: one kernel for decodes, drafts and prefill chunks.

A unit of work is a *task* (up to MAX_ROWS / G consecutive queries of one request, or one split of a decode's context)
with one KV head or with all of them (attend_plan.py). The G query heads of a KV head go together:

    scores [rows, 64] = q [rows, D] x K^T, 64 keys at a time: four groups of 16 keys, one vector each, because the pool
                        stores a block's keys transposed; no sums across lanes
                        (of int8 and e4m3 pools: codes; the scores then take the scales, kv_codes.py)
    online softmax    over 64 keys; after each SPLIT keys the running (maximum, sum, weighted values) of the split is
                        merged into the row's total

Chunks and splits begin at fixed positions, and every row takes the same float steps whether its split was computed by
the same unit or another: a row's result does not depend on the batch, on chunking or on the number of threads. Keys
that no row may see are masked by selection and their values are not read, so a NaN there cannot leak.
Keys are counted in *pool order*: position p is v = p // S * S' + p % S with S' the block size rounded up to 16.
Source: Milakov and Gimelshein 2018 (online softmax); Dao et al. 2023 (splits).
"""
from __future__ import annotations

from numba import types

from worker.jit import step as st
from worker.jit.attend_plan import (BEGIN, COUNT, DONE, END, FIRST, MAX_ROWS, PADDING, PARTIAL, POSITION, REQUEST,
                                    SPLIT, SPLIT_QUERIES, TASK_FIELDS, TOKEN_FIELDS, pool_order)
from worker.jit.attend_tiles import (CHUNK, GROUP_COUNT, GROUP_FIELDS, GROUP_K, GROUP_K_SCALES, GROUP_NEXT_K,
                                     GROUP_NEXT_V, GROUP_V, GROUP_V_SCALES, scores_rows, values_rows)
from worker.jit.kv_codes import load_scales, times
from worker.jit.lanes import exp2_below_0
from worker.jit.vector import (add, device, div, get_f32, get_i32, get_i64, keep_between, lane_numbers, load_f32,
                               max_lanes, maximum, mul, prefetch_line, set_f32, set_i64, splat, splat_i32, store_f32,
                               sub, sum_lanes)

_f32, _i32 = types.float32, types.int32
HEADER = 16                                 # floats before a row's weighted values: maximum, sum
Q, LD_Q, K_POOL, V_POOL, OUT, LD_OUT, OUT_Q, SIDE, LD_SIDE, K_SCALES, V_SCALES = range(8, 19)
POOL_FIELDS = (K_POOL, V_POOL, K_SCALES, V_SCALES)   # of the tensors of a cache, in order
_NEG_INF = float("-inf")
_LOG2_E = 1.4426950408889634                # scores are in units of log2: 2**x takes fewer steps than e**x


# ------------------------------------------------------------------ running softmax


@device
def _clear(rows, state, ld):  # type: ignore[no-untyped-def]
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
def _softmax_rows(rows, scores, states, ld, limits, chunk, groups, k_factors,  # type: ignore[no-untyped-def]
                  v_factors, bases, keeps):
    """scores [rows, 64] -> weights in place, times the factors of their values; updates maxima and sums and rescales
    what is there. Keys outside a row's limits, and those that do not exist, get weight 0.

    In three passes, so that no row waits for the one before and the first has no branch that nobody can predict.
    """
    n0, n1 = get_i64(groups, GROUP_COUNT), get_i64(groups, GROUP_FIELDS + GROUP_COUNT)
    n2, n3 = get_i64(groups, 2 * GROUP_FIELDS + GROUP_COUNT), get_i64(groups, 3 * GROUP_FIELDS + GROUP_COUNT)
    is_full = n0 + n1 + n2 + n3 == CHUNK
    f0, f1, f2, f3 = k_factors
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
    for m in range(0, rows, 16):
        store_f32(keeps + 4 * m, exp2_below_0(load_f32(keeps + 4 * m)))
    w0, w1, w2, w3 = v_factors
    for m in range(rows):
        at, state, base = scores + m * (CHUNK * 4), states + m * ld, splat(get_f32(bases, m))
        s0, s1 = exp2_below_0(sub(load_f32(at), base)), exp2_below_0(sub(load_f32(at + 64), base))
        s2, s3 = exp2_below_0(sub(load_f32(at + 128), base)), exp2_below_0(sub(load_f32(at + 192), base))
        store_f32(at, mul(s0, w0))
        store_f32(at + 64, mul(s1, w1))
        store_f32(at + 128, mul(s2, w2))
        store_f32(at + 192, mul(s3, w3))
        keep = get_f32(keeps, m)
        set_f32(state, 1, get_f32(state, 1) * keep + sum_lanes(add(add(s0, s1), add(s2, s3))))
        if keep != _f32(1.0):
            factor = splat(keep)
            for i in range(HEADER * 4, ld, 64):
                store_f32(state + i, mul(load_f32(state + i), factor))


# ------------------------------------------------------------------ a unit of work


@device
def attend_unit(op, step, unit, thread, scale):  # type: ignore[no-untyped-def]
    kv_heads, whole = get_i64(step, st.KV_HEADS), get_i64(step, st.NUM_WHOLE)
    if unit < whole:
        _attend(op, step, unit, 0, kv_heads, thread, scale)
    else:
        _attend(op, step, whole + (unit - whole) // kv_heads, (unit - whole) % kv_heads, 1, thread, scale)


@device
def _attend(op, step, number, first_head, num_heads, thread, scale):  # type: ignore[no-untyped-def]
    """A task with some KV heads: chunk by chunk, and in each the heads in turn, as they lie in a block."""
    heads, kv_heads, dim = get_i64(step, st.HEADS), get_i64(step, st.KV_HEADS), get_i64(step, st.HEAD_DIM)
    size, kind, window = get_i64(step, st.BLOCK_SIZE), get_i64(step, st.POOL_KIND), get_i64(step, st.WINDOW)
    group = heads // kv_heads
    task = get_i64(step, st.TASKS) + number * (8 * TASK_FIELDS)
    request, first, count = get_i64(task, REQUEST), get_i64(task, FIRST), get_i64(task, COUNT)
    position, partial = get_i64(task, POSITION), get_i64(task, PARTIAL)
    padded, padded_dim = (size + 15) // 16 * 16, (dim + 15) // 16 * 16
    rows, ld = count * group, (HEADER + padded_dim) * 4
    item = 4 if kind == st.POOL_F32 else 2 if kind == st.POOL_BF16 else 1
    has_scales = kind != st.POOL_F32 and kind != st.POOL_BF16

    scratch = get_i64(step, st.SCRATCH) + thread * get_i64(step, st.SCRATCH_BYTES)
    most = (max(MAX_ROWS, group * SPLIT_QUERIES) + 15) // 16 * 16
    q_tile, total, part = scratch, scratch + most * padded_dim * 4, scratch + most * (padded_dim * 4 + ld)
    scores = part + most * ld
    limits = scores + most * (CHUNK * 4)
    bases, keeps = limits + most * 16, limits + most * 20
    groups = limits + most * 24              # as the kernels read them, then where the first head's lie: here and next
    here, ahead = groups + 4 * 8 * GROUP_FIELDS, groups + 8 * 8 * GROUP_FIELDS
    for t in range(count):
        at = position + t
        high = pool_order(at, size, padded)
        low = pool_order(max(0, at - window + 1), size, padded) if window > 0 else 0
        for g in range(group):
            m = t * group + g
            set_i64(limits, 2 * m, low)
            set_i64(limits, 2 * m + 1, high)
            for h in range(num_heads):
                source = get_i64(op, Q) + (first + t) * get_i64(op, LD_Q) + ((first_head + h) * group + g) * dim * 4
                _copy(source, q_tile + (h * rows + m) * padded_dim * 4, dim)
    tile_low, tile_high = get_i64(limits, 0), get_i64(limits, 2 * rows - 1)

    table = get_i64(step, st.TABLE) + request * get_i64(step, st.TABLE_STRIDE) * 4
    total_ld = rows * ld                        # of a head
    if partial >= 0:
        total_ld = group * SPLIT_QUERIES * ld
        total = get_i64(step, st.PARTIALS) + (partial * kv_heads + first_head) * total_ld
    for h in range(num_heads):
        _clear(rows, total + h * total_ld, ld)
    first_key = max(get_i64(task, BEGIN) * SPLIT, tile_low // CHUNK * CHUNK)
    last_key = min(get_i64(task, END) * SPLIT - 1, tile_high)
    # Walks the groups of 16 keys, one chunk ahead: which block of the table, and where in it.
    index, within = first_key // padded, first_key % padded
    index, within = _locate(ahead, first_key, tile_high, index, within, table, op, first_head, kv_heads, size, padded,
                            dim * item, padded_dim * item, item)
    one, factor = splat(_f32(1.0)), splat(_f32(scale * _LOG2_E))
    ones, fresh = (one, one, one, one), True
    for chunk in range(first_key, last_key + 1, CHUNK):
        if fresh or chunk % SPLIT == 0:
            _clear(num_heads * rows, part, ld)
            fresh = False
        for i in range(4 * GROUP_FIELDS):
            set_i64(here, i, get_i64(ahead, i))
        index, within = _locate(ahead, chunk + CHUNK, tile_high, index, within, table, op, first_head, kv_heads, size,
                                padded, dim * item, padded_dim * item, item)
        for h in range(num_heads):
            _point(groups, here, ahead, h, num_heads, dim * padded * item, padded * padded_dim * item, padded * 2)
            if has_scales:
                for g in range(4):
                    prefetch_line(get_i64(ahead, g * GROUP_FIELDS + GROUP_K_SCALES) + h * padded * 2)
                    prefetch_line(get_i64(ahead, g * GROUP_FIELDS + GROUP_V_SCALES) + h * padded * 2)
            states = part + h * rows * ld
            scores_rows(kind, rows, q_tile + h * rows * padded_dim * 4, padded_dim * 4, dim, groups, padded * item,
                        scores)
            k_factors, v_factors = ones, ones
            if has_scales:
                k_factors = _scales(kind, groups + 8 * GROUP_K_SCALES)
                v_factors = _scales(kind, groups + 8 * GROUP_V_SCALES)
            _softmax_rows(rows, scores, states, ld, limits, chunk, groups, times(k_factors, factor), v_factors, bases,
                          keeps)
            # Values before the lowest window are not read: they may hold anything.
            values_rows(kind, rows, scores, groups, max(0, tile_low - chunk), padded_dim, states + HEADER * 4, ld)
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
    """The four groups of the h-th head from those of the first; what comes next is the next head's, or after the last
    head the next chunk's."""
    is_last = h + 1 == num_heads
    soon, behind = ahead if is_last else here, types.int64(0) if is_last else h + 1
    for at in range(0, 4 * GROUP_FIELDS, GROUP_FIELDS):
        set_i64(groups, at + GROUP_K, get_i64(here, at + GROUP_K) + h * k_ld)
        set_i64(groups, at + GROUP_V, get_i64(here, at + GROUP_V) + h * v_ld)
        set_i64(groups, at + GROUP_K_SCALES, get_i64(here, at + GROUP_K_SCALES) + h * scales_ld)
        set_i64(groups, at + GROUP_V_SCALES, get_i64(here, at + GROUP_V_SCALES) + h * scales_ld)
        set_i64(groups, at + GROUP_COUNT, get_i64(here, at + GROUP_COUNT))
        set_i64(groups, at + GROUP_NEXT_K, get_i64(soon, at + GROUP_K) + behind * k_ld)
        set_i64(groups, at + GROUP_NEXT_V, get_i64(soon, at + GROUP_V) + behind * v_ld)


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
