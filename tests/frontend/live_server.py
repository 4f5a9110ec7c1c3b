"""The real HTTP server over the fake engine, in a thread of the test."""
from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

from frontend.http_server import HttpServer, bind_socket
from frontend.openai.app import build_app
from ipc.config import FrontendSection
from tests.frontend.fake_llm import FakeLLM


class LiveServer:
    """Use as a context manager; `url` has no path."""

    def __init__(self, llm: FakeLLM, section: FrontendSection | None = None, **options: Any) -> None:
        self.app = build_app(llm, section=section)
        self._options = options
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(20)

    def block(self, seconds: float) -> None:
        """Its loop does nothing for so long, from now on."""
        self._loop.call_soon_threadsafe(time.sleep, seconds)

    def __enter__(self) -> LiveServer:
        self._thread.start()
        self._server = HttpServer(self.app, bind_socket("127.0.0.1", 0), **self._options)
        try:
            self.run(self._server.start())
        except BaseException:
            self.run(self._server.stop())
            self._end()
            raise
        scheme = "https" if self._options.get("ssl_certfile") else "http"
        self.port = self._server.port
        self.url = f"{scheme}://127.0.0.1:{self.port}"
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self._server.stop(0.2))
        self._end()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
