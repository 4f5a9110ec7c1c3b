"""Calls that the worker answers, passed on, and its answers on the way back: the profiler's and grammars to be compiled
before their requests come, which frontends ask for and no step depends on, so that no recording needs them; and
grammars of requests that the core holds (grammar_holds.py)."""
from __future__ import annotations

import itertools
from typing import Any

import msgspec

from ipc.messages import Command, CommandReply, GrammarPrepared, PrepareGrammar, Profile, Profiled

NAMES = ("start_profile", "stop_profile", "prepare_grammar")
LOST = "the worker ended while it was asked; ask again"


class WorkerRelay:
    """Who waits for which answer. The worker sees call ids of this relay: those of two frontends may be equal."""

    def __init__(self) -> None:
        self._calls = itertools.count(1)
        self._waiting: dict[int, tuple[int, int]] = {}      # our call id -> frontend, its call id
        self._own: dict[int, bytes] = {}                    # our call id -> the grammar the core itself asked for

    @property
    def is_owed(self) -> bool:
        """The worker was asked and has not answered."""
        return bool(self._waiting or self._own)

    def ask(self, number: int, command: Command) -> Profile | PrepareGrammar:
        """For the worker."""
        call = next(self._calls)
        self._waiting[call] = number, command.call_id
        if command.name == "prepare_grammar":
            return PrepareGrammar(call, command.grammar)
        return Profile(call, command.name == "start_profile")

    def ask_for(self, grammar: bytes) -> PrepareGrammar:
        """For the worker, which is to compile a grammar that this core waits for."""
        call = next(self._calls)
        self._own[call] = grammar
        return PrepareGrammar(call, memoryview(grammar))

    def prepared(self, reply: GrammarPrepared) -> bytes | None:
        """The grammar that this core waited for; None: a frontend did, or nobody."""
        return self._own.pop(reply.call_id, None)

    def forget_own(self) -> None:
        """A worker begins anew: what it was asked before is not its own answer."""
        self._own.clear()

    def answer(self, reply: Profiled | GrammarPrepared) -> tuple[int, CommandReply] | None:
        """(frontend, reply); None: nobody waits for it any more."""
        asked = self._waiting.pop(reply.call_id, None)
        if asked is None:
            return None
        if isinstance(reply, GrammarPrepared):
            return asked[0], CommandReply(asked[1], _raw({"problem": reply.problem}))
        return asked[0], CommandReply(asked[1], _raw({"path": reply.path, "seconds": reply.seconds}), reply.error)

    def lost(self) -> list[tuple[int, CommandReply]]:
        """The worker has ended: what to tell everyone who waits."""
        told = [(number, CommandReply(call, _raw(None), LOST)) for number, call in self._waiting.values()]
        self._waiting.clear()
        self._own.clear()
        return told


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(value))
