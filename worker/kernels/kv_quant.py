"""What the kernels that write narrow KV share: the scale and the codes of worker/kv_quant.py, as Triton functions."""

# mypy: allow-untyped-defs
# (kernels: their parameters are Triton's, not Python's)
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def magnitude(x):
    """Of what scale_of is given the largest. A GPU's max passes over NaN, so NaN counts as infinite."""
    return tl.where(x == x, tl.abs(x), float("inf"))


@triton.jit
def scale_of(largest, LARGEST: tl.constexpr):
    """Scale as stored (bfloat16), from the largest magnitude (float32)."""
    return tl.maximum(largest / LARGEST, 7.888609052210118e-31).to(tl.bfloat16)


@triton.jit
def encode(x, scale, LARGEST: tl.constexpr, IS_INT8: tl.constexpr):
    """Codes as float32; the store's cast is exact for int8 and rounds to nearest even for float8. NaN is 0 in int8,
    which has no code for it; what is read is NaN all the same, as the scale is infinite."""
    scaled = x / scale.to(tl.float32)[:, None]
    clamped = tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST)
    if IS_INT8:
        return tl.where(scaled == scaled, tl.floor(clamped + 0.5), 0.0)
    else:
        return tl.where(scaled == scaled, clamped, scaled)
