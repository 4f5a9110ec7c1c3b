"""The fields of the step record: what changes from step to step, as an int64 array that the operations read.

Everything else is in the operations themselves, which are made once per model (program.py).
"""
from __future__ import annotations

(NUM_ROWS, NUM_REQS, IDS, POSITIONS, SLOTS, QUERY_START, SEQ_LENS, TABLE, TABLE_STRIDE, BLOCK_SIZE, NUM_SLOTS, COS, SIN,
 WINDOW, HEADS, KV_HEADS, HEAD_DIM, TASKS, NUM_TASKS, TOKENS, PARTIALS, SCRATCH, SCRATCH_BYTES, SCALE_BITS,
 NUM_THREADS, POOL_KIND, NUM_WHOLE) = range(27)
SIZE = 32

POOL_F32, POOL_BF16, POOL_INT8, POOL_FP8 = range(4)   # the last two: codes with scales
