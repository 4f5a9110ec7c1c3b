"""Paged attention over a flat batch: one kernel for decodes, drafts and prefill chunks.

A unit of work is a *task* (up to MAX_ROWS / G consecutive queries of one request, or one split of a decode's context)
times one KV head, whose G query heads go together:

    scores [rows, 64] = q [rows, D] x K^T, 64 keys at a time: four groups of 16 keys, one vector each, because the pool
                        stores a block's keys transposed; no sums across lanes
    online softmax    over 64 keys; after each SPLIT keys the running (maximum, sum, weighted values) of the split is
                        merged into the row's total

Chunks and splits begin at fixed positions, and every row takes the same float steps whether its split was computed by
the same unit or another: a row's result does not depend on the batch, on chunking or on the number of threads. Keys
that no row may see are masked by selection and their values are not read, so a NaN there cannot leak.
Keys are counted in *pool order*: position p is v = p // S * S' + p % S with S' the block size rounded up to 16.
Source: Milakov and Gimelshein 2018 (online softmax); Dao et al. 2023 (splits).
"""
from __future__ import annotations

from typing import Any


from numba import types
from numba.core import cgutils

from worker.jit import step as st
from worker.jit.vector import (F32, I64, VF, add, constant, device, div, exp, fma, get_f32, get_i32, get_i64,
                               keep_between, lane_numbers, load_f32, make, max_lanes, maximum, mul,
                               offset, prefetch, read, read_bf16, set_f32, set_i64, splat, splat_i32, spread, store_f32, sub,
                               sum_lanes, write)

_f32, _i32 = types.float32, types.int32
CHUNK, SPLIT = 64, 256                      # keys of one softmax step, keys of one split
MAX_ROWS = 96                               # query rows of a task, all heads of a group together
SPLIT_QUERIES = 4                           # a request with at most so many queries may be split over the context
HEADER = 16                                 # floats before a row's weighted values: maximum, sum
Q, LD_Q, K_POOL, V_POOL, OUT, LD_OUT, OUT_Q, SIDE, LD_SIDE = range(8, 17)
# Fields of a task.
REQUEST, FIRST, COUNT, POSITION, BEGIN, END, PARTIAL = range(7)
TASK_FIELDS = 8
# Fields of a token: first partial (-1: its task wrote the output, -2: padding), number of partials, its number in the task.
TOKEN_FIELDS = 4
# Fields of a group of 16 keys: addresses of its keys and values, how many of them exist, keys of the group 64 further on.
GROUP_K, GROUP_V, GROUP_COUNT, GROUP_NEXT_K, GROUP_FIELDS = range(5)
FEW_ROWS = 3                                # up to so many rows a kernel fetches ahead
_NEG_INF = float("-inf")


# ------------------------------------------------------------------ the two products


def _read_pool(b: Any, kind: int, address: Any) -> Any:
    return read(b, address, VF, 4) if kind == st.POOL_F32 else read_bf16(b, address)


def make_scores(kind: int, rows: int) -> Any:
    """scores(q, ld_q, dim, groups, ld_k, out, ld_out): rows of q [dim] times four groups of 16 keys, each a column of
    vectors ld_k bytes apart -> out [rows, 64]. groups: see GROUP_FIELDS.

    With few rows memory is what counts, and a block is too short for the hardware to see a stream: the next four groups
    are asked for meanwhile.
    """
    def generate(b: Any, q: Any, ld_q: Any, dim: Any, groups: Any, ld_k: Any, out: Any, ld_out: Any) -> None:
        cells = [[cgutils.alloca_once(b, VF) for _ in range(4)] for _ in range(rows)]
        for row in cells:
            for cell in row:
                b.store(constant(VF, 0.0), cell)
        q_rows = [b.add(q, b.mul(ld_q, constant(I64, m))) for m in range(rows)]
        here = [read(b, offset(b, groups, 8 * (GROUP_FIELDS * g + GROUP_K)), I64, 8) for g in range(4)]
        ahead = [read(b, offset(b, groups, 8 * (GROUP_FIELDS * g + GROUP_NEXT_K)), I64, 8) for g in range(4)]
        with cgutils.for_range(b, dim, intp=I64) as loop:
            at_k, at_q = b.mul(loop.index, ld_k), b.mul(loop.index, constant(I64, 4))
            keys = [_read_pool(b, kind, b.add(group, at_k)) for group in here]
            if rows <= FEW_ROWS:
                for group in ahead:
                    prefetch(b, b.add(group, at_k))
            for m in range(rows):
                value = spread(b, read(b, b.add(q_rows[m], at_q), F32, 4), VF)
                for g in range(4):
                    b.store(fma(b, keys[g], value, b.load(cells[m][g])), cells[m][g])
        for m in range(rows):
            for g in range(4):
                write(b, offset(b, b.add(out, b.mul(ld_out, constant(I64, m))), 64 * g), b.load(cells[m][g]), 4)
    return make(types.void, (types.intp,) * 7, generate)


def make_values(kind: int, rows: int, vectors: int) -> Any:
    """values(p, ld_p, v, next_v, ld_v, count, acc, ld_acc): acc[row] += sum over count keys of p[row, key] * v[key], for
    `vectors` vectors of dimensions. next_v: values that are wanted soon."""
    def generate(b: Any, p: Any, ld_p: Any, v: Any, next_v: Any, ld_v: Any, count: Any, acc: Any, ld_acc: Any) -> None:
        rows_at = [b.add(acc, b.mul(ld_acc, constant(I64, m))) for m in range(rows)]
        cells = [[cgutils.alloca_once(b, VF) for _ in range(vectors)] for _ in range(rows)]
        for m in range(rows):
            for i in range(vectors):
                b.store(read(b, offset(b, rows_at[m], 64 * i), VF, 4), cells[m][i])
        size = 64 if kind == st.POOL_F32 else 32
        with cgutils.for_range(b, count, intp=I64) as loop:
            at_v, at_p = b.mul(loop.index, ld_v), b.mul(loop.index, constant(I64, 4))
            parts = [_read_pool(b, kind, offset(b, b.add(v, at_v), size * i)) for i in range(vectors)]
            if rows <= FEW_ROWS:
                for i in range(0, size * vectors, 64):
                    prefetch(b, offset(b, b.add(next_v, at_v), i))
            for m in range(rows):
                weight = spread(b, read(b, b.add(b.add(p, b.mul(ld_p, constant(I64, m))), at_p), F32, 4), VF)
                for i in range(vectors):
                    b.store(fma(b, parts[i], weight, b.load(cells[m][i])), cells[m][i])
        for m in range(rows):
            for i in range(vectors):
                write(b, offset(b, rows_at[m], 64 * i), b.load(cells[m][i]), 4)
    return make(types.void, (types.intp,) * 8, generate)


_sf1, _sf2, _sf3, _sf6 = (make_scores(st.POOL_F32, rows) for rows in (1, 2, 3, 6))
_sb1, _sb2, _sb3, _sb6 = (make_scores(st.POOL_BF16, rows) for rows in (1, 2, 3, 6))
_vf1, _vf2, _vf3, _vf6 = (make_values(st.POOL_F32, rows, 4) for rows in (1, 2, 3, 6))
_vb1, _vb2, _vb3, _vb6 = (make_values(st.POOL_BF16, rows, 4) for rows in (1, 2, 3, 6))
_vf1s, _vb1s = make_values(st.POOL_F32, 1, 1), make_values(st.POOL_BF16, 1, 1)


@device
def _scores(kind, rows, q, ld_q, dim, groups, ld_k, out):  # type: ignore[no-untyped-def]
    m, ldo = 0, CHUNK * 4
    while m < rows:
        left = rows - m
        n = 6 if left >= 6 else 3 if left >= 3 else left
        at, to = q + m * ld_q, out + m * ldo
        if kind == st.POOL_F32:
            if n == 6:
                _sf6(at, ld_q, dim, groups, ld_k, to, ldo)
            elif n == 3:
                _sf3(at, ld_q, dim, groups, ld_k, to, ldo)
            elif n == 2:
                _sf2(at, ld_q, dim, groups, ld_k, to, ldo)
            else:
                _sf1(at, ld_q, dim, groups, ld_k, to, ldo)
        elif n == 6:
            _sb6(at, ld_q, dim, groups, ld_k, to, ldo)
        elif n == 3:
            _sb3(at, ld_q, dim, groups, ld_k, to, ldo)
        elif n == 2:
            _sb2(at, ld_q, dim, groups, ld_k, to, ldo)
        else:
            _sb1(at, ld_q, dim, groups, ld_k, to, ldo)
        m += n


@device
def _values(kind, rows, p, v, next_v, dim, count, acc, ld_acc):  # type: ignore[no-untyped-def]
    """dim here is D', a multiple of 16."""
    ldp = CHUNK * 4
    ld_v = dim * 4 if kind == st.POOL_F32 else dim * 2
    column = 0
    while column < dim:
        wide = dim - column >= 64
        skip = column * 4 if kind == st.POOL_F32 else column * 2
        at_v, soon = v + skip, next_v + skip
        m = 0
        while m < rows:
            left = rows - m
            n = 1 if not wide else 6 if left >= 6 else 3 if left >= 3 else left
            at, to = p + m * ldp, acc + m * ld_acc + column * 4
            if not wide:
                if kind == st.POOL_F32:
                    _vf1s(at, ldp, at_v, soon, ld_v, count, to, ld_acc)
                else:
                    _vb1s(at, ldp, at_v, soon, ld_v, count, to, ld_acc)
            elif kind == st.POOL_F32:
                if n == 6:
                    _vf6(at, ldp, at_v, soon, ld_v, count, to, ld_acc)
                elif n == 3:
                    _vf3(at, ldp, at_v, soon, ld_v, count, to, ld_acc)
                elif n == 2:
                    _vf2(at, ldp, at_v, soon, ld_v, count, to, ld_acc)
                else:
                    _vf1(at, ldp, at_v, soon, ld_v, count, to, ld_acc)
            elif n == 6:
                _vb6(at, ldp, at_v, soon, ld_v, count, to, ld_acc)
            elif n == 3:
                _vb3(at, ldp, at_v, soon, ld_v, count, to, ld_acc)
            elif n == 2:
                _vb2(at, ldp, at_v, soon, ld_v, count, to, ld_acc)
            else:
                _vb1(at, ldp, at_v, soon, ld_v, count, to, ld_acc)
            m += n
        column += 64 if wide else 16


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
    keep, take = exp(splat(old - base)), exp(splat(new - base))
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
def _softmax_row(scores, state, ld, scale, low, high, n0, n1, n2, n3, is_open):  # type: ignore[no-untyped-def]
    """scores [64] -> weights in place; updates maximum and sum, rescales what is there. Keys outside low .. high, and
    from the n-th of a group on, get weight 0; is_open: there are none."""
    factor = splat(scale)
    s0, s1 = mul(load_f32(scores), factor), mul(load_f32(scores + 64), factor)
    s2, s3 = mul(load_f32(scores + 128), factor), mul(load_f32(scores + 192), factor)
    if not is_open:
        lanes, minus = lane_numbers(), splat(_f32(_NEG_INF))
        s0 = keep_between(s0, lanes, splat_i32(_i32(low)), splat_i32(_i32(min(high, n0 - 1))), minus)
        s1 = keep_between(s1, lanes, splat_i32(_i32(low - 16)), splat_i32(_i32(min(high - 16, n1 - 1))), minus)
        s2 = keep_between(s2, lanes, splat_i32(_i32(low - 32)), splat_i32(_i32(min(high - 32, n2 - 1))), minus)
        s3 = keep_between(s3, lanes, splat_i32(_i32(low - 48)), splat_i32(_i32(min(high - 48, n3 - 1))), minus)
    old, new = get_f32(state, 0), max_lanes(maximum(maximum(s0, s1), maximum(s2, s3)))
    top = old if old > new else new
    base = splat(_f32(0.0) if top == _f32(_NEG_INF) else top)
    s0, s1, s2, s3 = exp(sub(s0, base)), exp(sub(s1, base)), exp(sub(s2, base)), exp(sub(s3, base))
    store_f32(scores, s0)
    store_f32(scores + 64, s1)
    store_f32(scores + 128, s2)
    store_f32(scores + 192, s3)
    added = sum_lanes(add(add(s0, s1), add(s2, s3)))
    if top != old:
        keep = exp(sub(splat(old), base))
        for i in range(HEADER * 4, ld, 64):
            store_f32(state + i, mul(load_f32(state + i), keep))
        set_f32(state, 1, max_lanes(mul(splat(get_f32(state, 1)), keep)) + added)
        set_f32(state, 0, top)
    else:
        set_f32(state, 1, get_f32(state, 1) + added)


# ------------------------------------------------------------------ a unit of work


@device
def _pool_order(position, size, padded):  # type: ignore[no-untyped-def]
    return position // size * padded + position % size


@device
def attend_unit(op, step, unit, thread, scale):  # type: ignore[no-untyped-def]
    heads, kv_heads, dim = get_i64(step, st.HEADS), get_i64(step, st.KV_HEADS), get_i64(step, st.HEAD_DIM)
    size, kind, window = get_i64(step, st.BLOCK_SIZE), get_i64(step, st.POOL_KIND), get_i64(step, st.WINDOW)
    group, head = heads // kv_heads, unit % kv_heads
    task = get_i64(step, st.TASKS) + (unit // kv_heads) * (8 * TASK_FIELDS)
    request, first, count = get_i64(task, REQUEST), get_i64(task, FIRST), get_i64(task, COUNT)
    position, partial = get_i64(task, POSITION), get_i64(task, PARTIAL)
    padded, padded_dim = (size + 15) // 16 * 16, (dim + 15) // 16 * 16
    rows, ld = count * group, (HEADER + padded_dim) * 4
    item = 4 if kind == st.POOL_F32 else 2

    scratch = get_i64(step, st.SCRATCH) + thread * get_i64(step, st.SCRATCH_BYTES)
    most = max(MAX_ROWS, group * SPLIT_QUERIES)
    q_tile, total, part = scratch, scratch + most * padded_dim * 4, scratch + most * (padded_dim * 4 + ld)
    scores = part + most * ld
    limits = scores + most * (CHUNK * 4)
    groups = limits + most * 16              # this chunk's four, then the next one's
    m = 0
    for t in range(count):
        at = position + t
        high = _pool_order(at, size, padded)
        low = _pool_order(max(0, at - window + 1), size, padded) if window > 0 else 0
        for g in range(group):
            source = get_i64(op, Q) + (first + t) * get_i64(op, LD_Q) + (head * group + g) * dim * 4
            _copy(source, q_tile + m * padded_dim * 4, dim)
            set_i64(limits, 2 * m, low)
            set_i64(limits, 2 * m + 1, high)
            m += 1
    tile_low, tile_high = get_i64(limits, 0), get_i64(limits, 2 * rows - 1)

    table = get_i64(step, st.TABLE) + request * get_i64(step, st.TABLE_STRIDE) * 4
    k_pool, v_pool = get_i64(op, K_POOL), get_i64(op, V_POOL)
    head_bytes = dim * padded * item            # of one head's keys in a block
    value_bytes = padded * padded_dim * item
    if partial >= 0:
        total = get_i64(step, st.PARTIALS) + (partial * kv_heads + head) * (group * SPLIT_QUERIES * ld)
    _clear(rows, total, ld)
    first_key = max(get_i64(task, BEGIN) * SPLIT, tile_low // CHUNK * CHUNK)
    last_key = min(get_i64(task, END) * SPLIT - 1, tile_high)
    # Walks the groups of 16 keys, one chunk ahead: which block of the table, and where in it.
    index, within = first_key // padded, first_key % padded
    index, within = _locate(groups, first_key, tile_high, index, within, table, k_pool, v_pool, head, kv_heads, size, padded,
                            dim * item, padded_dim * item, item)
    fresh = True
    for chunk in range(first_key, last_key + 1, CHUNK):
        if fresh or chunk % SPLIT == 0:
            _clear(rows, part, ld)
            fresh = False
        for i in range(4 * GROUP_FIELDS):
            set_i64(groups, i, get_i64(groups, 4 * GROUP_FIELDS + i) if chunk > first_key else get_i64(groups, i))
        index, within = _locate(groups + 4 * 8 * GROUP_FIELDS, chunk + CHUNK, tile_high, index, within, table, k_pool, v_pool,
                                head, kv_heads, size, padded, dim * item, padded_dim * item, item)
        num_keys = 0
        for g in range(4):
            num_keys += get_i64(groups, g * GROUP_FIELDS + GROUP_COUNT)
            set_i64(groups, g * GROUP_FIELDS + GROUP_NEXT_K, get_i64(groups, (4 + g) * GROUP_FIELDS + GROUP_K))
        _scores(kind, rows, q_tile, padded_dim * 4, dim, groups, padded * item, scores)
        n0, n1 = get_i64(groups, GROUP_COUNT), get_i64(groups, GROUP_FIELDS + GROUP_COUNT)
        n2, n3 = get_i64(groups, 2 * GROUP_FIELDS + GROUP_COUNT), get_i64(groups, 3 * GROUP_FIELDS + GROUP_COUNT)
        for m in range(rows):
            low, high = get_i64(limits, 2 * m) - chunk, get_i64(limits, 2 * m + 1) - chunk
            is_open = num_keys == CHUNK and high >= CHUNK - 1 and low <= 0
            _softmax_row(scores + m * (CHUNK * 4), part + m * ld, ld, scale, low, high, n0, n1, n2, n3, is_open)
        for g in range(4):
            # Keys before the lowest window are not read: they may hold anything.
            at, skip = groups + 8 * g * GROUP_FIELDS, max(0, tile_low - chunk - 16 * g)
            if skip < get_i64(at, GROUP_COUNT):
                _values(kind, rows, scores + (16 * g + skip) * 4, get_i64(at, GROUP_V) + skip * padded_dim * item,
                        get_i64(at + 4 * 8 * GROUP_FIELDS, GROUP_V), padded_dim, get_i64(at, GROUP_COUNT) - skip,
                        part + HEADER * 4, ld)
        if (chunk + CHUNK) % SPLIT == 0 or chunk + CHUNK > last_key:
            for m in range(rows):
                merge(total + m * ld, part + m * ld, ld)
    if partial < 0:
        for m in range(rows):
            out = get_i64(op, OUT) + (first + m // group) * get_i64(op, LD_OUT) + (head * group + m % group) * dim * 4
            finish(total + m * ld, dim, out)


@device
def _copy(source, target, count):  # type: ignore[no-untyped-def]
    whole = count // 16 * 16
    for i in range(0, whole * 4, 64):
        store_f32(target + i, load_f32(source + i))
    for i in range(whole, count):
        set_f32(target, i, get_f32(source, i))


@device
def _locate(groups, key, last, index, within, table, k_pool, v_pool, head, kv_heads, size, padded, dim_bytes, row_bytes,
            item):  # type: ignore[no-untyped-def]
    """Fill four groups from `key` on; `index` and `within` say where that is. Behind the last key a group has no keys and
    the address of one that has. Returns (index, within) of what follows."""
    k = v = types.int64(0)
    for g in range(4):
        count = 0
        if key + 16 * g <= last:
            block = types.int64(get_i32(table, index)) * kv_heads + head
            k = k_pool + block * dim_bytes * padded + within * item
            v = v_pool + (block * padded + within) * row_bytes
            count = min(16, last - key - 16 * g + 1, size - within)
        elif g == 0:
            k, v = k_pool, v_pool
        set_i64(groups, g * GROUP_FIELDS + GROUP_K, k)
        set_i64(groups, g * GROUP_FIELDS + GROUP_V, v)
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
    if first == -1:
        return
    heads, kv_heads, dim = get_i64(step, st.HEADS), get_i64(step, st.KV_HEADS), get_i64(step, st.HEAD_DIM)
    out = get_i64(op, OUT) + n * get_i64(op, LD_OUT)
    if first == -2:
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


# ------------------------------------------------------------------ the plan of a step


@device
def plan_attention(step, num_threads):  # type: ignore[no-untyped-def]
    """Fill TASKS and TOKENS of the step. Splitting a context over units changes no bit of the result, so how much is
    split may depend on the batch: only when there would be too few units for the threads."""
    num_reqs, kv_heads = get_i64(step, st.NUM_REQS), get_i64(step, st.KV_HEADS)
    group, size = get_i64(step, st.HEADS) // kv_heads, get_i64(step, st.BLOCK_SIZE)
    window, padded = get_i64(step, st.WINDOW), (size + 15) // 16 * 16
    starts, lengths = get_i64(step, st.QUERY_START), get_i64(step, st.SEQ_LENS)
    tasks, tokens = get_i64(step, st.TASKS), get_i64(step, st.TOKENS)
    per_task = max(1, MAX_ROWS // group)
    units = 0
    for r in range(num_reqs):
        units += (types.int64(get_i32(starts, r + 1) - get_i32(starts, r)) + per_task - 1) // per_task * kv_heads
    may_split = units < 4 * num_threads
    num_tasks, num_partials = 0, 0
    for r in range(num_reqs):
        first, last = types.int64(get_i32(starts, r)), types.int64(get_i32(starts, r + 1))
        length = types.int64(get_i32(lengths, r))
        begin = length - (last - first)
        for n in range(first, last):
            set_i64(tokens, n * TOKEN_FIELDS, -2 if length == 0 else -1)
        if length == 0:
            continue
        at = first
        while at < last:
            count = min(per_task, last - at)
            position = begin + at - first
            lowest = max(0, position - window + 1) if window > 0 else 0
            split, end = _pool_order(lowest, size, padded) // SPLIT, _pool_order(position + count - 1, size, padded) // SPLIT + 1
            if may_split and last - first <= SPLIT_QUERIES and end - split > 1:
                for n in range(at, at + count):
                    set_i64(tokens, n * TOKEN_FIELDS, num_partials)
                    set_i64(tokens, n * TOKEN_FIELDS + 1, end - split)
                    set_i64(tokens, n * TOKEN_FIELDS + 2, n - at)
                for s in range(split, end):
                    _task(tasks + num_tasks * (8 * TASK_FIELDS), r, at, count, position, s, s + 1, num_partials)
                    num_tasks += 1
                    num_partials += 1
            else:
                _task(tasks + num_tasks * (8 * TASK_FIELDS), r, at, count, position, split, end, -1)
                num_tasks += 1
            at += count
    set_i64(step, st.NUM_TASKS, num_tasks)


@device
def _task(task, request, first, count, position, begin, end, partial):  # type: ignore[no-untyped-def]
    set_i64(task, REQUEST, request)
    set_i64(task, FIRST, first)
    set_i64(task, COUNT, count)
    set_i64(task, POSITION, position)
    set_i64(task, BEGIN, begin)
    set_i64(task, END, end)
    set_i64(task, PARTIAL, partial)
