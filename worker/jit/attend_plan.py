"""How the attention of a step is cut into units of work.

A task is some consecutive queries of one request, or one split of a short request's context; a unit is a task with one
KV head. Short tasks, of decodes and drafts, come first; where there is work enough to share out they are units with all
their heads, which reads whole blocks one after the other. Knows lengths and tables, not keys.
"""
from __future__ import annotations

from numba import types

from worker.jit import step as st
from worker.jit.vector import device, get_i32, get_i64, set_i64

SPLIT = 256                                 # keys of one split, in pool order
MAX_ROWS = 96                               # query rows of a task, all heads of a group together
SPLIT_QUERIES = 4                           # a request with at most so many queries may be split over the context
_TASKS_PER_THREAD = 4                       # so many of the largest short one make it worth being a unit as a whole
# Fields of a task.
REQUEST, FIRST, COUNT, POSITION, BEGIN, END, PARTIAL = range(7)
TASK_FIELDS = 8
# Fields of a token: its first partial result, how many there are, its number in the task.
TOKEN_FIELDS = 4
DONE, PADDING = -1, -2                      # instead of a first partial: the task wrote the output; there is no task


@device
def pool_order(position, size, padded):  # type: ignore[no-untyped-def]
    """Where a position lies when blocks are padded from `size` to `padded` keys."""
    return position // size * padded + position % size


@device
def lowest_key(position, window, size, padded):  # type: ignore[no-untyped-def]
    """The first key, in pool order, that the query at a position sees; window 0: all before it."""
    return pool_order(max(0, position - window + 1), size, padded) if window > 0 else 0


@device
def plan_attention(step, num_threads):  # type: ignore[no-untyped-def]
    """Fill TASKS and TOKENS of the step. Splitting a context over units changes no bit of the result, so how much is
    split may depend on the batch: only when there would be too few units for the threads."""
    num_reqs, kv_heads = get_i64(step, st.NUM_REQS), get_i64(step, st.KV_HEADS)
    heads, size = get_i64(step, st.HEADS), get_i64(step, st.BLOCK_SIZE)
    group = heads // kv_heads
    window, padded = get_i64(step, st.WINDOW), (size + 15) // 16 * 16
    starts, lengths = get_i64(step, st.QUERY_START), get_i64(step, st.SEQ_LENS)
    tasks, tokens = get_i64(step, st.TASKS), get_i64(step, st.TOKENS)
    per_task = max(1, MAX_ROWS // group)
    units = 0
    for r in range(num_reqs):
        units += (types.int64(get_i32(starts, r + 1) - get_i32(starts, r)) + per_task - 1) // per_task * kv_heads
    may_split = units < 4 * num_threads
    num_tasks, num_partials, num_whole = 0, 0, 0
    work, most_work = 0, 0                      # of all tasks, and of the largest short one, in splits times queries
    for is_long in range(2):
        for r in range(num_reqs):
            first, last = types.int64(get_i32(starts, r)), types.int64(get_i32(starts, r + 1))
            if ((last - first) * heads > MAX_ROWS) != (is_long == 1):
                continue
            length = types.int64(get_i32(lengths, r))
            begin = length - (last - first)
            for n in range(first, last):
                set_i64(tokens, n * TOKEN_FIELDS, PADDING if length == 0 else DONE)
            if length == 0:
                continue
            at = first
            while at < last:
                count = min(per_task, last - at)
                position = begin + at - first
                split = lowest_key(position, window, size, padded) // SPLIT
                end = pool_order(position + count - 1, size, padded) // SPLIT + 1
                largest = end - split
                if may_split and last - first <= SPLIT_QUERIES and end - split > 1:
                    largest = 1
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
                work += (end - split) * count
                if is_long == 0:
                    most_work = max(most_work, largest * count)
                at += count
        if is_long == 0:
            num_whole = num_tasks
    set_i64(step, st.NUM_TASKS, num_tasks)
    set_i64(step, st.NUM_WHOLE, num_whole if most_work * _TASKS_PER_THREAD * num_threads <= work else 0)


@device
def _task(task, request, first, count, position, begin, end, partial):  # type: ignore[no-untyped-def]
    set_i64(task, REQUEST, request)
    set_i64(task, FIRST, first)
    set_i64(task, COUNT, count)
    set_i64(task, POSITION, position)
    set_i64(task, BEGIN, begin)
    set_i64(task, END, end)
    set_i64(task, PARTIAL, partial)
