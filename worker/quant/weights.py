"""Narrow weights of a linear layer for the GPU: how they are made from float ones, what they stand for.

    kind            codes                   a scale covers (outputs x inputs)
    int8            int8 [out, K]           1 x K
    int4            uint8 [out, K / 2]      1 x group: the largest of 128, 64, 32 that divides K
    fp8             float8_e4m3fn [out, K]  1 x K
    fp8_per_block   float8_e4m3fn [out, K]  128 x 128, as published fp8 checkpoints have it

Weights are rounded to the nearest code of their own scale; no calibration data. worker/kernels/quant_linear.py computes
with them and draws how 4-bit codes are packed. Does not know models.
"""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ipc.errors import ConfigError

INT8, INT4, FP8, FP8_PER_BLOCK = "int8", "int4", "fp8", "fp8_per_block"
KINDS = (INT8, INT4, FP8, FP8_PER_BLOCK)
LARGEST = {INT8: 127.0, INT4: 7.0, FP8: 448.0, FP8_PER_BLOCK: 448.0}
INT4_GROUPS = (128, 64, 32)
FP8_BLOCK = 128
SMALLEST_SCALE = 2.0 ** -100


class QuantWeight(NamedTuple):
    """See the module. scales [outputs / group_n, K / group_k] float32, rounded up. Those of a mixture of experts have
    one more dimension in front."""
    kind: str
    codes: Tensor
    scales: Tensor
    group_n: int
    group_k: int

    @property
    def num_out(self) -> int:
        return self.codes.shape[0]

    def part(self, expert: int) -> QuantWeight:
        """One expert's."""
        return self._replace(codes=self.codes[expert], scales=self.scales[expert])


def groups_of(kind: str, num_k: int) -> tuple[int, int]:
    """(outputs, inputs) that a scale covers. Raises ConfigError for a width that has no whole groups."""
    if kind == FP8_PER_BLOCK:
        return FP8_BLOCK, FP8_BLOCK
    if kind != INT4:
        return 1, num_k
    for group in INT4_GROUPS:
        if num_k % group == 0:
            return 1, group
    raise ConfigError(f"--quantization int4 needs widths that are a multiple of {INT4_GROUPS[-1]}; this model has one "
                      f"of {num_k}; use int8")


def quantize(weight: Tensor, kind: str) -> QuantWeight:
    """weight [out, K], any float dtype, stays as it is."""
    num_out, num_k = weight.shape
    group_n, group_k = groups_of(kind, num_k)
    rows, columns = -(-num_out // group_n), -(-num_k // group_k)
    padded = torch.zeros((rows * group_n, columns * group_k), dtype=torch.float32, device=weight.device)
    padded[:num_out, :num_k] = weight
    groups = padded.view(rows, group_n, columns, group_k)
    scales = (groups.abs().amax((1, 3)) / LARGEST[kind]).clamp_min(SMALLEST_SCALE)
    scaled = (groups / scales[:, None, :, None]).view(padded.shape)[:num_out, :num_k]
    if kind in (FP8, FP8_PER_BLOCK):
        codes = scaled.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    elif kind == INT8:
        codes = scaled.round().to(torch.int8)
    else:
        halves = (scaled.round().clamp(-8, 7) + 8).to(torch.uint8).view(num_out, columns, 2, group_k // 2)
        codes = (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(num_out, num_k // 2)
    return QuantWeight(kind, codes.contiguous(), scales.contiguous(), group_n, group_k)


def quantize_experts(weights: Tensor, kind: str) -> QuantWeight:
    """weights [X, out, K], one after the other: the memory that this takes beside the result is one expert's."""
    made = quantize(weights[0], kind)
    codes, scales = (part.new_empty((len(weights), *part.shape)) for part in (made.codes, made.scales))
    for expert, weight in enumerate(weights):
        made = quantize(weight, kind)
        codes[expert], scales[expert] = made.codes, made.scales
    return made._replace(codes=codes, scales=scales)


def dequantize(weight: QuantWeight) -> Tensor:
    """What the codes stand for, float32 [out, K]: the reference of the kernel."""
    codes = weight.codes
    if weight.kind == INT4:
        pairs = codes.view(len(codes), -1, weight.group_k // 2)
        values = torch.stack([pairs & 15, pairs >> 4], 2).reshape(len(codes), -1).float() - 8
    else:
        values = codes.float()
    num_out, num_k = values.shape
    scales = weight.scales.repeat_interleave(weight.group_n, 0).repeat_interleave(weight.group_k, 1)
    return values * scales[:num_out, :num_k]
