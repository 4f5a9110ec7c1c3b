"""A low priority: what computes so takes the time that others leave, and they do not wait for it.

Three measures. The highest niceness: a thread that has had more than its share waits until the others caught up, so who
has a small share makes the others wait rarely, for a tick of the kernel's clock; it still has one, for on cores that
are always busy it must come to an end, too. The longest slice: the kernel hands a core over at once to a thread with a
shorter slice, and otherwise only at the next tick. SCHED_BATCH: waking up it takes the core from nobody. All of it
holds among the threads of one session (where the kernel groups tasks by session, sessions share a core evenly and
niceness counts only within), so the engine and its helpers stay in the session of whoever started them. Not SCHED_IDLE,
which may never get a turn.
Sources: sched(7), "The autogroup feature"; sched_setattr(2); kernel documentation, "EEVDF Scheduler".
"""
from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import struct
import threading

NICENESS = 19
SLICE_NS = 100_000_000                          # the longest the kernel takes
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}.get(platform.machine())
_SCHED_ATTR = struct.Struct("<IIQiIQQQII")      # size, policy, flags, nice, priority, runtime, deadline, period, clamps
_libc = ctypes.CDLL(None, use_errno=True)


def give_way(number: int) -> None:
    """number: of a process that has one thread, whose children inherit it, or of a thread. Best effort."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, number, NICENESS)
        os.sched_setscheduler(number, os.SCHED_BATCH, os.sched_param(0))
    if _SCHED_SETATTR is not None:              # kernels before 6.12 have no slices of a thread, and ignore it
        _libc.syscall(_SCHED_SETATTR, number, _SCHED_ATTR.pack(_SCHED_ATTR.size, os.SCHED_BATCH, 0, NICENESS, 0,
                                                               SLICE_NS, 0, 0, 0, 0), 0)


def give_way_in_thread() -> None:
    """For the calling thread alone."""
    give_way(threading.get_native_id())
