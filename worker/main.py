"""One worker process: load the model, size the pool, say Ready, then execute plans in the order they come.

Started by the supervisor as `python -m worker.main`. Binds its socket, because it may outlive the core. One thread of
Python; the compute pool is torch's.
"""
from __future__ import annotations

import gc
import logging
import os
import time
import traceback
from typing import TYPE_CHECKING

import zmq

from ipc.config import WorkerProcess
from ipc.errors import ConfigError
from ipc.lifeline import ChildLife
from ipc.messages import HELLO, ConfigWorker, Profile, SchedulerOutput, Shutdown, StepFailed, WorkerReady
from ipc.process import configure_logging
from ipc.progress import Progress
from ipc.sockets import Link
from worker.kept_rows import with_kept_rows
from worker.profiler import OperatorProfiler, named_range, no_range

if TYPE_CHECKING:
    from worker.model_runner import ModelRunner

logger = logging.getLogger("worker")

PHASE_INTERVAL_S = 0.1
PROFILER_S = 60.0                               # prediction for reading what the profiler recorded
FIRST_STEP_S = 6.0                              # prediction for the first step, which may warm things up


class Starting:
    """Tells supervisor and core what the start is doing."""

    def __init__(self, life: ChildLife, link: Link) -> None:
        self.life, self.link = life, link
        self.name, self._began, self._last = "", 0.0, 0.0

    def begin(self, name: str) -> None:
        self.name, self._began, self._last = name, time.monotonic(), 0.0
        self.advance(0.0)

    def advance(self, fraction: float, detail: str = "") -> None:
        now = time.monotonic()
        if fraction in (0.0, 1.0) or now - self._last >= PHASE_INTERVAL_S:
            self._last = now
            phase = self.life.phase(self.name, fraction, now - self._began, detail)
            if self.link.epoch:                 # a core is there
                self.link.send(phase)

    def end(self, detail: str = "") -> None:
        self.advance(1.0, detail)


class WorkerLoop:
    """Receives plans and answers them. A newer epoch in a Hello means a new core: it is told what the pool
    holds, then rows are dropped; weights stay."""

    def __init__(self, config: WorkerProcess, life: ChildLife) -> None:
        self.config, self.life = config, life
        self.context = zmq.Context()
        self.link = Link(self.context, bind=config.listen)
        self.poller = zmq.Poller()
        self.poller.register(self.link.socket, zmq.POLLIN)
        self.poller.register(life.lifeline.fileno(), zmq.POLLIN)
        self.profiler = OperatorProfiler(config.run_dir)
        self.poller.register(self.profiler.fd, zmq.POLLIN)
        self.is_stopping = False
        self.step_s = 0.0                       # longest step so far, what a step is predicted to take at most

    def poll(self, timeout_ms: int | None) -> None:
        fd = self.life.lifeline.fileno()
        if any(source == fd for source, _ in self.poller.poll(timeout_ms)):
            for _, message in self.life.lifeline.receive():
                self.is_stopping |= isinstance(message, Shutdown)
            if self.life.lifeline.is_closed:
                self.life.exit_orphaned()

    def greet(self) -> None:
        """Take a Hello that is already there, so that phases reach the core too."""
        for header, _ in self.link.drain():
            if header.kind == HELLO:
                self.link.epoch = header.epoch

    def run(self) -> None:
        starting = Starting(self.life, self.link)
        starting.begin("import torch")
        from worker.startup import build_runner
        starting.end()
        runner, ready = build_runner(self.config, starting, self.greet)
        self.greet()
        if self.link.epoch:
            self.link.send(ready)
        self.life.ready(ready.detail, ready.num_blocks)
        gc.collect()
        gc.freeze()
        self.serve(runner, ready)

    def serve(self, runner: ModelRunner, ready: WorkerReady) -> None:
        clock = time.monotonic_ns
        progress = Progress(self.config.run_dir, f"worker-{self.config.rank}")
        while not self.is_stopping:
            progress.waiting()
            self.poll(None)
            if (answer := self.profiler.take()) is not None:
                self.link.send(answer)
            while (item := self.link.receive()) is not None:
                header, message = item
                received_ns = clock()
                if header.kind == HELLO:
                    self.link.epoch = header.epoch
                    self.link.send(with_kept_rows(ready, runner.state, is_sound=not runner.needs_reset))
                    runner.state.clear()
                    runner.needs_reset = False
                elif isinstance(message, Profile):
                    progress.working(PROFILER_S)
                    if (answer := self.profiler.handle(message)) is not None:
                        self.link.send(answer)
                elif not isinstance(message, SchedulerOutput) or header.epoch != self.link.epoch:
                    logger.warning("dropped a %s of epoch %d", type(message).__name__, header.epoch)
                elif runner.needs_reset and not message.reset:
                    continue                    # planned before the core knew of the failure
                else:
                    progress.working(self.step_s or FIRST_STEP_S)
                    self._execute(runner, message, received_ns)
                    self.step_s = max(self.step_s, (clock() - received_ns) / 1e9)

    def _execute(self, runner: ModelRunner, plan: SchedulerOutput, received_ns: int) -> None:
        runner.needs_reset = False
        runner.range = named_range if self.profiler.is_recording else no_range
        try:
            with runner.range(f"step {plan.step}"):
                result = runner.execute(plan, received_ns)
            self.link.send(result)
            self.profiler.check_limit()
        except Exception as error:              # the core undoes the step and ends whoever is to blame
            runner.needs_reset = True
            self.link.send(StepFailed(plan.step, f"{type(error).__name__}: {error}", traceback.format_exc()))


def main() -> None:
    life = ChildLife.from_argv("worker")
    try:
        config = life.config(ConfigWorker)
        configure_logging(f"worker {config.rank}", config.log_level)
        loop = WorkerLoop(config, life)
        loop.run()
        loop.link.close()
        os._exit(0)                             # pools and JIT threads need no tidy end
    except ConfigError as error:
        life.fail(str(error))
    except MemoryError as error:
        life.fail(f"worker: out of memory: {error}; lower --kv-cache-memory or use a smaller model",
                  traceback.format_exc())
    except Exception as error:
        life.fail(f"worker: {type(error).__name__}: {error}", traceback.format_exc())


if __name__ == "__main__":
    main()
