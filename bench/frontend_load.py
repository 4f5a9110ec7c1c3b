"""Streams against one HTTP server with as little client as possible: events are counted, not parsed.

Knows the shape of a chat stream and nothing of the server. CPU times are the kernel's, of all threads of a process.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import Sequence
from typing import Any

EVENT_END = b"\n\n"
FIRST_TEXT = re.compile(rb'"content":"[^"]')
LAST_EVENT = b"data: [DONE]"


def cpu_us(pid: int) -> float:
    """Time on a processor of all threads of a process, user and system, in microseconds."""
    total = 0
    for thread in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{thread}/schedstat") as file:
            total += int(file.read().split()[0])
    return total / 1000


class Call(asyncio.Protocol):
    """One call on its own connection. `num_events` grows while it runs; `done` ends it."""

    def __init__(self, request: bytes) -> None:
        self.request = request
        self.num_events = 0
        self.head = b""
        self.start_s = self.first_text_s = 0.0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._carry = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.start_s = time.perf_counter()
        transport.write(self.request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self.num_events += (self._carry + data).count(EVENT_END)
        self._carry = data[-1:]
        if not self.first_text_s:
            self.head += data
            if FIRST_TEXT.search(self.head):
                self.first_text_s = time.perf_counter()
        if LAST_EVENT in data or (self.head and b"text/event-stream" not in self.head and data.endswith(b"}")):
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def check(self) -> None:
        """Raises RuntimeError unless the server answered 200."""
        if not self.head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"the server answered {self.head[:400]!r}")


def chat_request(port: int, model: str, content: str, max_tokens: int, **fields: Any) -> bytes:
    """The bytes of a streamed chat call."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": max_tokens,
                       "temperature": 0, "stream": True, **fields}).encode()
    return (b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % (port, len(body))) + body


async def call(port: int, request: bytes) -> Call:
    """A call that has begun."""
    _, made = await asyncio.get_running_loop().create_connection(lambda: Call(request), "127.0.0.1", port)
    return made


async def steady_cost(calls: Sequence[Call], pid: int, first: int, last: int) -> float:
    """CPU of process `pid` per event, in microseconds, from the mean stream's event `first` to event `last`."""

    def events() -> int:
        return sum(one.num_events for one in calls)

    async def reach(count: int) -> tuple[int, float]:
        while events() < count * len(calls):
            if any(one.done.done() for one in calls):
                calls[0].check()
                raise RuntimeError("a stream ended while it was measured")
            await asyncio.sleep(0.02)
        return events(), cpu_us(pid)

    (events_1, cpu_1), (events_2, cpu_2) = await reach(first), await reach(last)
    return (cpu_2 - cpu_1) / (events_2 - events_1)
