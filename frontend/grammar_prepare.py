"""Has the worker compile a checked grammar before its request is sent, so that no step of others waits for it.

What compiles while a forward pass runs is left to the first step that needs it, which saves the two steps that asking
takes. The worker keeps what it compiles, so each grammar is asked for once, as long as it surely has not been pushed
out and the worker is the same. Nothing depends on it: what the worker has lost it compiles again. Belongs to one event
loop.
"""
from __future__ import annotations

import asyncio
import collections
import contextlib
import hashlib

import msgspec

from frontend.engine_client import EngineClient
from ipc.errors import EngineDeadError, RequestError
from ipc.structured_outputs import COMPILED_BYTES, StructuredOutputs, compiled_bytes

CHEAP_S = 0.002                                 # CPU of the helper: less than a step's forward pass takes
MAX_BYTES = COMPILED_BYTES // 2                 # other frontends prepare grammars too


class GrammarPreparer:
    """One per engine client."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._num_workers = client.num_workers  # when the known ones were prepared
        self._known: collections.OrderedDict[bytes, tuple[asyncio.Task[str], int]] = collections.OrderedDict()
        self._bytes = 0

    async def prepare(self, spec: StructuredOutputs, seconds: float) -> None:
        """Returns when the worker has it compiled, or can soon; `seconds`: CPU that this takes, about. Raises
        RequestError when it does not compile there."""
        if self._client.num_workers != self._num_workers:
            self._num_workers = self._client.num_workers
            self._known.clear()
            self._bytes = 0
        if seconds < CHEAP_S and self._known:   # the very first has the worker load its vocabulary
            return
        body = msgspec.msgpack.encode(spec)
        key = hashlib.blake2b(body, digest_size=16).digest()
        if key in self._known:
            self._known.move_to_end(key)
        else:
            size = compiled_bytes(body)
            self._known[key] = asyncio.create_task(self._ask(key, body)), size
            self._bytes += size
            while self._bytes > MAX_BYTES and len(self._known) > 1:
                self._bytes -= self._known.popitem(last=False)[1][1]
        problem = await asyncio.shield(self._known[key][0])     # others may wait for the same
        if problem:
            raise RequestError(f"structured_outputs.{spec.kind}: {problem}", "structured_outputs")

    async def _ask(self, key: bytes, body: bytes) -> str:
        """Why it does not compile; empty: it does, or nobody can tell now."""
        with contextlib.suppress(EngineDeadError, ValueError):  # no worker just now; the request waits for the next
            return str((await self._client.command("prepare_grammar", grammar=body))["problem"])
        known = self._known.get(key)
        if known is not None and known[0] is asyncio.current_task():
            del self._known[key]
            self._bytes -= known[1]
        return ""
