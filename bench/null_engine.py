"""A supervised engine some of whose processes are replaced by ones that compute nothing, for measuring the others.

    with NullEngine("smollm2-135m", NULL_CORE, tokens=ids) as engine:  # the real frontend, a core that only emits
        ... engine.port, engine.pid("frontend")

The supervisor must own a main thread, so it runs as `python -m bench.null_engine`. Knows no load and no figures.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import msgspec
import numpy as np

from ipc.child import MODULES, ROOT
from ipc.cli import build_config
from ipc.config import EngineConfig
from ipc.messages import EngineUp, Failure
from ipc.supervisor import Supervisor

NULL_WORKER: Mapping[str, str] = {**MODULES, "worker": "bench.null_worker"}
NULL_CORE: Mapping[str, str] = {**NULL_WORKER, "engine_core": "bench.null_core"}
TOKENS_VARIABLE = "THREEFOLD_NULL_CORE_TOKENS"  # a file of int32 ids, for bench.null_core
RATE_VARIABLE = "THREEFOLD_NULL_CORE_RATE"  # tokens per second of each stream


class NullEngine:
    """Serving while the block runs. `tokens`: what the null core's streams say, over and over."""

    def __init__(self, model: str, modules: Mapping[str, str], *, tokens: np.ndarray | None = None, rate: float = 20.0,
                 **options: Any) -> None:
        self.config = build_config(model, {"port": 0, "log_level": "warning", **options}, serve=True)
        self._modules = modules
        self._file = tempfile.NamedTemporaryFile(suffix=".ids")  # noqa: SIM115
        self._file.write(np.asarray(tokens if tokens is not None else [0], np.int32).tobytes())
        self._file.flush()
        self._env = {**os.environ, "PYTHONPATH": ROOT, TOKENS_VARIABLE: self._file.name, RATE_VARIABLE: str(rate)}
        self.port = 0
        self.pids: dict[str, int] = {}

    def __enter__(self) -> NullEngine:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.null_engine"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=self._env, cwd=ROOT)
        assert self._process.stdin is not None and self._process.stdout is not None
        order = {"config": msgspec.to_builtins(self.config), "modules": dict(self._modules)}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline() or "{}")
        if "port" not in answer:
            self.__exit__(None, None, None)
            raise RuntimeError(f"the null engine does not start: {answer.get('error', 'see above')}")
        self.port, self.pids = answer["port"], answer["pids"]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
                 ) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.communicate(timeout=10)       # closes its pipes too
        self._file.close()


def main() -> int:
    """The supervisor's process: one line of JSON in, one out once everything serves."""
    order = json.loads(sys.stdin.readline())
    config = msgspec.convert(order["config"], EngineConfig)

    def report(name: str, event: Any) -> None:
        if isinstance(event, EngineUp):
            pids = {child.name: child.pid for child in supervisor.children}
            print(json.dumps({"port": supervisor.port, "pids": pids}), flush=True)
        elif isinstance(event, Failure):
            print(json.dumps({"error": event.reason}), flush=True)
            print(event.traceback, file=sys.stderr)

    supervisor = Supervisor(config, report, modules=order["modules"])
    return supervisor.run()


if __name__ == "__main__":
    sys.exit(main())
