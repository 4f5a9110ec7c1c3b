"""Grammars that are compiled before their requests come, so that no step waits for one.

A thread of Grammars compiles; the loop watches `fd` and sends what `take` returns. Knows no sockets.
"""
from __future__ import annotations

import contextlib
import functools
import os
import queue
from typing import TYPE_CHECKING

import msgspec

from ipc.errors import RequestError
from ipc.messages import GrammarPrepared, PrepareGrammar
from ipc.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from worker.sampling.grammar import Compiled, Grammars


class GrammarCalls:
    """Those of one worker."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._answers: queue.SimpleQueue[tuple[int, GrammarPrepared]] = queue.SimpleQueue()
        self._num_owed = 0
        self._core = 0                          # how many cores were forgotten: answers are for the one that asked
        self._decoder = msgspec.msgpack.Decoder(StructuredOutputs)

    @property
    def is_busy(self) -> bool:
        """`take` will have more answers."""
        return self._num_owed > 0

    def handle(self, message: PrepareGrammar, grammars: Grammars | None) -> None:
        """Begin; `take` will have the answer. None: the worker sleeps, and the first step compiles."""
        self._num_owed += 1
        if grammars is None:
            self._answer(self._core, GrammarPrepared(message.call_id))
            return
        key = bytes(message.grammar)
        try:
            compiled = grammars.compile(key, self._decoder.decode(key))
        except (msgspec.MsgspecError, RequestError) as error:
            self._answer(self._core, GrammarPrepared(message.call_id, str(error)))
            return
        compiled.add_done_callback(functools.partial(self._done, self._core, message.call_id))

    def take(self) -> list[GrammarPrepared]:
        """What is answered since the last call."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                core, answer = self._answers.get_nowait()
                self._num_owed -= 1
                if core == self._core:
                    found.append(answer)
        return found

    def forget(self) -> None:
        """There is another core, whose calls may have the same ids."""
        self._core += 1

    def _done(self, core: int, call_id: int, compiled: Compiled) -> None:
        """In the compiling thread, or at once."""
        error = compiled.exception()
        self._answer(core, GrammarPrepared(call_id, "" if error is None else str(error) or type(error).__name__))

    def _answer(self, core: int, answer: GrammarPrepared) -> None:
        self._answers.put((core, answer))
        os.eventfd_write(self.fd, 1)
