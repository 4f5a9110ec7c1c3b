"""Merges the partial results that paged_attention.py leaves when it has split a tile's keys.

    out = sum_s w_s out_s / sum_s w_s,   w_s = 2 ** (lse_s - max lse)

One program per query head and token of a tile, all splits at once: at one row the time is one trip to memory. Tiles
that used one split were written by the attention kernel itself and are left alone.
Does not know how the parts were made. Source: Dao et al. 2023 (Flash-Decoding).
"""

# mypy: allow-untyped-defs
# (kernels: their parameters are Triton's, not Python's)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.paged_attention import PER_STEP, PER_STEP_POINTERS, find_tile


@triton.jit(do_not_specialize=[name for name in PER_STEP if name != "stride_table"],
            do_not_specialize_on_alignment=[name for name in PER_STEP_POINTERS if name != "table_ptr"])
def combine_splits_kernel(
    out_ptr, part_ptr, part_lse_ptr, starts_ptr, lens_ptr, num_reqs, window, num_splits, min_tiles, max_split_queries,
    part_rows, parts_by_request, stride_out, num_kv_heads, D: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SPLITS: tl.constexpr, ONE_TOKEN: tl.constexpr,
):
    """Grid (rows of a part, Hkv, parts): parts are requests or tiles."""
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    tile = part
    if not ONE_TOKEN:
        if parts_by_request != 0:
            tile = tl.load(starts_ptr + part) // BLOCK_Q + part
    request, first, num_queries, position, key_begin, key_tiles, per_split, count = find_tile(
        starts_ptr, lens_ptr, num_reqs, tile, window, min_tiles, num_splits, BLOCK_Q, BLOCK_N, ONE_TOKEN)
    if (row >= num_queries * GROUP) | (per_split >= key_tiles) | (count > max_split_queries):
        return
    used = tl.cdiv(key_tiles, per_split)
    splits = tl.arange(0, BLOCK_SPLITS)
    offsets_d = tl.arange(0, BLOCK_D)
    at = ((part.to(tl.int64) * num_kv_heads + kv_head) * num_splits + splits) * part_rows + row
    lse = tl.load(part_lse_ptr + at, mask=splits < used, other=float("-inf"))
    highest = tl.max(lse, 0)
    weights = tl.exp2(lse - tl.where(highest == float("-inf"), 0.0, highest))
    total = tl.sum(weights, 0)
    values = tl.load(part_ptr + at[:, None] * D + offsets_d[None, :],
                     mask=(splits < used)[:, None] & (offsets_d < D)[None, :], other=0.0)
    out = tl.sum(values * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    at_out = (first + row // GROUP).to(tl.int64) * stride_out + (kv_head * GROUP + row % GROUP) * D + offsets_d
    tl.store(out_ptr + at_out, out.to(out_ptr.dtype.element_ty), mask=offsets_d < D)


def combine_splits_reference(parts: Tensor, lse: Tensor) -> Tensor:
    """parts [splits, rows, D] of softmax-weighted means, lse [splits, rows] base 2 -> [rows, D]."""
    weights = torch.softmax(lse * 0.6931471805599453, 0)
    return (weights[..., None] * parts).sum(0)
