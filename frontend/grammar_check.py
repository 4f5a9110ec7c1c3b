"""Tries out a request's grammar before the engine sees it, in a process that may be killed.

A grammar is a small program of a stranger: it may take minutes or gigabytes to compile. The helper process
(grammar_helper.py) starts with the first grammar, ends itself when one takes too long or too much memory, and is
started anew for the next. Answers are remembered. Belongs to one event loop.
"""
from __future__ import annotations

import asyncio
import collections
import contextlib
import hashlib
import struct
import sys
from pathlib import Path

import msgspec

from ipc.errors import OverloadedError, RequestError
from ipc.structured_outputs import StructuredOutputs

TIME_S = 2.0                                    # the helper's own limit, for messages
LATE_S = 2.4                                    # it should have ended by itself
START_S = 30.0
MAX_WAITING = 64
MAX_REMEMBERED = 4096


class GrammarChecker:
    """One per engine client."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()
        self._num_waiting = 0
        self._known: collections.OrderedDict[bytes, str] = collections.OrderedDict()

    async def check(self, spec: StructuredOutputs) -> None:
        """Raises RequestError when the grammar cannot be used, OverloadedError when too many wait to be checked."""
        body = msgspec.msgpack.encode(spec)
        key = hashlib.blake2b(body, digest_size=16).digest()
        problem = self._known.get(key)
        if problem is None:
            if self._num_waiting >= MAX_WAITING:
                raise OverloadedError(f"{MAX_WAITING} grammars wait to be checked; try again in a moment")
            self._num_waiting += 1
            try:
                async with self._lock:
                    problem = self._known.get(key)
                    if problem is None:
                        problem = self._known[key] = await self._ask(body)
            finally:
                self._num_waiting -= 1
            while len(self._known) > MAX_REMEMBERED:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(key)
        if problem:
            raise RequestError(f"structured_outputs.{spec.kind}: {problem}", "structured_outputs")

    async def _ask(self, body: bytes) -> str:
        """What is wrong with it; empty: nothing."""
        process = await self._start()
        try:
            answer = await asyncio.wait_for(_exchange(process, body), LATE_S)
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            await self.close()
            return (f"it takes more than {TIME_S:g} s or 64 MB to compile; make it smaller: fewer alternatives, "
                    "shorter repetitions")
        except BaseException:                   # cancelled with an answer on its way, which nobody would read
            await self.close()
            raise
        return answer

    async def _start(self) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        process = self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "frontend.grammar_helper", stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
            cwd=Path(__file__).resolve().parent.parent)
        warm_up = msgspec.msgpack.encode(StructuredOutputs(choice=["a"]))
        try:                                    # the start is not part of a grammar's time
            await asyncio.wait_for(_exchange(process, warm_up), START_S)
        except BaseException as error:
            await self.close()
            if isinstance(error, (TimeoutError, OSError, asyncio.IncompleteReadError)):
                raise OverloadedError("the process that checks grammars did not start; try again") from error
            raise
        return process

    async def close(self) -> None:
        """End the helper. Idempotent; the next check starts another."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()             # its pipes are closed


async def _exchange(process: asyncio.subprocess.Process, body: bytes) -> str:
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("the helper has no pipes")
    process.stdin.write(struct.pack("<I", len(body)) + body)
    await process.stdin.drain()
    (size,) = struct.unpack("<I", await process.stdout.readexactly(4))
    return (await process.stdout.readexactly(size)).decode()
