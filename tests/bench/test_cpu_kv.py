"""bench cpu --kv: what it reports of a small model."""
from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from bench.cpu import Bench, best_s  # noqa: E402
from bench.cpu_kv import measure_kv, print_kv  # noqa: E402
from tests.equivalence.test_batch_invariant import compiled, flat_model  # noqa: E402
from worker.attention.jit import JitBackend  # noqa: E402
from worker.attention.reference import ReferenceBackend  # noqa: E402

LAYERS, KV_HEADS, HEAD_DIM, CONTEXT = 2, 2, 16, 350


def test_each_dtype_has_its_bytes_and_its_divergence(capsys: pytest.CaptureFixture[str]) -> None:
    model, backend = compiled("none", 1), JitBackend()
    tokens = np.random.default_rng(0).integers(0, 50, 200).tolist()

    def make_bench(dtype: torch.dtype, context: int) -> Bench:
        return Bench(model, backend, dtype, 1, context)

    own = measure_kv(model, backend, make_bench, best_s, tokens, 1, (model, backend))
    heads = LAYERS * 2 * KV_HEADS
    assert {name: entry["bytes_per_token"] for name, entry in own.items()} == {
        "float32": heads * 4 * HEAD_DIM, "bfloat16": heads * 2 * HEAD_DIM, "int8": heads * (HEAD_DIM + 2),
        "fp8": heads * (HEAD_DIM + 2)}
    assert all(entry["context"] == CONTEXT and entry["ms"] > 0 and entry["attention_ms"] > 0 for entry in own.values())
    assert "mean_kl" not in own["float32"]      # it is the reference itself
    assert 0 < own["bfloat16"]["mean_kl"] < own["int8"]["mean_kl"] < own["fp8"]["mean_kl"]
    other = measure_kv(model, backend, make_bench, best_s, tokens, 1, (flat_model(), ReferenceBackend()))
    assert other["float32"]["mean_kl"] < own["bfloat16"]["mean_kl"]
    print_kv("none", other, "torch")
    assert capsys.readouterr().out.count("against torch over float32: mean KL") == 4
