"""The residual add and the RMSNorm that follows it: one read and one write of each, instead of two.

The sum is rounded to the stream's dtype before it is squared, as the unfused pair does: the norm must be that of the
numbers the stream holds. One program a row. Source: Zhang and Sennrich 2019 (RMSNorm).
"""

# mypy: allow-untyped-defs
# (kernels: their parameters are Triton's, not Python's)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.configs import row_warps


@triton.jit
def add_rms_norm_kernel(
    out_ptr, residual_ptr, delta_ptr, weight_ptr, eps, stride_delta, E: tl.constexpr, BLOCK_E: tl.constexpr,
    HAS_DELTA: tl.constexpr,
):
    """Grid (N,)."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK_E)
    mask = offsets < E
    x = tl.load(residual_ptr + row * E + offsets, mask=mask, other=0.0).to(tl.float32)
    if HAS_DELTA:
        x += tl.load(delta_ptr + row * stride_delta + offsets, mask=mask, other=0.0).to(tl.float32)
        rounded = x.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + row * E + offsets, rounded, mask=mask)
        x = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 0) / E + eps)
    weight = tl.load(weight_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * E + offsets, (x * inverse * weight).to(out_ptr.dtype.element_ty), mask=mask)


def add_rms_norm(residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """rms_norm(residual + delta) * weight [N, E]; residual [N, E], contiguous, is updated in place. delta None: no add.
    """
    num_rows, size = residual.shape
    out = torch.empty_like(residual)
    if num_rows:
        added = residual if delta is None else delta
        add_rms_norm_kernel[(num_rows,)](
            out, residual, added, weight, eps, added.stride(0), E=size, BLOCK_E=triton.next_power_of_2(size),
            HAS_DELTA=delta is not None, num_warps=row_warps(size))
    return out


def add_rms_norm_reference(residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """The same in plain torch."""
    if delta is not None:
        residual.copy_(residual.float() + delta.float())
    x = residual.float()
    return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(residual.dtype)
