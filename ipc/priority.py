"""A low priority: what computes so takes the time that others leave, and they do not wait for it.

Four measures. The highest niceness: a thread that has had more than its share waits until the others caught up, so who
has a small share makes the others wait rarely; it still has one, for on cores that are always busy it must come to an
end, too. The longest slice: the kernel hands a core over at once to a thread that wakes up and has a shorter slice, and
otherwise only at the next tick of its clock, up to 4 ms later. SCHED_BATCH: waking up it takes the core from nobody.
Pauses: who has just been taken off a core, say by the thread that sends its message, waits behind a thread of the
smallest share like behind any other, until the next tick; one that sleeps for a moment every half millisecond lets
it in. All of it holds among the threads of one session (where the kernel groups tasks by session, sessions share a
core evenly and niceness counts only within), so the engine and its helpers stay in the session of whoever started them.
Not SCHED_IDLE, which may never get a turn.
Sources: timer_create(2); sched(7), "The autogroup feature"; sched_setattr(2); kernel documentation, "EEVDF Scheduler".
"""
from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import signal
import struct
import threading
import time
from collections.abc import Iterator

NICENESS = 19
SLICE_NS = 100_000_000                          # the longest the kernel takes
PAUSE_EVERY_S = 0.0005
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}.get(platform.machine())
_SCHED_ATTR = struct.Struct("<IIQiIQQQII")      # size, policy, flags, nice, priority, runtime, deadline, period, clamps
_SIGEVENT = struct.Struct("<QiiI44x")           # value, signal, how to tell, thread
_SIGEV_THREAD_ID = 4
_PAUSE_SIGNAL = getattr(signal, "SIGRTMIN", 0)    # 34: for nothing else in such a process
_ITIMERSPEC = struct.Struct("<qqqq")            # interval and first: seconds, nanoseconds
_libc = ctypes.CDLL(None, use_errno=True)
_libc.signal.argtypes, _libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p


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


@contextlib.contextmanager
def pausing() -> Iterator[None]:
    """While this runs, the calling thread sleeps for a moment every half millisecond, inside the call of a library,
    too: the signal's handler is the C library's usleep itself, and sleeps as many microseconds as its argument, the
    signal's number, says. Best effort."""
    if not _PAUSE_SIGNAL or not hasattr(_libc, "timer_create"):
        yield
        return
    _libc.signal(_PAUSE_SIGNAL, ctypes.cast(_libc.usleep, ctypes.c_void_p))
    timer, every = ctypes.c_void_p(), int(PAUSE_EVERY_S * 1e9)
    event = _SIGEVENT.pack(0, _PAUSE_SIGNAL, _SIGEV_THREAD_ID, threading.get_native_id())
    # A clock of CPU time would count in ticks.
    if _libc.timer_create(time.CLOCK_MONOTONIC, event, ctypes.byref(timer)):
        yield
        return
    _libc.timer_settime(timer, 0, _ITIMERSPEC.pack(0, every, 0, every), None)
    try:
        yield
    finally:
        _libc.timer_delete(timer)
