"""Tries out a request's grammar before the engine sees it, in a process that may be killed.

A grammar is a small program of a stranger: it may take minutes or gigabytes to compile. The helper
(grammar_helper.py) starts with the first grammar and ends what takes too long or too much memory; a helper that should
not answer is killed and started anew. Answers are remembered. Belongs to one event loop, which neither starts nor reaps
the helper: threads do.
"""
from __future__ import annotations

import asyncio
import collections
import hashlib
import os
import signal
import socket
import struct
import subprocess
from typing import NamedTuple

import msgspec

from ipc.child import environment, python_command
from ipc.errors import OverloadedError, RequestError
from ipc.priority import give_way
from ipc.structured_outputs import CHECK_ANSWER, StructuredOutputs

LATE_S = 2.4                                    # of the clock; the helper itself counts CPU
START_S = 30.0
MAX_WAITING = 64
MAX_REMEMBERED = 4096


class Tried(NamedTuple):
    """What came of a grammar."""
    problem: str                                # empty: none
    seconds: float                              # of CPU


class Helper:
    """One process, its child, and the line to them."""

    def __init__(self, process: subprocess.Popen[bytes], line: socket.socket) -> None:
        self.process, self._line = process, line
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    @staticmethod
    def spawn() -> Helper:
        """Takes milliseconds: not for the loop's thread. It has a low priority from the beginning: its imports
        are most of what it computes."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(python_command("frontend.grammar_helper"), stdin=theirs.fileno(),
                                       stdout=theirs.fileno(), stderr=subprocess.DEVNULL, env=environment(),
                                       process_group=0)
        give_way(process.pid)
        return Helper(process, ours)

    async def exchange(self, body: bytes) -> Tried:
        """Raises OSError or IncompleteReadError when it ends meanwhile."""
        if self._streams is None:
            self._streams = await asyncio.open_unix_connection(sock=self._line)
        reader, writer = self._streams
        writer.write(struct.pack("<I", len(body)) + body)
        await writer.drain()
        size, seconds = CHECK_ANSWER.unpack(await reader.readexactly(CHECK_ANSWER.size))
        return Tried((await reader.readexactly(size)).decode(), seconds)

    def kill(self) -> None:
        """Both processes. `process.wait` then returns soon."""
        if self._streams is not None:
            self._streams[1].transport.abort()
        else:
            self._line.close()
        if self.process.poll() is None:         # not reaped: the number is still its group's
            os.killpg(self.process.pid, signal.SIGKILL)


class GrammarChecker:
    """One per engine client."""

    def __init__(self) -> None:
        self._helper: Helper | None = None
        self._lock = asyncio.Lock()
        self._num_waiting = 0
        self._known: collections.OrderedDict[bytes, Tried] = collections.OrderedDict()

    async def check(self, spec: StructuredOutputs) -> float:
        """Seconds of CPU that it takes to compile, about. Raises RequestError when the grammar cannot be used,
        OverloadedError when too many wait to be checked, or the machine is too busy."""
        body = msgspec.msgpack.encode(spec)
        key = hashlib.blake2b(body, digest_size=16).digest()
        tried = self._known.get(key)
        if tried is None:
            if self._num_waiting >= MAX_WAITING:
                raise OverloadedError(f"{MAX_WAITING} grammars wait to be checked; try again in a moment")
            self._num_waiting += 1
            try:
                async with self._lock:
                    tried = self._known.get(key)
                    if tried is None:
                        tried = self._known[key] = await self._ask(body)
            finally:
                self._num_waiting -= 1
            while len(self._known) > MAX_REMEMBERED:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(key)
        if tried.problem:
            raise RequestError(f"structured_outputs.{spec.kind}: {tried.problem}", "structured_outputs")
        return tried.seconds

    async def _ask(self, body: bytes) -> Tried:
        """A helper that was killed by somebody says nothing about the grammar: another one tries it."""
        for _ in range(2):
            helper = await self._start()
            try:
                return await asyncio.wait_for(helper.exchange(body), LATE_S)
            except TimeoutError:
                await self.close()
                break
            except (OSError, asyncio.IncompleteReadError):
                await self.close()
            except BaseException:               # cancelled with an answer on its way, which nobody would read
                await self.close()
                raise
        raise OverloadedError(f"the grammar could not be checked within {LATE_S:g} s, of which it got less than 2 of "
                              "CPU; try again in a moment, or make it smaller")

    async def _start(self) -> Helper:
        if self._helper is not None and self._helper.process.poll() is None:
            return self._helper
        await self.close()
        spawning = asyncio.create_task(asyncio.to_thread(Helper.spawn))
        try:
            helper = self._helper = await asyncio.shield(spawning)
        except asyncio.CancelledError:
            self._helper = await spawning
            await self.close()
            raise
        warm_up = msgspec.msgpack.encode(StructuredOutputs(choice=["a"]))
        try:                                    # the start is not part of a grammar's time
            await asyncio.wait_for(helper.exchange(warm_up), START_S)
        except BaseException as error:
            await self.close()
            if isinstance(error, (TimeoutError, OSError, asyncio.IncompleteReadError)):
                raise OverloadedError("the process that checks grammars did not start; try again") from error
            raise
        return helper

    async def close(self) -> None:
        """End the helper. Idempotent; the next check starts another."""
        helper, self._helper = self._helper, None
        if helper is None:
            return
        helper.kill()
        try:
            await asyncio.to_thread(helper.process.wait)
        except RuntimeError:                    # the interpreter is exiting and starts no threads any more
            helper.process.wait()
