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
PLANS = "plans-0"                               # written by the core for the worker: it owes an answer to a plan
STILL_S = 0.4
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
    """The side that watches one process."""

    def __init__(self, run_dir: str, name: str) -> None:
        self._map = _open(run_dir, name, create=True)

    @property
    def counter(self) -> int:
        """Changes whenever the process did something."""
        return int(_FORMAT.unpack_from(self._map, 0)[0])

    @property
    def is_waiting(self) -> bool:
        """It says that it waits for messages."""
        return not _FORMAT.unpack_from(self._map, 0)[1]

    def overdue_s(self, early_s: float = 0.0) -> float:
        """Seconds since its deadline passed, or since `early_s` before that; 0 while all is well."""
        _, deadline = _FORMAT.unpack_from(self._map, 0)
        return max(0.0, (time.monotonic_ns() - deadline) / 1e9 + early_s) if deadline else 0.0

    def clear(self) -> None:
        """A new process takes the name: nothing is expected of it yet."""
        _FORMAT.pack_into(self._map, 0, 0, 0)

    def close(self) -> None:
        self._map.close()


class Starvation:
    """How long a process has been ready to run without getting a core, since it last made progress. On a machine that
    is far too busy this is why it is late, and ending it would only make more work."""

    def __init__(self) -> None:
        self._last, self._queued_ns = (-1, 0), 0    # progress and process

    def seconds(self, counter: int, pid: int) -> float:
        """`counter`: its progress now. Call often: what counts begins with the first call after a change, also of the
        process: a successor starts with a clock of its own."""
        queued_ns = run_queue_ns(pid)
        if (counter, pid) != self._last:
            self._last, self._queued_ns = (counter, pid), queued_ns
        return (queued_ns - self._queued_ns) / 1e9


def run_queue_ns(pid: int) -> int:
    """Nanoseconds that the main thread of a process has spent waiting for a core; 0 where the kernel does not tell."""
    try:
        with open(f"/proc/{pid}/schedstat") as file:
            return int(file.read().split()[1])
    except (OSError, IndexError, ValueError):
        return 0


class EngineProgress:
    """Core and worker together: which of them is silent for longer than it may be."""

    def __init__(self, run_dir: str) -> None:
        self.core, self.worker, self.plans = (ProgressReader(run_dir, name)
                                              for name in ("engine_core-0", "worker-0", PLANS))
        self._still = (-1, 0.0)                 # the worker's counter, and since when it is that

    def worker_overdue_s(self, early_s: float = 0.0) -> float:
        """A worker that says it waits, while the core has long waited for its answer, may have been stopped in its
        wait. It counts when it stays so for a moment: the answer to a slow step may just be on its way. A core that
        is silent itself blames nobody."""
        if not self.worker.is_waiting:
            return self.worker.overdue_s(early_s)
        overdue_s, counter, now = self.plans.overdue_s(early_s), self.worker.counter, time.monotonic()
        if counter != self._still[0] or not overdue_s or self.core.overdue_s(MIN_SILENCE_S / 2) > 0:
            self._still = counter, now
        return overdue_s if now - self._still[1] >= STILL_S else 0.0

    def silent(self, early_s: float) -> str:
        """What to say of the one that is late, or will be in `early_s`; "": nobody is."""
        if self.core.overdue_s(early_s) > 0:
            return "the engine core makes no progress"
        return "the worker makes no progress" if self.worker_overdue_s(early_s) > 0 else ""

    def close(self) -> None:
        for reader in (self.core, self.worker, self.plans):
            reader.close()


def _open(run_dir: str, name: str, create: bool) -> mmap.mmap:
    fd = os.open(os.path.join(run_dir, f"progress-{name}"), os.O_RDWR | (os.O_CREAT if create else 0), 0o600)
    try:
        if os.fstat(fd).st_size < _FORMAT.size:
            os.ftruncate(fd, _FORMAT.size)
        return mmap.mmap(fd, _FORMAT.size)
    finally:
        os.close(fd)
