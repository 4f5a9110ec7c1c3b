"""The engine's processes as the kernel sees them: role, pid, CPU seconds used, resident bytes. Linux only."""
from __future__ import annotations

import os
from collections.abc import Iterable
from typing import NamedTuple


class ProcessUse(NamedTuple):
    """One process now."""
    role: str                                   # "worker", "engine_core", "frontend"
    pid: int
    cpu_s: float                                # used since it began, user and system
    rss_bytes: int


def siblings() -> list[int]:
    """The children of this process's parent: of an HTTP frontend, all processes that its supervisor started."""
    parent = os.getppid()
    try:
        with open(f"/proc/{parent}/task/{parent}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return [os.getpid()]


def process_use(pids: Iterable[int]) -> list[ProcessUse]:
    """Those of the processes that are ours and still there; this process is a frontend, whatever it is called."""
    found = []
    for pid in pids:
        try:
            with open(f"/proc/{pid}/stat") as file:
                fields = file.read().rsplit(")", 1)[1].split()
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                words = file.read().split(b"\0")
            with open(f"/proc/{pid}/statm") as file:
                resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:                         # it has just ended
            continue
        module = next((word.decode() for word in words if word.endswith(b".main")), "")
        role = "frontend" if pid == os.getpid() else module.removesuffix(".main")
        if role:
            cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            found.append(ProcessUse(role, pid, cpu_s, resident))
    return found
