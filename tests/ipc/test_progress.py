"""Being late for want of a core is not hanging."""
from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from ipc import progress
from ipc.progress import Starvation, run_queue_ns


def test_time_without_a_core_counts_from_the_last_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    queued = [5_000_000_000]
    monkeypatch.setattr(progress, "run_queue_ns", lambda pid: queued[0])
    starved = Starvation()
    assert starved.seconds(1, 42) == 0.0
    queued[0] += 3_000_000_000
    assert starved.seconds(1, 42) == 3.0
    assert starved.seconds(2, 42) == 0.0
    queued[0] += 1_000_000_000
    assert starved.seconds(2, 42) == 1.0
    queued[0] = 7                               # a successor, that has not moved either
    assert starved.seconds(2, 43) == 0.0


def python(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code])


def test_the_kernel_tells_how_long_a_process_waited_for_its_core() -> None:
    assert run_queue_ns(1 << 30) == 0
    core = min(os.sched_getaffinity(0))
    rivals = [python(f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass") for _ in range(2)]
    try:
        end = time.monotonic() + 60
        while time.monotonic() < end and not all(run_queue_ns(r.pid) > 300_000_000 for r in rivals):
            time.sleep(0.1)
        assert all(run_queue_ns(r.pid) > 300_000_000 for r in rivals)
    finally:
        for rival in rivals:
            rival.kill()
            rival.wait()


def test_a_stopped_process_waits_for_no_core() -> None:
    """SIGSTOP takes it off the queue: it is found to hang as before."""
    child = python("import time; time.sleep(60)")
    try:
        time.sleep(0.5)
        os.kill(child.pid, signal.SIGSTOP)
        time.sleep(0.3)
        before = run_queue_ns(child.pid)
        time.sleep(0.3)
        assert run_queue_ns(child.pid) == before
    finally:
        child.kill()
        child.wait()
