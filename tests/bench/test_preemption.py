"""`bench preemption`: what it models and how it sums up; and what `auto` decides from."""
from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np
import pytest
import torch

from bench.preemption import (BLOCK_SIZE, BUDGET, CACHES, MODES, NUM_BLOCKS, SEATS, SHAPES, Runs, auto_over_best,
                              cpu_seconds, make_workload, report)
from bench.preemption_model import TOKEN_NS, modelled_ratios, modelled_time
from engine_core.preemption import CostModel
from worker.attention.registry import get_backend
from worker.kv_pool import KVPool, measure_block_swap_ns
from worker.swap_stream import SwapStream

SIZES = dict(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, budget=BUDGET, seats=SEATS)


def wave(name: str) -> list[tuple[np.ndarray, int]]:
    return make_workload(name, 0, 4096)[0]


def test_workloads_repeat_exactly_and_differ_by_seed() -> None:
    for name, (waves, count, *_) in SHAPES.items():
        first, again, other = (make_workload(name, seed, 4096) for seed in (0, 0, 1))
        assert [len(requests) for requests in first] == [count] * waves
        assert all(a.tobytes() == b.tobytes() and m == n
                   for one, two in zip(first, again) for (a, m), (b, n) in zip(one, two))
        assert first[0][0][0].tobytes() != other[0][0][0].tobytes()


@pytest.mark.parametrize("name", list(SHAPES))
@pytest.mark.parametrize("is_cached", CACHES.values())
def test_auto_is_within_five_percent_whatever_copying_costs(name: str, is_cached: bool) -> None:
    """Steps that cost nothing but their tokens: here the modes differ most."""
    found = modelled_ratios(wave(name), is_cached=is_cached, overhead_ns=0, costs=(0.1, 0.8, 1.5, 5.0), **SIZES)
    assert found["swap_over_recompute"][0] < 1 < found["swap_over_recompute"][-1]
    assert max(found["auto_over_best"]) <= 1.05


def test_what_a_step_costs_anyway_is_not_held_against_recomputing() -> None:
    """With steps of 5 ms and tokens of 25 us, copying a block at twice the cost of its tokens loses. Judged by a step's
    average cost per token, it would have won."""
    took = {mode: modelled_time(wave("long"), mode, is_cached=False, overhead_ns=5_000_000,
                                copy_ns=2 * TOKEN_NS * BLOCK_SIZE, **SIZES) for mode in MODES}
    assert took["recompute"] < took["swap"]
    assert took["auto"] <= 1.01 * took["recompute"]


def test_costs_follow_prefill_steps_less_what_a_decode_step_takes() -> None:
    costs = CostModel()
    costs.observe(256, 4, 256_000)
    assert costs.prefill_token_ns == 1000           # no decode step seen yet: the average
    costs = CostModel()
    costs.observe(8, 8, 100_000)
    costs.observe(248, 8, 340_000)
    assert costs.decode_step_ns == 100_000 and costs.prefill_token_ns == 1000
    costs.observe(16, 8, 900_000)                   # neither a decode step nor large enough to say anything
    assert costs.prefill_token_ns == 1000


def test_a_first_step_that_compiled_is_forgotten_at_once() -> None:
    costs = CostModel()
    costs.observe(8, 8, 3_000_000_000)
    costs.observe(8, 8, 1_000_000)
    assert costs.decode_step_ns == 1_000_000


def test_without_measurements_auto_recomputes() -> None:
    costs = CostModel(swap_block_ns=1)
    assert not costs.prefers_swap(1000, 10, 10)
    costs.observe(256, 1, 256_000)
    assert costs.prefers_swap(160, 10, 10)
    assert not CostModel().prefers_swap(160, 10, 10)


def test_what_the_cache_keeps_speaks_for_recomputing() -> None:
    costs = CostModel(swap_block_ns=12_000)         # of a block; its 16 tokens take 16,000 to compute
    costs.observe(256, 1, 256_000)
    assert costs.prefers_swap(160, 10, 10)
    for _ in range(10):
        costs.observe_return(161, 128)
    assert 0.6 < costs.survival < 0.8
    assert not costs.prefers_swap(160, 10, 10)
    for _ in range(20):
        costs.observe_return(161, 0)
    assert costs.prefers_swap(160, 10, 10)


def test_blocks_that_others_hold_are_no_reason_to_swap() -> None:
    costs = CostModel(swap_block_ns=1000)
    costs.observe(256, 1, 256_000)
    assert not costs.prefers_swap(0, 10, 0)


def test_cost_state_survives_a_snapshot() -> None:
    costs, other = CostModel(77), CostModel()
    costs.observe(8, 8, 500)
    costs.observe(256, 1, 256_000)
    costs.observe_return(101, 50)
    other.restore(costs.state())
    assert other.state() == costs.state() == [77, costs.prefill_token_ns, 500, 0.1]


def test_measuring_the_copy_of_a_block_leaves_the_pool_as_it_was() -> None:
    pool = KVPool(get_backend("reference"), 12, 4, (3, 2, 8), torch.float32)
    for cache in pool.caches:
        for tensor in cache:
            tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape))
    before = [words.clone() for words in pool.block_words]
    assert measure_block_swap_ns(pool, 5) > 0
    assert measure_block_swap_ns(pool, 5, lambda *its: SwapStream(*its).apply) > 0
    assert all(torch.equal(a, b) for a, b in zip(before, pool.block_words))
    assert measure_block_swap_ns(pool, 0) == 0


def made_up_runs() -> Runs:
    def run(total_s: float, cpu_s: float) -> dict[str, float]:
        return {"total_s": total_s, "cpu_s": cpu_s, "p99_tpot_ms": 1.0, "recomputed_tokens": 5, "swapped_out": 0,
                "swapped_in": 0, "preemptions": 1, "computed_tokens": 9, "steps": 3}
    return {("thrash", "cached", "recompute"): [run(4, 3), run(4, 3), run(8, 3)],
            ("thrash", "cached", "swap"): [run(2, 2), run(2, 2.5), run(4, 2)],
            ("thrash", "cached", "auto"): [run(2.2, 1), run(2.1, 1), run(4, 1.5)]}


def test_auto_is_compared_with_the_better_one_run_by_run() -> None:
    assert auto_over_best(made_up_runs(), "thrash", "cached") == {"median": 1.05, "least": 1.05, "cpu": 0.5}


def test_report_prints_tables_and_returns_the_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    args = argparse.Namespace(model="tiny", repeat=3, blocks=112)
    model: dict[str, Any] = {"copy_costs": [1.0], "compute thrash cached": {"auto_over_best": [1.01]}}
    result = report(made_up_runs(), 0, model, args)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:4] for line in lines[1:4]] == [["thrash", "cached", mode, total]
                                                         for mode, total in zip(MODES, ("4.0", "2.0", "2.2"))]
    assert result["auto_over_best"] == {"thrash cached": 1.05} and result["auto_over_best_modelled"] == 1.01
    assert json.loads(json.dumps(result)) == result
    assert {(row["workload"], row["cache"], row["mode"]) for row in result["rows"]} == set(made_up_runs())


def test_cpu_time_of_processes_that_are_gone_is_no_figure() -> None:
    assert cpu_seconds([1 << 22]) is None
