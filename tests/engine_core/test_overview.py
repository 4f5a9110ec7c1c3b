"""The pool and the queue at a glance, and profiler calls on their way through the core."""
from __future__ import annotations

import msgspec

from engine_core.overview import BLOCK_STATES, overview
from engine_core.worker_relay import WorkerRelay
from ipc.messages import Command, GrammarPrepared, PrepareGrammar, Profile, Profiled
from tests.engine_core.tools import Engine


def states(engine: Engine) -> list[str]:
    return [BLOCK_STATES[state] for state in overview(engine.core.scheduler)["blocks"]]


def test_blocks_are_free_then_in_use_then_shared_then_cached() -> None:
    engine = Engine(num_blocks=32)
    assert set(states(engine)) == {"free"}
    prompt = list(range(1, 40))
    engine.add(1, prompt, max_tokens=8)
    engine.step()
    assert states(engine).count("in use") == len(engine.core.requests[1].blocks)
    engine.step()
    engine.add(2, prompt, max_tokens=2)
    engine.step()
    assert "shared" in states(engine)
    engine.run()
    assert set(states(engine)) == {"free", "cached"}


def test_the_queue_says_why_each_waits() -> None:
    engine = Engine(max_num_seqs=1)
    for number in (1, 2, 3):
        engine.add(number, [1, 2, 3], max_tokens=8)
    engine.step()
    found = overview(engine.core.scheduler)
    assert (found["num_running"], found["num_waiting"], found["num_seats"]) == (1, 2, 1)
    assert [entry["request_id"] for entry in found["waiting"]] == [2, 3]
    assert "all 1 seats are taken" in found["waiting"][0]["reason"] and "1 waiting" in found["waiting"][1]["reason"]


def test_answers_of_the_worker_find_who_asked() -> None:
    relay = WorkerRelay()
    first, second = relay.ask(1, Command(7, "start_profile")), relay.ask(2, Command(7, "stop_profile"))
    assert (first.is_start, second.is_start) == (True, False) and first.call_id != second.call_id
    number, reply = relay.answer(Profiled(second.call_id, "a.json", 2.0)) or (0, None)
    assert number == 2 and reply is not None and reply.call_id == 7
    assert msgspec.msgpack.decode(reply.result) == {"path": "a.json", "seconds": 2.0}
    assert relay.answer(Profiled(second.call_id)) is None
    grammar = relay.ask(3, Command(7, "prepare_grammar", grammar=memoryview(b"abc")))
    assert isinstance(grammar, PrepareGrammar) and grammar.grammar == b"abc"
    number, reply = relay.answer(GrammarPrepared(grammar.call_id, "no such type")) or (0, None)
    assert number == 3 and reply is not None and not reply.error
    assert msgspec.msgpack.decode(reply.result) == {"problem": "no such type"}
    assert relay.is_owed
    (lost,) = relay.lost()
    assert lost[0] == 1 and "worker ended" in lost[1].error and relay.lost() == []
    assert not relay.is_owed
    assert isinstance(first, Profile)
