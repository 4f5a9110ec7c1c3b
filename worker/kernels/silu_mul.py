"""silu(gate) * up of a fused gate-and-up projection, in one pass. Source: Shazeer 2020 (SwiGLU)."""

# mypy: allow-untyped-defs
# (kernels: their parameters are Triton's, not Python's)
from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.configs import ELEMENTS_PER_PROGRAM


@triton.jit
def silu_mul_kernel(out_ptr, both_ptr, size, stride_both, BLOCK: tl.constexpr):
    """Grid (N, size / BLOCK)."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    gate = tl.load(both_ptr + row * stride_both + offsets, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(both_ptr + row * stride_both + size + offsets, mask=mask, other=0.0).to(tl.float32)
    silu = gate / (1.0 + tl.exp2(gate * -1.4426950408889634))
    tl.store(out_ptr + row * size + offsets, (silu * up).to(out_ptr.dtype.element_ty), mask=mask)


def silu_mul(both: Tensor) -> Tensor:
    """both [N, 2F]: gate, then up; rows may be strided -> [N, F]."""
    num_rows, size = both.shape[0], both.shape[1] // 2
    out = torch.empty((num_rows, size), dtype=both.dtype, device=both.device)
    if num_rows:
        block = min(ELEMENTS_PER_PROGRAM, triton.next_power_of_2(size))
        silu_mul_kernel[(num_rows, triton.cdiv(size, block))](out, both, size, both.stride(0), BLOCK=block, num_warps=4)
    return out


def silu_mul_reference(both: Tensor) -> Tensor:
    """The same in plain torch and float32."""
    gate, up = both.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(both.dtype)
