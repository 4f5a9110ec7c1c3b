"""The arg-max of a row under a bit mask, compiled: only what the mask allows is read.

A grammar often allows few tokens, in runs. The numbers of the mask's words that are not 0 are listed first, without a
branch; then WORDS of them at a time, each 32 logits, are one chunk whose largest counts. Does not know grammars.
"""
from __future__ import annotations

from numba import types

from worker.jit.lanes import CHUNK, copy_non_zero, is_full_256, lanes_of_chunk, lanes_of_words, largest_lane
from worker.jit.vector import (add_i32, device, get_f32, get_i32, lane_numbers, load_i32, set_i32, splat_i32,
                               store_i32)
from worker.sampling.jit_chunks import fill_tail, first_of, is_allowed

_F32, _MINUS_INF, _NAN = types.float32, float("-inf"), float("nan")
WORDS = CHUNK // 32
AHEAD = 8                                       # chunks of words; what is fetched while one is read


@device
def list_words(bits, count, words):  # type: ignore[no-untyped-def]
    """The numbers of the first `count` words, a multiple of WORDS, that are not 0, int32; how many. Zeros for
    AHEAD more chunks follow, if there are any."""
    n = 0
    for i in range(0, count // 16 * 16, 16):
        n += copy_non_zero(words + 4 * n, add_i32(lane_numbers(), splat_i32(i)), load_i32(bits + 4 * i))
    for i in range(count // 16 * 16, count):
        if get_i32(bits, i) != 0:
            set_i32(words, n, i)
            n += 1
    for i in range(0, (AHEAD + 2) * WORDS if n > 0 else 0, 16):
        store_i32(words + 4 * (n + i), splat_i32(0))
    return n


@device
def largest_allowed(x, width, bits, tail, words):  # type: ignore[no-untyped-def]
    """(the first token with the largest of the logits whose bit is 1, that logit); NaN if any of them is. `words`:
    room for the list."""
    fill_tail(x, width, bits, tail)
    n = list_words(bits, width // CHUNK * WORDS, words)
    best, place = _F32(_MINUS_INF), -1
    for i in range(0, n, WORDS):
        first = get_i32(words, i)
        if get_i32(words, i + WORDS - 1) == first + WORDS - 1 and is_full_256(bits + 4 * first):
            largest = largest_lane(lanes_of_chunk(x + 128 * first))     # nothing is masked
        else:
            largest = largest_lane(lanes_of_words(x, bits, words + 4 * i, words + 4 * (i + WORDS * AHEAD)))
        if not largest <= best:
            best, place = largest, i
            if best != best:
                return 0, _F32(_NAN)
    largest = largest_lane(lanes_of_chunk(tail))
    if not largest <= best:
        return first_of(x, width // CHUNK, width, bits, tail, largest), largest
    if place < 0:
        return 0, best
    for i in range(place, place + WORDS):
        first = 32 * get_i32(words, i)
        for token in range(first, first + 32):
            if get_f32(x, token) == best and is_allowed(bits, token):
                return token, best
    return 0, best
