"""From BatchMeta to the step record: shapes of attention, this step's tables, memory for its plan and partial results.

Knows the batch layout and the pool's shape, not the model. Memory grows to the largest step seen and is then reused.
"""
from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.attention.base import BatchMeta
from worker.attention.jit_layout import LANES, padded
from worker.jit import attend_plan as plan
from worker.jit import step as st
from worker.jit.attend_softmax import CHUNK, HEADER
from worker.jit.attend_tiles import GROUP_FIELDS
from worker.jit.program import float_bits, new_step

POOL_KINDS = {torch.float32: st.POOL_F32, torch.bfloat16: st.POOL_BF16, torch.int8: st.POOL_INT8,
              torch.float8_e4m3fn: st.POOL_FP8}


class AttentionWorkspace:
    """One step record, for layers of one shape. One instance serves one thread."""

    def __init__(self, heads: int, kv_heads: int, dim: int, num_threads: int) -> None:
        self.heads, self.kv_heads, self.dim, self.num_threads = heads, kv_heads, dim, num_threads
        self.step = new_step()
        self.step[st.HEADS], self.step[st.KV_HEADS], self.step[st.HEAD_DIM] = heads, kv_heads, dim
        group, width = heads // kv_heads, padded(dim)
        self._row_floats = HEADER + width
        rows = padded(max(plan.MAX_ROWS, group * plan.SPLIT_QUERIES))
        # A row's query, two states, scores, limits of two int64, base and factor; three times four groups of two floats
        # a field.
        num_groups = 4 * 3
        floats = rows * (width + 2 * self._row_floats + CHUNK + 6) + num_groups * 2 * GROUP_FIELDS
        self._scratch = _floats((num_threads, padded(floats)))
        self.step[st.SCRATCH], self.step[st.SCRATCH_BYTES] = self._scratch.ctypes.data, self._scratch.strides[0]
        self._tasks = np.zeros((0, plan.TASK_FIELDS), np.int64)
        self._tokens = np.zeros((0, plan.TOKEN_FIELDS), np.int64)
        self._partials = _floats((0,))

    def bind(self, meta: BatchMeta, num_rows: int, cache: tuple[Tensor, ...], *, scale: float | None,
             window: int) -> NDArray[np.int64]:
        """Point the record at this step. The tensors of `meta` are read in place: they must outlive the run."""
        step, size = self.step, meta.block_size
        step[st.NUM_ROWS], step[st.NUM_REQS] = num_rows, meta.num_reqs
        step[st.SLOTS] = meta.slot_mapping.data_ptr()
        step[st.QUERY_START], step[st.SEQ_LENS] = meta.query_start_loc.data_ptr(), meta.seq_lens.data_ptr()
        step[st.TABLE], step[st.TABLE_STRIDE] = meta.block_table.data_ptr(), meta.block_table.stride(0)
        step[st.BLOCK_SIZE], step[st.NUM_SLOTS] = size, cache[0].shape[0] * size
        step[st.POOL_KIND], step[st.WINDOW] = POOL_KINDS[cache[0].dtype], window
        step[st.SCALE_BITS] = float_bits(self.dim ** -0.5 if scale is None else scale)
        # The plan splits contexts only while there are fewer units than 4 per thread (plan_attention).
        splits = -(-meta.max_seq_len * padded(size) // (size * plan.SPLIT)) + 1
        may_split = -(-4 * self.num_threads // self.kv_heads)
        per_task = max(1, plan.MAX_ROWS // (self.heads // self.kv_heads))
        num_tasks = meta.num_reqs + num_rows // per_task + 1 + may_split * splits
        if num_tasks > len(self._tasks):
            self._tasks = np.zeros((num_tasks * 3 // 2, plan.TASK_FIELDS), np.int64)
        if num_rows > len(self._tokens):
            self._tokens = np.zeros((num_rows * 3 // 2, plan.TOKEN_FIELDS), np.int64)
        floats = may_split * splits * self.heads * plan.SPLIT_QUERIES * self._row_floats
        if floats > self._partials.size:
            self._partials = _floats((floats * 3 // 2,))
        step[st.TASKS], step[st.TOKENS] = self._tasks.ctypes.data, self._tokens.ctypes.data
        step[st.PARTIALS] = self._partials.ctypes.data
        return step


def _floats(shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Zeros at a multiple of 64 bytes, on pages that cost memory once they are written."""
    size = int(np.prod(shape))
    raw = np.zeros(size + LANES, np.float32)
    start = (-raw.ctypes.data % 64) // 4
    return raw[start:start + size].reshape(shape)
