"""The loads of `bench cpu`: they run to their ends through the real core, and a share of the limit is what it says."""
from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from bench.cpu_rows import Costs, Limits, Rig, loads, measure_rows, split  # noqa: E402
from tests.worker.test_jit_model import make_config, make_flat  # noqa: E402
from worker.attention.jit import JitBackend  # noqa: E402
from worker.jit.model import JitModel  # noqa: E402
from worker.linear.source import ModelSource  # noqa: E402

COSTS = Costs(layer_bytes=1000, head_bytes=500, layer_weights=10, head_weights=50, kv_token_bytes=2)


@pytest.mark.parametrize(("tokens", "sampled", "context", "seconds"), [
    (1, 1, 100, 1.7),               # bytes: 1000 + 500 + 200 over 1000
    (1, 0, 100, 1.2),               # nothing sampled: the head is not read
    (500, 1, 500, 10.1),            # products: 2 * (500 * 10 + 50) over 1000
])
def test_the_limit_of_a_step_is_the_longer_of_reading_and_computing(tokens, sampled, context, seconds):
    assert COSTS.limit_s(Limits(1000.0, 1000.0), tokens, sampled, context) == pytest.approx(seconds)


def test_loads_are_those_of_the_comparison_with_peers():
    made = loads(131)
    assert {name: (len(load), sum(len(p) for p, _ in load), sum(o for _, o in load)) for name, load in made.items()
            if name != "shared"} == {"c1": (1, 256, 128), "c8": (8, 2048, 1024), "c32": (32, 8192, 4096),
                                     "prefill": (8, 2048, 8)}
    shared = made["shared"]
    assert len(shared) == 16 and all(np.array_equal(p[:192], shared[0][0][:192]) for p, _ in shared)
    assert all(200 <= len(p) <= 240 and 8 <= o <= 40 for p, o in shared)


def test_a_load_is_served_whole_and_its_time_is_accounted_for():
    model = JitModel(ModelSource(make_flat(make_config())))
    rig = Rig(model, JitBackend(), torch.float32)
    costs = Costs.of(model, rig.kv_itemsize)
    assert costs.layer_bytes + costs.head_bytes + model.embedding.nbytes == model.nbytes
    load = [(np.arange(1, 41, dtype=np.int32), 5)] * 3
    spent = rig.run(load, costs, Limits(1e9, 1e9))
    # The first step computes the prompts as far as the budget reaches; equal prompts share blocks from then on.
    assert spent["steps"] >= 5 and spent["limit"] > 0
    parts = ("prompt layers", "decode layers", "head", "sampling", "host")
    assert all(spent[part] > 0 for part in parts)
    assert sum(spent[part] for part in parts) == pytest.approx(spent["all"])
    assert rig.run(load, costs, Limits(2e9, 2e9))["limit"] == pytest.approx(spent["limit"] / 2)


def test_time_of_the_layers_is_shared_out_by_their_parts():
    spent = {"prompt layers": 0.010, "decode layers": 0.030, "head": 0.004, "sampling": 0.001, "host": 0.002}
    stages = {"8": {"matmul": 2.0, "attention": 1.0, "head": 9.0}, "prompt": {"matmul": 4.0, "attention": 1.0}}
    assert split(spent, 8, stages) == {"matmul": 28.0, "attention": 12.0, "head": 4.0, "sampling": 1.0, "host": 2.0}
    assert split(spent, 8, {}) == {"layers": 40.0, "head": 4.0, "sampling": 1.0, "host": 2.0}


def test_figures_are_rates_and_shares(monkeypatch):
    model = JitModel(ModelSource(make_flat(make_config())))
    prompt = np.arange(1, 33, dtype=np.int32)
    monkeypatch.setattr("bench.cpu_rows.loads", lambda size: {"c1": [(prompt, 4)], "prefill": [(prompt, 1)] * 2})
    found = measure_rows(Rig(model, JitBackend(), torch.float32), Costs.of(model, 4), Limits(1e12, 1e12), 2, {})
    assert found["c1"]["tok_s"] * found["c1"]["ms"] == pytest.approx(4000, rel=0.1)         # output tokens
    assert found["prefill"]["tok_s"] * found["prefill"]["ms"] == pytest.approx(64000, rel=0.1)     # input tokens
    assert all(0 <= entry["share_of_limit"] < 1 for entry in found.values())
