"""Nothing is compiled per request: what a start launches are all the variants that steps of any shape ask for.

The launches are the serving code's own, on CPU tensors, under a driver that starts nothing; compilations are noted.
"""

from __future__ import annotations

import contextlib
import json
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from bench import gpu_in_process  # noqa: E402
from bench.gpu_in_process import InProcessEngine, Setup, random_model  # noqa: E402
from ipc.model_config import from_hf_config  # noqa: E402
from worker.attention.triton_paged import TritonBackend  # noqa: E402
from worker.kernels.offline import OfflineDriver  # noqa: E402
from worker.models.quant_linear import quantize_linears  # noqa: E402
from worker.quant.weights import KINDS  # noqa: E402
from worker.sampling import device_rows  # noqa: E402
from worker.sampling.sampler import SamplingColumns  # noqa: E402
from worker.warm_up import warm_up, warm_up_sizes  # noqa: E402

CONFIG: dict[str, Any] = dict(vocab_size=1000, hidden_size=128, intermediate_size=192, num_hidden_layers=1,
                              num_attention_heads=6, num_key_value_heads=2, head_dim=64, max_position_embeddings=4096,
                              eos_token_id=1, bos_token_id=1)
MODELS = {
    "qwen3": CONFIG | {"architectures": ["Qwen3ForCausalLM"]},
    "moe": CONFIG | {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 12, "num_experts_per_tok": 3,
                     "moe_intermediate_size": 64},
    "mixed": CONFIG | {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 12, "num_experts_per_tok": 3,
                       "moe_intermediate_size": 64, "num_hidden_layers": 3, "mlp_only_layers": [1]},
    "window": CONFIG | {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 40,
                        "max_window_layers": 0},
}


@contextlib.contextmanager
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Engines on CPU tensors, whose launches ask for the variants of a chip that is not here."""
    with monkeypatch.context() as patch:
        empty = torch.empty
        patch.setattr(torch, "empty", lambda *shape, **options: empty(*shape, **options).zero_())   # not filled: 0
        driver = OfflineDriver(90)
        driver.get_current_device = lambda: f"device {id(driver)}"  # type: ignore[assignment,method-assign]
        patch.setattr(triton.runtime.driver, "_active", driver)    # a device has a cache of its own
        patch.setattr(gpu_in_process, "get_backend", lambda name, device: TritonBackend())
        yield


@contextlib.contextmanager
def noted_compilations(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Kernel and key of each variant that would be compiled from here on."""
    seen: list[str] = []

    def compile_nothing(self: Any, key: str, signature: Any, device: Any, constexprs: Any, *rest: Any) -> Any:
        seen.append(f"{self.__name__} {key}")
        self.device_caches[device][0][key] = kernel = types.SimpleNamespace()
        return kernel

    original = JITFunction.run

    def run(self: Any, *args: Any, grid: tuple[int, ...], warmup: bool, **options: Any) -> Any:
        """A device refuses grids that the interpreter runs: empty ones, and long second and third axes."""
        assert all(1 <= size < 1 << 31 for size in grid) and all(size < 1 << 16 for size in grid[1:]), (self, grid)
        return original(self, *args, grid=grid, warmup=True, **options)

    with offline(monkeypatch), monkeypatch.context() as patch:
        patch.setattr(JITFunction, "_do_compile", compile_nothing)
        patch.setattr(JITFunction, "run", run)
        yield seen


def make_engine(name: str, budget: int, kind: str = "none", pool: torch.dtype | None = None) -> InProcessEngine:
    config = from_hf_config(json.loads(json.dumps(MODELS[name])), name)
    model = random_model(config, torch.bfloat16, "cpu")
    setup = Setup(400, seats=40, budget=budget, max_model_len=1024, graphs="static", kv_dtype=pool)
    engine = InProcessEngine(model, setup, "cpu")
    if kind != "none":
        quantize_linears(model, kind, engine.runner.backend.ops)
    return engine


CASES = [("qwen3", "none", None), ("qwen3", "none", torch.int8), ("qwen3", "none", torch.float8_e4m3fn),
         ("window", "none", None), ("moe", "none", None), *((name, kind, None) for kind in KINDS
                                                             for name in ("qwen3", "moe"))]


@pytest.mark.parametrize("name, kind, pool", CASES)
def test_steps_of_any_shape_launch_what_the_start_has_launched(
    name: str, kind: str, pool: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of every length beside decodes, 1 to 37 rows that come and go, prefix hits, one row alone, preemption."""
    with noted_compilations(monkeypatch) as seen:
        engine = make_engine(name, 300, kind, pool)
        warm_up(engine.runner, 300)
        assert len(seen) > 15
        known = set(seen)
        rng = np.random.default_rng(0)
        for count in (1, 37, 9):
            prompts = [rng.integers(2, 999, rng.integers(1, 250)).tolist() for _ in range(count)]
            engine.run([*prompts, prompts[0]], int(rng.integers(3, 20)))
        assert len(engine.plans) > 50 and len({tokens for _, tokens in engine.plans}) > 20
        assert sorted(set(seen) - known) == []


def test_rows_with_any_options_launch_what_the_start_has_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws, masks of other widths, penalties and log-probabilities of 1 to 40 rows, with and without a tokenizer that
    is narrower than the logits."""
    with noted_compilations(monkeypatch) as seen:
        engine = make_engine("qwen3", 64)
        warm_up(engine.runner, 64)
        known = set(seen)
        for count in (1, 2, 16, 17, 40):
            logits = torch.zeros((count, 1000))
            columns = SamplingColumns.greedy(count)
            for num_words in (32, 33, 40):
                for index in ([], [-1] * (count - 1) + [0], list(range(count))):
                    columns.words = np.full((count, num_words), -1, np.int32)
                    columns.word_index = np.array(index, np.int32)
                    device_rows.sample(logits, 1000, columns)
            pairs = 7 * count
            device_rows.penalise_rows(logits, np.arange(count), np.full(count, 7), np.arange(pairs), np.ones(pairs),
                                      np.ones((count, 3)))
            device_rows.logprobs_of(logits, np.zeros(count, np.int64))
        assert sorted(set(seen) - known) == []


def test_the_largest_step_is_warmed_up_too() -> None:
    assert warm_up_sizes(1) == [1] and warm_up_sizes(8) == [1, 2, 4, 8] and warm_up_sizes(100)[-2:] == [64, 100]
