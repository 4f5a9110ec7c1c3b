"""One process that the supervisor started: how it is spawned, heard, signalled and how its end reads.

Does not decide anything: which children there are, in which order they stop and what a death means is supervisor.py.
A child is ended by its recorded pid only, and only while it is not reaped: the number cannot belong to another process.
"""
from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from ipc.codec import check_hello
from ipc.errors import WireError
from ipc.lifeline import FD_ARGUMENT, PR_SET_PDEATHSIG, Lifeline
from ipc.messages import HELLO, Failure, Ready
from ipc.system import describe_status, open_pidfd

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SECRETS = ("THREEFOLD_API_KEY", "THREEFOLD_ADMIN_API_KEY")     # read by launch.py; no child needs them there
MODULES: Mapping[str, str] = {"worker": "worker.main", "engine_core": "engine_core.main", "frontend": "frontend.main"}

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
_libc = ctypes.CDLL(None, use_errno=True)


def environment(num_threads: int = 1) -> dict[str, str]:
    """The environment of a child: ours with our root first on its path, and its compute pools limited.

    A waiting compute thread sleeps instead of spinning: on a small host it would take time from core and frontend.
    """
    env = {name: text for name, text in os.environ.items() if name not in SECRETS}
    env["PYTHONPATH"] = os.pathsep.join([ROOT, *filter(None, [env.get("PYTHONPATH")])])
    env.update({name: str(num_threads) for name in _THREAD_VARIABLES})
    env.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    return env


def python_command(module: str, *arguments: object) -> list[str]:
    """-P: neither the current folder nor its `worker` or `frontend` is importable in a child."""
    return [sys.executable, "-P", "-m", module, *map(str, arguments)]


def _die_with_parent() -> None:
    """Runs between fork and exec. The child's own first statement does it again and checks its parent; this closes the
    seconds before, while it imports."""
    _libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


class Child:
    """A role and rank, and the process that plays it now. `epoch` counts its processes."""

    def __init__(self, role: str, module: str, rank: int = 0) -> None:
        self.role, self.module, self.rank = role, module, rank
        self.epoch = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.lifeline: Lifeline | None = None
        self.pidfd = -1                          # -1: this kernel has none, poll instead
        self.is_ready = False
        self.num_blocks = 0                      # of a worker's pool, known once it was ready
        self.failure: Failure | None = None      # its own words, or how it ended

    @property
    def name(self) -> str:
        return f"{self.role} {self.rank}" if self.role == "worker" or self.rank else self.role

    @property
    def pid(self) -> int:
        return self.process.pid if self.process is not None else 0

    def spawn(self, num_threads: int, pass_fds: tuple[int, ...] = ()) -> Lifeline:
        """Start the next process of this role. Must run in the main thread: the kernel's death signal is tied to the
        thread that spawned."""
        self.epoch += 1
        self.is_ready, self.failure = False, None
        ours, theirs = socket.socketpair()
        with theirs:
            self.lifeline = Lifeline(ours)
            self.process = subprocess.Popen(
                python_command(self.module, FD_ARGUMENT, theirs.fileno(), "--parent", os.getpid(), "--rank", self.rank),
                stdin=subprocess.DEVNULL, stdout=2, env=environment(num_threads), process_group=0,
                pass_fds=(theirs.fileno(), *pass_fds), preexec_fn=_die_with_parent)
        self.pidfd = open_pidfd(self.process.pid)
        return self.lifeline

    def receive(self) -> list[Any]:
        """Messages that have arrived; None stands for its Hello. Notes Ready, Failure and bytes that are no message."""
        messages: list[Any] = []
        if self.lifeline is None or self.lifeline.sock.fileno() < 0:
            return messages
        try:
            for header, message in self.lifeline.receive():
                if header.kind == HELLO:
                    role, rank, _ = check_hello(header)
                    if (role, rank) != (self.role, self.rank):
                        raise WireError(f"it says it is {role} {rank}")
                messages.append(message)
                if isinstance(message, Ready):
                    self.is_ready = True
                    self.num_blocks = message.num_blocks or self.num_blocks
                elif isinstance(message, Failure) and self.failure is None:
                    self.failure = message
        except WireError as error:
            self.lifeline.is_closed = True
            self.failure = self.failure or Failure(f"{self.name} (pid {self.pid}): {error}")
        return messages

    def send(self, message: Any) -> None:
        if self.lifeline is not None and not self.lifeline.is_closed:
            self.lifeline.send(message)

    def has_ended(self) -> bool:
        return self.process is None or self.process.poll() is not None

    def note_end(self) -> None:
        """It has ended or hung up: keep its last words, or else say how it went."""
        self.receive()
        if self.failure is None and self.process is not None:
            try:
                status = self.process.wait(0.5)  # the line closes a moment before the process is gone
                text = f"ended with {describe_status(status)}"
            except subprocess.TimeoutExpired:
                text = "closed its line to the supervisor"
            self.failure = Failure(f"{self.name} (pid {self.pid}) {text}")

    def signal(self, number: int) -> None:
        if self.process is not None:
            self.process.send_signal(number)     # does nothing once reaped

    def close(self) -> None:
        """Release descriptors and reap. The process has ended or was killed; one that the kernel cannot end yet (stuck
        in a driver) is left to it."""
        if self.lifeline is not None:
            self.lifeline.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
        if self.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(2.0)
