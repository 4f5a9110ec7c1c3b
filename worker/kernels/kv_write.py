"""Scatters a step's keys and values into the pool, whatever its dtype: the part of qkv_rope_kv_write that a model uses
which has rotated its heads itself.

Slot -1 is padding and goes to the pool's last slot. Does not know positions or norms.
"""

# mypy: allow-untyped-defs
# (kernels: their parameters are Triton's, not Python's)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.configs import HEADS_PER_PROGRAM
from worker.kernels.kv_quant import encode, magnitude, scale_of
from worker.kv_quant import LARGEST_CODE


@triton.jit(do_not_specialize=["last_slot"], do_not_specialize_on_alignment=["slots_ptr"])
def kv_write_kernel(
    k_ptr, v_ptr, k_pool_ptr, v_pool_ptr, k_scale_ptr, v_scale_ptr, slots_ptr, last_slot, stride_k, stride_v, num_heads,
    D: tl.constexpr, BLOCK_D: tl.constexpr, HEADS: tl.constexpr, LARGEST: tl.constexpr, IS_INT8: tl.constexpr,
):
    """Grid (N, heads / HEADS). LARGEST 0: the pool has no scales."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    slot = tl.where(slot >= 0, slot, last_slot)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    offsets_d = tl.arange(0, BLOCK_D)
    mask = (heads < num_heads)[:, None] & (offsets_d < D)[None, :]
    at = heads[:, None] * D + offsets_d[None, :]
    k = tl.load(k_ptr + token * stride_k + at, mask=mask, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + token * stride_v + at, mask=mask, other=0.0).to(tl.float32)
    if LARGEST > 0:
        k_scale = scale_of(tl.max(magnitude(k), 1), LARGEST)
        v_scale = scale_of(tl.max(magnitude(v), 1), LARGEST)
        tl.store(k_scale_ptr + slot * num_heads + heads, k_scale, mask=heads < num_heads)
        tl.store(v_scale_ptr + slot * num_heads + heads, v_scale, mask=heads < num_heads)
        k = encode(k, k_scale, LARGEST, IS_INT8)
        v = encode(v, v_scale, LARGEST, IS_INT8)
    at_pool = slot * (num_heads * D) + at
    tl.store(k_pool_ptr + at_pool, k.to(k_pool_ptr.dtype.element_ty), mask=mask)
    tl.store(v_pool_ptr + at_pool, v.to(v_pool_ptr.dtype.element_ty), mask=mask)


def kv_write(cache: tuple[Tensor, ...], k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    """cache: k, v [B, S, Hkv, D] and, for int8 and float8, their scales [B, S, Hkv] bfloat16; k, v [N, Hkv, D], heads
    and dims contiguous (rows may be strided); slot_mapping [N] int64."""
    num_tokens, num_heads, dim = k.shape
    if num_tokens == 0:
        return
    pool = cache[0]
    k, v = (x if x.stride()[1:] == (dim, 1) else x.contiguous() for x in (k, v))
    scales = cache[2:] or cache[:2]
    heads = min(HEADS_PER_PROGRAM, triton.next_power_of_2(num_heads))
    kv_write_kernel[(num_tokens, triton.cdiv(num_heads, heads))](
        k, v, cache[0], cache[1], scales[0], scales[1], slot_mapping, pool.shape[0] * pool.shape[1] - 1, k.stride(0),
        v.stride(0), num_heads, D=dim, BLOCK_D=triton.next_power_of_2(dim), HEADS=heads,
        LARGEST=LARGEST_CODE.get(pool.dtype, 0.0), IS_INT8=pool.dtype == torch.int8, num_warps=1)
