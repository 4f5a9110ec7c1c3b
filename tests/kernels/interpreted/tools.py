"""Ragged batches over a pool in which everything that must not be read is NaN."""

from __future__ import annotations

import numpy as np
import torch

from tests.worker.test_attention import poison
from worker.attention.base import BatchMeta
from worker.kv_pool import write_kv
from worker.kv_quant import is_quantized

BF16, FP8, INT8 = torch.bfloat16, torch.float8_e4m3fn, torch.int8


def make_cache(
    num_blocks: int, block_size: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    shape = (num_blocks, block_size, kv_heads, dim)
    if not is_quantized(dtype):
        cache = tuple(torch.empty(shape, dtype=dtype) for _ in range(2))
    else:
        cache = tuple(torch.empty(shape, dtype=torch.uint8).view(dtype) for _ in range(2)) + tuple(
            torch.empty(shape[:3], dtype=BF16) for _ in range(2)
        )
    poison(cache)
    return cache


def make_batch(
    query_lens: list[int],
    seq_lens: list[int],
    *,
    block_size: int = 16,
    kv_heads: int = 2,
    dim: int = 16,
    dtype: torch.dtype = torch.float32,
    window: int = 0,
    seed: int = 0,
) -> tuple[BatchMeta, tuple[torch.Tensor, ...]]:
    """Blocks are shuffled. With a window, blocks that no query sees are replaced by the null block, as if freed."""
    g = torch.Generator().manual_seed(seed)
    counts = [-(-n // block_size) for n in seq_lens]
    order = (torch.randperm(max(1, sum(counts)), generator=g) + 1).int()
    table = torch.zeros((len(seq_lens), max(1, *counts, 1)), dtype=torch.int32)
    cache = make_cache(sum(counts) + 2, block_size, kv_heads, dim, dtype)
    begin = 0
    for r, (count, length, t) in enumerate(zip(counts, seq_lens, query_lens, strict=True)):
        table[r, :count] = order[begin : begin + count]
        begin += count
        position = torch.arange(length)
        slots = table[r, position // block_size].long() * block_size + position % block_size
        k, v = torch.randn((2, length, kv_heads, dim), generator=g).unbind(0)
        oldest = max(0, length - t - window + 1) if window else 0
        write_kv(cache, k[oldest:], v[oldest:], slots[oldest:])
        table[r, : oldest // block_size] = 0
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    lengths = np.array(seq_lens, np.int32)
    meta = BatchMeta.of(starts, lengths, table, torch.zeros(int(starts[-1]), dtype=torch.long), block_size)
    return meta, cache
