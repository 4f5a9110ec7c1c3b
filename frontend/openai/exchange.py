"""One HTTP request and its answer, over ASGI's receive and send.

Owns what must be right once: limits while reading, the request id, the headers of every answer, one writer at a time,
keep-alive comments, and the watch for a client that leaves.
"""
from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
import urllib.parse
from collections.abc import AsyncGenerator
from typing import Any, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from frontend.http_push import PUSH, ChunkForm, Push
from frontend.openai import protocol, sse
from frontend.openai.dialect import OPENAI, Dialect
from frontend.openai.errors import ClientDisconnectedError, UnsupportedMediaTypeError, describe
from frontend.openai.limits import (
    Limits,
    check_body_bytes,
    check_header_bytes,
    check_json_depth,
    checked_cache_salt,
    checked_request_id,
)
from frontend.openai.protocol import GenerationRequest, NeutralValues
from frontend.request_context import RequestContext

R = TypeVar("R", bound=GenerationRequest)
S = TypeVar("S", bound=msgspec.Struct)

logger = logging.getLogger(__name__)

LINGER_S = 1.0                                  # how long the rest of a refused body is read and thrown away


class Exchange:
    """Handlers read the body, then either `reply` once or `write` events and `end`."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, limits: Limits) -> None:
        self.scope = scope
        self.limits = limits
        self.request_id = secrets.token_hex(16)
        self.dialect: Dialect = OPENAI                  # how errors are written
        self.caller = ""                                # stands for the caller's API key; "": no keys are configured
        self.cache_owner = ""                           # whose prefixes may be reused; "": everybody's
        self.headers: list[tuple[bytes, bytes]] = []    # of the answer, whatever it will be
        self.returns_timings = False                    # the answer says where its time went
        self.is_stream = False                          # the caller asked for events
        self.is_started = False                         # status and headers are out
        self.is_ended = False
        self.is_body_read = False
        self.disconnected = False
        self._receive = receive
        self._send = send
        self._push: Push | None = scope.get("extensions", {}).get(PUSH)    # under another server there is none
        self._lock = asyncio.Lock()                     # the handler and the keep-alive comments both write
        self._arrival_s = self._last_sent_s = time.monotonic()

    def elapsed_s(self) -> float:
        """Seconds since the request arrived."""
        return time.monotonic() - self._arrival_s

    def context(self) -> RequestContext:
        """For the engine request that this one becomes."""
        trace = [(self.header(name) or b"").decode("latin-1") for name in (b"traceparent", b"tracestate")]
        return RequestContext(self._arrival_s, *trace)

    def header(self, name: bytes) -> bytes | None:
        """The first value of a request header; `name` in lower case."""
        return next((value for key, value in self.scope["headers"] if key == name), None)

    def check_headers(self) -> None:
        """Size, then the caller's request id. Raises RequestError."""
        check_header_bytes(self.scope["headers"], self.limits.max_header_bytes)
        value = self.header(b"x-request-id")
        if value is not None:
            self.request_id = checked_request_id(value, self.limits.max_request_id_chars)

    async def read_request(self, cls: type[R]) -> tuple[R, int]:
        """The decoded body and its size. Fields nobody documents are named in a header of the answer."""
        body = await self.read_json()
        request, ignored = protocol.decode(cls, body)
        self._take_request_id(request.request_id)
        if request.return_timings is not None:
            self.returns_timings = request.return_timings
        if ignored:
            self.headers.append((b"x-ignored-fields", protocol.note_ignored(self.request_id, cls, ignored)))
        return request, len(body)

    async def read_fields(self, cls: type[S], neutral: NeutralValues) -> tuple[S, int]:
        """`read_request` for bodies of another family, with their own table of fields not supported."""
        body = await self.read_json()
        request, ignored = protocol.decode_fields(cls, body, neutral)
        self._take_request_id(getattr(request, "request_id", None))
        if ignored:
            self.headers.append((b"x-ignored-fields", protocol.note_ignored(self.request_id, cls, ignored)))
        return request, len(body)

    def _take_request_id(self, asked: str | None) -> None:
        """The body's, unless a header brought one. Raises RequestError."""
        if asked is not None and self.header(b"x-request-id") is None:
            self.request_id = checked_request_id(asked.encode(), self.limits.max_request_id_chars, "request_id")

    def cache_salt(self, asked: str | None = None) -> str:
        """What keys the prefix cache of this request: callers with different keys, or who ask for different salts,
        never share blocks. A caller cannot name another one's. Raises RequestError."""
        salt = "" if asked is None else checked_cache_salt(asked)
        return f"{self.cache_owner}/{salt}" if self.cache_owner or salt else ""

    def query(self) -> dict[str, str]:
        """The parameters behind the question mark; of a repeated one the last."""
        return dict(urllib.parse.parse_qsl(self.scope["query_string"].decode("latin-1"), keep_blank_values=True))

    def path_param(self, name: str) -> str:
        """A part of the path, as the route names it."""
        params: dict[str, Any] = self.scope["path_params"]
        return str(params[name])

    async def read_json(self) -> bytes:
        """The whole body, within all limits, not yet decoded.

        A body that names another type is refused: a web page can post such a body to localhost without asking, but no
        JSON. Raises RequestError, ClientDisconnectedError.
        """
        kind = (self.header(b"content-type") or b"application/json").split(b";")[0].strip().lower()
        if kind != b"application/json" and not kind.endswith(b"+json"):
            raise UnsupportedMediaTypeError(f"content-type is {kind[:80].decode('ascii', 'replace')}; "
                                            "send application/json", "content-type")
        announced = self.header(b"content-length")
        if announced is not None and announced.isdigit():
            check_body_bytes(int(announced), self.limits.max_body_bytes)
        body = bytearray()
        while not self.is_body_read:
            body += await self._receive_body()
            check_body_bytes(len(body), self.limits.max_body_bytes)
        content = bytes(body)
        check_json_depth(content, self.limits.max_json_depth)
        return content

    async def _receive_body(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.disconnected = True
            raise ClientDisconnectedError
        self.is_body_read = not message.get("more_body", False)
        body: bytes = message.get("body", b"")
        return body

    async def reply(self, status: int, body: bytes, headers: list[tuple[bytes, bytes]] | None = None, *,
                    content_type: bytes = b"application/json") -> None:
        """The whole answer at once."""
        self.is_started = True
        await self._send({"type": "http.response.start", "status": status, "headers": [
            (b"content-type", content_type), (b"content-length", b"%d" % len(body)),
            (b"x-request-id", self.request_id.encode("ascii")), *self.headers, *(headers or [])]})
        if not self.is_body_read and status >= 400:
            # A socket closed with unread data sends a reset, and the client may lose the answer with it: read on, a
            # little, with the answer already out.
            await self._send({"type": "http.response.body", "body": body, "more_body": True})
            await self._linger()
            body = b""
        await self._send({"type": "http.response.body", "body": body, "more_body": False})
        self.is_ended = True

    async def reply_empty(self, headers: list[tuple[bytes, bytes]]) -> None:
        """204, which has neither a body nor a length."""
        self.is_started = self.is_ended = True
        await self._send({"type": "http.response.start", "status": 204, "headers": [
            (b"x-request-id", self.request_id.encode("ascii")), *self.headers, *headers]})
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _linger(self) -> None:
        with contextlib.suppress(TimeoutError, ClientDisconnectedError):
            async with asyncio.timeout(LINGER_S):
                while not self.is_body_read:
                    await self._receive_body()

    async def write(self, data: bytes, *, more: bool = True) -> None:
        """Bytes of a stream; the first ones bring the headers. Waits while the client reads slowly."""
        if self._push is not None:
            self._push.hold()
        try:
            async with self._lock:
                if not self.is_started:
                    self.is_started = True
                    await self._send({"type": "http.response.start", "status": 200, "headers": [
                        (b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"),
                        (b"x-accel-buffering", b"no"), (b"x-request-id", self.request_id.encode("ascii")),
                        *self.headers]})
                await self._send({"type": "http.response.body", "body": data, "more_body": more})
                self.is_ended = not more
                self._last_sent_s = time.monotonic()
        finally:
            if self._push is not None:
                self._push.release()

    @property
    def can_push(self) -> bool:
        """Whether `push` would write: the stream has begun, nobody else is writing, and the client keeps up."""
        return self._push is not None and self._push.is_open

    def push(self, data: bytes) -> bool:
        """`write` without waiting, from any callback of the loop. False: nothing was written, see `can_push`."""
        if self._push is None or not self._push(data):
            return False
        self._last_sent_s = time.monotonic()
        return True

    def push_form(self, head: bytes, tail: bytes) -> ChunkForm | None:
        """For many small pieces that differ in their middle; its clock is time.monotonic_ns. None: use `push`."""
        return None if self._push is None else self._push.form(head, tail)

    def _silent_s(self) -> float:
        """Seconds since something was sent."""
        last_s = self._last_sent_s if self._push is None else max(self._last_sent_s, self._push.last_ns / 1e9)
        return time.monotonic() - last_s

    async def end(self, data: bytes) -> None:
        """The last bytes of a stream."""
        await self.write(data, more=False)

    async def fail(self, exc: BaseException) -> None:
        """Answer with an error: as a response, or inside the stream when that has begun."""
        reply = describe(exc)
        if not reply.is_expected:
            logger.error("%s: %s %s failed", self.request_id, self.scope["method"], self.scope["path"], exc_info=exc)
        if not self.is_started:
            await self.reply(reply.status, self.dialect.body(reply.info), reply.headers)
        elif self.is_stream and not self.is_ended:
            await self.end(self.dialect.events(reply.info))

    @contextlib.asynccontextmanager
    async def watch(self) -> AsyncGenerator[None, None]:
        """Runs the block while watching the connection: a client that leaves cancels it, and it ends with
        ClientDisconnectedError.

        In a stream a comment goes out whenever nothing else did for `keep_alive_s`, also before the first token:
        proxies close silent connections.
        """
        owner = asyncio.current_task()
        if owner is None:
            raise RuntimeError("watch() needs a running task")

        task = asyncio.create_task(self._watch(owner))
        try:
            yield
        except asyncio.CancelledError:
            # Our own cancel becomes a named error; one from outside (shutdown) goes on.
            if self.disconnected and owner.uncancel() == 0:
                raise ClientDisconnectedError from None
            raise
        finally:
            task.cancel()

    async def _watch(self, owner: asyncio.Task[object]) -> None:
        """Cancels `owner` when the client is gone; writes comments into silent streams."""
        with contextlib.suppress(OSError):              # some servers report a closed connection so
            await self._until_gone()
        self.disconnected = True
        owner.cancel()

    async def _until_gone(self) -> None:
        silence_s = self.limits.keep_alive_s
        while True:
            wait_s = None
            if self.is_stream:
                wait_s = silence_s - self._silent_s()
                if wait_s <= 0:                         # due, but the handler is writing to a slow client
                    wait_s = silence_s
            try:
                async with asyncio.timeout(wait_s):
                    if (await self._receive())["type"] == "http.disconnect":
                        return
            except TimeoutError:
                if self._silent_s() >= silence_s and not self._lock.locked():
                    await self.write(sse.KEEP_ALIVE)
