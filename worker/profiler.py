"""torch's operator profiler for a while, on request: started and stopped between steps, written by a thread.

Loading the profiler takes seconds and writing what it recorded does too; both happen beside the steps. Only reading its
buffers, at the stop, needs the thread that computes. Ranges named "threefold clock NS" tie its clock to ours: NS is the
monotonic time at which such a range begins. Knows no sockets: the loop watches `fd` and sends what `take` returns.
"""
from __future__ import annotations

import contextlib
import logging
import os
import queue
import tempfile
import threading
import time
from typing import Any

from ipc.messages import Profile, Profiled

logger = logging.getLogger("worker")

MAX_SECONDS = 60.0                              # it stops by itself then: what it records grows with every operator
CLOCK_MARKS = 5
_NOTHING = contextlib.nullcontext()


class OperatorProfiler:
    """At most one recording at a time."""

    def __init__(self, folder: str) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.is_recording = False
        self._folder = folder
        self._profile: Any = None
        self._began = self._seconds = 0.0
        self._call: Profile | None = None       # being answered by a thread
        self._from_thread: queue.SimpleQueue[str] = queue.SimpleQueue()     # the error, or ""
        self._path = ""

    @property
    def is_busy(self) -> bool:
        """A thread is at work on an answer."""
        return self._call is not None

    def handle(self, message: Profile) -> Profiled | None:
        """Begin to answer; None: `take` will have the answer."""
        if self._call is not None:
            return Profiled(message.call_id, error="the profiler is being started or stopped; wait for that")
        if message.is_start == (self._profile is not None):
            state = "records already" if message.is_start else "does not record; start it first"
            return Profiled(message.call_id, error=f"the operator profiler {state}")
        self._call = message
        if not message.is_start:
            self._stop()
        work = self._load if message.is_start else self._write
        threading.Thread(target=self._run, args=(work,), name="profiler", daemon=True).start()
        return None

    def check_limit(self) -> None:
        """Between steps: end a recording that nobody stopped."""
        if self.is_recording and time.monotonic() - self._began > MAX_SECONDS:
            logger.warning("the operator profiler stopped after %d s", MAX_SECONDS)
            self._stop()

    def take(self) -> Profiled | None:
        """The thread is done: its answer. Starts the recording, which must be the loop's thread."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        try:
            error = self._from_thread.get_nowait()
        except queue.Empty:
            return None
        call, self._call = self._call, None
        if call is None:
            raise RuntimeError("the profiler's thread answered and nobody had asked")
        if error:
            self._profile = None
            return Profiled(call.call_id, error=error)
        if call.is_start:
            self._profile = self._make()
            self._profile.start()
            self._mark()
            self._began, self.is_recording = time.monotonic(), True
            return Profiled(call.call_id)
        self._profile = None
        return Profiled(call.call_id, self._path, self._seconds)

    # ------------------------------------------------------------ in the loop's thread

    def _make(self) -> Any:
        import torch
        from torch.profiler import ProfilerActivity, profile
        cuda = [ProfilerActivity.CUDA] if torch.cuda.is_initialized() else []
        return profile(activities=[ProfilerActivity.CPU, *cuda], acc_events=True)

    def _mark(self) -> None:
        from torch.profiler import record_function
        for _ in range(CLOCK_MARKS):
            with record_function(f"threefold clock {time.monotonic_ns()}"):
                pass

    def _stop(self) -> None:
        if self.is_recording:
            self._mark()
            self._profile.stop()
            self._seconds, self.is_recording = time.monotonic() - self._began, False

    # ------------------------------------------------------------ in a thread

    def _run(self, work: Any) -> None:
        error = ""
        try:
            work()
        except Exception as problem:            # the caller hears it; steps go on
            error = f"the operator profiler failed: {type(problem).__name__}: {problem}"
        self._from_thread.put(error)
        os.eventfd_write(self.fd, 1)

    def _load(self) -> None:
        """The first recording of a process loads much; this is it, and it is thrown away."""
        with self._make():
            pass

    def _write(self) -> None:
        handle, self._path = tempfile.mkstemp(".json", "operators-", self._folder)
        os.close(handle)
        self._profile.export_chrome_trace(self._path)


def no_range(_: str) -> contextlib.AbstractContextManager[Any]:
    """While nothing is recorded."""
    return _NOTHING


def named_range(name: str) -> contextlib.AbstractContextManager[Any]:
    """A range in the recording."""
    from torch.profiler import record_function
    found: contextlib.AbstractContextManager[Any] = record_function(name)
    return found
