"""Running real engines in tests: private folders, what is left of them, a server, a loop in a thread."""
from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from bench.server_process import (GONE_S as GONE_S, HARD_TIMEOUT_S as HARD_TIMEOUT_S, ServerProcess as ServerProcess,
                                  assert_nothing_left as assert_nothing_left, engine_environment,
                                  run_dirs as run_dirs, survivors as survivors, wait_until as wait_until)
from frontend import AsyncLLM

T = TypeVar("T")

# Small and quick to start: nothing compiled, one compute thread.
OPTIONS: dict[str, Any] = dict(num_gpu_blocks_override=512, attention_backend="cpu", num_threads=1)
FLAGS = ("--num-gpu-blocks-override", "512", "--attention-backend", "cpu", "--num-threads", "1")
REFERENCE_FLAGS = ("--num-gpu-blocks-override", "512", "--attention-backend", "reference", "--num-threads", "1")
ENDLESS_TOKENS = 4000                           # of a request that a test leaves before its end; seconds of work


def run_script(path: Path, temp: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A user's program, to its end."""
    return subprocess.run([sys.executable, str(path)], env=engine_environment(temp), cwd=cwd or path.parent,
                          capture_output=True, text=True, timeout=HARD_TIMEOUT_S)


class LoopThread:
    """An event loop that runs in a thread of its own, as a notebook's does."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="loop", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result, from any other thread."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result(HARD_TIMEOUT_S)
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        self.run(self.loop.shutdown_asyncgens())
        self.run(self.loop.shutdown_default_executor())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()


async def wait_idle(llm: AsyncLLM) -> dict[str, Any]:
    """Until nothing runs or waits; then every block and host slot must be free and the core's books must agree."""
    deadline = time.monotonic() + HARD_TIMEOUT_S
    while (stats := await llm.stats())["num_running"] or stats["num_waiting"]:
        assert time.monotonic() < deadline, stats
        await asyncio.sleep(0.01)
    assert stats["num_free_blocks"] == stats["num_blocks"]
    await llm.check_invariants()
    return stats
