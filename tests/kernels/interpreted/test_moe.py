"""Mixtures of experts: the sort, the grouped product and the whole block against torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.kernels.moe import experts, experts_reference, grouped_matmul, sort_by_expert
from worker.quant.weights import KINDS, dequantize, quantize_experts

BF16 = torch.bfloat16


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def choose(num_tokens: int, num_experts: int, top_k: int, seed: int = 0) -> torch.Tensor:
    return torch.topk(randn(num_tokens, num_experts, seed=seed), top_k).indices


@pytest.mark.parametrize("num_tokens, num_experts, top_k", [(1, 1, 1), (1, 8, 3), (70, 20, 5), (300, 3, 2)])
def test_entries_are_sorted_by_expert(num_tokens: int, num_experts: int, top_k: int) -> None:
    ids = choose(num_tokens, num_experts, top_k)
    order, counts = sort_by_expert(ids, num_experts)
    flat = ids.reshape(-1)
    assert counts.tolist() == torch.bincount(flat, minlength=num_experts).tolist()
    assert sorted(order.tolist()) == list(range(flat.numel()))
    assert flat[order.long()].tolist() == sorted(flat.tolist())


def test_one_expert_takes_every_token() -> None:
    """The others have no tile at all, and its last tile is part full."""
    ids = torch.full((37, 1), 4)
    x, weights = randn(37, 20), randn(6, 9, 20, seed=1)
    order, counts = sort_by_expert(ids, 6)
    torch.testing.assert_close(grouped_matmul(x, weights, order, counts, 1), x @ weights[4].T, atol=1e-5, rtol=1e-5)


@settings(max_examples=12, deadline=None)
@given(num_tokens=st.integers(0, 40), num_experts=st.integers(1, 12), top_k=st.integers(1, 4),
       width=st.sampled_from([16, 40]), size=st.sampled_from([8, 24]), seed=st.integers(0, 99))
def test_the_block_equals_torch(num_tokens: int, num_experts: int, top_k: int, width: int, size: int,
                                seed: int) -> None:
    top_k = min(top_k, num_experts)
    x, ids = randn(num_tokens, width, seed=seed), choose(num_tokens, num_experts, top_k, seed)
    weights = torch.softmax(randn(num_tokens, top_k, seed=seed), -1)
    gate_up, down = randn(num_experts, 2 * size, width, seed=1), randn(num_experts, width, size, seed=2)
    ours = experts(x, ids, weights, gate_up, down)
    torch.testing.assert_close(ours, experts_reference(x, ids, weights, gate_up, down), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_tokens, num_experts, top_k", [(1, 1, 1), (9, 5, 2), (70, 3, 2)])
def test_experts_with_narrow_weights_equal_torchs(kind: str, num_tokens: int, num_experts: int, top_k: int) -> None:
    """Outputs that fill no tile or block of scales, more than one group of inputs, experts without a token."""
    x, ids = randn(num_tokens, 160, seed=4), choose(num_tokens, num_experts, top_k)
    weights = torch.softmax(randn(num_tokens, top_k), -1)
    gate_up = quantize_experts(0.1 * randn(num_experts, 2 * 96, 160, seed=1), kind)
    down = quantize_experts(0.1 * randn(num_experts, 160, 96, seed=2), kind)
    assert gate_up.codes.shape == (num_experts, 192, 80 if kind == "int4" else 160)
    ours = experts(x, ids, weights, gate_up, down)
    torch.testing.assert_close(ours, experts_reference(x, ids, weights, gate_up, down), atol=2e-4, rtol=1e-4)
    wide = [torch.stack([dequantize(w.part(x)) for x in range(num_experts)]) for w in (gate_up, down)]
    torch.testing.assert_close(ours, experts_reference(x, ids, weights, *wide), atol=2e-4, rtol=1e-4)


def test_the_block_in_bfloat16_stays_near_float32() -> None:
    x, ids, weights = randn(9, 32), choose(9, 4, 2), torch.full((9, 2), 0.5)
    gate_up, down = 0.2 * randn(4, 48, 32, seed=1), 0.2 * randn(4, 32, 24, seed=2)
    exact = experts_reference(x, ids, weights, gate_up, down)
    ours = experts(x.to(BF16), ids, weights, gate_up.to(BF16), down.to(BF16))
    assert ours.dtype == BF16 and (ours.float() - exact).abs().max() < 0.02 * exact.abs().max()
