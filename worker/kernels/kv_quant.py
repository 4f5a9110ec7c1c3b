"""What the kernels that write narrow KV share: the scale and the codes of worker/kv_quant.py, as Triton functions."""

# mypy: allow-untyped-defs
# (kernels: their parameters are Triton's, not Python's)
from __future__ import annotations

import triton
import triton.language as tl


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
