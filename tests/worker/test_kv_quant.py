"""Codes and scales of narrow KV: error bounds, extremes, and which dtype an option means where."""
from __future__ import annotations

import pytest
import torch

from ipc.config import KV_CACHE_DTYPES
from ipc.errors import ConfigError
from worker.kv_quant import KV_DTYPES, SMALLEST_SCALE, dequantize, quantize, resolve_kv_dtype

INT8, FP8 = torch.int8, torch.float8_e4m3fn


@pytest.mark.parametrize("magnitude", [1e-20, 1e-3, 1.0, 1e20])
def test_the_error_is_at_most_half_a_step_of_the_heads_own_scale(magnitude: float) -> None:
    """int8: half a scale, a little more where rounding the scale down clips the largest value. e4m3: 2^-4 of the value,
    or half a subnormal step."""
    x = magnitude * torch.randn((50, 4, 64), generator=torch.Generator().manual_seed(0))
    codes, scale = quantize(x, INT8)
    assert codes.dtype == INT8 and scale.dtype == torch.bfloat16 and scale.shape == (50, 4)
    step = x.abs().amax(-1, keepdim=True) / 127
    assert ((dequantize(codes, scale) - x).abs() <= 0.51 * step * (1 + 2**-8)).float().mean() > 0.99
    assert ((dequantize(codes, scale) - x).abs() <= step).all()
    codes, scale = quantize(x, FP8)
    assert codes.dtype == FP8
    limit = torch.maximum(x.abs() * 2**-4, scale.float()[..., None] * 2**-10)
    assert ((dequantize(codes, scale) - x).abs() <= limit * 1.001).all()


@pytest.mark.parametrize("dtype", [INT8, FP8])
def test_a_head_of_zeros_has_a_scale_and_gives_zeros(dtype: torch.dtype) -> None:
    codes, scale = quantize(torch.zeros((1, 8)), dtype)
    assert scale.item() == SMALLEST_SCALE and not dequantize(codes, scale).any()


@pytest.mark.parametrize("dtype", [INT8, FP8])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_head_that_is_not_finite_reads_as_nan(dtype: torch.dtype, bad: float) -> None:
    x = torch.ones((2, 8))
    x[0, 3] = bad
    values = dequantize(*quantize(x, dtype))
    assert values[0, 3].isnan() and values[1].isfinite().all()


def test_every_dtype_of_the_option_has_a_pool() -> None:
    assert set(KV_CACHE_DTYPES) == {"auto", *KV_DTYPES}
    assert KV_DTYPES["fp8"] == KV_DTYPES["fp8_e4m3"] == FP8


def test_auto_says_what_else_there_is() -> None:
    assert resolve_kv_dtype("auto", torch.bfloat16, 90) == (
        torch.bfloat16, "as computed; fp8 and int8 hold about twice the tokens of bfloat16")
    dtype, reason = resolve_kv_dtype("auto", torch.bfloat16, 80)
    assert dtype == torch.bfloat16 and "no fp8 below compute capability 8.9; int8 holds about twice" in reason


def test_fp8_is_refused_on_a_gpu_without_it_and_int8_is_named() -> None:
    with pytest.raises(ConfigError, match="capability 8.9 or higher; this one has 8.6: use --kv-cache-dtype int8"):
        resolve_kv_dtype("fp8", torch.bfloat16, 86)
    assert resolve_kv_dtype("int8", torch.bfloat16, 80) == (INT8, "as asked")
    assert resolve_kv_dtype("fp8", torch.float32, None)[0] == FP8       # a CPU computes with them by bits
