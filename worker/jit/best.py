"""The largest of a row's outputs and where it is, while they are still in the cache of the core that made them.

For the output layer: reading all logits of 32 rows again for their greedy tokens would take a third of the time that
making them took.
"""
from __future__ import annotations

import numpy as np
from numba import types

from worker.jit.lanes import mark_nan, min_lanes_i32, pick_above, pick_equal
from worker.jit.vector import (add_i32, device, keep_between, lane_numbers, load_f32, max_lanes, maximum, set_f32,
                               set_i32, splat, splat_i32)

_F32, _I32 = types.float32, types.int32
ENTRY_BYTES = 8                                 # of a row: the largest, float32, and its number, int32
_MINUS_INF, _NAN, _NOWHERE = np.float32(-np.inf), np.float32(np.nan), np.int32(2**31 - 1)


@device
def note_best(x, ldx, rows, width, first, entries):  # type: ignore[no-untyped-def]
    """Of each of `rows` rows, ldx bytes apart, the largest of `width` outputs at x, NaN if any is, and the number of
    the first that is as large, counted from `first`. entries: where that of the first row goes."""
    lanes, zero, sixteen, lowest = lane_numbers(), splat_i32(_I32(0)), splat_i32(_I32(16)), splat(_MINUS_INF)
    for m in range(rows):
        row, here = x + m * ldx, add_i32(lanes, splat_i32(_I32(first)))
        best, at, nans = lowest, here, zero
        for i in range(0, width, 16):
            value = load_f32(row + 4 * i)
            if width - i < 16:
                value = keep_between(value, lanes, zero, splat_i32(_I32(width - i - 1)), lowest)
            at = pick_above(value, best, here, at)
            best = maximum(value, best)
            nans = mark_nan(nans, value)
            here = add_i32(here, sixteen)
        largest = max_lanes(best)
        number = min_lanes_i32(pick_equal(best, splat(largest), at, splat_i32(_NOWHERE)))
        set_f32(entries, 2 * m, _F32(_NAN) if min_lanes_i32(nans) < 0 else largest)
        set_i32(entries, 2 * m + 1, number)
