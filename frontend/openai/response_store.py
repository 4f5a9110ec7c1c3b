"""Responses that may be asked for again: in memory, bounded in number and bytes, one caller's apart from another's.

The oldest finished one goes first; a running one never does. A restart of the server forgets all. Knows no HTTP.
"""
from __future__ import annotations

import asyncio
import dataclasses
from collections import OrderedDict

import msgspec

from frontend.openai.errors import ResponseNotFoundError
from frontend.openai.responses_protocol import ResponseBody
from ipc.errors import OverloadedError


@dataclasses.dataclass(slots=True)
class StoredResponse:
    """One response and what led to it."""
    body: ResponseBody
    conversation: bytes                         # JSON list of messages, with the answer once it is complete
    task: asyncio.Task[None] | None = None      # of one that runs in the background
    size: int = 0                               # bytes counted for it


class ResponseStore:
    """Keyed by the caller and the id: nobody can read or cancel another caller's responses."""

    def __init__(self, max_entries: int = 1000, max_bytes: int = 64 << 20, max_running: int = 128) -> None:
        self.max_entries, self.max_bytes, self.max_running = max_entries, max_bytes, max_running
        self._entries: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def check_running(self) -> None:
        """Raises OverloadedError when another background response would be one too many."""
        running = sum(1 for entry in self._entries.values() if entry.task is not None)
        if running >= self.max_running:
            raise OverloadedError(f"{running} background responses are running; at most {self.max_running}. Retry "
                                  "later, or send background: false", 5.0)

    def put(self, caller: str, entry: StoredResponse) -> None:
        """Keeps it, or keeps it anew after it changed."""
        key = (caller, entry.body.id)
        self._num_bytes -= entry.size if key in self._entries else 0
        entry.size = len(entry.conversation) + len(msgspec.json.encode(entry.body))
        self._num_bytes += entry.size
        self._entries[key] = entry
        self._evict()

    def get(self, caller: str, response_id: str, param: str = "response_id") -> StoredResponse:
        """Raises ResponseNotFoundError."""
        entry = self._entries.get((caller, response_id))
        if entry is None:
            raise ResponseNotFoundError(f"there is no response {response_id[:100]!r}; this server keeps the last "
                                        f"{self.max_entries} until it restarts, and none with store: false", param)
        return entry

    def delete(self, caller: str, response_id: str) -> None:
        """Forgets it, and ends it if it runs. Raises ResponseNotFoundError."""
        entry = self.get(caller, response_id)
        if entry.task is not None:
            entry.task.cancel()
        self._remove((caller, response_id))

    def _remove(self, key: tuple[str, str]) -> None:
        self._num_bytes -= self._entries.pop(key).size

    def _evict(self) -> None:
        if len(self._entries) <= self.max_entries and self._num_bytes <= self.max_bytes:
            return
        for key in [key for key, entry in self._entries.items() if entry.task is None]:
            if len(self._entries) <= self.max_entries and self._num_bytes <= self.max_bytes:
                return
            self._remove(key)
