"""A helper gives way to others by every measure the kernel knows."""
from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ipc.priority import NICENESS, SLICE_NS, give_way, give_way_in_thread

KERNEL = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])


def test_a_process_and_its_children_give_way() -> None:
    fork = "import os, sys; pid = os.fork(); print(pid, flush=True) if pid else sys.stdin.read()"
    process = subprocess.Popen([sys.executable, "-c", f"import sys; sys.stdin.readline(); {fork}; sys.stdin.read()"],
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin and process.stdout
    try:
        give_way(process.pid)
        process.stdin.write(b"\n")
        process.stdin.flush()
        for pid in (process.pid, int(process.stdout.readline())):
            assert os.getpriority(os.PRIO_PROCESS, pid) == NICENESS
            assert os.sched_getscheduler(pid) == os.SCHED_BATCH
            state = Path(f"/proc/{pid}/sched")
            if KERNEL >= (6, 12) and state.exists():
                slices, = (line for line in state.read_text().splitlines() if line.startswith("se.slice"))
                assert int(slices.split(":")[1]) == SLICE_NS
    finally:
        process.kill()
        process.communicate()


def test_a_process_that_has_ended_is_no_error() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    give_way(process.pid)


def test_a_thread_gives_way_alone() -> None:
    def own_niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = own_niceness()
    with ThreadPoolExecutor(1, initializer=give_way_in_thread) as executor:
        assert executor.submit(own_niceness).result() == NICENESS
    assert own_niceness() == before


PAUSES = """
import hashlib, resource
from ipc.priority import pausing

def num_pauses():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    hashlib.pbkdf2_hmac("sha256", b"a", b"b", 400_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before

with pausing():
    inside = num_pauses()
print(inside, num_pauses())
"""


def test_a_thread_pauses_inside_one_long_call_of_a_library() -> None:
    """It kept the core until the kernel's next tick from whoever had just been taken off it."""
    found = subprocess.run([sys.executable, "-c", PAUSES], check=True, capture_output=True, text=True).stdout
    inside, after = map(int, found.split())
    assert inside > 20 and after < inside / 4
