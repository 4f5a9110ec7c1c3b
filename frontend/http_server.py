"""uvicorn with httptools, inside a loop that is already running, on a socket that is already bound.

The supervisor binds the port and passes the file descriptor, so a taken port is an early error and this process can be
restarted without losing it. Signals belong to the process's main(); this server installs no handlers. Knows ASGI, not
what is served.
"""
from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Generator
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from frontend.http_protocol import LimitedHttpProtocol, UntilClosed
from frontend.http_push import PUSH, Outbox
from ipc.errors import ConfigError

IDLE_CONNECTION_S = 65          # longer than the idle time of common client pools, so that they close first
BACKLOG = 2048
DATE_INTERVAL_S = 1.0           # between updates of the date header
MIN_GRACE_S = 0.25


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
        if scope["http_version"] == "1.0":
            send = UntilClosed(scope["extensions"][PUSH].cycle)
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
