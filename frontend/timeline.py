"""The last steps of all processes on one clock: what each sent, collected here.

The core sends the stamps of every step it commits (ipc.messages.STAMPS); this frontend adds when it received their
news, had made text of it, and had written it. All are monotonic nanoseconds of one host. Always on: a few clock reads
and one row copy a step. Streamed text is written where it is made, so that `detokenize` holds it and `write` what tasks
do afterwards. Steps from before this frontend came are told too, as far as the core has them; its own part of them is
0. What the rows say is step_report.py's and trace.py's to tell. Knows no HTTP.

    plan ─ encode ─ wire ─ prepare ─ forward ─ sample ─ wire ─ commit ─ wire ─ detokenize ─ write
    core                   worker                              core           frontend
"""

from __future__ import annotations

import threading
from array import array
from typing import Any

import numpy as np

from ipc.messages import STAMPS
from ipc.step_ring import RING_STEPS, ROW_BYTES

COLUMNS = (*STAMPS, "received", "handled", "written", "num_running", "num_waiting", "num_free_blocks")
COLUMN = {name: i for i, name in enumerate(COLUMNS)}

STAGES = (  # stage, process, from, to
    ("plan", "engine_core", "plan_begin", "plan_end"),
    ("encode", "engine_core", "plan_end", "plan_sent"),
    ("plan wire", "wire", "plan_sent", "worker_received"),
    ("prepare", "worker", "worker_received", "worker_prepared"),
    ("forward", "worker", "worker_prepared", "worker_launched"),
    ("sample", "worker", "worker_launched", "worker_done"),
    ("result wire", "wire", "worker_done", "commit_begin"),
    ("commit", "engine_core", "commit_begin", "commit_end"),
    ("output wire", "wire", "outputs_sent", "received"),
    ("detokenize", "frontend", "received", "handled"),
    ("write", "frontend", "handled", "written"),
)


_COMMIT_END = STAMPS.index("commit_end")
_NUM_TIMES = len(COLUMNS) - len(STAMPS)
_MOST_BYTES = RING_STEPS * ROW_BYTES


class Timeline:
    """A ring of the last RING_STEPS steps, and how many there were. Written by one thread, read by any."""

    def __init__(self, since_ns: int = 0) -> None:
        """since_ns: when this frontend came; it had no news of steps committed before."""
        self._since_ns = since_ns
        self._ring = np.zeros((RING_STEPS, len(COLUMNS)), np.int64)
        self._stamps, self._times = bytearray(), array("q")     # of steps that are not in the ring yet
        self._lock = threading.Lock()
        self.num_steps = 0  # ever

    def __len__(self) -> int:
        return RING_STEPS

    def add(
        self,
        stamps: Any,
        received_ns: int,
        handled_ns: int,
        written_ns: int,
        num_running: int,
        num_waiting: int,
        num_free_blocks: int,
    ) -> None:
        """The steps of one Outputs message."""
        count = len(stamps) // ROW_BYTES
        with self._lock:
            self._stamps += stamps
            self._times.extend((received_ns, handled_ns, written_ns, num_running, num_waiting, num_free_blocks) * count)
            self.num_steps += count
            if len(self._stamps) > _MOST_BYTES:
                self._settle()

    def _settle(self) -> None:
        """Move what was added into the ring. The lock is held."""
        rows = np.frombuffer(self._stamps, np.int64).reshape(-1, len(STAMPS))[-RING_STEPS:]
        times = np.frombuffer(self._times, np.int64).reshape(-1, _NUM_TIMES)[-RING_STEPS:]
        places = np.arange(self.num_steps - len(rows), self.num_steps) % RING_STEPS
        self._ring[places, : len(STAMPS)] = rows
        self._ring[places, len(STAMPS) :] = times * (rows[:, _COMMIT_END] >= self._since_ns)[:, None]
        self._stamps, self._times = bytearray(), array("q")

    def window(self, since_ns: int = 0) -> np.ndarray:
        """Rows [steps, COLUMNS] that were committed after `since_ns`, oldest first. A copy."""
        rows = self.after(0)[0]
        found: np.ndarray = rows[rows[:, COLUMN["commit_begin"]] >= since_ns]
        return found

    def known_since(self, since_ns: int) -> int:
        """`since_ns`, or when the ring begins if older steps have left it."""
        with self._lock:
            self._settle()
            oldest = self._ring[self.num_steps % RING_STEPS, COLUMN["commit_begin"]]   # 0: none has
        return max(since_ns, int(oldest))

    def after(self, count: int) -> tuple[np.ndarray, int]:
        """(rows of the steps behind the first `count`, as far as the ring still has them; how many there are now)."""
        with self._lock:
            self._settle()
            now = self.num_steps
            kept = min(now - count, now, RING_STEPS) if count <= now else min(now, RING_STEPS)
            rows: np.ndarray = self._ring[np.arange(now - kept, now) % RING_STEPS]
        return rows, now


def columns(rows: np.ndarray) -> dict[str, np.ndarray]:
    """The rows by column name."""
    return {name: rows[:, i] for name, i in COLUMN.items()}


def stage_ns(column: dict[str, np.ndarray], stage: str) -> np.ndarray:
    """Nanoseconds that a stage took in each step."""
    begin, end = next((begin, end) for name, _, begin, end in STAGES if name == stage)
    took: np.ndarray = np.maximum(column[end] - column[begin], 0)
    return took
