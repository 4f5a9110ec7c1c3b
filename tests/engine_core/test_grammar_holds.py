"""Requests whose grammar a new worker has to compile first wait for it, and nobody waits for them.

They used to be admitted at once: the first step compiled their grammars, and every other stream stood still meanwhile.
"""
from __future__ import annotations

import msgspec
import pytest

from bench.sim_worker import SimWorker
from bench.simulation import VOCAB, Options, over_the_wire, simulate_steps
from engine_core.core import MAX_BATCH_FAULTS
from engine_core.overview import overview
from engine_core.status import explain
from engine_core.worker_relay import WorkerRelay
from ipc.messages import Abort, CommandReply, GrammarPrepared, SchedulerOutput
from ipc.structured_outputs import StructuredOutputs
from tests.engine_core.test_recovery import alone
from tests.engine_core.test_scheduler import prompt
from tests.engine_core.tools import Engine, add_message

FORMS = [StructuredOutputs(regex="[a-z]*"), StructuredOutputs(regex="[0-9]*")]
KEYS = [msgspec.msgpack.encode(form) for form in FORMS]
POLICIES = ["fcfs", "priority", "lpm"]


def replace_worker(engine: Engine) -> None:
    engine.in_flight.clear()
    engine.worker = SimWorker(engine.blocks.num_blocks, engine.blocks.block_size, 0, VOCAB)
    engine.core.worker_lost()
    engine.core.worker_replaced()
    engine.check()


def served(engine: Engine, plan: SchedulerOutput) -> set[int]:
    """Requests that compute something in this plan."""
    counts = dict(zip(*[iter(memoryview(plan.counts).cast("i").tolist())] * 2))
    return {int(engine.rows.ids[row]) for row in range(plan.num_rows) if counts.get(row, 1)}


def steps(engine: Engine, count: int) -> set[int]:
    found: set[int] = set()
    for _ in range(count):
        plan = engine.plan()
        found |= served(engine, plan)
        engine.finish_step()
    return found


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("is_async", [False, True])
def test_after_a_restart_a_row_waits_for_its_grammar_and_nobody_for_the_row(policy: str, is_async: bool) -> None:
    """The worker ended in a step of all four, so that each is to replay alone before others run."""
    engine = Engine(num_blocks=64, policy=policy, async_scheduling=is_async)
    for request_id in (1, 2, 3, 4):
        form = {1: FORMS[0], 3: FORMS[1], 4: FORMS[0]}.get(request_id)
        engine.add(request_id, prompt(6, 10 * request_id), max_tokens=30, structured_outputs=form)
    engine.step()
    engine.plan()
    replace_worker(engine)
    assert sorted(engine.core.holds.unasked) == sorted(KEYS)
    assert steps(engine, 5) == {2}
    engine.core.grammar_prepared(KEYS[1])
    assert steps(engine, 5) == {2, 3}
    engine.core.grammar_prepared(KEYS[0])
    assert steps(engine, 5) == {1, 2, 3, 4}
    engine.run()
    for request_id in (1, 2, 3, 4):
        assert engine.tokens[request_id] == alone(request_id, prompt(6, 10 * request_id), 30)
    engine.assert_idle()


@pytest.mark.parametrize("policy", POLICIES)
def test_with_nobody_else_the_core_waits_without_a_plan(policy: str) -> None:
    engine = Engine(num_blocks=64, policy=policy)
    engine.add(1, prompt(6), max_tokens=8, structured_outputs=FORMS[0])
    engine.step()
    replace_worker(engine)
    assert not engine.core.can_plan() and len(engine.scheduler.waiting) == 1
    engine.core.grammar_prepared(KEYS[0])
    engine.run()
    assert engine.tokens[1] == alone(1, prompt(6), 8)
    engine.assert_idle()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_held_request_can_be_aborted_and_a_second_worker_is_asked_again(policy: str) -> None:
    engine = Engine(num_blocks=64, policy=policy)
    for request_id in (1, 2):
        engine.add(request_id, prompt(6, 10 * request_id), max_tokens=8, structured_outputs=FORMS[request_id - 1])
    engine.step()
    replace_worker(engine)
    engine.core.holds.unasked.clear()           # they are sent
    replace_worker(engine)
    assert sorted(engine.core.holds.unasked) == sorted(KEYS)
    engine.core.handle(0, Abort([1]))
    engine.take()
    engine.check()
    assert not engine.core.can_plan()
    for key in KEYS:
        engine.core.grammar_prepared(key)
    engine.run()
    assert engine.tokens[2] == alone(2, prompt(6, 20), 8)
    engine.assert_idle()


def test_a_worker_that_woke_up_is_asked_for_what_its_sleep_may_have_swallowed() -> None:
    """A request of a former core came while it slept: the question went to what ended with the sleep."""
    engine = Engine(num_blocks=64)
    message = add_message(1, prompt(6), max_tokens=8, structured_outputs=FORMS[0])
    engine.core.handle(0, over_the_wire(msgspec.structs.replace(message, is_replay=True)))
    engine.core.holds.unasked.clear()           # it is sent, and its answer is not expected after WorkerReady
    engine.core.worker_replaced()
    assert engine.core.holds.unasked == KEYS[:1] and not engine.core.can_plan()
    engine.core.grammar_prepared(KEYS[0])
    engine.run()
    assert engine.tokens[1] == alone(1, prompt(6), 8)
    engine.assert_idle()


def test_requests_that_end_workers_together_are_found_although_others_run_while_they_are_held() -> None:
    engine = Engine(num_blocks=64)
    for request_id, form in ((1, FORMS[0]), (2, FORMS[1]), (3, None)):
        engine.add(request_id, prompt(6, 10 * request_id), max_tokens=100, structured_outputs=form)
    engine.step()
    for _ in range(MAX_BATCH_FAULTS):
        for _ in range(10):
            if {1, 2} <= served(engine, engine.plan()):
                break
            engine.finish_step()
        replace_worker(engine)
        engine.take()
        if not engine.ends:
            assert steps(engine, 3) == {3}
        for key in KEYS:
            engine.core.grammar_prepared(key)
    assert {1, 2} <= set(engine.ends)


def test_a_request_of_a_former_core_is_held_and_a_new_one_is_not() -> None:
    engine = Engine(num_blocks=64)
    message = add_message(1, prompt(6), max_tokens=8, structured_outputs=FORMS[0])
    engine.core.handle(0, over_the_wire(msgspec.structs.replace(message, is_replay=True)))
    engine.add(2, prompt(6, 20), max_tokens=8, structured_outputs=FORMS[1])
    assert engine.core.holds.unasked == KEYS[:1] and steps(engine, 3) == {2}
    engine.core.grammar_prepared(KEYS[0])
    engine.run()
    assert engine.tokens[1] == alone(1, prompt(6), 8)
    engine.assert_idle()


def test_who_is_held_is_in_nobodys_way_and_said_to_be_in_nobodys_way() -> None:
    engine = Engine(num_blocks=64, max_num_seqs=1)
    message = add_message(1, prompt(6), structured_outputs=FORMS[0])
    engine.core.handle(0, over_the_wire(msgspec.structs.replace(message, is_replay=True)))
    for request_id in (2, 3, 4):
        engine.add(request_id, prompt(6, 10 * request_id))
    engine.step()
    reasons = [row["reason"] for row in overview(engine.scheduler)["waiting"]]
    assert [text.partition(" ")[2][:30] for text in reasons] == [
        "worker has just started and co", "1 seats are taken (--max-num-s", "waiting request ranks ahead of"]
    assert [explain(engine.scheduler, engine.request(i))["reason"] for i in (1, 3, 4)] == reasons


def test_nobody_is_said_to_wait_for_a_suspect_that_is_held() -> None:
    engine = Engine(num_blocks=64)
    for request_id, form in ((1, FORMS[0]), (2, FORMS[1])):
        engine.add(request_id, prompt(6, 10 * request_id), structured_outputs=form)
    engine.plan()
    replace_worker(engine)
    assert [request.request_id for request in engine.scheduler.suspects] == [1, 2]
    engine.add(3, prompt(6, 30), max_tokens=30)
    engine.step()
    assert explain(engine.scheduler, engine.request(3))["reason"] == "computes one token a step"
    engine.core.grammar_prepared(KEYS[1])
    assert "1 requests of a failed step" in explain(engine.scheduler, engine.request(3))["reason"]


def test_answers_to_the_core_and_to_frontends_are_told_apart() -> None:
    relay = WorkerRelay()
    own = relay.ask_for(KEYS[0])
    assert relay.is_owed and bytes(own.grammar) == KEYS[0]
    assert relay.prepared(GrammarPrepared(own.call_id + 1)) is None
    assert relay.prepared(GrammarPrepared(own.call_id)) == KEYS[0] and not relay.is_owed
    asked = relay.ask_for(KEYS[1])
    relay.forget_own()                          # the worker began anew; its old answer may still come
    late = GrammarPrepared(asked.call_id)
    answer: tuple[int, CommandReply] | None = relay.answer(late)
    assert relay.prepared(late) is None and answer is None


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("restart_rate", [0.0, 0.01])
def test_nobody_is_held_for_ever_whenever_workers_and_cores_end(policy: str, restart_rate: float) -> None:
    """A new core would ask for what was lost, and an abort ends who was left behind: without them, too."""
    done = simulate_steps(2_000, 4_000, Options(policy=policy, grammar_rate=0.5, loss_rate=0.02, fault_rate=0.02,
                                                restart_rate=restart_rate, abort_rate=0, max_rounds=5_000))
    assert done.num_lost > 10 and (done.num_restarts > 5) == (restart_rate > 0)
