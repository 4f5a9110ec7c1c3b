"""One pass over the fused projection: head norms and rotary positions for q and k, then k and v into the pool.

    qkv row:   q 0 .. H-1        | k 0 .. Hkv-1            | v 0 .. Hkv-1
               norm, rotate, q   | norm, rotate, k pool    | v pool

In plain torch this is nine passes over memory and as many launches a layer. A program takes HEADS heads of one token as
two halves of D / 2, since the rotation pairs (i, i + D/2). cos and sin come from the step's tables: computing them here
would need the slow reduction of large angles.
Rounding: everything is float32 until the store, so a bfloat16 result differs from the unfused one by its roundings.
Does not know requests. Sources: Su et al. 2021 (RoPE); Zhang and Sennrich 2019 (RMSNorm).
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
from worker.kv_pool import write_kv
from worker.kv_quant import LARGEST_CODE


@triton.jit(do_not_specialize=["last_slot"], do_not_specialize_on_alignment=["slots_ptr"])
def qkv_rope_kv_write_kernel(
    qkv_ptr, q_out_ptr, k_pool_ptr, v_pool_ptr, k_scale_ptr, v_scale_ptr, cos_ptr, sin_ptr, norm_ptr, slots_ptr,
    last_slot, eps, stride_qkv, stride_table, num_heads, num_kv_heads,
    D: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, HEADS: tl.constexpr, HAS_NORM: tl.constexpr,
    LARGEST: tl.constexpr, IS_INT8: tl.constexpr,
):
    """Grid (N, all heads / HEADS). LARGEST 0: the pool has no scales."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    offsets = tl.arange(0, BLOCK_HALF)
    num_rotated = num_heads + num_kv_heads
    in_half = (offsets < HALF)[None, :]
    mask = (heads < num_rotated + num_kv_heads)[:, None] & in_half
    at = heads[:, None] * D + offsets[None, :]
    row = qkv_ptr + token * stride_qkv
    x1 = tl.load(row + at, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(row + at + HALF, mask=mask, other=0.0).to(tl.float32)
    is_rotated = (heads < num_rotated)[:, None]

    n1 = x1
    n2 = x2
    if HAS_NORM:
        mean = (tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / D
        inverse = tl.rsqrt(mean + eps)[:, None]
        rotated_mask = mask & is_rotated
        n1 = x1 * inverse * tl.load(norm_ptr + at, mask=rotated_mask, other=0.0).to(tl.float32)
        n2 = x2 * inverse * tl.load(norm_ptr + at + HALF, mask=rotated_mask, other=0.0).to(tl.float32)
    # Both halves of the cos table are equal; of the sin table the second half has the plain sign.
    at_table = token * stride_table + offsets[None, :]
    cos = tl.load(cos_ptr + at_table, mask=in_half, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + at_table + HALF, mask=in_half, other=0.0).to(tl.float32)
    y1 = tl.where(is_rotated, n1 * cos - n2 * sin, x1)
    y2 = tl.where(is_rotated, n2 * cos + n1 * sin, x2)

    q_mask = mask & (heads < num_heads)[:, None]
    q_row = q_out_ptr + token * (num_heads * D)
    tl.store(q_row + at, y1.to(q_out_ptr.dtype.element_ty), mask=q_mask)
    tl.store(q_row + at + HALF, y2.to(q_out_ptr.dtype.element_ty), mask=q_mask)

    slot = tl.load(slots_ptr + token)
    slot = tl.where(slot >= 0, slot, last_slot)
    is_k = (heads >= num_heads) & (heads < num_rotated)
    is_v = (heads >= num_rotated) & (heads < num_rotated + num_kv_heads)
    kv_heads = tl.where(is_k, heads - num_heads, heads - num_rotated)
    if LARGEST > 0:
        scale = scale_of(tl.maximum(tl.max(magnitude(y1), 1), tl.max(magnitude(y2), 1)), LARGEST)
        tl.store(k_scale_ptr + slot * num_kv_heads + kv_heads, scale, mask=is_k)
        tl.store(v_scale_ptr + slot * num_kv_heads + kv_heads, scale, mask=is_v)
        y1 = encode(y1, scale, LARGEST, IS_INT8)
        y2 = encode(y2, scale, LARGEST, IS_INT8)
    at_pool = (slot * num_kv_heads + kv_heads)[:, None] * D + offsets[None, :]
    k_mask = is_k[:, None] & in_half
    v_mask = is_v[:, None] & in_half
    tl.store(k_pool_ptr + at_pool, y1.to(k_pool_ptr.dtype.element_ty), mask=k_mask)
    tl.store(k_pool_ptr + at_pool + HALF, y2.to(k_pool_ptr.dtype.element_ty), mask=k_mask)
    tl.store(v_pool_ptr + at_pool, y1.to(v_pool_ptr.dtype.element_ty), mask=v_mask)
    tl.store(v_pool_ptr + at_pool + HALF, y2.to(v_pool_ptr.dtype.element_ty), mask=v_mask)


def qkv_rope_kv_write(
    qkv: Tensor, cos: Tensor, sin: Tensor, cache: tuple[Tensor, ...], slot_mapping: Tensor, *, num_heads: int,
    norm_weight: Tensor | None = None, eps: float = 1e-6,
) -> Tensor:
    """Rotated queries [N, H, D] in qkv's dtype; k and v are in the pool afterwards.

    qkv [N, H + 2 Hkv, D], rows may be strided; cos, sin [N, 1, D] as RotaryTables gives them (any float dtype);
    norm_weight [H + Hkv, D] or None; cache k, v [B, S, Hkv, D] and, for int8 and float8, scales [B, S, Hkv] bfloat16;
    slot_mapping [N] int64, -1 for padding.
    """
    num_tokens, num_all, dim = qkv.shape
    pool, num_kv_heads = cache[0], cache[0].shape[2]
    q_out = torch.empty((num_tokens, num_heads, dim), dtype=qkv.dtype, device=qkv.device)
    if num_tokens == 0:
        return q_out
    scales = cache[2:] or cache[:2]
    heads = min(HEADS_PER_PROGRAM, triton.next_power_of_2(num_all))
    qkv_rope_kv_write_kernel[(num_tokens, triton.cdiv(num_all, heads))](
        qkv, q_out, cache[0], cache[1], scales[0], scales[1], cos, sin, cos if norm_weight is None else norm_weight,
        slot_mapping, pool.shape[0] * pool.shape[1] - 1, eps, qkv.stride(0), cos.stride(0), num_heads,
        num_kv_heads, D=dim, HALF=dim // 2, BLOCK_HALF=triton.next_power_of_2(dim // 2), HEADS=heads,
        HAS_NORM=norm_weight is not None, LARGEST=LARGEST_CODE.get(pool.dtype, 0.0), IS_INT8=pool.dtype == torch.int8,
        num_warps=1)
    return q_out


def qkv_rope_kv_write_reference(
    qkv: Tensor, cos: Tensor, sin: Tensor, cache: tuple[Tensor, ...], slot_mapping: Tensor, *, num_heads: int,
    norm_weight: Tensor | None = None, eps: float = 1e-6,
) -> Tensor:
    """The same in plain torch and float32."""
    num_kv_heads = cache[0].shape[2]
    x = qkv[:, : num_heads + num_kv_heads].float()
    if norm_weight is not None:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * norm_weight.float()
    x = x * cos.float() + x.roll(x.shape[-1] // 2, -1) * sin.float()
    write_kv(cache, x[:, num_heads:], qkv[:, num_heads + num_kv_heads :].float(), slot_mapping)
    return x[:, :num_heads].to(qkv.dtype)
