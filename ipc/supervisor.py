"""Start the processes of one engine, watch them, and end them all when one of them or their owner ends.

One loop, one thread; it sleeps only in its selector. launch.py runs a Supervisor itself; AsyncLLM starts one as a
process of its own (`python -m ipc.supervisor`, driven by engine_process.py), because the kernel's death signal follows
the *thread* that spawned a child, and the user's threads come and go. Knows neither models nor requests.

    spawn worker(s), core, frontend ─▶ each: Hello ─▶ its section ─▶ Phase ... Ready ─▶ all ready: EngineUp
    a child ends or fails, the owner ends, a signal ─▶ Shutdown, SIGTERM, SIGKILL; sockets and directory removed
"""
from __future__ import annotations

import argparse
import functools
import os
import select
import selectors
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from ipc.attach import EngineFile, write_engine_file
from ipc.child import MODULES, Child
from ipc.config import CoreProcess, EngineConfig, FrontendProcess, Peer, WorkerProcess
from ipc.errors import ConfigError, WireError
from ipc.lifeline import Lifeline
from ipc.messages import (ConfigCore, ConfigFrontend, ConfigWorker, EngineUp, Failure, PeerDown, PeerUp, Phase, Ready,
                          Shutdown, Start)
from ipc.progress import EngineProgress, ProgressReader, Starvation
from ipc.run_dir import RunDir
from ipc.step_ring import save_steps
from ipc.system import SignalPipe, bind_listeners, open_pidfd, usable_cores

Report = Callable[[str, Any], None]              # (name of the process, Phase | Ready | Failure | EngineUp)

EXIT_CLEAN, EXIT_START_FAILED, EXIT_DIED = 0, 1, 3
NUM_WORKERS = 1
# Longest waits of a stop. Their sums keep the promises: 3 s after a signal, 2 s after a fault.
_FRONTEND_S, _CORE_S, _WORKER_S, _FAULT_S, _TERM_S = 1.0, 0.6, 0.6, 0.8, 0.4
PROGRESS_CHECK_S = 0.5
MAX_RESTARTS, RESTART_WINDOW_S = 5, 60
_POLL_S = 0.1                                    # only where the kernel has no pidfds


class Supervisor:
    """One engine's processes. Construct, then `run()` in the main thread."""

    def __init__(self, config: EngineConfig, report: Report, *, modules: Mapping[str, str] = MODULES,
                 control: Lifeline | None = None, host_pidfd: int = -1, host_pid: int = 0) -> None:
        """Raises ConfigError when the TCP port is taken: before anything else is made."""
        self.config, self.report = config, report
        self.control, self.host_pidfd, self.host_pid = control, host_pidfd, host_pid
        section = config.frontend
        num_servers = section.api_servers if config.serve else 0
        self.listeners = bind_listeners(section.host, section.port, num_servers) if num_servers else []
        self.run_dir = RunDir()
        self.hash_key = os.urandom(32)
        self.num_threads = config.num_threads or usable_cores()
        self.workers = [Child("worker", modules["worker"], rank) for rank in range(NUM_WORKERS)]
        self.core = Child("engine_core", modules["engine_core"])
        self.frontends = [Child("frontend", modules["frontend"], rank) for rank in range(num_servers)]
        self.children = [*self.workers, self.core, *self.frontends]   # the root of a chain of failures comes first
        self.is_up = False                       # all were ready once
        self._is_told = False                    # EngineUp was reported for the present processes
        self.failure: Failure | None = None      # why everything ends, unless it was asked to
        self.num_stops = 0                       # requests to stop; the second one means at once
        self.restarts: deque[float] = deque()    # times of the last ones
        self._selector = selectors.DefaultSelector()
        self._progress = {child: ProgressReader(self.run_dir.path, f"{child.role}-{child.rank}")
                          for child in self.children}
        self._starved = {child: Starvation() for child in self._progress}
        self._engine_progress = EngineProgress(self.run_dir.path)

    def run(self) -> int:
        """Serve until a signal, the owner's end or a fault. Returns the exit status; nothing is left when it does."""
        with SignalPipe() as signals:
            self._selector.register(signals, selectors.EVENT_READ, functools.partial(self._on_signal, signals))
            try:
                self._watch_host()
                for child in self.children:
                    self._spawn(child)
                while not self.num_stops and self.failure is None:
                    self._poll(PROGRESS_CHECK_S if self.is_up else None)
                    self._find_hung()
                    self._judge()
                if self.failure is not None:
                    reason, notes = self.failure.reason, self.failure.traceback
                    if self.is_up and (saved := self._save_steps(reason)):
                        notes += f"{saved}\n"
                    self.report("supervisor", Failure(reason, notes))
            finally:
                self._end_all()
        if self.failure is None:
            return EXIT_CLEAN
        return EXIT_DIED if self.is_up else EXIT_START_FAILED

    @property
    def port(self) -> int:
        """The port in use, also when 0 was asked for."""
        return int(self.listeners[0].getsockname()[1]) if self.listeners else 0

    # ------------------------------------------------------------ start

    def _spawn(self, child: Child) -> None:
        self._progress[child].clear()
        self._engine_progress.plans.clear()
        is_worker = child.role == "worker"
        fds = (self.listeners[child.rank].fileno(),) if child.role == "frontend" else ()
        lifeline = child.spawn(self.num_threads if is_worker else 1, fds)
        self._selector.register(lifeline, selectors.EVENT_READ, functools.partial(self._on_message, child))
        if child.pidfd >= 0:
            self._selector.register(child.pidfd, selectors.EVENT_READ, functools.partial(self._on_end, child))

    def _section(self, child: Child) -> ConfigWorker | ConfigCore | ConfigFrontend:
        """What this process is told: its part of the options, and where the others listen."""
        config, run_dir = self.config, self.run_dir.path
        if child.role == "worker":
            cache = config.cache                 # a successor's blocks are numbered as its predecessor's were
            if child.num_blocks:
                cache = msgspec.structs.replace(cache, num_gpu_blocks_override=child.num_blocks)
            return ConfigWorker(WorkerProcess(
                rank=child.rank, listen=self._peer(child).address, epoch=child.epoch, model=config.model, cache=cache,
                max_num_seqs=config.scheduler.max_num_seqs,
                max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
                num_speculative_tokens=config.scheduler.num_speculative_tokens, device=config.device,
                attention_backend=config.attention_backend, cuda_graphs=config.cuda_graphs,
                num_threads=self.num_threads, run_dir=run_dir,
                log_level=config.log_level))
        if child.role == "engine_core":
            return ConfigCore(CoreProcess(
                listen=self._peer(child).address, epoch=child.epoch, workers=[self._peer(w) for w in self.workers],
                cache=config.cache, scheduler=config.scheduler, hash_key=self.hash_key,
                flight_recorder=config.flight_recorder, flight_recorder_dir=config.flight_recorder_dir, run_dir=run_dir,
                log_level=config.log_level))
        return ConfigFrontend(FrontendProcess(
            rank=child.rank, number=self._number(child), core=self._peer(self.core), model=config.model,
            frontend=config.frontend, listen_fd=self.listeners[child.rank].fileno(), run_dir=run_dir,
            log_level=config.log_level))

    def _number(self, child: Child) -> int:
        """By which others know a process: its rank, and of a frontend a number that none before it had."""
        return 1 + child.rank + (child.epoch - 1) * len(self.frontends) if child.role == "frontend" else child.rank

    def _peer(self, child: Child) -> Peer:
        name = f"worker-{child.rank}" if child.role == "worker" else "core"
        return Peer(self.run_dir.address(f"{name}-{child.epoch}"), child.epoch)

    # ------------------------------------------------------------ watch

    def _poll(self, timeout: float | None = None) -> None:
        """The one place this process sleeps."""
        if any(child.pidfd < 0 for child in self.children) or (self.host_pid and self.host_pidfd < 0):
            timeout = _POLL_S if timeout is None else min(timeout, _POLL_S)
            if self.host_pid and os.getppid() != self.host_pid:
                self._on_host_end()
        for key, _ in self._selector.select(timeout):
            key.data()

    def _on_message(self, child: Child) -> None:
        for message in child.receive():
            if message is None:
                child.send(self._section(child))
            elif isinstance(message, (Phase, Ready)):
                self.report(child.name, message)
        if child.lifeline is not None and child.lifeline.is_closed:
            self._forget(child.lifeline)
            child.note_end()
        if not self._is_told and all(c.is_ready for c in self.children):
            self.is_up = self._is_told = True
            write_engine_file(self.run_dir.path, EngineFile(self._peer(self.core), self.config.model,
                                                            self.config.frontend.served_model_name))
            self.report("supervisor", EngineUp(self._peer(self.core).address, self.core.epoch, self.run_dir.path,
                                               [os.getpid(), *(c.pid for c in self.children)]))

    def _on_end(self, child: Child) -> None:
        self._forget(child.pidfd)
        child.note_end()

    def _judge(self) -> None:
        """A failed child is restarted once the engine was up, and ends it before that or when it happens too often.

        Its peers may have failed because of it: the one nearest the root counts.
        """
        for child in self.children:
            if child.pidfd < 0 and child.failure is None and child.has_ended():
                child.note_end()
        if not any(child.failure is not None for child in self.children):
            return
        if not self.is_up:
            self._poll(0.05)                     # others may say more
        failed = [child for child in self.children if child.failure is not None]
        for child in failed:
            if self.is_up and self._may_restart():
                self._restart(child)
            else:
                self.failure = self.failure or child.failure

    def _may_restart(self) -> bool:
        now = time.monotonic()
        while self.restarts and now - self.restarts[0] > RESTART_WINDOW_S:
            self.restarts.popleft()
        return self.config.restart and len(self.restarts) < MAX_RESTARTS

    def _restart(self, child: Child) -> None:
        """Replace a child that has ended or hangs. The others are told of both, and go on."""
        failure = child.failure or Failure(f"{child.name} ended")
        self.restarts.append(time.monotonic())
        saved = self._save_steps(failure.reason) if child.role != "frontend" else ""
        self.report(child.name, Failure(f"{failure.reason}; restarting it ({len(self.restarts)} of at most "
                                        f"{MAX_RESTARTS} in {RESTART_WINDOW_S} s){saved and '; ' + saved}",
                                        failure.traceback))
        number = self._number(child)
        if not child.has_ended():
            child.signal(signal.SIGKILL)
        if child.lifeline is not None:
            self._forget(child.lifeline)
        self._forget(child.pidfd)
        child.close()
        self._is_told = False
        self._tell(child, PeerDown(child.role, number, failure.reason))
        self._spawn(child)
        self._tell(child, PeerUp(child.role, self._number(child), self._peer(child)))

    def _save_steps(self, reason: str) -> str:
        """Keep what the engine did last; words about where it is."""
        config = self.config
        path = save_steps(self.run_dir.path, config.flight_recorder_dir, reason) if config.flight_recorder else ""
        return f"the last steps: launch.py profile --steps {path}" if path else ""

    def _tell(self, about: Child, message: PeerDown | PeerUp) -> None:
        for child in self.children:
            if child is not about:
                child.send(message)
        if self.control is not None:
            self.control.send(message)

    def _find_hung(self) -> None:
        """A ready process that has not moved for longer than it may is ended; `_judge` does the rest."""
        for child in self.children:
            watched = self._engine_progress.worker_overdue_s if child.role == "worker" else \
                self._progress[child].overdue_s
            overdue = watched() if child.is_ready and child.failure is None else 0.0
            starved = self._starved[child].seconds(self._progress[child].counter, child.pid)
            if overdue > starved and not child.has_ended():
                child.failure = Failure(f"{child.name} (pid {child.pid}) hangs: it is {overdue:.1f} s over the time in "
                                        "which it had to make progress")
                child.signal(signal.SIGKILL)

    def _on_signal(self, signals: SignalPipe) -> None:
        self.num_stops += signals.drain()

    def _watch_host(self) -> None:
        """The user's process: its pidfd counts, for its forked children keep the control socket open."""
        if self.control is not None:
            self._selector.register(self.control, selectors.EVENT_READ, self._on_control)
        if self.host_pidfd >= 0:
            self._selector.register(self.host_pidfd, selectors.EVENT_READ, self._on_host_end)

    def _on_control(self) -> None:
        control = self.control
        if control is None:
            return
        for _, message in control.receive():
            if isinstance(message, Shutdown):
                self.num_stops += 1
        if control.is_closed:
            self._forget(control)
            self._on_host_end()

    def _on_host_end(self) -> None:
        if self.host_pidfd >= 0:
            self._forget(self.host_pidfd)
        self.num_stops += 2                      # nobody waits for an orderly end

    def _forget(self, source: Any) -> None:
        try:
            self._selector.unregister(source)
        except (KeyError, ValueError):           # it was forgotten before
            pass

    # ------------------------------------------------------------ end

    def _end_all(self) -> None:
        """Every child is gone when this returns. An orderly stop goes from the frontend inwards, so that streams end
        before what feeds them."""
        if self.failure is not None or not self.num_stops:
            self._shut_down(self.children, _FAULT_S)
        else:
            drain_s = self.config.frontend.drain_timeout
            self._shut_down(self.frontends, _FRONTEND_S + drain_s, drain_s)
            self._shut_down([self.core], _CORE_S)
            self._shut_down(self.workers, _WORKER_S)
        if self.num_stops < 2:
            for child in self._alive(self.children):
                child.signal(signal.SIGTERM)
            self._wait_for(self.children, _TERM_S)
        for child in self._alive(self.children):
            child.signal(signal.SIGKILL)
        for child in self.children:
            child.close()
            self._progress[child].close()
        self._engine_progress.close()
        self._selector.close()
        for listener in self.listeners:
            listener.close()
        self.run_dir.remove()

    def _shut_down(self, children: list[Child], seconds: float, drain_s: float = 0.0) -> None:
        if self.num_stops >= 2:
            return
        reason = self.failure.reason if self.failure is not None else "the engine is stopping"
        for child in children:
            child.send(Shutdown(reason, drain_s))
        self._wait_for(children, seconds, [*self.workers, self.core] if drain_s else [])

    def _wait_for(self, children: list[Child], seconds: float, needed: Sequence[Child] = ()) -> None:
        """Until they have ended, the time is over, or a second signal says: at once. Who of `needed` ends meanwhile, or
        ended just before, is restarted: streams that may end in their own time wait for it."""
        deadline = time.monotonic() + seconds
        while any(self._alive(children)) and self.num_stops < 2:
            left = deadline - time.monotonic()
            if left <= 0:
                return
            for child in needed:
                if child.failure is not None and self.is_up and self._may_restart():
                    self._restart(child)
            self._poll(left)

    @staticmethod
    def _alive(children: Iterable[Child]) -> list[Child]:
        return [child for child in children if not child.has_ended()]


# ---------------------------------------------------------------- the form that AsyncLLM starts

def main(argv: list[str] | None = None, modules: Mapping[str, str] = MODULES) -> int:
    """Wait for Start on the control socket, then supervise until the host stops it, ends or a child fails."""
    parser = argparse.ArgumentParser(prog="ipc.supervisor")
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--host-pid", type=int, required=True)
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)       # it may print from the background; children too
    os.set_inheritable(args.control_fd, False)
    control = Lifeline(socket.socket(fileno=args.control_fd))
    try:
        host_pidfd = open_pidfd(args.host_pid)
    except ProcessLookupError:
        return EXIT_CLEAN

    def report(name: str, event: Any) -> None:
        if isinstance(event, Ready):
            return
        if isinstance(event, Failure) and name != "supervisor":
            print(event.reason, event.traceback, sep="\n" if event.traceback else "", file=sys.stderr, flush=True)
            return                               # it is restarted; the host hears PeerDown and PeerUp
        if isinstance(event, Phase) and not select.select([], [control], [], 0)[1]:
            return                               # a host that does not read must not stop us from watching
        control.send(event)

    try:
        config = _await_start(control, host_pidfd)
        if config is None:
            return EXIT_CLEAN
        return Supervisor(config, report, modules=modules, control=control, host_pidfd=host_pidfd,
                          host_pid=args.host_pid).run()
    except (ConfigError, WireError) as error:
        control.send(Failure(str(error)))
    except Exception as error:                   # the host must learn of any end
        control.send(Failure(f"supervisor: {type(error).__name__}: {error}", traceback.format_exc()))
    return EXIT_START_FAILED


def _await_start(control: Lifeline, host_pidfd: int) -> EngineConfig | None:
    """None when the host ended first, or changed its mind."""
    while not control.is_closed:
        watched: list[Any] = [control, host_pidfd] if host_pidfd >= 0 else [control]
        ready = select.select(watched, [], [])[0]
        if host_pidfd in ready:
            return None
        messages = [message for _, message in control.receive()]
        if any(isinstance(message, Shutdown) for message in messages):
            return None
        for message in messages:
            if isinstance(message, Start):
                return message.config
    return None


if __name__ == "__main__":
    sys.exit(main())
