"""Profiler calls of frontends, passed to the worker, and its answers on the way back. Decides nothing about steps."""
from __future__ import annotations

import itertools

import msgspec

from ipc.messages import Command, CommandReply, Profile, Profiled

NAMES = ("start_profile", "stop_profile")


class ProfileRelay:
    """Who waits for which answer. The worker sees call ids of this relay: those of two frontends may be equal."""

    def __init__(self) -> None:
        self._calls = itertools.count(1)
        self._waiting: dict[int, tuple[int, int]] = {}      # our call id -> frontend, its call id

    def ask(self, number: int, command: Command) -> Profile:
        """For the worker."""
        call = next(self._calls)
        self._waiting[call] = number, command.call_id
        return Profile(call, command.name == "start_profile")

    def answer(self, reply: Profiled) -> tuple[int, CommandReply] | None:
        """(frontend, reply); None: nobody waits for it any more."""
        asked = self._waiting.pop(reply.call_id, None)
        if asked is None:
            return None
        result = msgspec.msgpack.encode({"path": reply.path, "seconds": reply.seconds})
        return asked[0], CommandReply(asked[1], msgspec.Raw(result), reply.error)

    def lost(self) -> list[tuple[int, CommandReply]]:
        """The worker has ended: what to tell everyone who waits."""
        none = msgspec.Raw(msgspec.msgpack.encode(None))
        told = [(number, CommandReply(call, none, "the worker ended while its profiler was called; start it again"))
                for number, call in self._waiting.values()]
        self._waiting.clear()
        return told
