"""The last steps of all processes on one clock: what each sent, collected here.

The core sends the stamps of every step it commits (ipc.messages.STAMPS), those of many steps at once, a few times a
second; this frontend notes of each message when it received it, had made text of it, and had written it, and joins the
two here when somebody looks. All are monotonic nanoseconds of one host. Always on: a few clock reads a step. Streamed
text is written where it is made, so that `detokenize` holds it and `write` what tasks do afterwards. Steps from before
this frontend came are told too, as far as the core has them; its own part of them is 0.
What the rows say is step_report.py's and trace.py's to tell. Knows no HTTP.

    plan ─ encode ─ wire ─ prepare ─ forward ─ sample ─ wire ─ commit ─ wire ─ detokenize ─ write
    core                   worker                              core           frontend
"""

from __future__ import annotations

import threading
import time
from array import array

import numpy as np

from ipc.messages import STAMPS, Outputs
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


_STEP, _COMMIT_END = STAMPS.index("step"), STAMPS.index("commit_end")
_NUM_HEARD = 1 + len(COLUMNS) - len(STAMPS)     # of one message: the last step it knows of, then our columns
_WRITTEN = COLUMNS.index("written") - len(COLUMNS)
_MOST_BYTES = RING_STEPS * ROW_BYTES


class Timeline:
    """A ring of the last RING_STEPS steps, and how many there were. Written by one thread, read by any."""

    def __init__(self, since_ns: int = 0) -> None:
        """since_ns: when this frontend came; it had no news of steps committed before."""
        self._since_ns = since_ns
        self._ring = np.zeros((RING_STEPS, len(COLUMNS)), np.int64)
        self._stamps = bytearray()              # of steps that are not in the ring yet
        self._heard = array("q")                # [messages, _NUM_HEARD]: of those whose steps are not in the ring yet
        self._last_heard = 0                    # step
        self._is_written = True                 # what was heard last
        self._lock = threading.Lock()
        self.is_recording = True                # False: nothing is noted; `bench overhead` measures what that saves
        self.num_steps = 0                      # told of, ever

    def __len__(self) -> int:
        return RING_STEPS

    def hear(self, outputs: Outputs, received_ns: int) -> bool:
        """A message was handled just now. True: call `written` when the tasks that it woke have run. If another message
        comes before, they write for both, and it counts as the later one's."""
        was_written = False
        if outputs.step != self._last_heard and self.is_recording:
            self._last_heard = outputs.step
            handled_ns = time.monotonic_ns()
            self._heard.extend((outputs.step, received_ns, handled_ns, handled_ns, outputs.num_running,
                                outputs.num_waiting, outputs.num_free_blocks))
            was_written, self._is_written = self._is_written, False
        if outputs.stamps:
            self._tell(outputs.stamps)
        return was_written

    def written(self) -> None:
        """What was heard last is written now."""
        self._is_written = True
        self._heard[_WRITTEN] = time.monotonic_ns()

    def _tell(self, stamps: memoryview) -> None:
        with self._lock:
            if len(self._stamps) + len(stamps) > _MOST_BYTES:
                self._settle()
            self._stamps += stamps
            self.num_steps += len(stamps) // ROW_BYTES

    def begin(self) -> None:
        """Another core counts its steps from 1."""
        with self._lock:
            self._settle()
            self._last_heard = 0
            del self._heard[:-_NUM_HEARD]
            if self._heard:                     # no step of the new core is its news
                self._heard[0] = 0

    def _settle(self) -> None:
        """Move the steps we were told of into the ring. The lock is held; `hear` and `written` do without it."""
        if not self._stamps:
            return
        rows = np.frombuffer(self._stamps, np.int64).reshape(-1, len(STAMPS))
        heard = np.array(self._heard, np.int64).reshape(-1, _NUM_HEARD)
        is_over = heard[:-1, 0] <= rows[-1, _STEP]              # the last one stays: `written` may be about to come
        rows = rows[-RING_STEPS:]
        first = np.searchsorted(heard[:, 0], rows[:, _STEP])    # the first message that knows of it brought its news
        is_ours = (first < len(heard)) & (rows[:, _COMMIT_END] >= self._since_ns)
        places = np.arange(self.num_steps - len(rows), self.num_steps) % RING_STEPS
        self._ring[places, : len(STAMPS)] = rows
        self._ring[places, len(STAMPS) :] = 0
        self._ring[places[is_ours], len(STAMPS) :] = heard[first[is_ours], 1:]
        del self._heard[: int(is_over.sum()) * _NUM_HEARD]
        self._stamps = bytearray()

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
