"""The user's side of an engine that runs beside a Python program: start its supervisor, hear it, stop it.

Used by AsyncLLM. Every method may be called from any thread; nothing here keeps a thread or a signal handler of its
own. The supervisor leads a process group, so Ctrl-C in the user's terminal is for the user's program to handle; it
stays in the program's session, among whose threads priority.py has effect. However that program ends, the supervisor
sees it and ends the engine. A forked copy owns nothing: its calls do nothing.
"""
from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

from ipc.child import environment, python_command
from ipc.config import EngineConfig
from ipc.errors import EngineDeadError, WireError
from ipc.lifeline import Lifeline
from ipc.messages import EngineUp, Failure, Phase, Shutdown, Start
from ipc.run_dir import remove_run_dir
from ipc.system import describe_status, is_running

SUPERVISOR_MODULE = "ipc.supervisor"


class EngineProcess:
    """One engine. `start` blocks until it serves; under asyncio call `spawn`, watch `fileno()` and call `receive()`."""

    def __init__(self, module: str = SUPERVISOR_MODULE) -> None:
        self._module = module
        self._lock = threading.Lock()
        self._stop_lock = threading.Lock()
        self._owner = os.getpid()
        self._process: subprocess.Popen[bytes] | None = None
        self._lifeline: Lifeline | None = None
        self._up: EngineUp | None = None
        self._reason: str | None = None          # why it is gone
        self._traceback = ""
        self._inbox: list[Any] = []              # read and not yet handed out

    @property
    def pid(self) -> int:
        """Of the supervisor."""
        return self._process.pid if self._process is not None else 0

    def start(self, config: EngineConfig, report: Callable[[Phase], None] | None = None) -> EngineUp:
        """Spawn and wait until the engine serves. Raises EngineDeadError with the reason of the process that failed."""
        try:
            self.spawn(config)
            while True:
                for message in self.receive(timeout=0.2):
                    if isinstance(message, Phase) and report is not None:
                        report(message)
                if self._up is not None:
                    return self._up
                if self.died() is not None:
                    raise self.error()
        except BaseException:
            self.stop()
            raise

    def spawn(self, config: EngineConfig) -> None:
        """Start the supervisor and hand it the options."""
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            self._lifeline = Lifeline(ours)
            self._process = subprocess.Popen(
                python_command(self._module, "--control-fd", theirs.fileno(), "--host-pid", os.getpid()),
                stdin=subprocess.DEVNULL, stdout=2, env=environment(), pass_fds=(theirs.fileno(),),
                process_group=0)
            self._lifeline.send(Start(config))

    def fileno(self) -> int:
        """Readable when `receive` has news or the supervisor has ended; -1 after stop."""
        return self._lifeline.fileno() if self._lifeline is not None else -1

    def receive(self, timeout: float = 0.0) -> list[Phase | EngineUp | Failure]:
        """What the supervisor said since the last call. After its end: nothing, and died() has the reason."""
        fd = self.fileno()
        if fd < 0:
            return []
        if timeout > 0 and not self._lifeline_is_closed():
            with contextlib.suppress(OSError, ValueError):     # another thread stops the engine meanwhile
                poller = select.poll()
                poller.register(fd, select.POLLIN)
                poller.poll(timeout * 1000)
        with self._lock:
            self._drain()
            inbox, self._inbox = self._inbox, []
            return inbox

    def died(self) -> str | None:
        """The reason, once the engine is gone; None while it lives. Never blocks for longer than a moment."""
        with self._lock:
            self._drain()
            return self._reason

    def error(self) -> EngineDeadError:
        """The exception for its end; a fault of ours carries the traceback as a note."""
        error = EngineDeadError(self._reason or "the engine is gone")
        if self._traceback:
            error.add_note(self._traceback)
        return error

    def stop(self, timeout: float = 3.0) -> None:
        """End the engine; no process, descriptor or file of it is left. Idempotent: a second caller waits."""
        if os.getpid() != self._owner:           # a forked copy: the engine is its parent's
            if self._lifeline is not None:
                self._lifeline.sock.close()
            self._process = self._lifeline = None
            self._reason = self._reason or "the engine was stopped"
            return
        with self._stop_lock:
            self._stop(timeout)

    def _stop(self, timeout: float) -> None:
        with self._lock:
            process, lifeline = self._process, self._lifeline
            self._process = self._lifeline = None
            self._reason = self._reason or "the engine was stopped"
        if process is None or lifeline is None:
            return
        lifeline.send(Shutdown("the engine was stopped"))
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()                       # its children die with it, by the kernel's hand
            process.wait()
        lifeline.close()
        if self._up is not None:
            if process.returncode < 0:           # killed: it could not tidy up
                self._wait_for_children(self._up.pids[1:])
            remove_run_dir(self._up.run_dir)

    # ------------------------------------------------------------

    def _lifeline_is_closed(self) -> bool:
        return self._lifeline is None or self._lifeline.is_closed

    def _drain(self) -> None:
        """Read what has arrived, note it and keep it for `receive`. Called with the lock."""
        if (self._lifeline is None or self._process is None or self._lifeline.is_closed
                or os.getpid() != self._owner):  # a forked copy must not take its parent's messages
            return
        try:
            messages = [message for _, message in self._lifeline.receive()]
        except WireError as error:
            messages = []
            self._reason = self._reason or f"the engine's supervisor (pid {self._process.pid}): {error}"
        for message in messages:
            if isinstance(message, EngineUp):
                self._up = message               # again after a restart: other pids
            elif isinstance(message, Failure) and self._reason is None:
                self._reason, self._traceback = message.reason, message.traceback
        if self._lifeline.is_closed and self._reason is None:
            try:
                how = f"ended with {describe_status(self._process.wait(0.5))}"
            except subprocess.TimeoutExpired:
                how = "hung up"
            self._reason = f"the engine's supervisor (pid {self._process.pid}) {how}"
        self._inbox += messages

    @staticmethod
    def _wait_for_children(pids: list[int]) -> None:
        """They are not ours to reap, and the kernel takes a moment to end them."""
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline and any(map(is_running, pids)):
            time.sleep(0.01)
