"""Narrow KV: int8 and float8 (e4m3) values with one scale per token and head. Shared by the kernels that write.

A scale is the largest magnitude of the head's D values over the largest code, kept as bfloat16: two bytes beside D, so
a pool of D = 128 holds 1.97 times the tokens of a bfloat16 one, and the range is float32's. Values are divided by the
*rounded* scale, so rounding it costs no accuracy. Scales live in the pool beside the values ([B, S, Hkv]), and travel
with their block when it is swapped or copied. Rejected: one scale per layer, which needs calibration data.
"""

# mypy: allow-untyped-defs
# (kernels: their parameters are Triton's, not Python's)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST_CODE = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
SMALLEST_SCALE = 2.0**-100  # of a head whose values are all zero


def is_quantized(dtype: torch.dtype) -> bool:
    """Whether a pool of this dtype has scales."""
    return dtype in LARGEST_CODE


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [..., D] -> (codes [..., D], scales [...] bfloat16). The torch reference."""
    largest = LARGEST_CODE[dtype]
    values = x.float()
    scale = (values.abs().amax(-1) / largest).clamp_min(SMALLEST_SCALE).bfloat16()
    scaled = (values / scale.float()[..., None]).clamp(-largest, largest)
    return (torch.floor(scaled + 0.5) if dtype == torch.int8 else scaled).to(dtype), scale


def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    """The values as float32."""
    return codes.float() * scale.float()[..., None]


@triton.jit
def scale_of(largest, LARGEST: tl.constexpr):
    """Scale as stored (bfloat16), from the largest magnitude (float32)."""
    return tl.maximum(largest / LARGEST, 7.888609052210118e-31).to(tl.bfloat16)


@triton.jit
def encode(x, scale, LARGEST: tl.constexpr, IS_INT8: tl.constexpr):
    """Codes as float32; the store's cast is exact for int8 and rounds to nearest even for float8."""
    scaled = x / scale.to(tl.float32)[:, None]
    scaled = tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST)
    if IS_INT8:
        scaled = tl.where(scaled == scaled, tl.floor(scaled + 0.5), 0.0)  # no code for NaN: padding rows may hold it
    return scaled
