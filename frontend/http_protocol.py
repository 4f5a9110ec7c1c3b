"""One connection: uvicorn's httptools protocol, with limits, and with what it leaves out of HTTP.

Those are answers for HTTP/1.0, refusals as JSON, and going on in HTTP/1.1 when a client offers another protocol. Knows
no routes.
"""
from __future__ import annotations

import asyncio
import json
import logging

import httptools
from starlette.types import Message
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from frontend.http_push import PUSH, BorrowedSocket, Outbox, Push

logger = logging.getLogger(__name__)

MAX_HEADER_BYTES = 16 << 10
REQUEST_READ_S = 60             # from the first byte of a request (or the connection's begin) to its last
LINGER_S = 2                    # after a refusal; what the client still sends is read for so long, and thrown away
LINGERING = 64                  # connections at most that may
SLOW_READER_S = 30              # in which a client must take some of what is buffered for it (64 KiB and the kernel's)


def _refusal(status: str, kind: str, text: str, more: str = "") -> bytes:
    """A whole answer that closes the connection: for what the application never sees."""
    body = json.dumps({"error": {"message": text, "type": kind, "param": None, "code": int(status[:3])}}).encode()
    return (f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\n{more}content-length: {len(body)}\r\n"
            "connection: close\r\n\r\n").encode() + body


_TOO_LARGE = _refusal("431 Request Header Fields Too Large", "HeadersTooLargeError",
                      f"the request headers have more than {MAX_HEADER_BYTES} bytes")
_TOO_MANY = _refusal("503 Service Unavailable", "ServiceUnavailableError",
                     "too many connections are in use; retry later, or raise --max-connections", "retry-after: 1\r\n")
_TOO_SLOW = _refusal("408 Request Timeout", "RequestTimeoutError",
                     f"the request took more than {REQUEST_READ_S} s to arrive")
_MALFORMED = _refusal("400 Bad Request", "BadRequestError", "what arrived is no HTTP/1.1 request")


class LimitedHttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits on what a client may hold without using it.

    Header bytes are counted while they arrive: the parser itself would collect them without end. A request that does
    not arrive whole in REQUEST_READ_S is refused, also one whose first byte never comes. A client that takes nothing of
    its answer for SLOW_READER_S is cut off, which ends its requests; until then what is new for it coalesces in its
    stream. A refusal ends our side only, for a while: a connection that is closed while bytes arrive is reset, which
    may take the answer from the client. When one connection more than allowed is made, the one that has been idle
    longest is closed; the new one is refused only when all are in use.
    """

    max_connections = 0         # 0: no limit; set by a subclass, for uvicorn makes the instances
    outbox: Outbox              # the server's; as above
    request_read_s = REQUEST_READ_S
    slow_reader_s = SLOW_READER_S
    _header_bytes = 0           # received while a head was awaited; 0 once it is complete
    _in_headers = True          # what comes next is a head, not a body
    _reading: asyncio.TimerHandle | None = None         # runs from the connection or a request's first byte to its last
    _stalled: asyncio.TimerHandle | None = None         # runs while the client does not take what is written
    _idle_since = 0.0
    _is_lingering = False                               # refused: what arrives is thrown away
    _num_lingering = 0                                  # of the class
    _socket: BorrowedSocket | None = None               # once an answer asked for it
    _is_retold = False                                  # the parser reads a head that it has read before

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._pushes: list[Push] = []                   # of answers that are not complete
        self._expect_request()
        if self.max_connections and len(self.connections) > self.max_connections and not self._make_room():
            self._refuse(_TOO_MANY)

    def connection_lost(self, exc: Exception | None) -> None:
        LimitedHttpProtocol._num_lingering -= self._is_lingering
        _cancel(self._reading)
        _cancel(self._stalled)
        super().connection_lost(exc)
        for push in self._pushes:
            push.lose()
        if self._socket is not None:
            self._socket.detach()               # the transport closes it when this returns

    def _borrow_socket(self) -> BorrowedSocket | None:
        if self._socket is None:
            self._socket = BorrowedSocket.of(self.transport)
        return self._socket

    @property
    def is_idle(self) -> bool:
        """No request of it is being answered, or sends its body; headers may be half here."""
        return self.cycle is None or self.cycle.response_complete

    def _make_room(self) -> bool:
        idle = [c for c in self.connections
                if isinstance(c, LimitedHttpProtocol) and c is not self and c.is_idle and not c.transport.is_closing()]
        if idle:
            min(idle, key=lambda connection: connection._idle_since).transport.close()
        return bool(idle)

    def _expect_request(self) -> None:
        self._idle_since = self.loop.time()
        _cancel(self._reading)
        self._reading = self.loop.call_later(self.request_read_s, self._on_slow_request)

    def _on_slow_request(self) -> None:
        if self.flow.read_paused or self._is_earlier_open:
            self._expect_request()              # it is we who do not read on, or answer an earlier request still
        elif self.is_idle and not self._header_bytes:
            self.transport.close()              # it never said anything
        else:
            self._refuse(_TOO_SLOW)

    @property
    def _is_earlier_open(self) -> bool:
        """What would be written now would stand inside the answer to an earlier request, or be taken for it."""
        return bool(self.pipeline) or not self.is_idle and (self.cycle.response_started or not self.cycle.more_body)

    def _refuse(self, answer: bytes) -> None:
        if self.transport.is_closing() or self._is_lingering:
            return
        if self._is_earlier_open:
            self.transport.close()
            return
        self.transport.write(answer)
        if LimitedHttpProtocol._num_lingering < LINGERING and self.transport.can_write_eof():
            self._is_lingering = True
            LimitedHttpProtocol._num_lingering += 1
            self.transport.write_eof()
            if self.cycle is not None and not self.cycle.response_complete:
                self.cycle.disconnected = True  # it reads no more, and writes nothing behind our end
                self.cycle.message_event.set()
            _cancel(self._reading)
            self._reading = self.loop.call_later(LINGER_S, self.transport.close)
        else:
            self.transport.close()

    def on_message_begin(self) -> None:
        if self._is_retold:
            return
        self._expect_request()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._is_retold:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_retold:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._is_retold:
            return
        self._in_headers = False
        self._header_bytes = 0
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is self.scope:
            self._pushes = [push for push in self._pushes if not push.is_ended]
            self._pushes.append(Push(self.cycle, self._borrow_socket, self.outbox))
            self.scope["extensions"] = {PUSH: self._pushes[-1]}  # type: ignore[dict-item]

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade() and self._framing():
            return                              # its body is still to come: see _decline_upgrade
        self._in_headers = True
        _cancel(self._reading)
        super().on_message_complete()

    def _framing(self) -> bytes:
        """The header lines that say how long the request's body is; empty: it has none."""
        return b"".join(b"%b: %b\r\n" % (name, value) for name, value in self.headers
                        if name == b"transfer-encoding" or name == b"content-length" and value.strip(b"0"))

    def _decline_upgrade(self) -> None:
        """The client offered to go on in another protocol, and a server may go on in HTTP/1.1 (Java's client offers
        HTTP/2 with every request). The parser takes the head for the end of HTTP, so a new one is told how the body is
        framed, and gets it.
        """
        framing = self._framing()
        self.parser = httptools.HttpRequestParser(self)
        if framing:
            self._is_retold = True
            self.parser.feed_data(b"POST / HTTP/1.1\r\n" + framing + b"\r\n")
            self._is_retold = False

    def on_response_complete(self) -> None:
        self._idle_since = self.loop.time()
        super().on_response_complete()

    def data_received(self, data: bytes) -> None:
        if self._is_lingering:
            return
        self._unset_keepalive_if_required()
        if self._in_headers:
            self._header_bytes += len(data)     # all of it, until a head in it is complete
        self._parse(data)
        if self._in_headers and self._header_bytes > MAX_HEADER_BYTES:
            self._refuse(_TOO_LARGE)

    def _parse(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0]:]
                self._decline_upgrade()
            except httptools.HttpParserError as error:
                logger.info("%s sent what is no HTTP request (%s)", self.client[0] if self.client else "?", error)
                self._refuse(_MALFORMED)
                return

    def pause_writing(self) -> None:
        super().pause_writing()
        self._settle()
        _cancel(self._stalled)
        self._stalled = self.loop.call_later(self.slow_reader_s, self._cut_off)

    def resume_writing(self) -> None:
        _cancel(self._stalled)
        super().resume_writing()
        self._settle()

    def _settle(self) -> None:
        for push in self._pushes:
            push.settle()

    def _cut_off(self) -> None:
        logger.warning("a client at %s took less than %d bytes in %g s; its connection is closed and its requests end",
                       self.client[0] if self.client else "?", self.transport.get_write_buffer_size(),
                       self.slow_reader_s)
        self.transport.abort()


class UntilClosed:
    """ASGI's `send` for clients of HTTP/1.0, who know no chunks: its end is that of the connection."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._is_unframed = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._is_unframed = all(name.lower() != b"content-length" for name, _ in message["headers"])
            if self._is_unframed:
                self._cycle.chunked_encoding = False
        elif self._is_unframed:
            self._cycle.expected_content_length = len(message.get("body", b""))
        await self._cycle.send(message)  # type: ignore[arg-type]


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
