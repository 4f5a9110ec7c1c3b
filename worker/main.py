"""One worker process: load the model, size the pool, say Ready, then execute plans in the order they come.

Started by the supervisor as `python -m worker.main`. Binds its socket, because it may outlive the core. One thread of
Python; the compute pool is torch's.
"""
from __future__ import annotations

import functools
import gc
import logging
import os
import sys
import time
import traceback
from typing import TYPE_CHECKING

import msgspec
import zmq

from ipc.config import WorkerProcess
from ipc.errors import ConfigError
from ipc.lifeline import ChildLife
from ipc.messages import (HELLO, ConfigWorker, PrepareGrammar, Profile, SchedulerOutput, Shutdown, Sleep, Slept,
                          StepFailed, WakeUp, WorkerReady)
from ipc.process import configure_logging
from ipc.progress import Progress
from ipc.sockets import Link
from ipc.step_ring import StepRing
from worker.grammar_calls import GrammarCalls
from worker.kept_rows import with_kept_rows
from worker.process_memory import release_device_memory, release_memory
from worker.profiler import OperatorProfiler, named_range, no_range

if TYPE_CHECKING:
    from worker.model_runner import ModelRunner, Step
    from worker.startup import Weights

logger = logging.getLogger("worker")

PHASE_INTERVAL_S = 0.1
PROFILER_S = 60.0                               # prediction for reading what the profiler recorded
NAP_S = 60.0                                    # for giving up weights and pool, and each phase of making them again
THREADS_POLL_MS = 100                           # while threads work on answers: the core sees that this loop turns
UPGRADE_POLL_MS = 200                           # while kernels are being compiled
TIDY_MS = 200                                   # idle for so long, a worker gives back what only its start needed
FIRST_STEP_S = 6.0                              # prediction for the first step, which may warm things up
STEP_POLL_S = 50e-6                             # how often messages and the step in flight are looked at
SWITCH_S = 0.0005                               # steps wait no longer for a thread that converts a grammar


class EarlierStepFailed(Exception):
    """The step before the one being launched turned out to have failed."""


class DeviceLost(Exception):
    """The device answers nothing but the error of an earlier step."""


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
        self.grammar_calls = GrammarCalls()
        self.poller.register(self.grammar_calls.fd, zmq.POLLIN)
        self.is_stopping = False
        self.step_s = 0.0                       # longest step so far, what a step is predicted to take at most
        self.ring = StepRing(config.run_dir, f"worker-{config.rank}")
        self.in_flight: Step | None = None      # launched, its result not sent
        self.is_tidy = False                    # what only the start needed is given back

    def poll(self, timeout_ms: int | None) -> bool:
        """Whether anything came."""
        fd, events = self.life.lifeline.fileno(), [] if self.life.early else self.poller.poll(timeout_ms)
        if self.life.early or any(source == fd for source, _ in events):
            for message in self.life.receive():
                self.is_stopping |= isinstance(message, Shutdown)
            if self.life.lifeline.is_closed:
                self.life.exit_orphaned()
        return bool(events)

    def greet(self) -> None:
        """Take a Hello that is already there, so that phases reach the core too."""
        for header, _ in self.link.drain():
            if header.kind == HELLO:
                self.link.epoch = header.epoch

    def _start(self) -> tuple[ModelRunner, WorkerReady]:
        starting = Starting(self.life, self.link)
        gc.disable()                            # importing torch makes 250,000 objects, none of them garbage
        starting.begin("import torch")
        from worker.startup import build_runner
        starting.end()
        runner, ready = build_runner(self.config, starting, self.greet)
        runner.ring = self.ring
        self.greet()
        if self.link.epoch:
            self.link.send(ready)
        self.life.ready(ready.detail, ready.num_blocks)
        if runner.upgrade is not None:
            self.life.phase(runner.upgrade.phase, 0.0, runner.upgrade.seconds, "torch serves meanwhile")
        gc.freeze()                             # what was loaded stays
        gc.enable()
        return runner, ready

    def run(self) -> None:
        """Start, then serve until Shutdown. The runner is held by this frame alone: a sleep gives it up."""
        runner, ready = self._start()
        clock = time.monotonic_ns
        progress = Progress(self.config.run_dir, f"worker-{self.config.rank}")
        while not self.is_stopping:
            if self.in_flight is None:
                progress.waiting()
            self._wait(runner, progress)
            self._upgrade(runner)
            self._answer()
            while (item := self.link.receive()) is not None:
                header, message = item
                received_ns = clock()
                self._answer()                  # plans may come without a pause
                if header.kind == HELLO:
                    self.grammar_calls.forget()
                    self._drop(runner)
                    self.link.epoch = header.epoch
                    self.link.send(with_kept_rows(ready, runner.state, is_sound=not runner.needs_reset))
                    runner.state.clear()
                    runner.needs_reset = False
                elif isinstance(message, Profile):
                    self._profile(message, progress)
                elif isinstance(message, PrepareGrammar):
                    self.grammar_calls.handle(message, runner.grammars)
                elif isinstance(message, Sleep) and header.epoch == self.link.epoch:
                    progress.working(NAP_S)
                    self._drop(runner)
                    kept = self._kept(runner, message.level)
                    del runner                  # the last reference
                    runner, ready = self._sleep(kept, ready.num_blocks, progress)
                elif not isinstance(message, SchedulerOutput) or header.epoch != self.link.epoch:
                    logger.warning("dropped a %s of epoch %d", type(message).__name__, header.epoch)
                elif runner.needs_reset and not message.reset:
                    continue                    # planned before the core knew of the failure
                else:
                    progress.working(self.step_s or FIRST_STEP_S)
                    self._upgrade(runner)
                    self._execute(runner, message, received_ns)
            if self.in_flight is not None and self.in_flight.is_ready():
                self._finish(runner)

    @staticmethod
    def _kept(runner: ModelRunner, level: int) -> list[Weights | None]:
        from worker.startup import Weights
        return [Weights.of(runner) if level == 1 else None]

    def _sleep(self, kept: list[Weights | None], num_blocks: int, progress: Progress
               ) -> tuple[ModelRunner, WorkerReady]:
        """Hold nothing but what is kept, until a WakeUp or the Hello of a new core. The pool that is made again has as
        many blocks: the core has numbered them."""
        from worker.startup import build_runner
        release_memory()
        release_device_memory()
        progress.waiting()                      # before anybody hears of it: a stop at once is then seen, too
        self.link.send(Slept())
        while not self.is_stopping:
            progress.waiting()
            self.poll(THREADS_POLL_MS if self._has_threads else None)
            self._answer()
            item = self.link.receive()
            if item is not None and (item[0].kind == HELLO or isinstance(item[1], WakeUp)):
                self.link.epoch = item[0].epoch
                break
            if item is not None and isinstance(item[1], Profile):
                self._profile(item[1], progress)
            elif item is not None and isinstance(item[1], PrepareGrammar):
                self.grammar_calls.handle(item[1], None)
        if self.is_stopping:
            self.link.close()
            os._exit(0)
        cache = msgspec.structs.replace(self.config.cache, num_gpu_blocks_override=num_blocks)
        config = msgspec.structs.replace(self.config, cache=cache)
        progress.working(NAP_S)
        runner, ready = build_runner(config, Starting(self.life, self.link), lambda: progress.working(NAP_S),
                                     kept.pop())
        runner.ring = self.ring
        release_memory()
        progress.working()                      # the long part is over
        self.link.send(ready)
        return runner, ready

    def _profile(self, message: Profile, progress: Progress) -> None:
        progress.working(PROFILER_S)
        answer = self.profiler.handle(message)
        progress.working()
        if answer is not None:
            self.link.send(answer)

    @property
    def _has_threads(self) -> bool:
        return self.profiler.is_busy or self.grammar_calls.is_busy

    def _answer(self) -> None:
        """What threads have done since the last call."""
        if (answer := self.profiler.take()) is not None:
            self.link.send(answer)
        for prepared in self.grammar_calls.take():
            self.link.send(prepared)

    def _wait(self, runner: ModelRunner, progress: Progress) -> None:
        """Until there is a message, or the step in flight is done. Idle time goes to capturing graphs."""
        while self.in_flight is not None:
            if self.poll(0) or self.in_flight.is_ready():
                return
            time.sleep(STEP_POLL_S)
        while runner.has_capture and not self.poll(0):
            progress.working(FIRST_STEP_S)
            runner.capture_next()
        if not runner.has_capture:
            progress.waiting()
            if self._has_threads:
                self.poll(THREADS_POLL_MS)
                return
            if not self.is_tidy:
                if self.poll(TIDY_MS):
                    return
                release_memory()                # takes 0.2 s, in which the requests of a predecessor would wait
                self.is_tidy = True
            self.poll(None if runner.upgrade is None or runner.upgrade.is_over else UPGRADE_POLL_MS)

    def _upgrade(self, runner: ModelRunner) -> None:
        """Between steps: change to the compiled model once it is there. An upgrade that failed stays: the pool keeps
        its layout."""
        upgrade = runner.upgrade
        if upgrade is None or self.in_flight is not None:
            return
        if (built := upgrade.take()) is not None:
            runner.use(built.model, built.backend)
            self.life.phase(upgrade.phase, 1.0, upgrade.seconds, f"{built.text}; compiled kernels serve now")
            logger.info("compiled kernels serve from now on: %s, attention %s", built.text, built.backend.name)
            del built
            release_memory()                    # the torch model goes

    def _execute(self, runner: ModelRunner, plan: SchedulerOutput, received_ns: int) -> None:
        """Launch a plan, then finish the one before it, which ran meanwhile."""
        runner.needs_reset = False
        runner.range = named_range if self.profiler.is_recording else no_range
        try:
            with runner.range(f"step {plan.step}"):
                step = runner.launch(plan, received_ns, functools.partial(self._finish_before, runner))
            self._finish_before(runner)
        except EarlierStepFailed:
            return                              # the core undoes this one too
        except Exception as error:              # the core undoes the step and ends whoever is to blame
            self._finish(runner)
            self._fail(runner, plan.step, error)
            return
        self.in_flight = step
        if step.is_ready():
            self._finish(runner)
        self.profiler.check_limit()

    def _finish(self, runner: ModelRunner) -> None:
        """Send the result of the step in flight, if there is one; waits for it."""
        step, self.in_flight = self.in_flight, None
        if step is None:
            return
        try:
            self.link.send(runner.finish(step))
            self.step_s = max(self.step_s, (time.monotonic_ns() - step.received_ns) / 1e9)
        except Exception as error:
            self._fail(runner, step.number, error)

    def _finish_before(self, runner: ModelRunner) -> None:
        """The same within the next plan, which ends if this fails."""
        self._finish(runner)
        if runner.needs_reset:
            raise EarlierStepFailed

    def _fail(self, runner: ModelRunner, step: int, error: Exception) -> None:
        """Tell the core. Raises DeviceLost where no later step can succeed: this process ends, another takes over."""
        if runner.is_device_lost():
            raise DeviceLost(f"step {step}: {type(error).__name__}: {error}") from error
        if not runner.needs_reset:              # else it is known, and the core undoes what came after
            runner.needs_reset = True
            text = "".join(traceback.format_exception(error))
            self.link.send(StepFailed(step, f"{type(error).__name__}: {error}", text))

    def _drop(self, runner: ModelRunner) -> None:
        """Wait for the step in flight; nobody wants its result."""
        step, self.in_flight = self.in_flight, None
        try:
            if step is not None:
                runner.finish(step)
        except Exception as error:
            logger.warning("step %d failed after its core had ended: %s", step.number if step else -1, error)
            runner.needs_reset = True


def main() -> None:
    life = ChildLife.from_argv("worker")
    try:
        config = life.config(ConfigWorker)
        sys.setswitchinterval(SWITCH_S)
        configure_logging(f"worker {config.rank}", config.log_level)
        loop = WorkerLoop(config, life)
        loop.run()
        loop.link.close()
        os._exit(0)                             # pools and JIT threads need no tidy end
    except ConfigError as error:
        life.fail(str(error))
    except MemoryError as error:
        life.fail(f"worker: out of memory: {error}; lower --kv-cache-memory or use a smaller model")
    except Exception as error:
        life.fail(f"worker: {type(error).__name__}: {error}", traceback.format_exc())


if __name__ == "__main__":
    main()
