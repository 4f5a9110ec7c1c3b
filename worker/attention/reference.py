"""The oracle: gathers each request's context and computes plain causal attention in float32.

Slow on purpose and never optimised; every other backend is tested against it. It does not know how to be fast.
"""

from __future__ import annotations

import torch
from torch import Tensor

from worker.attention.base import BatchMeta
from worker.kv_pool import allocate_kv, write_kv
from worker.kv_quant import dequantize
from worker.models.ops import TORCH_OPS


def gather_context(pool: Tensor, block_row: Tensor, length: int, scales: Tensor | None = None) -> Tensor:
    """The first `length` tokens of one request as float32 [length, Hkv, D], read through its row of the block table.
    pool [B, S, Hkv, D]; scales [B, S, Hkv] if it holds codes."""
    block_size = pool.shape[1]
    blocks = block_row[: -(-length // block_size)].long()
    rows = pool[blocks].flatten(0, 1)[:length]
    return rows.float() if scales is None else dequantize(rows, scales[blocks].flatten(0, 1)[:length])


class ReferenceBackend:
    """See AttentionBackend. Pools of any float dtype, int8 and float8; the arithmetic is float32."""

    name = "reference"
    ops = TORCH_OPS

    def allocate(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
        return allocate_kv(shape, dtype, device)

    def write(self, cache: tuple[Tensor, ...], k: Tensor, v: Tensor, meta: BatchMeta) -> None:
        write_kv(cache, k, v, meta.slot_mapping)

    def forward(
        self, q: Tensor, cache: tuple[Tensor, ...], meta: BatchMeta, *, scale: float | None = None, window: int = 0
    ) -> Tensor:
        k_pool, v_pool, *scales = cache
        k_scales, v_scales = scales or (None, None)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        out = torch.zeros_like(q)
        for r in range(meta.num_reqs):
            begin, end = int(meta.query_start_loc_cpu[r]), int(meta.query_start_loc_cpu[r + 1])
            length = int(meta.seq_lens_cpu[r])
            if length == 0 or begin == end:  # padding
                continue
            k = gather_context(k_pool, meta.block_table[r], length, k_scales)
            v = gather_context(v_pool, meta.block_table[r], length, v_scales)
            out[begin:end] = causal_attention(q[begin:end].float(), k, v, scale, window).to(q.dtype)
        return out


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int = 0) -> Tensor:
    """q [t, H, D] are the last t positions of k, v [length, Hkv, D]; returns [t, H, D].

    softmax(q k^T * scale + mask) v, each key/value head serving H / Hkv query heads.
    """
    t, length = q.shape[0], k.shape[0]
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    q_pos = torch.arange(length - t, length, device=q.device)[:, None]
    k_pos = torch.arange(length, device=q.device)[None, :]
    allowed = k_pos <= q_pos
    if window > 0:
        allowed &= k_pos > q_pos - window
    scores = torch.einsum("thd,lhd->htl", q, k) * scale
    weights = torch.softmax(scores.masked_fill(~allowed, float("-inf")), dim=-1)
    return torch.einsum("htl,lhd->thd", weights, v)
