"""Attention by the compiled kernels of worker/jit: all requests of a step in one parallel call.

The pool's layout is the kernel's (jit_layout.py). Every row's result is independent of the batch.
Does not know how the kernel splits the work (worker/jit/attend.py).
"""
from __future__ import annotations

import torch
from torch import Tensor

from worker.attention import jit_layout
from worker.attention.base import BatchMeta
from worker.jit import attend, rope
from worker.jit import program as pg
from worker.jit import step as st
from worker.jit.team import Team, get_team
from worker.jit.workspace import AttentionWorkspace
from worker.models.ops import TORCH_OPS


class JitBackend:
    """See AttentionBackend. Pools of float32, bfloat16, int8 and float8 (e4m3); the arithmetic is float32."""

    name = "jit"
    ops = TORCH_OPS

    def __init__(self, team: Team | None = None) -> None:
        self.team = team or get_team()
        self._workspaces: dict[tuple[int, int, int], AttentionWorkspace] = {}
        self._write = pg.Program()
        self._write.add(pg.ROPE, {})
        self._attend = pg.Program()
        self._attend.add(pg.ATTEND, {})
        self._attend.add(pg.MERGE, {})

    def allocate(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
        return jit_layout.allocate(shape, dtype, device)

    def write(self, cache: tuple[Tensor, ...], k: Tensor, v: Tensor, meta: BatchMeta) -> None:
        k, v = k.float().contiguous(), v.float().contiguous()
        num_rows, kv_heads, dim = k.shape
        step = self._workspace(kv_heads, kv_heads, dim).bind(meta, num_rows, cache, scale=None, window=0)
        step[st.TASKS] = 0                      # nothing to plan: this call only writes
        row = self._write.table[0]
        row[rope.K], row[rope.V], row[rope.LD_KV] = k.data_ptr(), v.data_ptr(), kv_heads * dim * 4
        for field, tensor in zip(rope.POOL_FIELDS, cache):
            row[field] = tensor.data_ptr()
        self.team.run(self._write.address, 1, step)

    def forward(
        self, q: Tensor, cache: tuple[Tensor, ...], meta: BatchMeta, *, scale: float | None = None, window: int = 0
    ) -> Tensor:
        rows = q.float().contiguous()
        num_rows, heads, dim = rows.shape
        out = torch.empty_like(rows)
        step = self._workspace(heads, cache[0].shape[1], dim).bind(meta, num_rows, cache, scale=scale, window=window)
        first, second = self._attend.table
        first[attend.Q], first[attend.LD_Q] = rows.data_ptr(), heads * dim * 4
        for field, tensor in zip(attend.POOL_FIELDS, cache):
            first[field] = tensor.data_ptr()
        for row in (first, second):
            row[attend.OUT], row[attend.LD_OUT] = out.data_ptr(), heads * dim * 4
        self.team.run(self._attend.address, 2, step)
        return out.to(q.dtype)

    def _workspace(self, heads: int, kv_heads: int, dim: int) -> AttentionWorkspace:
        key = (heads, kv_heads, dim)
        if key not in self._workspaces:
            self._workspaces[key] = AttentionWorkspace(heads, kv_heads, dim, self.team.num_threads)
        return self._workspaces[key]
