"""Failed steps and lost workers: what was promised is taken back exactly, the guilty end, everybody else goes on with
the right tokens."""
from __future__ import annotations

import pytest

from bench.sim_worker import SimWorker
from ipc.errors import FAULT
from ipc.messages import FINISH_ABORT, FINISH_ERROR, FINISH_LENGTH, Abort, ModelRunnerOutput, StepFailed
from bench.simulation import VOCAB, pack, unpack
from tests.engine_core.test_scheduler import new_rows, prompt
from tests.engine_core.tools import Engine, pairs


def alone(request_id: int, tokens: list[int], count: int) -> list[int]:
    engine = Engine(num_blocks=64)
    engine.add(request_id, tokens, max_tokens=count)
    engine.run()
    return engine.tokens[request_id]


def snapshot(engine: Engine) -> tuple:
    rows, n = engine.rows, engine.rows.n
    return ([list(r.blocks) for r in engine.core.requests.values()], engine.blocks.num_free, dict(engine.blocks.cached),
            rows.computed[:n].tolist(), rows.planned[:n].tolist(), rows.known[:n].tolist(), rows.length[:n].tolist())


def running(**options) -> Engine:
    engine = Engine(**options)
    engine.add(1, prompt(6), max_tokens=8)
    engine.add(2, prompt(6, 20), max_tokens=8)
    engine.step()
    return engine


def test_a_failed_step_is_taken_back_exactly():
    engine = running()
    engine.step()
    engine.step()
    engine.scheduler.settle()
    before = snapshot(engine)
    plan = engine.plan()
    assert pairs(plan.extend) == [(0, 5), (1, 6)] and snapshot(engine) != before
    engine.fail()
    assert snapshot(engine) == before


def test_a_failed_first_step_publishes_nothing():
    """The seed's worst fault: hashes published before the step computes them were found by others after it failed."""
    engine = Engine()
    engine.add(1, prompt(9), max_tokens=3)
    engine.plan()
    assert len(engine.blocks.cached) == 2
    engine.fail()
    assert engine.blocks.cached == {}
    engine.add(2, prompt(9), max_tokens=3)
    engine.run()
    assert engine.tokens[1] == engine.tokens[2] == alone(1, prompt(9), 3)
    engine.assert_idle()


def test_the_plan_after_a_failure_resets_the_worker_and_brings_every_row_anew():
    engine = running()
    engine.plan()
    engine.fail()
    plan = engine.plan()
    assert plan.reset and not plan.moves and not plan.extend
    assert new_rows(plan) == [(1, 7, 6, 2), (2, 7, 6, 2)]
    assert unpack(plan.new_tokens) == prompt(6) + engine.tokens[1] + prompt(6, 20) + engine.tokens[2]
    engine.finish_step()
    assert not engine.plan().reset


def test_named_requests_end_with_the_reason_and_nobody_else():
    engine = running()
    engine.plan()
    engine.fail(named=(2,))
    assert (engine.ends[2].reason, engine.ends[2].error_code) == (FINISH_ERROR, FAULT)
    assert "boom" in engine.ends[2].message and 1 not in engine.ends
    plan = engine.step()
    assert plan.reset and pairs(plan.counts) == []      # the rest goes on at once, together
    engine.run()
    assert engine.tokens[1] == alone(1, prompt(6), 8)
    engine.assert_idle()


def test_suspects_of_a_failed_step_replay_alone_one_by_one():
    engine = running(async_scheduling=True)
    engine.plan()
    engine.fail()
    first = engine.plan()
    assert pairs(first.counts) == [(1, 0)] and not engine.core.can_plan()      # one plan at a time, one row at a time
    engine.finish_step()
    assert pairs(engine.plan().counts) == [(0, 0)]
    engine.finish_step()
    assert pairs(engine.plan().counts) == []
    engine.run()
    assert engine.tokens[1] == alone(1, prompt(6), 8) and engine.tokens[2] == alone(2, prompt(6, 20), 8)
    engine.assert_idle()


def test_a_suspect_that_fails_alone_is_the_cause_and_ends():
    engine = running()
    engine.add(3, prompt(6, 35), max_tokens=8)
    engine.step()
    engine.plan()
    engine.fail()
    engine.step()                               # 1 alone: well
    engine.plan()
    engine.fail()                               # 2 alone
    assert engine.ends[2].reason == FINISH_ERROR and list(engine.ends) == [2]
    engine.run()
    assert engine.tokens[1] == alone(1, prompt(6), 8) and engine.tokens[3] == alone(3, prompt(6, 35), 8)
    engine.assert_idle()


def test_all_suspects_replay_although_one_of_them_is_found_guilty():
    """Else the next one fails everybody again, and after a few such rounds the innocent end with the guilty."""
    engine = Engine()
    for request_id in (1, 2, 3, 4):
        engine.add(request_id, prompt(6, 10 * request_id), max_tokens=5)
    guilty = {1, 2, 4}
    for _ in range(60):
        if not engine.core.can_plan():
            break
        plan = engine.plan()
        counts = dict(pairs(plan.counts))
        computing = {int(engine.rows.ids[row]) for row in range(plan.num_rows) if counts.get(row, 1)}
        if computing & guilty:
            engine.worker.apply(plan)
            engine.fail(plan)
        else:
            engine.finish_step()
    assert {i for i, end in engine.ends.items() if end.reason == FINISH_ERROR} == guilty
    assert engine.tokens[3] == alone(3, prompt(6, 30), 5) and engine.stats.num_failed_steps == 4
    engine.assert_idle()


def test_one_failure_of_a_request_that_is_alone_is_forgiven():
    engine = Engine()
    engine.add(1, prompt(6), max_tokens=3)
    engine.plan()
    engine.fail()
    assert 1 not in engine.ends
    engine.run()
    assert engine.tokens[1] == alone(1, prompt(6), 3)
    engine.add(2, prompt(6, 9), max_tokens=3)
    for _ in range(2):
        engine.plan()
        engine.fail()
    assert engine.ends[2].reason == FINISH_ERROR
    engine.assert_idle()


@pytest.mark.parametrize("which", [0, 1])
def test_a_failure_of_either_plan_in_flight_takes_both_back(which):
    engine = Engine(async_scheduling=True)
    engine.add(1, prompt(6), max_tokens=8)
    engine.plan()
    engine.finish_step()
    plans = [engine.plan(), engine.plan()]
    if which == 1:
        engine.finish_step()
    before = len(engine.tokens[1])
    engine.fail(plans[which])
    assert len(engine.tokens[1]) == before and not engine.rows.in_flight
    assert int(engine.rows.known[0]) == int(engine.rows.length[0]) == 6 + before
    engine.run()
    assert engine.tokens[1] == alone(1, prompt(6), 8)
    engine.assert_idle()


def test_a_request_that_adopted_a_block_of_a_failed_step_computes_it_again():
    engine = Engine()
    engine.add(1, prompt(9), max_tokens=3)
    engine.add(2, prompt(12), max_tokens=3)
    plan = engine.plan()
    assert new_rows(plan) == [(1, 9, 0, 3), (2, 12, 8, 3)]
    engine.fail(named=(1,))
    assert engine.request(2).blocks == [] and int(engine.rows.computed[0]) == 0
    plan = engine.step()
    assert new_rows(plan)[0][:3] == (2, 12, 0)
    engine.run()
    assert engine.tokens[2] == alone(2, prompt(12), 3)
    engine.assert_idle()


def test_a_swap_that_failed_is_recomputed():
    engine = Engine(num_blocks=4, num_host_blocks=4, preemption_mode="swap")
    engine.add(1, prompt(7), max_tokens=6)
    engine.add(2, prompt(7, 20), max_tokens=6)
    engine.step()
    engine.step()
    assert pairs(engine.plan().swap_out) == [(3, 0), (4, 1)]
    engine.fail()
    assert engine.request(2).num_swapped_tokens == 0 and engine.request(2).host_slots == []
    engine.run()
    assert engine.tokens[2] == alone(2, prompt(7, 20), 6) and engine.tokens[1] == alone(1, prompt(7), 6)
    engine.assert_idle()


def test_a_swap_in_that_failed_falls_back_to_what_the_cache_gave():
    engine = Engine(num_blocks=4, num_host_blocks=4, preemption_mode="swap")
    engine.add(1, prompt(7))
    engine.add(2, prompt(7, 20), max_tokens=6)
    for _ in range(4):
        engine.step()
    assert pairs(engine.plan().swap_in) == [(1, 4)]
    engine.fail()
    assert int(engine.rows.computed[0]) == 4 and engine.request(2).blocks == [3]
    engine.run()
    assert engine.tokens[2] == alone(2, prompt(7, 20), 6)
    engine.assert_idle()


def test_an_abort_between_failure_and_reset_is_not_replayed():
    engine = running()
    engine.plan()
    engine.fail()
    engine.core.handle(0, Abort([1]))
    plan = engine.plan()
    assert plan.reset and new_rows(plan) == [(2, 7, 6, 2)] and not plan.moves
    engine.run()
    assert engine.ends[1].reason == FINISH_ABORT and engine.tokens[2] == alone(2, prompt(6, 20), 8)
    engine.assert_idle()


def test_all_ending_between_failure_and_reset_leaves_the_reset_to_the_next_request():
    engine = running()
    engine.plan()
    engine.fail()
    engine.core.handle(0, Abort([1, 2]))
    assert not engine.core.can_plan()
    engine.add(3, prompt(5), max_tokens=2)
    assert engine.plan().reset
    engine.run()
    assert engine.tokens[3] == alone(3, prompt(5), 2)
    engine.assert_idle()


def test_the_failure_of_an_unknown_step_is_counted_and_changes_nothing():
    engine = running()
    plan = engine.plan()
    before = snapshot(engine)
    engine.core.abort_step(StepFailed(99, "late"))
    assert snapshot(engine) == before and engine.stats.num_late_results == 1
    assert plan.step == 2
    engine.run()
    assert engine.tokens[1] == alone(1, prompt(6), 8)


def test_results_of_plans_that_were_taken_back_are_dropped():
    engine = running()
    plan = engine.plan()
    engine.fail()
    engine.commit(ModelRunnerOutput(plan.step, pack([1, 2])))
    assert engine.stats.num_late_results == 1
    engine.run()
    assert engine.tokens[1] == alone(1, prompt(6), 8)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("options", [dict(), dict(preemption_mode="swap", num_host_blocks=8)])
def test_a_lost_worker_is_a_preemption_of_everyone(is_async, options):
    engine = running(async_scheduling=is_async, num_blocks=8, **options)
    engine.add(3, prompt(9, 33), max_tokens=3)
    engine.plan()
    engine.core.worker_lost()
    engine.in_flight.clear()
    engine.worker = SimWorker(8, 4, options.get("num_host_blocks", 0), VOCAB)
    engine.check()
    assert engine.blocks.cached == {} and engine.rows.n == 0 and engine.blocks.num_free == 8
    plan = engine.plan()
    assert not plan.reset and all(new.num_computed_tokens == 0 for new in plan.new[:1])
    engine.run()
    assert engine.tokens[1] == alone(1, prompt(6), 8) and engine.tokens[3] == alone(3, prompt(9, 33), 3)
    assert engine.ends[1].reason == FINISH_LENGTH
    engine.assert_idle()


@pytest.mark.parametrize("at", ["planned", "executed", "committed"])
@pytest.mark.parametrize("failing", range(1, 8))
def test_a_failure_at_each_point_of_each_step_resumes_with_the_right_tokens(failing, at):
    """An exception between schedule() and update() once left counts and published hashes half done."""
    engine = Engine(num_blocks=6)
    for request_id in (1, 2, 3):
        engine.add(request_id, prompt(6, 9 * request_id), max_tokens=9)
    for _ in range(failing - 1):
        engine.step()
    plan = engine.plan()
    if at == "executed":
        engine.worker.apply(plan)
    if at == "committed":
        engine.finish_step()
        engine.core.abort_step(StepFailed(plan.step, "late"))
        assert engine.stats.num_late_results == 1
    else:
        engine.fail(plan)
    engine.run()
    for request_id in (1, 2, 3):
        assert engine.ends[request_id].reason == FINISH_LENGTH
        assert engine.tokens[request_id] == alone(request_id, prompt(6, 9 * request_id), 9)
    engine.assert_idle()


def test_a_suspect_that_was_cleared_is_not_charged_for_it_again():
    """Two steps apart failed with it and nobody else to blame it for; only two faults alone in a row end a request."""
    engine = running()
    engine.plan()
    engine.fail()
    engine.step()                               # 1 alone: cleared
    engine.step()                               # 2 alone: cleared
    engine.core.handle(0, Abort([2]))
    engine.take()
    engine.plan()
    engine.fail()                               # 1 is alone in the step: its first fault that counts
    assert 1 not in engine.ends and engine.request(1).num_faults == 1
    engine.run()
    assert engine.tokens[1] == alone(1, prompt(6), 8)
