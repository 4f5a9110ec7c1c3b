"""A low priority: a process computes mostly in the time that others leave, and never makes them wait for a core.

Niceness alone does not do it. Where the kernel groups tasks by session (autogroup), it compares niceness within a
session only, and sessions share cores evenly: a nice process alone in its session would hold a core for whole slices
while the engine, which has a session of its own, waits. So it gets a session, a low weight for that session's group,
and a short slice: a core is not taken from a process before its slice is over. The weight is a tenth, not the least: on
cores that are always busy the process must come to an end, too. Not SCHED_IDLE: a core with such a process counts as
free, so that others are woken there, and wait.
Sources: sched(7), "The autogroup feature"; sched_setattr(2).
"""
from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import struct
import threading
import time

NICENESS = 10
SLICE_NS = 500_000
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}.get(platform.machine())
_SCHED_ATTR = struct.Struct("<IIQiIQQQII")      # size, policy, flags, nice, priority, runtime, deadline, period, clamps
_TRIES, _PAUSE_S = 5, 0.12                      # without privileges, one group of the machine may change every 0.1 s
_libc = ctypes.CDLL(None, use_errno=True)


def give_way(pid: int) -> None:
    """For a process that leads a session of its own (`start_new_session`). Best effort; may take half a second, so not
    for a loop's thread."""
    _be_nice(pid)
    for _ in range(_TRIES):
        try:
            with open(f"/proc/{pid}/autogroup", "w") as file:
                file.write(str(NICENESS))
            return
        except OSError as error:
            if error.errno != errno.EAGAIN:     # no such groups here, or the process has ended
                return
        time.sleep(_PAUSE_S)


def give_way_in_thread() -> None:
    """For the calling thread alone, beside others of its session."""
    _be_nice(threading.get_native_id())


def _be_nice(number: int) -> None:
    """number: of a process that has one thread, or of a thread."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, number, NICENESS)
        os.sched_setscheduler(number, os.SCHED_BATCH, os.sched_param(0))
    if _SCHED_SETATTR is not None:              # kernels before 6.12 have no slices of a process, and ignore it
        _libc.syscall(_SCHED_SETATTR, number, _SCHED_ATTR.pack(_SCHED_ATTR.size, os.SCHED_BATCH, 0, NICENESS, 0,
                                                               SLICE_NS, 0, 0, 0, 0), 0)
