"""Requests that wait until a worker which may not know their grammar has it compiled.

A new request's grammar is compiled before the request is sent (frontend/grammar_prepare.py). A worker that has just
started knows none, and a request that outlived it would have its first step compile, for which everybody's step waits.
So it is held in the queue until the worker says that its grammar is there: what does not compile ends it in its step.
Knows no sockets.
"""
from __future__ import annotations

from collections.abc import Iterable

import msgspec

from engine_core.policies import WaitingQueue
from engine_core.request import Request


class GrammarHolds:
    """Those of one core. `unasked`: grammars, as StructuredOutputs in msgpack, for which the worker is to be asked."""

    def __init__(self) -> None:
        self.unasked: list[bytes] = []
        self._held: dict[bytes, list[Request]] = {}

    def hold(self, requests: Iterable[Request], waiting: WaitingQueue) -> None:
        """Of these, all in the queue, those that have a grammar."""
        found = []
        for request in requests:
            if request.params.structured_outputs is None or request.is_held:
                continue
            found.append(request)
            self._enter(request)
        if found:
            waiting.hold(found)

    def restore(self, requests: Iterable[Request]) -> None:
        """These are held already."""
        for request in requests:
            self._enter(request)

    def release(self, grammar: bytes, waiting: WaitingQueue) -> None:
        """The worker has been through this one."""
        for request in self._held.pop(grammar, []):
            waiting.release(request)

    def release_all(self, waiting: WaitingQueue) -> None:
        """The worker that was asked has ended."""
        for grammar in list(self._held):
            self.release(grammar, waiting)
        self.unasked.clear()

    def _enter(self, request: Request) -> None:
        grammar = msgspec.msgpack.encode(request.params.structured_outputs)
        if grammar not in self._held:
            self._held[grammar] = []
            self.unasked.append(grammar)
        self._held[grammar].append(request)
