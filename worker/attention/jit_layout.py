"""The pool layout of the compiled kernels, and the reference's arithmetic over it.

Keys [B, Hkv, D, S'], values [B, Hkv, S', D'] (S', D': rounded up to 16), so that the scores of sixteen keys are one
vector; scales of int8 and float8 pools are [B, Hkv, S']. Blocks stay the first axis.
"""
from __future__ import annotations

import torch
from torch import Tensor

from worker.attention.base import BatchMeta
from worker.attention.reference import ReferenceBackend
from worker.kv_pool import allocate_pools
from worker.kv_quant import SCALE_DTYPE, is_quantized, quantize

LANES = 16
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
    pools = (allocate_pools((num_blocks, kv_heads, dim, padded(size)), dtype, device, 1)
             + allocate_pools((*scales, padded(dim)), dtype, device, 1))
    return pools + allocate_pools(scales, SCALE_DTYPE, device) if is_quantized(dtype) else pools


def tokens_first(cache: tuple[Tensor, ...], block_size: int) -> tuple[Tensor, ...]:
    """The same memory as [B, S, Hkv, D], and scales as [B, S, Hkv]: strided views without the padding."""
    keys, values, *scales = cache
    dim = keys.shape[2]
    return (keys.permute(0, 3, 1, 2)[:, :block_size], values.permute(0, 2, 1, 3)[:, :block_size, :, :dim],
            *(tensor.permute(0, 2, 1)[:, :block_size] for tensor in scales))


class LayoutBackend(ReferenceBackend):
    """Serves over the kernels' pools while these are being compiled (worker/jit/upgrade.py)."""

    name = "torch"

    def allocate(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
        return allocate(shape, dtype, device)

    def write(self, cache: tuple[Tensor, ...], k: Tensor, v: Tensor, meta: BatchMeta) -> None:
        pools = tokens_first(cache, meta.block_size)
        slots = meta.resolved_slots(cache[0].shape[0] * meta.block_size)
        place = slots // meta.block_size, slots % meta.block_size
        for at, rows in enumerate((k, v)):
            pool = pools[at]
            if len(cache) > 2:
                rows, scales = quantize(rows, pool.dtype)
                pools[2 + at][place] = scales
                pool, rows = pool.view(torch.uint8), rows.view(torch.uint8)
            pool[place] = rows.to(pool.dtype)

    def forward(
        self, q: Tensor, cache: tuple[Tensor, ...], meta: BatchMeta, *, scale: float | None = None, window: int = 0
    ) -> Tensor:
        return super().forward(q, tokens_first(cache, meta.block_size), meta, scale=scale, window=window)
