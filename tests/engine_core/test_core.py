"""EngineCore: messages of frontends, the window of plans, outputs per frontend, commands, and errors that stay with
their request."""
from __future__ import annotations

import subprocess
import sys

import msgspec
import numpy as np
import pytest

from ipc.errors import INVALID, OVERLOADED
from ipc.messages import (FINISH_ABORT, FINISH_ERROR, FINISH_LENGTH, STAMPS, Abort, AddRequest, Command, EngineReady,
                          ModelRunnerOutput)
from ipc.sampling_params import SamplingParams
from bench.simulation import VOCAB, over_the_wire, pack, unpack
from tests.engine_core.tools import Engine, add_message

NUMBER = 1 << 40                                # ids of frontend 1 begin here


def refused(engine: Engine, message: AddRequest, number: int = 0) -> str:
    """The text of the refusal. Nothing of the request is kept."""
    before = set(engine.core.requests)
    engine.core.handle(number, over_the_wire(message))
    ((to, outputs),) = engine.core.take_outputs(0)
    engine.core.outbox.sent(to)
    (end,) = outputs.finished
    assert (to, end.reason, end.error_code) == (number, FINISH_ERROR, INVALID)
    assert set(engine.core.requests) == before and engine.blocks.num_free == engine.blocks.num_blocks
    return end.message


# ---------------------------------------------------------------- requests

def test_token_ids_outside_the_vocabulary_are_refused_with_the_range():
    engine = Engine()
    assert "token ids 3 to 50; the model's are 0 to 49" in refused(engine, add_message(1, [3, 50]))
    assert "token ids -1 to 3" in refused(engine, add_message(2, [3, -1]))
    assert "stop_token_ids contains 50" in refused(engine, add_message(3, [3], stop_token_ids=[50]))
    assert "0 to 49" in refused(engine, add_message(4, [3], outputs=(7, 99)))       # re-added after a restart
    assert not engine.core.can_plan()


def test_half_a_token_is_refused():
    message = AddRequest(1, memoryview(b"\1\0\0\0\2"), SamplingParams(seed=1))
    assert "whole int32" in refused(Engine(), message)


def test_an_id_of_another_frontend_or_one_in_use_is_refused():
    engine = Engine()
    assert f"{NUMBER} is not free for frontend 0" in refused(engine, add_message(NUMBER, [1]))
    engine.core.handle(1, add_message(NUMBER + 1, [1]))
    assert "not free" in refused(engine, add_message(NUMBER + 1, [1]), 1)
    engine.run()
    assert len(engine.tokens[NUMBER + 1]) == 4


@pytest.mark.parametrize("priority", [1 << 63, (1 << 64) - 1, -(1 << 63)])
def test_an_absurd_priority_costs_nobody_else_anything(priority):
    """It once overflowed a column in the middle of a plan, which ended the process."""
    engine = Engine(policy="priority")
    engine.add(1, [1, 2])
    engine.add(2, [3, 4], priority=priority)
    engine.run()
    assert engine.ends[1].reason == FINISH_LENGTH and 2 in engine.ends
    engine.assert_idle()


def test_a_request_that_is_re_added_goes_on_where_it_was():
    alone = Engine()
    alone.add(1, [1, 2, 3], max_tokens=6)
    alone.run()
    engine = Engine()
    engine.add(1, [1, 2, 3], max_tokens=6, outputs=tuple(alone.tokens[1][:2]))
    engine.tokens[1] = alone.tokens[1][:2]
    engine.run()
    assert engine.tokens[1] == alone.tokens[1] and engine.ends[1].reason == FINISH_LENGTH
    engine.assert_idle()


def test_a_request_that_is_re_added_with_all_its_tokens_ends_without_another():
    """It once received a token beyond max_tokens."""
    engine = Engine()
    engine.add(1, [1, 2, 3], max_tokens=2, outputs=(4, 5))
    engine.run()
    assert engine.tokens[1] == [] and 1 in engine.ends
    engine.assert_idle()


def test_a_message_that_is_not_for_the_core_is_dropped(caplog):
    engine = Engine()
    assert engine.core.handle(3, EngineReady(1, 1, 1, 1, [], 1, "", "")) is None
    assert "frontend 3 sent a EngineReady" in caplog.text


def choices_message(request_id: int, count: int, **options) -> AddRequest:
    return msgspec.structs.replace(add_message(request_id, [5] * 9, **options), num_choices=count)


def test_choices_have_consecutive_ids_and_share_their_prompt():
    engine = Engine()
    engine.core.handle(0, over_the_wire(choices_message(7, 3)))
    plan = engine.step()
    assert [(new.request_id, new.choice, new.num_computed_tokens)
            for new in plan.new] == [(7, 0, 0), (8, 1, 8), (9, 2, 8)]
    engine.run()
    assert sorted(engine.ends) == [7, 8, 9]
    engine.assert_idle()


@pytest.mark.parametrize("count, text", [(0, "n is 0; allowed are 1 to 128"), (129, "n is 129"), (1 << 60, "n is")])
def test_a_bad_number_of_choices_is_refused(count, text):
    engine = Engine()
    engine.core.handle(0, choices_message(1, count))
    engine.take()
    assert all(text in end.message for end in engine.ends.values()) and not engine.core.requests


def test_all_choices_are_accepted_or_none():
    engine = Engine()
    engine.add(8, [1, 2])
    engine.core.handle(0, choices_message(7, 2))        # 8 is taken
    engine.take()
    assert engine.ends[7].error_code == INVALID and list(engine.core.requests) == [8]
    small = Engine(num_blocks=2)
    small.core.handle(0, choices_message(1, 3))         # the prompt can never fit
    small.take()
    assert sorted(small.ends) == [1, 2, 3] and not small.core.requests
    small.assert_idle()


def test_a_full_queue_refuses_with_the_numbers_and_keeps_nothing():
    engine = Engine(max_num_queued_reqs=2)
    engine.add(1, [1])
    engine.core.handle(0, choices_message(10, 2))
    engine.take()
    assert {engine.ends[i].error_code for i in (10, 11)} == {OVERLOADED}
    assert "1 requests wait and at most 2 may; try again" in engine.ends[10].message
    engine.add(2, [1])
    engine.step()                               # both run: the queue is empty again
    engine.core.handle(0, choices_message(20, 2))
    engine.run()
    assert engine.ends[20].reason == engine.ends[21].reason == FINISH_LENGTH
    engine.assert_idle()


def test_a_queue_may_be_bounded_by_tokens():
    engine = Engine(max_num_queued_tokens=10)
    engine.add(1, [1] * 6)
    engine.add(2, [1] * 5)
    engine.take()
    assert "6 tokens wait, the request has 5 and at most 10 may wait" in engine.ends[2].message
    engine.add(3, [1] * 4)
    engine.run()
    assert engine.ends[1].reason == engine.ends[3].reason == FINISH_LENGTH
    engine.assert_idle()


@pytest.mark.parametrize("bounds", [dict(max_num_queued_reqs=1), dict(max_num_queued_tokens=3)])
def test_a_request_over_a_bound_of_the_queue_is_served_when_nobody_waits(bounds):
    """It was told to try again, on an idle engine too."""
    engine = Engine(**bounds)
    engine.core.handle(0, choices_message(10, 2))
    engine.core.handle(0, choices_message(20, 1))       # but nobody may wait behind it
    engine.run()
    assert engine.ends[20].error_code == OVERLOADED
    assert engine.ends[10].reason == engine.ends[11].reason == FINISH_LENGTH
    engine.assert_idle()


# ---------------------------------------------------------------- the window

@pytest.mark.parametrize("is_async, window", [(False, 1), (True, 2)])
def test_as_many_plans_are_in_flight_as_the_window_holds(is_async, window):
    engine = Engine(async_scheduling=is_async)
    engine.add(1, [1, 2], max_tokens=9)
    for _ in range(window):
        engine.plan()
    assert not engine.core.can_plan()
    engine.finish_step()
    assert engine.core.can_plan()


def test_an_idle_core_plans_nothing():
    assert not Engine().core.can_plan()


def test_an_empty_plan_is_not_asked_for_again_before_there_is_news():
    engine = Engine(async_scheduling=True)
    engine.add(1, [1, 2], max_tokens=1)
    engine.plan()
    assert engine.core.can_plan() and engine.core.plan() is None
    assert not engine.core.can_plan()
    engine.add(2, [1, 2], max_tokens=1)
    assert engine.core.can_plan()
    engine.run()
    engine.assert_idle()


def test_work_that_cannot_go_on_is_a_broken_invariant_and_said():
    """The progress theorem: work, nothing in flight, nothing scheduled. Here a block is lost on purpose."""
    engine = Engine(num_blocks=2)
    engine.add(1, [1] * 6)
    engine.blocks.pop_free()
    with pytest.raises(RuntimeError, match="no progress: 0 running, 1 waiting, 1 of 2 blocks free"):
        engine.core.plan()


@pytest.mark.parametrize("step", [0, 2, 99])
def test_late_results_are_counted_and_dropped(step):
    engine = Engine()
    engine.add(1, [1, 2], max_tokens=3)
    engine.plan()
    engine.commit(ModelRunnerOutput(step, pack([3, 4, 5])))
    assert engine.stats.num_late_results == 1 and engine.tokens[1] == []
    engine.run()
    assert len(engine.tokens[1]) == 3


def test_the_result_of_a_step_is_entered_once():
    engine = Engine()
    engine.add(1, [1, 2], max_tokens=3)
    engine.plan()
    result = engine.result()
    engine.commit(result)
    engine.commit(result)
    assert len(engine.tokens[1]) == 1 and engine.stats.num_late_results == 1


def test_the_same_messages_give_the_same_plans():
    """The scheduler reads no clock and draws no random number."""
    def plans() -> list[bytes]:
        engine = Engine(num_blocks=8, async_scheduling=True, max_num_batched_tokens=8)
        for i in range(1, 7):
            engine.add(i, [i] * (i + 3), max_tokens=7)
        seen = []
        while engine.core.can_plan() or engine.in_flight:
            while engine.core.can_plan() and (plan := engine.core.plan()) is not None:
                engine.in_flight.append(over_the_wire(plan))
                seen.append(msgspec.msgpack.encode(plan))
            engine.finish_step()
        return seen
    assert plans() == plans()


# ---------------------------------------------------------------- outputs

def test_each_frontend_receives_its_own_tokens():
    engine = Engine()
    engine.add(1, [1, 2], max_tokens=2)
    engine.add(NUMBER + 1, [1, 2], max_tokens=2)
    plan = engine.plan()
    assert plan.num_rows == 2
    engine.core.commit(engine.result(), 9)
    found = dict(engine.core.take_outputs(10))
    assert {number: unpack(outputs.request_ids, np.int64) for number, outputs in found.items()} == {0: [1],
                                                                                                    1: [NUMBER + 1]}
    assert [news.request_id for news in found[1].admitted] == [NUMBER + 1]
    assert found[0].step == 1 and found[0].num_running == 2 and len(unpack(found[0].stamps, np.int64)) == len(STAMPS)
    stamps = dict(zip(STAMPS, unpack(found[0].stamps, np.int64)))
    assert (stamps["commit_begin"], stamps["commit_end"], stamps["step"], stamps["num_rows"]) == (9, 10, 1, 2)


def test_outputs_of_a_slow_frontend_join_until_it_takes_them():
    engine = Engine()
    engine.add(1, [1, 2], max_tokens=3)
    for _ in range(3):
        engine.plan()
        engine.core.commit(engine.result())
    ((number, outputs),) = engine.core.take_outputs(0)
    assert number == 0 and unpack(outputs.request_ids, np.int64) == [1, 1, 1] and unpack(outputs.output_index) == [0, 1,
                                                                                                                   2]
    assert len(outputs.finished) == 1
    assert len(engine.core.take_outputs(0)) == 1        # not taken yet
    engine.core.outbox.sent(0)
    assert engine.core.take_outputs(0) == []


def test_a_frontend_that_leaves_has_its_requests_aborted():
    engine = Engine()
    engine.add(1, [1, 2], max_tokens=5)
    engine.add(NUMBER + 1, [3, 4], max_tokens=5)
    engine.step()
    engine.core.frontend_gone(1)
    assert list(engine.core.requests) == [1]
    engine.run()
    assert NUMBER + 1 not in engine.ends and len(engine.tokens[1]) == 5
    engine.assert_idle()


def test_a_frontend_cannot_abort_anothers_request():
    engine = Engine()
    engine.add(1, [1, 2])
    engine.core.handle(1, Abort([1]))
    engine.run()
    assert engine.ends[1].reason == FINISH_LENGTH
    engine.add(2, [1, 2])
    engine.core.handle(0, Abort([2]))
    engine.run()
    assert engine.ends[2].reason == FINISH_ABORT


def test_the_heartbeat_carries_the_last_step_and_the_load():
    engine = Engine(max_num_seqs=1)
    engine.add(1, [1, 2])
    engine.add(2, [1, 2])
    engine.step()
    beat = engine.core.beat(0)
    assert (beat.step, beat.num_running, beat.num_waiting, beat.num_free_blocks) == (1, 1, 1, 15)
    assert bytes(beat.tokens) == b""


# ---------------------------------------------------------------- commands

def command(engine: Engine, name: str, **options):
    reply = engine.core.handle(0, Command(7, name, **options))
    assert reply is not None and reply.call_id == 7
    return msgspec.msgpack.decode(reply.result), reply.error


def test_an_unknown_command_lists_the_known_ones():
    result, error = command(Engine(), "explode")
    assert result is None and "unknown command 'explode'; known are stats, reset_prefix_cache" in error


def test_stats_are_totals():
    engine = Engine()
    engine.add(1, [1, 2], max_tokens=2)
    engine.run()
    result, error = command(engine, "stats")
    assert not error
    assert (result["num_steps"], result["num_finished"], result["num_free_blocks"], result["num_blocks"]) == (2, 1, 16,
                                                                                                              16)


def test_the_cache_is_reset_by_command():
    engine = Engine()
    engine.add(1, [5] * 9, max_tokens=1)
    engine.run()
    assert command(engine, "reset_prefix_cache") == (True, "")
    engine.add(2, [5] * 9, max_tokens=1)
    assert engine.step().new[0].num_computed_tokens == 0


def test_the_status_of_a_request_is_told_with_numbers():
    engine = Engine(max_num_seqs=1)
    engine.add(1, [1, 2, 3])
    engine.add(2, [1, 2])
    engine.step()
    running, _ = command(engine, "request_status", request_id=1)
    assert (running["state"], running["num_prompt_tokens"], running["num_output_tokens"]) == ("running", 3, 1)
    assert running["reason"] == "computes one token a step" and running["num_computed_tokens"] == 3
    waiting, _ = command(engine, "request_status", request_id=2)
    assert (waiting["state"], waiting["num_prompt_tokens"]) == ("waiting", 2)
    assert waiting["reason"] == "all 1 seats are taken (--max-num-seqs, --max-num-batched-tokens)"
    assert command(engine, "request_status", request_id=5) == (None, "no live request 5")


def test_check_finds_a_broken_invariant():
    engine = Engine()
    assert command(engine, "check") == (True, "")
    engine.blocks.ref_count[1] += 1
    with pytest.raises(RuntimeError, match="reference counts"):
        command(engine, "check")


# ---------------------------------------------------------------- the process

def test_the_core_runs_without_torch():
    code = ("import sys, engine_core.main; bad = {'torch', 'triton', 'tokenizers', 'worker', 'frontend', 'numba'} "
            "& {name.split('.')[0] for name in sys.modules}; sys.exit(', '.join(sorted(bad)) or 0)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_vocabulary_of_the_tests_is_that_of_the_simulated_worker():
    assert Engine().core.stop.vocab_size == VOCAB
