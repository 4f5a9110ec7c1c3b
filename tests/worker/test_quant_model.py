"""A whole model with narrow linears: near the float one, smaller, and refused where it cannot be."""
from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ipc.errors import ConfigError
from tests.worker.test_models_parity import PROMPT, TINY, load_saved, make_hf, paged_greedy
from worker.models.layers import Linear
from worker.models.ops import TORCH_OPS
from worker.models.quant_linear import QuantLinear, QuantSparseMLP, quantize_linears
from worker.quant.weights import KINDS, quantize


@pytest.mark.parametrize("kind", KINDS)
def test_logits_stay_near_those_of_the_float_model(kind: str, tmp_path: Path) -> None:
    """Biases are kept. Four bits cost more than eight."""
    hf = make_hf("qwen2-tied" if kind != "int4" else "qwen3-wide")
    full = paged_greedy(load_saved(hf, tmp_path), PROMPT, 1)[1]
    model = load_saved(hf, tmp_path)
    assert quantize_linears(model, kind, TORCH_OPS) == 4 * TINY["num_hidden_layers"]
    linears = [module for module in model.layers.modules() if isinstance(module, (Linear, QuantLinear))]
    assert len(linears) == 8 and all(isinstance(module, QuantLinear) for module in linears)
    narrow = paged_greedy(model, PROMPT, 1)[1]
    limit = {"int8": 0.03, "int4": 0.5}.get(kind, 0.15)
    assert 0 < (narrow - full).norm() < limit * full.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_experts_become_narrow_and_their_router_stays(kind: str, tmp_path: Path) -> None:
    """One layer is a mixture of eight experts, the other dense. Where rounding sends a token to other experts its
    logits are others, so the router's input is what stays near: the first layers are compared by the logits of the
    first token."""
    hf = make_hf("qwen3-moe-wide")
    full = paged_greedy(load_saved(hf, tmp_path), PROMPT[:1], 1)[1]
    model = load_saved(hf, tmp_path)
    assert quantize_linears(model, kind, TORCH_OPS) == 2 * 2 + 2 + 2 * 8
    mlp = model.layers[1].mlp
    assert isinstance(mlp, QuantSparseMLP) and isinstance(mlp.gate, Linear)
    assert sum(parameter.numel() for parameter in mlp.parameters()) < 0.7 * 8 * 3 * 64 * 64 or kind != "int4"
    narrow = paged_greedy(model, PROMPT[:1], 1)[1]
    limit = {"int8": 0.03, "int4": 0.5}.get(kind, 0.15)
    assert 0 < (narrow - full).norm() < limit * full.norm()


def test_progress_rises_to_one_and_widths_without_groups_are_refused(tmp_path: Path) -> None:
    seen: list[float] = []
    model = load_saved(make_hf("llama"), tmp_path)
    quantize_linears(model, "int8", TORCH_OPS, seen.append)
    assert seen == sorted(seen) and seen[-1] == 1.0
    with pytest.raises(ConfigError, match="int4 needs widths that are a multiple of 32"):
        quantize_linears(load_saved(make_hf("qwen3-moe"), tmp_path / "moe"), "int4", TORCH_OPS)


def test_codes_take_a_quarter_or_an_eighth_of_float32(tmp_path: Path) -> None:
    model = load_saved(make_hf("qwen3-wide"), tmp_path)
    linear = model.layers[0].self_attn.o_proj
    for kind, part in (("int8", 4), ("int4", 8)):
        made = QuantLinear(quantize(linear.weight, kind), linear.bias, TORCH_OPS)
        assert made.codes.numel() * made.codes.itemsize * part == linear.weight.numel() * 4
        assert not any(parameter.requires_grad for parameter in made.parameters())
        x = torch.randn(3, linear.weight.shape[1])
        assert made(x).shape == linear(x).shape
