"""Calls of a running server, for `run-batch --url`: the same outcome as a call of our own application has.

A thread and a kept connection for each request in flight. A connection that breaks is made again, and the request
repeated, as after a restart of the server; one that gives no answer at all for GIVE_UP_S counts as dead. Closing ends
the connections, so that the server aborts what nobody waits for. Knows no files.
"""
from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from frontend.cli.batch_file import BatchRequest, error_body
from frontend.cli.source import ServerSource

GIVE_UP_S = 60.0
CONNECT_S = 10.0
ANSWER_S = 3600.0                                # of one request, after which its connection counts as broken
BROKEN = 503                                     # what a broken connection is told as: to be tried again


class ServerCalls:
    """Call it with a request: (status, request id, body). `close` may be called while calls run; they then end."""

    def __init__(self, source: ServerSource, max_concurrency: int) -> None:
        self._source = source
        self._threads = ThreadPoolExecutor(max_concurrency, "batch")
        self._local = threading.local()
        self._open: set[http.client.HTTPConnection] = set()
        self._lock = threading.Lock()
        self._is_closed = False
        self._last_answer = time.monotonic()

    async def __call__(self, request: BatchRequest) -> tuple[int, str, bytes]:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._call, request)

    def is_dead(self) -> bool:
        """Nothing but broken connections and refusals for want of an engine for a while."""
        return time.monotonic() - self._last_answer > GIVE_UP_S

    def _call(self, request: BatchRequest) -> tuple[int, str, bytes]:
        try:
            connection = self._connection()
            path = self._source.root.removesuffix("/v1") + request.url
            connection.request("POST", path, bytes(request.body), self._source.headers)
            response = connection.getresponse()
            status, request_id, body = response.status, response.getheader("x-request-id") or "", response.read()
        except (OSError, http.client.HTTPException) as error:
            self._drop()
            text = f"the connection to {self._source.where} broke: {error or type(error).__name__}"
            return BROKEN, "", error_body(BROKEN, "ServiceUnavailableError", text)
        if status not in (502, 503, 504):
            self._last_answer = time.monotonic()
        if status >= 400 and not body.lstrip().startswith(b"{"):      # a proxy's page
            body = error_body(status, "ServerError", body[:300].decode("utf-8", "replace"))
        return status, request_id, body

    def _connection(self) -> http.client.HTTPConnection:
        """Of this thread, connected, so that `close` can cut it. Raises OSError once closed."""
        connection: http.client.HTTPConnection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = self._source.connect(CONNECT_S)
        if connection.sock is None:              # new, or the server keeps none open
            connection.connect()
        if connection.sock is not None:
            connection.sock.settimeout(ANSWER_S)
        with self._lock:
            if self._is_closed:
                raise ConnectionError("closed")
            self._open.add(connection)
        return connection

    def _drop(self) -> None:
        connection: http.client.HTTPConnection | None = getattr(self._local, "connection", None)
        self._local.connection = None
        if connection is not None:
            with self._lock:
                self._open.discard(connection)
            connection.close()

    def close(self) -> None:
        """End all connections and threads. Idempotent."""
        with self._lock:
            self._is_closed = True
            for connection in self._open:
                with contextlib.suppress(OSError):
                    if connection.sock is not None:
                        connection.sock.shutdown(socket.SHUT_RDWR)
        self._threads.shutdown(cancel_futures=True)
        for connection in self._open:
            connection.close()
        self._open.clear()
