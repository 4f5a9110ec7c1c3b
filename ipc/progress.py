"""Progress that a supervisor can see from outside: a few bytes of a file in the run directory, mapped by both.

    0         8          16
    | counter | deadline |        counter: changes whenever the process did something
                                  deadline: monotonic ns until which it may be silent; 0: it waits for work, may sleep

The process that works writes, from its own loop; the supervisor only reads. So "hung" means that the loop itself does
not turn (a stopped process, an endless kernel), not that some helper thread still answers. Knows no messages.
"""
from __future__ import annotations

import mmap
import os
import struct
import time

_FORMAT = struct.Struct("<QQ")
MIN_SILENCE_S = 5.0                             # nobody is called hung before this
SAFETY = 10                                     # times the predicted duration of what it does


class Progress:
    """The writing side. One per process."""

    def __init__(self, run_dir: str, name: str) -> None:
        self._map = _open(run_dir, name, create=True)
        self._counter = 0

    def working(self, predicted_s: float = 0.0) -> None:
        """Something begins that should take about `predicted_s`."""
        self._counter += 1
        allowed = max(MIN_SILENCE_S, SAFETY * predicted_s)
        _FORMAT.pack_into(self._map, 0, self._counter, time.monotonic_ns() + int(allowed * 1e9))

    def waiting(self) -> None:
        """It waits for messages; silence is fine."""
        self._counter += 1
        _FORMAT.pack_into(self._map, 0, self._counter, 0)


class ProgressReader:
    """The supervisor's side of one process."""

    def __init__(self, run_dir: str, name: str) -> None:
        self._map = _open(run_dir, name, create=True)

    def overdue_s(self) -> float:
        """Seconds since its deadline passed; 0 while all is well."""
        _, deadline = _FORMAT.unpack_from(self._map, 0)
        return max(0.0, (time.monotonic_ns() - deadline) / 1e9) if deadline else 0.0

    def clear(self) -> None:
        """A new process takes the name: nothing is expected of it yet."""
        _FORMAT.pack_into(self._map, 0, 0, 0)

    def close(self) -> None:
        self._map.close()


def _open(run_dir: str, name: str, create: bool) -> mmap.mmap:
    fd = os.open(os.path.join(run_dir, f"progress-{name}"), os.O_RDWR | (os.O_CREAT if create else 0), 0o600)
    try:
        if os.fstat(fd).st_size < _FORMAT.size:
            os.ftruncate(fd, _FORMAT.size)
        return mmap.mmap(fd, _FORMAT.size)
    finally:
        os.close(fd)
