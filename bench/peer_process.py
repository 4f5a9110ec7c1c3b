"""Any server as a process tree: start it, wait for its first token, weigh it, end it. Knows Linux's /proc and HTTP."""
from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

POLL_S = 0.05
STOP_S = 10.0


def free_port() -> int:
    """A port nobody listens on now. Peers cannot be given a socket, so another process may still take it first."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def process_tree(root: int) -> list[int]:
    """root and its descendants that live now."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:                         # ended meanwhile
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found, todo = [], [root]
    while todo:
        pid = todo.pop()
        found.append(pid)
        todo += children.get(pid, [])
    return found


def _kib(path: str, field: str) -> int:
    try:
        for line in Path(path).read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1])
    except OSError:
        pass
    return 0


def memory_mb(root: int) -> tuple[float, float]:
    """(peak resident size, proportional size now) of the whole tree, in MB: the first counts pages that processes
    share once for each, the second once in all."""
    pids = process_tree(root)
    peak = sum(_kib(f"/proc/{pid}/status", "VmHWM") for pid in pids)
    now = sum(_kib(f"/proc/{pid}/smaps_rollup", "Pss") for pid in pids)
    return peak / 1e3, now / 1e3


class Server:
    """A running server; a context manager. Its output goes to `log`."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self.log = log
        self.started = time.monotonic()
        with log.open("wb") as out:
            self.process = subprocess.Popen(command, env={**os.environ, **env}, stdout=out, stderr=subprocess.STDOUT,
                                            stdin=subprocess.DEVNULL, process_group=0)

    def first_token_s(self, url: str, timeout_s: float) -> float:
        """Seconds from the start until one token came back. Raises RuntimeError with the log's end."""
        while time.monotonic() - self.started < timeout_s:
            if self.process.poll() is not None:
                raise RuntimeError(f"ended with status {self.process.returncode} before its first token: {self.tail()}")
            if ask_one_token(url):
                return time.monotonic() - self.started
            time.sleep(POLL_S)
        raise RuntimeError(f"no token within {timeout_s:.0f} s: {self.tail()}")

    def tail(self) -> str:
        return " | ".join(self.log.read_text(errors="replace").splitlines()[-4:])[-600:]

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        """A polite signal to the group, then none of the tree is left."""
        pids = process_tree(self.process.pid)
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                pass
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait()


def ask_one_token(url: str) -> bool:
    """Whether the server answers a one-token completion now; false while it does not listen or is still loading."""
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as answer:
            model = json.load(answer)["data"][0]["id"]
        body = json.dumps({"model": model, "prompt": [1, 2, 3, 4], "max_tokens": 1, "temperature": 0}).encode()
        request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return bool(json.load(answer)["choices"])
    except (OSError, ValueError, LookupError):
        return False
