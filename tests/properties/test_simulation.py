"""20,000 steps of the core against a worker whose pool stores what each slot means, over consecutive seeds.

A failure names its seed; `simulate(seed, options)` shows it again. Longer runs: python launch.py simulate.
"""
from __future__ import annotations

import pytest

from bench.simulation import Options, SimulationError, Simulation, Statistics, simulate, simulate_steps


def test_without_faults_every_request_has_the_tokens_it_has_alone():
    done = simulate_steps(6_000, 1_000, Options())
    assert done.num_preemptions > 50 and done.num_swapped_blocks > 50 and done.num_hit_tokens > 1_000
    assert done.num_aborted > 20 and done.num_failed == done.num_lost == done.num_bad_rows == 0


def test_failed_steps_poison_nothing():
    """5 % of the steps fail after writing garbage. Early-published hashes once gave thousands of wrong reads here."""
    done = simulate_steps(5_000, 2_000, Options(fault_rate=0.05))
    assert done.num_failed > 150 and done.num_checked_slots > 50_000


def test_values_that_are_not_finite_end_their_request_and_nobody_elses():
    done = simulate_steps(3_000, 3_000, Options(nan_rate=0.05))
    assert done.num_bad_rows > 50


def test_requests_that_always_fail_are_found_and_end():
    done = simulate_steps(2_000, 4_000, Options(poison_rate=0.1))
    assert done.num_failed > 10


def test_everything_at_once():
    """Failed steps, lost workers, late results, frontends that leave, NaN, requests that always fail, many resets."""
    done = simulate_steps(4_000, 5_000, Options(fault_rate=0.03, nan_rate=0.03, loss_rate=0.005, late_rate=0.05,
                                                gone_rate=0.003, poison_rate=0.03, reset_rate=0.03))
    assert min(done.num_failed, done.num_late) > 50 and done.num_lost > 3


@pytest.mark.parametrize("policy", ["fcfs", "priority", "lpm"])
@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
def test_each_policy_with_each_way_to_preempt(policy, mode):
    total = Statistics()
    for seed in range(3):
        total += simulate(6_000 + seed, Options(policy=policy, preemption_mode=mode, fault_rate=0.01, num_requests=30))
    assert total.num_requests >= 90


def test_a_failure_names_its_seed(monkeypatch):
    def wrong(self: Simulation) -> None:
        raise RuntimeError("what happened")
    monkeypatch.setattr(Simulation, "_check_end", wrong)
    with pytest.raises(SimulationError, match="seed 4711 with Options.*RuntimeError: what happened"):
        simulate(4711, Options(num_requests=3))


def test_the_worker_notices_a_slot_that_holds_another_history():
    simulation = Simulation(1, Options(num_requests=20, abort_rate=0.0))
    execute = simulation.worker.execute

    def overwrite(plan):
        if simulation.statistics.num_steps == 5:
            row = simulation.worker.rows[0]
            simulation.worker.pool[row.blocks[0]][0] = 12345
        return execute(plan)
    simulation.worker.execute = overwrite
    with pytest.raises(SimulationError, match="WrongReadError: step"):
        simulation.run()


def test_one_seed_gives_one_simulation():
    options = Options(fault_rate=0.05, loss_rate=0.01, nan_rate=0.02)
    assert simulate(7, options) == simulate(7, options)


def test_a_new_core_finds_what_the_worker_kept_and_nothing_else():
    """The pool of the former core is still there; every slot that a re-added request reads is checked."""
    done = simulate_steps(4_000, 8_000, Options(restart_rate=0.02, enable_prefix_caching=True))
    assert done.num_restarts > 40 and done.num_kept_tokens > 1_000


def test_restarts_among_all_other_faults():
    done = simulate_steps(4_000, 9_000, Options(restart_rate=0.02, fault_rate=0.03, nan_rate=0.03, loss_rate=0.005,
                                                late_rate=0.05, gone_rate=0.003, poison_rate=0.03, reset_rate=0.03))
    assert done.num_restarts > 40 and done.num_kept_tokens > 100 and done.num_bad_rows > 50
