"""Which way a victim returns, and who may take whose place."""
from __future__ import annotations

import pytest

from engine_core.preemption import CostModel
from engine_core.request import RequestStatus
from ipc.messages import ModelRunnerOutput
from tests.engine_core.test_scheduler import full_pool, prompt
from tests.engine_core.tools import Engine, pairs


def model(swap_block_ns: int = 1_000, prefill_ns: int = 100) -> CostModel:
    costs = CostModel(swap_block_ns)
    costs.observe(64, 1, 64 * prefill_ns)
    return costs


def test_without_measurements_a_victim_recomputes():
    assert not CostModel(0).prefers_swap(1000, 1, 1) and not CostModel(1).prefers_swap(1000, 1, 1)
    assert not model(swap_block_ns=0).prefers_swap(1000, 1, 1)


def test_the_cheaper_way_is_taken():
    assert model().prefers_swap(100, 4, 4)              # 4,000 ns to copy, 10,000 to compute
    assert not model().prefers_swap(30, 4, 4)
    assert model(prefill_ns=1000).prefers_swap(30, 4, 4)


def test_what_the_cache_keeps_is_neither_copied_back_nor_computed():
    costs = model()
    assert costs.prefers_swap(60, 4, 4)
    for _ in range(50):
        costs.observe_return(101, 100)
    assert not costs.prefers_swap(60, 4, 4)


@pytest.mark.parametrize("num_tokens, num_rows, device_ns", [(8, 1, 1000), (64, 32, 1000), (64, 1, 0)])
def test_steps_that_say_nothing_about_prefill_are_not_measured(num_tokens, num_rows, device_ns):
    costs = CostModel(1)
    costs.observe(num_tokens, num_rows, device_ns)
    assert costs.prefill_token_ns == 0.0


def test_one_outlier_counts_for_little():
    costs = model()
    costs.observe(64, 1, 64 * 100_000)
    assert costs.prefill_token_ns <= 200
    for _ in range(40):
        costs.observe(64, 1, 64 * 300)
    assert costs.prefill_token_ns == pytest.approx(300, rel=0.05)


def test_costs_return_from_a_snapshot():
    costs = model()
    costs.observe_return(10, 5)
    other = CostModel()
    other.restore(costs.state())
    assert vars(other) == vars(costs)


@pytest.mark.parametrize("swap_block_ns, is_swapped", [(1, True), (10_000_000, False)])
def test_auto_weighs_each_victim_by_what_was_measured(swap_block_ns, is_swapped):
    engine = Engine(num_blocks=16, num_host_blocks=16, preemption_mode="auto")
    engine.scheduler.costs.swap_block_ns = swap_block_ns
    engine.add(1, prompt(40), max_tokens=30)
    engine.plan()
    result = engine.result()
    engine.commit(ModelRunnerOutput(result.step, result.tokens, device_ns=40_000))
    engine.add(2, prompt(20, 17), max_tokens=20)
    while not engine.stats.num_preemptions:
        engine.step()
    assert (engine.stats.num_swapped_out_blocks > 0) == is_swapped
    engine.run()
    engine.assert_idle()


def test_recompute_counts_what_is_lost():
    engine = full_pool()
    engine.step()
    assert engine.stats.num_recomputed_tokens == engine.request(2).num_recomputed_tokens == 8


# ---------------------------------------------------------------- priority

def test_an_urgent_request_takes_the_place_of_a_lower_one_at_the_seat_limit():
    engine = Engine(policy="priority", max_num_seqs=2)
    engine.add(1, prompt(5), priority=1, max_tokens=9)
    engine.add(2, prompt(5, 9), priority=2, max_tokens=9)
    engine.step()
    engine.add(3, prompt(5, 30), priority=0, max_tokens=2)
    plan = engine.step()
    assert [new.request_id for new in plan.new] == [3] and engine.request(2).status == RequestStatus.PREEMPTED
    assert pairs(plan.moves) == [(1, 1)]
    engine.run()
    assert [engine.ends[i].num_preemptions for i in (1, 2, 3)] == [0, 1, 0]
    engine.assert_idle()


def test_an_equal_request_waits():
    engine = Engine(policy="priority", max_num_seqs=1)
    engine.add(1, prompt(5), priority=1, max_tokens=9)
    engine.step()
    engine.add(2, prompt(5, 9), priority=1)
    assert not engine.step().new
    engine.run()
    assert engine.stats.num_preemptions == 0


def test_a_low_priority_request_finishes_under_a_flood_of_high_ones():
    """Waiting ages: after priority_aging_steps it ranks a level better."""
    engine = Engine(policy="priority", max_num_seqs=1, priority_aging_steps=10)
    engine.add(1, prompt(3), priority=1, max_tokens=2)
    request_id = 1
    for step in range(200):
        if step % 2 == 0:
            request_id += 1
            engine.add(request_id, prompt(3, request_id % 40), priority=0, max_tokens=2)
        engine.step()
        if 1 in engine.ends:
            break
    assert step < 60
    engine.run()
    engine.assert_idle()
