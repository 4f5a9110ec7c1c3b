"""uvicorn with httptools, inside a loop that is already running, on a socket that is already bound.

The supervisor binds the port and passes the file descriptor, so a taken port is an early error and this process can be
restarted without losing it. Signals belong to the process's main(); this server installs no handlers. Knows ASGI, not
what is served.
"""
from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Generator
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from ipc.errors import ConfigError

logger = logging.getLogger(__name__)

MAX_HEADER_BYTES = 16 << 10
IDLE_CONNECTION_S = 65          # longer than the idle time of common client pools, so that they close first
BACKLOG = 2048
PUSH = "threefold.push"         # in scope["extensions"]: a Push
MIN_GRACE_S = 0.25

_TOO_LARGE = (b'{"error":{"message":"the request headers have more than %d bytes","type":"HeadersTooLargeError",'
              b'"param":null,"code":431}}' % MAX_HEADER_BYTES)


_TOO_MANY = (b'{"error":{"message":"too many connections are open; retry later, or raise --max-connections",'
             b'"type":"ServiceUnavailableError","param":null,"code":503}}')


class Push:
    """Writes a piece of a started, chunked answer at once, from any callback of the loop: `send` of ASGI without its
    coroutine and its dict, half of what a short event costs. False when nothing was written: the answer has not begun
    or has ended, the client is gone, or it reads so slowly that the piece should wait and grow."""

    __slots__ = ("_cycle", "_flow", "_write")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle, self._flow, self._write = cycle, cycle.flow, cycle.transport.write

    @property
    def is_open(self) -> bool:
        cycle = self._cycle
        return bool(cycle.chunked_encoding and not cycle.response_complete and not cycle.disconnected
                    and not self._flow.write_paused)

    def __call__(self, data: bytes) -> bool:
        if not self.is_open:
            return False
        self._write(b"%x\r\n%b\r\n" % (len(data), data))
        return True


class LimitedHttpProtocol(HttpToolsProtocol):
    """Counts header bytes while they arrive: the parser itself would collect headers without end. Counts connections
    too: one more than allowed is answered at once, and closed."""

    max_connections = 0         # 0: no limit; set by a subclass, for uvicorn makes the instances
    _header_bytes = 0           # received since the last complete header; data of a started body does not count
    _in_headers = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.max_connections and len(self.connections) > self.max_connections:
            transport.write(b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
                            b"content-length: %d\r\nconnection: close\r\n\r\n" % len(_TOO_MANY) + _TOO_MANY)
            transport.close()

    def on_message_begin(self) -> None:
        self._in_headers = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._header_bytes = 0
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is self.scope:
            self.scope["extensions"] = {PUSH: Push(self.cycle)}  # type: ignore[dict-item]

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._in_headers:
            return
        self._header_bytes += len(data)
        if self._header_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
                                 b"content-length: %d\r\nconnection: close\r\n\r\n" % len(_TOO_LARGE) + _TOO_LARGE)
            self.transport.close()


class _Server(uvicorn.Server):
    """uvicorn's server without signal handlers, and with an event instead of a flag for "listening"."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Signals stay with the process."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then say so."""
        await super().startup(sockets=sockets)
        self.listening.set()


class HttpServer:
    """One listening server. `start` returns when connections are accepted, `stop` when the last one is gone."""

    def __init__(self, app: ASGIApp, sock: socket.socket, *, max_connections: int = 0, ssl_certfile: str = "",
                 ssl_keyfile: str = "") -> None:
        self._app = app
        self._sock = sock
        self._protocol = type("HttpProtocol", (LimitedHttpProtocol,), {"max_connections": max_connections})
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
        self._server.should_exit = True
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
