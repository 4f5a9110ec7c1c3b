"""Sleep and waking as the core decides them: order of messages, and what each caller is told."""
from __future__ import annotations

from typing import Any

import msgspec

from engine_core.nap import Nap, State, Told
from ipc.messages import Command, Sleep, WakeUp


def values(told: Told) -> list[tuple[int, int, Any, bool]]:
    return [(number, reply.call_id, msgspec.msgpack.decode(reply.result), bool(reply.error)) for number, reply in told]


def test_the_worker_is_told_when_nothing_is_in_flight() -> None:
    nap = Nap()
    assert nap.ask(1, Command(7, "sleep", level=2)) == [] and not nap.may_plan
    assert nap.next_message(2) is None and nap.state is State.DRAINING
    assert not nap.is_owed
    assert nap.next_message(0) == Sleep(2) and nap.next_message(0) is None and nap.is_owed
    assert values(nap.slept()) == [(1, 7, True, False)] and nap.state is State.ASLEEP
    assert nap.next_message(0) is None and not nap.is_owed
    assert nap.ask(2, Command(8, "wake_up")) == []
    assert nap.next_message(0) == WakeUp() and nap.next_message(0) is None and nap.is_owed
    assert values(nap.woken()) == [(2, 8, True, False)] and nap.may_plan


def test_a_second_sleep_is_refused_and_waking_twice_is_harmless() -> None:
    nap = Nap()
    assert values(nap.ask(1, Command(1, "wake_up"))) == [(1, 1, True, False)]
    assert values(nap.ask(1, Command(2, "sleep", level=3))) == [(1, 2, None, True)]
    nap.ask(1, Command(3, "sleep", level=1))
    assert values(nap.ask(1, Command(4, "sleep", level=1))) == [(1, 4, None, True)]
    assert values(nap.ask(1, Command(5, "is_sleeping"))) == [(1, 5, True, False)]
    nap.ask(1, Command(6, "wake_up"))                       # while it falls asleep: it wakes as soon as it sleeps
    assert nap.next_message(0) == Sleep(1)
    nap.slept()
    assert nap.next_message(0) == WakeUp()


def test_a_worker_that_ends_meanwhile_comes_back_awake() -> None:
    nap = Nap()
    nap.ask(1, Command(3, "sleep", level=1))
    nap.ask(2, Command(4, "wake_up"))
    nap.next_message(0)
    assert values(nap.woken()) == [(1, 3, None, True), (2, 4, True, False)] and nap.may_plan
    assert nap.woken() == []
