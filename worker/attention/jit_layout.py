"""The pool layout of the compiled kernels, and the reference's arithmetic over it.

Keys [B, Hkv, D, S'], values [B, Hkv, S', D'] (S', D': rounded up to 16), so that the scores of sixteen keys are one
vector; keys of int8 [B, Hkv, D / 4, S', 4] (D / 4 rounded up), because one instruction multiplies four dimensions.
Scales of int8 and float8 pools are [B, Hkv, S']. Blocks stay the first axis.
"""
from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.attention.base import BatchMeta
from worker.attention.reference import ReferenceBackend
from worker.kv_pool import allocate_pools
from worker.kv_quant import SCALE_DTYPE, is_quantized, quantize

LANES, QUAD = 16, 4
POOL_DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn)


def padded(count: int) -> int:
    """Up to whole vectors."""
    return -(-count // LANES) * LANES


def allocate(shape: tuple[int, int, int, int], dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    """A layer's pools, asked for as [B, S, Hkv, D]. Raises ValueError for a dtype that the kernels do not read."""
    if dtype not in POOL_DTYPES:
        raise ValueError(f"the jit backend keeps keys and values as float32, bfloat16, int8 or fp8, not {dtype}; "
                         "use --kv-cache-dtype or --attention-backend cpu")
    num_blocks, size, kv_heads, dim = shape
    scales = (num_blocks, kv_heads, padded(size))
    keys = (num_blocks, kv_heads, -(-dim // QUAD), padded(size), QUAD) if dtype == torch.int8 \
        else (num_blocks, kv_heads, dim, padded(size))
    pools = (allocate_pools(keys, dtype, device, 1) + allocate_pools((*scales, padded(dim)), dtype, device, 1))
    return pools + allocate_pools(scales, SCALE_DTYPE, device) if is_quantized(dtype) else pools


def tokens_first(cache: tuple[Tensor, ...], block_size: int, dim: int) -> tuple[Tensor, ...]:
    """The same memory as [B, S, Hkv, D], and scales as [B, S, Hkv]: strided views without the padding of blocks. Keys
    of int8 are [B, S, Hkv, D / 4, 4]."""
    keys, values, *scales = cache
    order = (0, 3, 1, 2, 4) if keys.dim() == 5 else (0, 3, 1, 2)
    return (keys.permute(order)[:, :block_size], values.permute(0, 2, 1, 3)[:, :block_size, :, :dim],
            *(tensor.permute(0, 2, 1)[:, :block_size] for tensor in scales))


class LayoutBackend(ReferenceBackend):
    """Serves over the kernels' pools while these are being compiled (worker/jit/upgrade.py)."""

    name = "torch"

    def allocate(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
        return allocate(shape, dtype, device)

    def write(self, cache: tuple[Tensor, ...], k: Tensor, v: Tensor, meta: BatchMeta) -> None:
        pools = tokens_first(cache, meta.block_size, k.shape[-1])
        slots = meta.resolved_slots(cache[0].shape[0] * meta.block_size)
        place = slots // meta.block_size, slots % meta.block_size
        for at, rows in enumerate((k, v)):
            pool = pools[at]
            if len(cache) > 2:
                rows, scales = quantize(rows, pool.dtype)
                pools[2 + at][place] = scales
                pool, rows = pool.view(torch.uint8), rows.view(torch.uint8)
            if pool.dim() == 5:
                rows = F.pad(rows, (0, -rows.shape[-1] % QUAD)).unflatten(-1, (-1, QUAD))
            pool[place] = rows.to(pool.dtype)

    def forward(
        self, q: Tensor, cache: tuple[Tensor, ...], meta: BatchMeta, *, scale: float | None = None, window: int = 0
    ) -> Tensor:
        keys, *others = tokens_first(cache, meta.block_size, q.shape[-1])
        if keys.dim() == 5:                     # a copy of the blocks of this step: no view can join the last axes
            used, places = meta.block_table.unique(return_inverse=True)
            keys = keys[used.long()].flatten(-2)[..., :q.shape[-1]]
            others = [tensor[used.long()] for tensor in others]
            meta = replace(meta, block_table=places.to(meta.block_table.dtype))
        return super().forward(q, (keys, *others), meta, scale=scale, window=window)
