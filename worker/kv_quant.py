"""Narrow KV: int8 and float8 (e4m3) codes with one scale per token and head. What every backend stores.

A scale is the largest magnitude of the head's D values over the largest code, kept as bfloat16: two bytes beside D, so
a pool of D = 128 holds 1.97 times the tokens of a bfloat16 one, D = 64 1.94 times, and the range is float32's. Values
are divided by the *rounded* scale, so rounding it costs no accuracy. Scales live in the pool beside the codes
([B, S, Hkv]), so they travel with their block when it is swapped or copied. Rejected: one scale per layer, which needs
calibration data. A head that holds a NaN or an infinity has no finite scale: what reads it is NaN, as without codes.
"""
from __future__ import annotations

import torch
from torch import Tensor

from ipc.errors import ConfigError

LARGEST_CODE = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
SMALLEST_SCALE = 2.0**-100  # of a head whose values are all zero
SCALE_DTYPE = torch.bfloat16
FP8_CAPABILITY = 89  # the first compute capability that converts e4m3
KV_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8,
             "fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn}


def is_quantized(dtype: torch.dtype) -> bool:
    """Whether a pool of this dtype has scales."""
    return dtype in LARGEST_CODE


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [..., D] -> (codes [..., D], scales [...] bfloat16)."""
    largest = LARGEST_CODE[dtype]
    values = x.float()
    scale = (values.abs().amax(-1) / largest).clamp_min(SMALLEST_SCALE).to(SCALE_DTYPE)
    scaled = (values / scale.float()[..., None]).clamp(-largest, largest)
    if dtype == torch.int8:
        scaled = torch.floor(scaled + 0.5).nan_to_num(nan=0.0)
    return scaled.to(dtype), scale


def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    """The values as float32."""
    return codes.float() * scale.float()[..., None]


def resolve_kv_dtype(option: str, computed: torch.dtype, capability: int | None = None) -> tuple[torch.dtype, str]:
    """(dtype of the pool, reason). computed: of the arithmetic. capability: 80 for compute capability 8.0; None: a CPU.

    Raises ConfigError for fp8 on a GPU that cannot convert it.
    """
    has_fp8, first = capability is None or capability >= FP8_CAPABILITY, FP8_CAPABILITY / 10
    if option == "auto":
        narrow = "fp8 and int8 hold" if has_fp8 else f"no fp8 below compute capability {first}; int8 holds"
        return computed, f"as computed; {narrow} about twice the tokens of bfloat16"
    dtype = KV_DTYPES[option]
    if dtype == torch.float8_e4m3fn and not has_fp8:
        raise ConfigError(f"--kv-cache-dtype {option} needs a GPU of compute capability {first} or higher; this "
                          f"one has {(capability or 0) / 10}: use --kv-cache-dtype int8, which is as small")
    return dtype, "as asked"
