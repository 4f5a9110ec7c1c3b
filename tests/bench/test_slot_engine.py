"""The fixed-slot baseline owes every request the tokens it would get alone, computed without any cache."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bench.seed_workload import SEED_MODEL_CONFIG, seed_workload
from bench.slot_engine import SlotEngine, load_seed_model, measure_plain_decode, measure_slot_decode
from ipc.model_config import from_hf_config
from ipc.model_source import ModelFiles
from worker.models.flat_model import FlatModel
from worker.models.ops import TORCH_OPS
from worker.models.loader import load_model

TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "eos_token_id": None,
}
REQUEST_LENGTHS = [(5, 7), (1, 9), (12, 3), (9, 1), (20, 12), (3, 5), (17, 8)]  # (prompt, max_tokens)


def tiny_model(**changes: Any) -> FlatModel:
    """Dummy weights, made ten times larger: with the usual small ones a random model hardly looks at its context."""
    config = from_hf_config({**SEED_MODEL_CONFIG, **TINY, **changes}, "tiny test model")
    model = load_model(ModelFiles("dummy", "", config, "tiny"), dtype="float32", device="cpu", seed=1)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.mul_(10.0)
    return model


@pytest.fixture(scope="module")
def model() -> FlatModel:
    return tiny_model()


class WholePrefix:
    """Attention without a cache: every call computes all positions of one request in plain float32 arithmetic."""

    ops = TORCH_OPS

    def write(self, cache: list[Tensor], k: Tensor, v: Tensor, meta: None) -> None:
        cache[:] = [k, v]

    def forward(self, q: Tensor, cache: list[Tensor], meta: None, *, scale: float | None, window: int) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in cache)
        scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
        distance = torch.arange(len(q))[:, None] - torch.arange(len(q))[None, :]
        hidden = (distance < 0) | (distance >= window) if window else distance < 0
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


@torch.inference_mode()
def greedy(model: FlatModel, prompt: np.ndarray, max_tokens: int) -> list[int]:
    tokens = [int(token) for token in prompt]
    for _ in range(max_tokens):
        caches: list[list[Tensor]] = [[] for _ in model.layers]
        hidden = model(torch.tensor(tokens), torch.arange(len(tokens)), caches, None, WholePrefix())
        tokens.append(int(model.compute_logits(hidden[-1:]).argmax(-1)))
    return tokens[len(prompt) :]


def requests(vocab_size: int = 97) -> list[tuple[np.ndarray, int]]:
    generator = np.random.default_rng(3)
    return [(generator.integers(0, vocab_size, size=n, dtype=np.int32), m) for n, m in REQUEST_LENGTHS]


@pytest.mark.parametrize(("num_slots", "chunk"), [(3, 256), (3, 8), (1, 256), (8, 5)])
def test_every_request_gets_the_tokens_it_gets_alone(model: FlatModel, num_slots: int, chunk: int) -> None:
    """Three slots for seven requests leave holes among the running slots; small chunks split most prompts."""
    engine = SlotEngine(model, num_slots=num_slots, slot_tokens=32, chunk=chunk)
    tokens, stats = engine.generate(requests())
    assert tokens == [greedy(model, prompt, max_tokens) for prompt, max_tokens in requests()]
    assert len({tuple(output) for output in tokens}) == len(tokens)
    assert (stats["output_tokens"], stats["kv_slots"]) == (45, num_slots * 32)


def test_a_sliding_window_is_kept_in_prefill_and_decode() -> None:
    window = tiny_model(use_sliding_window=True, sliding_window=4, max_window_layers=0)
    assert window.config.sliding_window == 4
    tokens, _ = SlotEngine(window, num_slots=3, slot_tokens=32, chunk=8).generate(requests())
    assert tokens == [greedy(window, prompt, max_tokens) for prompt, max_tokens in requests()]
    assert tokens != SlotEngine(tiny_model(), num_slots=3, slot_tokens=32).generate(requests())[0]


def test_an_engine_is_empty_after_a_run_and_repeats_it(model: FlatModel) -> None:
    engine = SlotEngine(model, num_slots=3, slot_tokens=32)
    first, second = engine.generate(requests()), engine.generate(requests())
    assert first[0] == second[0]
    assert (first[1]["steps"], first[1]["forward_calls"]) == (second[1]["steps"], second[1]["forward_calls"])
    assert engine.slots == [None] * 3


def test_steps_prefill_each_new_request_in_its_own_call_and_decode_all_in_one(model: FlatModel) -> None:
    """Two requests of 3 tokens, two slots: two prefill calls and a decode, then one more decode."""
    _, stats = SlotEngine(model, num_slots=2, slot_tokens=32).generate([([1, 2], 3), ([3], 3)])
    assert (stats["steps"], stats["forward_calls"]) == (2, 4)


@pytest.mark.parametrize(("prompt", "max_tokens"), [([], 1), ([1], 0), ([1] * 30, 4)])
def test_a_request_that_fits_no_slot_is_refused_before_anything_runs(
    model: FlatModel, prompt: list[int], max_tokens: int
) -> None:
    engine = SlotEngine(model, num_slots=2, slot_tokens=32)
    with pytest.raises(ValueError, match=r"request 1: .* raise slot_tokens"):
        engine.generate([([1], 1), (prompt, max_tokens)])
    assert not engine.waiting
    assert engine.generate([([1] * 30, 3)])[1]["output_tokens"] == 3


def test_both_decode_rates_are_measured(model: FlatModel) -> None:
    assert measure_plain_decode(model, batch=2, context=16, num_steps=4) > 0
    assert measure_slot_decode(model, batch=2, context=16, num_steps=4) > 0


def test_seed_workload_is_the_chapters_and_repeats() -> None:
    first, second = seed_workload(), seed_workload()
    assert len(first) == 16
    assert all(np.array_equal(a, b) and m == n for (a, m), (b, n) in zip(first, second, strict=True))
    assert len({prompt[:192].tobytes() for prompt, _ in first}) == 1
    assert all(prompt.dtype == np.int32 and 200 <= len(prompt) <= 240 for prompt, _ in first)
    assert all(8 <= max_tokens <= 40 and len(prompt) + max_tokens <= 320 for prompt, max_tokens in first)
    assert all(0 <= int(prompt.min()) and int(prompt.max()) < 4096 for prompt, _ in first)


def test_seed_model_has_the_shape_of_the_benchmark() -> None:
    model = load_seed_model()
    assert model.kv_spec() == (2, 2, 64)
    config = model.config
    shape = (config.architecture, config.dtype, config.hidden_size, config.intermediate_size, config.vocab_size)
    assert shape == ("Qwen3ForCausalLM", "float32", 256, 768, 4096)
