"""A helper gives way to others by every measure the kernel knows."""
from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ipc.priority import NICENESS, give_way, give_way_in_thread


def test_the_process_and_its_session_have_a_low_weight() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE,
                               start_new_session=True)
    try:
        give_way(process.pid)
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == NICENESS
        assert os.sched_getscheduler(process.pid) == os.SCHED_BATCH
        group = Path(f"/proc/{process.pid}/autogroup")
        if not group.exists() or not group.read_text().strip():
            pytest.skip("this kernel does not group tasks by session")
        assert group.read_text().endswith(f"nice {NICENESS}\n")
        assert Path("/proc/self/autogroup").read_text() != group.read_text()
    finally:
        process.kill()
        process.communicate()


def test_a_process_that_has_ended_is_no_error() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
    process.wait()
    give_way(process.pid)


def test_a_thread_gives_way_alone() -> None:
    def own_niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = own_niceness()
    with ThreadPoolExecutor(1, initializer=give_way_in_thread) as executor:
        assert executor.submit(own_niceness).result() == NICENESS
    assert own_niceness() == before
