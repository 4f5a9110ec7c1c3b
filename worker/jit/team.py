"""The threads that run a program, and the one function they all execute.

Every thread walks the same list of operations. An operation is a number of units of work, cut into as many runs as
there are threads: a thread takes the units of its own run from the front, then those that others have not come to yet
from the back, and moves on when all are *done*. Rows and weights so stay with the core that has them in its caches from
one operation to the next; a line of another core's cache costs as much as reading it from memory. Nobody waits for a
thread, only for units that a thread has taken: if another process holds a core, the rest of the team does its share,
and a thread that comes late finds the tickets of its generation gone. This is why there is no barrier to collapse.

    words of a run:   generation | end | next unit          generation | units | units done
                         24 bits    20     20

One read of a word is a consistent view, whatever step it is of. A thread that takes a unit knows that the step is
alive, and stays so until it reports the unit done; only then does it look at the program and the step, which a late
thread must not touch: they may be another step's by then, or gone.

Waiting is a short spin (units take microseconds), then a futex: an idle team, and one waiting behind a descheduled
thread, costs nothing. The calling thread works too; the others are Python threads that never hold the GIL.
"""
from __future__ import annotations

import atexit
import os
import platform
import sys
import threading
import time

import numpy as np
from numba import types

from worker.jit import step as st
from worker.jit.atomics import atomic_add, atomic_load, atomic_store, compare_and_swap, pause, set_ordered
from worker.jit.attend_plan import plan_attention
from worker.jit.choice import ThreadChoice
from worker.jit.program import NUM_UNITS, OP_BYTES, prepare, run_unit
from worker.jit.vector import device, entry, get_i64, merged, set_i64

# The control block, int64 fields; those that threads write lie in cache lines of their own.
GENERATION, IDLE, SLEEPING, STOP, PROGRAM, NUM_OPS, STEP, COUNTERS, TIMEOUT, THREADS, ALONE = (
    0, 8, 16, 24, 32, 33, 34, 35, 40, 42, 48)
CONTROL_SIZE = 64
RUN_BYTES = 128                             # a cache line for each of its words
MAX_OPS = 4096
MAX_UNITS = (1 << 20) - 1
MAX_ROWS = 1 << 16
SPINS = 3000                                # pauses: 50 to 150 microseconds, several times a unit
_COUNT, _UNITS_SHIFT, _GENERATION_SHIFT, _GENERATIONS = MAX_UNITS, 20, 40, (1 << 23) - 1

if sys.platform == "linux":
    _FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 98)
    _syscall = types.ExternalFunction("syscall", types.int64(*[types.int64] * 7))
    _WAIT_PRIVATE, _WAKE_PRIVATE = 128, 129

    @device
    def _sleep(address, value, timeout):  # type: ignore[no-untyped-def]
        """Until a wake or the timeout, unless the low word at the address is no longer `value`."""
        _syscall(_FUTEX, address, _WAIT_PRIVATE, value & 0xFFFFFFFF, timeout, 0, 0)

    @device
    def _wake(address):  # type: ignore[no-untyped-def]
        _syscall(_FUTEX, address, _WAKE_PRIVATE, 1 << 30, 0, 0, 0)
else:
    _usleep = types.ExternalFunction("usleep", types.int32(types.uint32))

    @device
    def _sleep(address, value, timeout):  # type: ignore[no-untyped-def]
        _usleep(types.uint32(100))

    @device
    def _wake(address):  # type: ignore[no-untyped-def]
        return


@merged
def _execute(control, generation, thread):  # type: ignore[no-untyped-def]
    """Walk the program once. Returns early when the step has ended without this thread."""
    counters, sleeping, threads = get_i64(control, COUNTERS), control + 8 * SLEEPING, get_i64(control, THREADS)
    for index in range(get_i64(control, NUM_OPS)):
        runs = counters + index * threads * RUN_BYTES
        for i in range(threads):
            ticket = runs + (thread + i) % threads * RUN_BYTES
            done = ticket + 64
            while True:
                word = atomic_load(ticket)
                if word >> _GENERATION_SHIFT != generation:
                    return
                end, unit = (word >> _UNITS_SHIFT) & _COUNT, word & _COUNT
                if unit >= end:
                    break
                taken = word + 1
                if i > 0:
                    unit, taken = end - 1, word - (1 << _UNITS_SHIFT)
                if compare_and_swap(ticket, word, taken) == word:
                    run_unit(get_i64(control, PROGRAM) + index * OP_BYTES, get_i64(control, STEP), unit, thread)
                    if _is_complete(atomic_add(done, 1) + 1) and atomic_load(sleeping) > 0:
                        _wake(done)
        for i in range(threads):
            if not _await(runs + (thread + i) % threads * RUN_BYTES + 64, generation, control):
                return


@device
def _is_complete(word):  # type: ignore[no-untyped-def]
    """All units of a run are done."""
    return word & _COUNT == (word >> _UNITS_SHIFT) & _COUNT


@device
def _await(done, generation, control):  # type: ignore[no-untyped-def]
    """Until a run is complete; false when the step has ended meanwhile."""
    sleeping, spins = control + 8 * SLEEPING, 0
    while True:
        word = atomic_load(done)
        if word >> _GENERATION_SHIFT != generation:
            return False
        if _is_complete(word):
            return True
        spins += 1
        if spins < SPINS:
            pause()
        else:
            atomic_add(sleeping, 1)
            _sleep(done, word, control + 8 * TIMEOUT)
            atomic_add(sleeping, -1)


@device
def _publish(control, generation):  # type: ignore[no-untyped-def]
    """Open a step: sizes first, then the words, the last of which let threads in. Who is alone has all in one run."""
    program, step, counters = get_i64(control, PROGRAM), get_i64(control, STEP), get_i64(control, COUNTERS)
    num_ops, threads = get_i64(control, NUM_OPS), get_i64(control, THREADS)
    alone = get_i64(control, ALONE) != 0
    if get_i64(step, st.TASKS) != 0:
        plan_attention(step, threads)
    mark = generation << _GENERATION_SHIFT
    for index in range(num_ops):
        op = program + index * OP_BYTES
        units, begin = prepare(op, step, threads), types.int64(0)
        set_i64(op, NUM_UNITS, units)
        for run in range(threads):
            word = counters + (index * threads + run) * RUN_BYTES
            end = units if alone else units * (run + 1) // threads
            set_ordered(word + 64, mark | ((end - begin) << _UNITS_SHIFT))
            # A late thread of the last step may see this before the others are set: it is not of this generation yet,
            # and whoever is takes operations in order and waits for each.
            set_ordered(word, mark | (end << _UNITS_SHIFT) | begin)
            begin = end
    atomic_store(control + 8 * GENERATION, generation)
    if atomic_load(control + 8 * IDLE) > 0 and not alone:
        _wake(control + 8 * GENERATION)


@device
def _next_generation(control, seen):  # type: ignore[no-untyped-def]
    """Wait until there is one."""
    spins = 0
    while True:
        generation = atomic_load(control + 8 * GENERATION)
        if generation != seen:
            return generation
        spins += 1
        if spins < SPINS:
            pause()
        else:
            atomic_add(control + 8 * IDLE, 1)
            if atomic_load(control + 8 * GENERATION) == seen:
                _sleep(control + 8 * GENERATION, seen, 0)
            atomic_add(control + 8 * IDLE, -1)


@entry
def run_team(control, thread):  # type: ignore[no-untyped-def]
    """Thread 0: run the program once and return. Others: take part in every program until STOP. One function, because
    both contain every kernel and it is compiled once."""
    seen = types.int64(0)
    while True:
        if thread == 0:
            seen = (get_i64(control, GENERATION) + 1) & _GENERATIONS
            _publish(control, seen)
        else:
            seen = _next_generation(control, seen)
            if atomic_load(control + 8 * STOP) != 0:
                return
        # Of a later step this flag may already be: then this generation's tickets are gone, whichever way is taken.
        if thread == 0 or atomic_load(control + 8 * ALONE) == 0:
            _execute(control, seen, thread)
        if thread == 0:
            return


class Team:
    """`num_threads` compute threads, the caller's included. One program runs at a time."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        raw = np.zeros(8 * CONTROL_SIZE + RUN_BYTES * MAX_OPS * num_threads + 64, np.uint8)
        start = -raw.ctypes.data % 64
        self._memory = raw[start:]
        self._control = self._memory[:8 * CONTROL_SIZE].view(np.int64)
        self.address = self._control.ctypes.data
        self._control[COUNTERS] = self.address + 8 * CONTROL_SIZE
        self._control[TIMEOUT:TIMEOUT + 2] = (0, 2_000_000)     # seconds, nanoseconds
        self._control[THREADS] = num_threads
        self._no_step = np.zeros(st.SIZE, np.int64)
        self._is_started = False
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Compile or load the code, then start the threads. Safe to call again, from another thread too: a worker that
        slept while an upgrade was being built starts the team itself."""
        with self._lock:
            if self._is_started:
                return
            run_team.compile((types.intp, types.intp))
            self._is_started = True
            for number in range(1, self.num_threads):
                thread = threading.Thread(target=self._work, args=(number,), name=f"kernel {number}", daemon=True)
                thread.start()
                self._threads.append(thread)
            atexit.register(self.stop)

    def _work(self, number: int) -> None:
        """A bound method, so that a thread keeps the memory it reads alive until it has left."""
        run_team(self.address, number)

    def run(self, program: int, num_ops: int, step: np.ndarray, choice: ThreadChoice | None = None) -> None:
        """Execute a program (its address) on this step record, and return when it is done.

        `choice` decides whether the other threads take part; without it they do.
        """
        if num_ops > MAX_OPS:
            raise ValueError(f"a program of {num_ops} operations; the team holds {MAX_OPS}")
        if step[st.NUM_ROWS] > MAX_ROWS:        # an operation has at most MAX_UNITS units
            raise ValueError(f"a step of {step[st.NUM_ROWS]} rows; the team takes {MAX_ROWS}: lower "
                             "--max-num-batched-tokens")
        if not self._is_started:
            self.start()
        with self._lock:
            self._control[PROGRAM], self._control[NUM_OPS], self._control[STEP] = program, num_ops, step.ctypes.data
            step[st.NUM_THREADS] = self.num_threads
            if choice is None or self.num_threads == 1:
                self._control[ALONE] = 0
                run_team(self.address, 0)
                return
            rows = int(step[st.NUM_ROWS])
            self._control[ALONE] = alone = choice.alone(rows)
            begin = time.perf_counter_ns()
            run_team(self.address, 0)
            choice.observe(rows, alone, time.perf_counter_ns() - begin)

    def stop(self) -> None:
        """End the threads; the team cannot be used afterwards."""
        with self._lock:
            if self._threads:
                self._control[STOP], self._control[NUM_OPS], self._control[ALONE] = 1, 0, 0
                self._control[STEP] = self._no_step.ctypes.data
                run_team(self.address, 0)
                for thread in self._threads:
                    thread.join(timeout=5.0)
                self._threads = []


_teams: dict[int, Team] = {}


def get_team(num_threads: int = 0) -> Team:
    """The process's team of this size; 0: one thread per usable core. Started at its first program."""
    count = num_threads or usable_cores()
    team = _teams.get(count)
    return _teams.setdefault(count, Team(count)) if team is None else team


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
