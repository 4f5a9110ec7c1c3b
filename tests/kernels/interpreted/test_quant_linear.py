"""Products with narrow weights against torch, and how near the codes stay to the weights."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ipc.errors import ConfigError
from worker.kernels.quant_linear import quant_linear
from worker.models.ops import TORCH_OPS
from worker.quant.weights import KINDS, dequantize, quantize

BF16 = torch.bfloat16


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("num_rows", [0, 1, 17])
@pytest.mark.parametrize("num_out, num_k", [(40, 64), (130, 384), (1, 32)])
@pytest.mark.parametrize("kind", KINDS)
def test_products_equal_torchs(kind: str, num_out: int, num_k: int, num_rows: int) -> None:
    """Outputs and rows that fill no tile, several groups, splits, a strided input, a bias."""
    weight, x = quantize(randn(num_out, num_k), kind), randn(num_rows, 2 * num_k, seed=1)[:, :num_k]
    bias = randn(num_out, seed=2)
    for b in (None, bias):
        torch.testing.assert_close(quant_linear(x, weight, b), TORCH_OPS.quant_linear(x, weight, b), atol=2e-4,
                                   rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_rows", [3, 70])
def test_products_in_bfloat16_stay_near_float32(kind: str, num_rows: int) -> None:
    weight, x = quantize(randn(72, 256), kind), randn(num_rows, 256, seed=1)
    exact = F.linear(x.to(BF16).float(), dequantize(weight))
    ours = quant_linear(x.to(BF16), weight)
    assert ours.dtype == BF16 and (ours.float() - exact).abs().max() < 0.01 * exact.abs().max()


@pytest.mark.parametrize("kind, limit", [("int8", 0.5 / 127), ("int4", 0.5 / 7), ("fp8", 16 / 448),
                                         ("fp8_per_block", 16 / 448)])
def test_codes_are_the_nearest(kind: str, limit: float) -> None:
    """Half a code of the group's scale; e4m3's steps are at most 32 of 448."""
    weight = randn(130, 256)
    made = quantize(weight, kind)
    scale_rows = made.scales.repeat_interleave(made.group_n, 0).repeat_interleave(made.group_k, 1)[:130, :256]
    largest = scale_rows * {"int8": 127, "int4": 7}.get(kind, 448)
    assert ((dequantize(made) - weight).abs() <= limit * 1.001 * largest).all()
    assert torch.equal(dequantize(quantize(torch.zeros(2, 32), kind)), torch.zeros(2, 32))


def test_a_width_without_whole_groups_is_refused() -> None:
    with pytest.raises(ConfigError, match="int4 needs widths that are a multiple of 32; this model has one of 48"):
        quantize(randn(4, 48), "int4")
