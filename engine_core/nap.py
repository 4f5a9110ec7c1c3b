"""Sleep and waking of the engine: when the worker may be told, and who waits for it.

    awake ─ sleep ─▶ draining ─ nothing in flight ─▶ falling ─ Slept ─▶ asleep ─ wake_up ─▶ waking
      ▲────────────────────────────── WorkerReady ──────────────────────────────────────────────┘

For the requests it is what a worker's end is: all of them are preempted with nothing computed, no block is cached, and
the next plan finds a worker without rows. While it is not awake nothing is planned. Knows no sockets.
"""
from __future__ import annotations

import enum
from typing import Any

import msgspec

from ipc.messages import Command, CommandReply, Sleep, WakeUp

NAMES = ("sleep", "wake_up", "is_sleeping")
Told = list[tuple[int, CommandReply]]            # frontend, what it is told


class State(enum.Enum):
    """Of the worker, as the core knows it."""
    AWAKE = enum.auto()
    DRAINING = enum.auto()                      # results are still to come
    FALLING = enum.auto()                       # told to sleep
    ASLEEP = enum.auto()
    WAKING = enum.auto()                        # told to wake up


class Nap:
    """The state, and the calls that wait for the next one."""

    def __init__(self) -> None:
        self.state = State.AWAKE
        self.level = 0
        self._sleepers: list[tuple[int, int]] = []          # frontend, call id
        self._wakers: list[tuple[int, int]] = []

    @property
    def may_plan(self) -> bool:
        return self.state is State.AWAKE

    @property
    def is_owed(self) -> bool:
        """The worker was told and has not answered."""
        return self.state in (State.FALLING, State.WAKING)

    def ask(self, number: int, command: Command) -> Told:
        """A call of a frontend; the answers that are known at once."""
        call = number, command.call_id
        if command.name == "is_sleeping":
            return [_reply(call, self.state is not State.AWAKE)]
        if command.name == "wake_up":
            if self.state is State.AWAKE:
                return [_reply(call, True)]
            self._wakers.append(call)
            return []
        if command.level not in (1, 2):
            return [_reply(call, None, f"level is {command.level}; allowed are 1 and 2")]
        if self.state is not State.AWAKE:
            return [_reply(call, None, "the engine sleeps already; wake it up first")]
        self.state, self.level = State.DRAINING, command.level
        self._sleepers.append(call)
        return []

    def next_message(self, num_in_flight: int) -> Sleep | WakeUp | None:
        """For the worker, if it is time. After a Sleep its pool counts as lost."""
        if self.state is State.DRAINING and not num_in_flight:
            self.state = State.FALLING
            return Sleep(self.level)
        if self.state is State.ASLEEP and self._wakers:
            self.state = State.WAKING
            return WakeUp()
        return None

    def slept(self) -> Told:
        """The worker sleeps: its callers may know."""
        self.state = State.ASLEEP
        told, self._sleepers = [_reply(call, True) for call in self._sleepers], []
        return told

    def woken(self) -> Told:
        """A worker is ready: this one, or its successor, which begins awake."""
        if self.state is State.AWAKE:
            return []
        told = [_reply(call, None, "the worker ended while it fell asleep; the engine is awake")
                for call in self._sleepers]
        told += [_reply(call, True) for call in self._wakers]
        self._sleepers, self._wakers, self.state = [], [], State.AWAKE
        return told


def _reply(call: tuple[int, int], result: Any, error: str = "") -> tuple[int, CommandReply]:
    return call[0], CommandReply(call[1], msgspec.Raw(msgspec.msgpack.encode(result)), error)
