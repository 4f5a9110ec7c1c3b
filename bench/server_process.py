"""A server as its users start it, `python launch.py --model ...`: its screen, its processes, and what is left of it."""
from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ipc.child import ROOT

HARD_TIMEOUT_S = 20.0                           # of anything; who needs it has failed
GONE_S = 4.0                                    # the promise is 2 s after a kill; the rest is for a busy test machine


def engine_environment(temp: str) -> dict[str, str]:
    """For a process that starts engines: our packages, and `temp` for their run directories."""
    path = os.pathsep.join(filter(None, (ROOT, os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": path, "TMPDIR": temp}
    env.pop("XDG_RUNTIME_DIR", None)
    return env


def survivors(temp: str) -> dict[int, str]:
    """Live processes that were started with this private folder, however related to us: pid -> command line."""
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            variables = Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
            state = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0]
            if f"TMPDIR={temp}".encode() in variables and state not in "ZX":
                found[int(name)] = Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:                         # it ended meanwhile, or is somebody else's
            continue
    return found


def run_dirs(temp: str) -> list[str]:
    """Recordings of failures are files beside them, and stay."""
    return sorted(entry.path for entry in os.scandir(temp) if entry.name.startswith("threefold-") and entry.is_dir())


def wait_until(is_true: Callable[[], Any], seconds: float = HARD_TIMEOUT_S, what: str = "") -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        if time.monotonic() > deadline:
            raise AssertionError(f"not so after {seconds} s: {what or is_true}")
        time.sleep(0.01)


def assert_nothing_left(temp: str, seconds: float = GONE_S) -> None:
    """No process, no socket, no directory of any engine that was started with this folder."""
    deadline = time.monotonic() + seconds
    while (left := (survivors(temp), run_dirs(temp))) != ({}, []):
        if time.monotonic() > deadline:
            raise AssertionError(f"left after {seconds} s: {left}")
        time.sleep(0.01)


class ServerProcess:
    """`python launch.py --model ...`, its screen, its processes."""

    def __init__(self, model: str, temp: str, *options: str) -> None:
        self.temp, self.options = temp, options
        self._screen = Path(temp) / "screen.txt"
        command = [sys.executable, os.path.join(ROOT, "launch.py"), "--model", model, "--port", "0", *options]
        with self._screen.open("w") as screen:
            self.process = subprocess.Popen(command, env=engine_environment(temp), stdin=subprocess.DEVNULL,
                                            stdout=screen, stderr=screen)
        self.url, self.pids = "", {"supervisor": self.process.pid}

    @property
    def screen(self) -> str:
        return self._screen.read_text()

    def wait_ready(self, seconds: float = 2 * HARD_TIMEOUT_S) -> ServerProcess:
        deadline = time.monotonic() + seconds
        while "\n  try" not in self.screen and self.process.poll() is None:
            if time.monotonic() > deadline:
                raise AssertionError(f"the server is not ready after {seconds} s: {self.screen}")
            time.sleep(0.02)
        if self.process.poll() is not None:
            raise AssertionError(f"the server ended with {self.process.returncode}: {self.screen}")
        self.url = self._said(r"^  URL +(\S+)/v1$")
        pids = self._said(r"^  PIDs +(.*)$")
        self.pids = {name: int(pid) for name, pid in re.findall(r"(\w+)(?: 0)? (\d+)", pids)}
        return self

    def _said(self, pattern: str) -> str:
        found = re.search(pattern, self.screen, re.M)
        if found is None:
            raise AssertionError(f"the screen has no {pattern}: {self.screen}")
        return found[1]

    @property
    def num_restarts(self) -> int:
        """Of any of its processes."""
        return self.screen.count("; restarting it (")

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def core_address(self) -> str:
        [folder] = run_dirs(self.temp)
        return f"ipc://{folder}/core-1"

    def end(self, number: int = signal.SIGINT) -> int:
        """The exit status after a signal to the supervisor."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.wait()

    def kill(self) -> None:
        """For the end of a test that failed."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def wait(self) -> int:
        try:
            return self.process.wait(HARD_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the server does not end: {self.screen}") from None
