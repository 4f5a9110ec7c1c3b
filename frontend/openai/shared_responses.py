"""Stored responses, whichever API server of the engine made them: its own first, then the others are asked.

Each response stays with the process that made it, which alone changes it. Knows no HTTP.
"""
from __future__ import annotations

import asyncio

import msgspec

from frontend.openai.errors import ResponseNotFoundError
from frontend.openai.response_store import ResponseStore, StoredResponse
from frontend.peers import Peers

QUESTION = "response"
READ, CANCEL, DELETE = "read", "cancel", "delete"


class FoundResponse(msgspec.Struct, frozen=True, array_like=True):
    """What others may know of one. `body`, `conversation`: JSON."""
    id: str
    status: str
    background: bool
    body: bytes
    conversation: bytes


class SharedResponses:
    """All stored responses. `store`: those of this process; `peers`: the other processes, where there are such."""

    def __init__(self, store: ResponseStore, peers: Peers | None = None) -> None:
        self.store = store
        self._peers = peers
        if peers is not None:
            peers.answers[QUESTION] = self._answer

    async def read(self, caller: str, response_id: str, param: str = "response_id") -> FoundResponse:
        """Raises ResponseNotFoundError, as all of these do."""
        return await self._find(READ, caller, response_id, param)

    async def cancel(self, caller: str, response_id: str) -> FoundResponse:
        """Ends it if it runs in the background; the state it has then."""
        return await self._find(CANCEL, caller, response_id)

    async def delete(self, caller: str, response_id: str) -> None:
        """Forgets it, and ends it if it runs."""
        await self._find(DELETE, caller, response_id)

    async def _find(self, action: str, caller: str, response_id: str, param: str = "response_id") -> FoundResponse:
        try:
            return await self._here(action, caller, response_id, param)
        except ResponseNotFoundError:
            if self._peers is None:
                raise
            words = " ".join([QUESTION, action, caller.encode().hex() or "-", response_id.encode().hex() or "-"])
            for answer in await self._peers.ask(words):
                if answer:
                    return msgspec.msgpack.decode(answer, type=FoundResponse)
            raise

    async def _answer(self, arguments: list[str]) -> bytes:
        """Of one process to another; b"": it has none of that id."""
        action, *texts = arguments
        caller, response_id = (bytes.fromhex(text.replace("-", "")).decode() for text in texts)
        try:
            return msgspec.msgpack.encode(await self._here(action, caller, response_id))
        except ResponseNotFoundError:
            return b""

    async def _here(self, action: str, caller: str, response_id: str, param: str = "response_id") -> FoundResponse:
        entry = self.store.get(caller, response_id, param)
        if action == CANCEL and entry.task is not None:
            task = entry.task
            task.cancel()
            await asyncio.wait([task])
            await asyncio.sleep(0)              # its end is noted by a callback
        elif action == DELETE:
            self.store.delete(caller, response_id)
        return _found(entry)


def _found(entry: StoredResponse) -> FoundResponse:
    body = entry.body
    return FoundResponse(body.id, body.status, body.background, msgspec.json.encode(body), entry.conversation)
