"""uvicorn with httptools, inside a loop that is already running, on a socket that is already bound.

The supervisor binds the port and passes the file descriptor, so a taken port is an early error and this process can be
restarted without losing it. Signals belong to the process's main(); this server installs no handlers. Knows ASGI, not
what is served.
"""
from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import Generator
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from frontend.http_push import PUSH, BorrowedSocket, Outbox, Push
from ipc.errors import ConfigError

logger = logging.getLogger(__name__)

MAX_HEADER_BYTES = 16 << 10
IDLE_CONNECTION_S = 65          # longer than the idle time of common client pools, so that they close first
BACKLOG = 2048
DATE_INTERVAL_S = 1.0           # between updates of the date header
MIN_GRACE_S = 0.25
REQUEST_READ_S = 60             # from the first byte of a request (or the connection's begin) to its last
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


class LimitedHttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits on what a client may hold without using it.

    Header bytes are counted while they arrive: the parser itself would collect them without end. A request that does
    not arrive whole in REQUEST_READ_S is refused, also one whose first byte never comes. A client that takes nothing of
    its answer for SLOW_READER_S is cut off, which ends its requests; until then what is new for it coalesces in its
    stream. When one connection more than allowed is made, the one that has been idle longest is closed; the new one is
    refused only when all are in use.
    """

    max_connections = 0         # 0: no limit; set by a subclass, for uvicorn makes the instances
    outbox: Outbox              # the server's; as above
    request_read_s = REQUEST_READ_S
    slow_reader_s = SLOW_READER_S
    _header_bytes = 0           # received since the last complete header; data of a started body does not count
    _in_headers = True
    _reading: asyncio.TimerHandle | None = None         # runs from the connection or a request's first byte to its last
    _stalled: asyncio.TimerHandle | None = None         # runs while the client does not take what is written
    _idle_since = 0.0
    _socket: BorrowedSocket | None = None               # once an answer asked for it

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._pushes: list[Push] = []                   # of answers that are not complete
        self._expect_request()
        if self.max_connections and len(self.connections) > self.max_connections and not self._make_room():
            self._refuse(_TOO_MANY)

    def connection_lost(self, exc: Exception | None) -> None:
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
        if self.flow.read_paused or self.pipeline or (not self.is_idle and self.cycle.response_started):
            self._expect_request()              # it is we who do not read on, or answer an earlier request still
        elif self.is_idle and not self._header_bytes:
            self.transport.close()              # it never said anything
        else:
            self._refuse(_TOO_SLOW)

    def _refuse(self, answer: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(answer)
            self.transport.close()

    def on_message_begin(self) -> None:
        self._in_headers = True
        self._expect_request()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._header_bytes = 0
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is self.scope:
            self._pushes = [push for push in self._pushes if not push.is_ended]
            self._pushes.append(Push(self.cycle, self._borrow_socket, self.outbox))
            self.scope["extensions"] = {PUSH: self._pushes[-1]}  # type: ignore[dict-item]

    def on_message_complete(self) -> None:
        _cancel(self._reading)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._idle_since = self.loop.time()
        super().on_response_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._in_headers:
            return
        self._header_bytes += len(data)
        if self._header_bytes > MAX_HEADER_BYTES:
            self._refuse(_TOO_LARGE)

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


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


class _Server(uvicorn.Server):
    """uvicorn's server without signal handlers, and with events instead of flags for "listening" and "exit"."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()
        self.exiting = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Signals stay with the process."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then say so."""
        await super().startup(sockets=sockets)
        self.listening.set()

    async def main_loop(self) -> None:
        """Keep the date header right. uvicorn's own loop looks ten times a second whether it should exit."""
        while not self.exiting.is_set():
            await self.on_tick(0)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DATE_INTERVAL_S):
                    await self.exiting.wait()


class HttpServer:
    """One listening server. `start` returns when connections are accepted, `stop` when the last one is gone."""

    def __init__(self, app: ASGIApp, sock: socket.socket, *, max_connections: int = 0, ssl_certfile: str = "",
                 ssl_keyfile: str = "") -> None:
        self._app = app
        self._sock = sock
        self._protocol = type("HttpProtocol", (LimitedHttpProtocol,), {
            "max_connections": max_connections, "outbox": Outbox()})
        self._ssl = {"ssl_certfile": ssl_certfile, "ssl_keyfile": ssl_keyfile or None} if ssl_certfile else {}
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The TCP port."""
        return int(self._sock.getsockname()[1])

    async def start(self) -> None:
        """Accept connections. Raises what the socket raises, and ConfigError for a bad certificate or key."""
        options: dict[str, Any] = {"loop": "none", "ws": "none", "lifespan": "off", "interface": "asgi3", **self._ssl}
        config = uvicorn.Config(self._asgi, http=self._protocol, log_config=None, access_log=False,
                                server_header=False, timeout_keep_alive=IDLE_CONNECTION_S, backlog=BACKLOG, **options)
        if self._ssl:
            try:
                config.load()
            except OSError as error:            # ssl.SSLError is one
                raise ConfigError(f"--ssl-certfile {self._ssl['ssl_certfile']}: the certificate and its key cannot be "
                                  f"loaded: {error}") from error
        self._server = _Server(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[self._sock]))
        listening = asyncio.create_task(self._server.listening.wait())
        await asyncio.wait({self._task, listening}, return_when=asyncio.FIRST_COMPLETED)
        listening.cancel()
        if self._task.done():
            await self._task
            raise RuntimeError("the HTTP server ended before it was listening")

    async def wait_closed(self) -> None:
        """Returns when the server has ended; raises what ended it."""
        if self._task is not None:
            await asyncio.shield(self._task)

    async def stop(self, grace_s: float = 0.0) -> None:
        """Close the port at once and give running requests `grace_s` seconds; those still running then get an error in
        their stream. Safe to call twice."""
        if self._server is None or self._task is None:
            self._sock.close()
            return
        # Idle connections need a moment to close; without it uvicorn would report them as cancelled.
        self._server.config.timeout_graceful_shutdown = max(grace_s, MIN_GRACE_S)  # type: ignore[assignment]
        self._server.exiting.set()
        await asyncio.shield(self._task)
        tasks = list(self._server.server_state.tasks)
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)      # cancelled: they write their last event
        for connection in list(self._server.server_state.connections):
            connection.transport.close()

    async def _asgi(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(asyncio.CancelledError):   # by stop(); the task ends here anyway
            await self._app(scope, receive, send)


def socket_from_fd(fd: int) -> socket.socket:
    """The bound socket that a parent passed, no longer inherited by children. Raises OSError."""
    sock = socket.socket(fileno=fd)
    sock.set_inheritable(False)
    sock.setblocking(False)
    return sock


def bind_socket(host: str, port: int) -> socket.socket:
    """A bound TCP socket, for tests and for embedding without a supervisor. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError:
        sock.close()
        raise
    sock.setblocking(False)
    return sock
