"""A supervised engine whose worker sleeps in every forward pass, so that a core is free while a step is computed.

    with sleeping_engine(step_ms=20):
        async with AsyncLLM(...) as llm: ...

All else is the real thing: plans, masks beside the forward pass, sampling. What others notice of a load is then
interference, not two processes that compute on two cores.
"""
from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import frontend.async_llm
from ipc import supervisor
from ipc.child import MODULES
from ipc.engine_process import EngineProcess

STEP_VARIABLE = "THREEFOLD_BENCH_STEP_MS"


@contextlib.contextmanager
def sleeping_engine(step_ms: float) -> Iterator[None]:
    """An AsyncLLM that starts while the block runs has such an engine."""
    with mock.patch.dict(os.environ, {STEP_VARIABLE: str(step_ms)}), \
            mock.patch.object(frontend.async_llm, "EngineProcess", functools.partial(EngineProcess, __name__)):
        yield


def worker() -> None:
    """The worker's process, worker.main but for the sleep."""
    from worker.main import main
    from worker.model_runner import ModelRunner
    forward, step_s = ModelRunner._forward, float(os.environ[STEP_VARIABLE]) / 1000

    def sleep_and_compute(self: ModelRunner, batch: Any) -> Any:
        time.sleep(step_s)
        return forward(self, batch)
    ModelRunner._forward = sleep_and_compute  # type: ignore[method-assign]
    main()


if __name__ == "__main__":
    if "--control-fd" in sys.argv:
        sys.exit(supervisor.main(modules={**MODULES, "worker": "bench.sleeping_engine"}))
    worker()
