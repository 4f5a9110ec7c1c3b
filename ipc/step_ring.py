"""The last steps of one process, in a file of the run directory that outlives the process: what it did before it ended.

    steps-engine_core-0, steps-worker-0:  int64 [RING_STEPS, STAMPS]; step n lies in row n % RING_STEPS

Each process writes the stamps that it knows, into memory that is there from the start; a step that is under way shows
how far it came. The core's rows are also what frontends are told. When a process fails, the supervisor saves all rings
in one file, which `launch.py profile --steps FILE` shows. Knows no sockets.
"""
from __future__ import annotations

import glob
import mmap
import os
import struct
import tempfile

import msgspec
import numpy as np

from ipc.errors import ConfigError
from ipc.messages import STAMPS

RING_STEPS = 4096
PREFIX = "steps-"
STEP, PLAN_BEGIN, RECEIVED = (STAMPS.index(name) for name in ("step", "plan_begin", "worker_received"))
_ROW, _ONE, _TWO = struct.Struct(f"={len(STAMPS)}q"), struct.Struct("=q"), struct.Struct("=2q")
ROW_BYTES = _ROW.size
_BYTES = RING_STEPS * ROW_BYTES


class StepRing:
    """The writing side. Without a run directory it is memory of this process."""

    def __init__(self, run_dir: str = "", name: str = "") -> None:
        if run_dir:
            fd = os.open(os.path.join(run_dir, PREFIX + name), os.O_RDWR | os.O_CREAT, 0o600)
            try:
                os.ftruncate(fd, _BYTES)
                self._map = mmap.mmap(fd, _BYTES)
            finally:
                os.close(fd)
        else:
            self._map = mmap.mmap(-1, _BYTES)
        self.rows: np.ndarray = np.frombuffer(self._map, np.int64).reshape(RING_STEPS, len(STAMPS))

    def put(self, step: int, stamps: tuple[int, ...]) -> None:
        """The whole row of a step, in the order of STAMPS; 0: not known, or not yet."""
        _ROW.pack_into(self._map, step % RING_STEPS * ROW_BYTES, *stamps)

    def mark(self, step: int, column: int, value: int) -> None:
        """One field of the row of a step, given by its place in STAMPS."""
        _ONE.pack_into(self._map, step % RING_STEPS * ROW_BYTES + 8 * column, value)

    def mark_two(self, step: int, column: int, value: int, next_value: int) -> None:
        """The same, and the field behind it."""
        _TWO.pack_into(self._map, step % RING_STEPS * ROW_BYTES + 8 * column, value, next_value)

    def part(self, first: int, last: int) -> bytes:
        """The rows of so many steps, RING_STEPS at most, as they are sent. A copy."""
        begin, end = first % RING_STEPS * ROW_BYTES, (last % RING_STEPS + 1) * ROW_BYTES
        return self._map[begin:end] if begin < end else self._map[begin:] + self._map[:end]


class SavedSteps(msgspec.Struct):
    """A file of saved rings."""
    reason: str                                 # why a process failed
    rings: dict[str, bytes]                     # name of the process -> its ring


def save_steps(run_dir: str, folder: str, reason: str) -> str:
    """Save every ring of a run directory in `folder` ("": that of temporary files), readable by the user alone. The
    path; "" when nothing was there or it could not be written. A later failure of the same engine replaces it."""
    path = os.path.join(folder or tempfile.gettempdir(), f"threefold-steps-{os.getpid()}.msgpack")
    try:
        rings = {}
        for name in glob.glob(os.path.join(glob.escape(run_dir), PREFIX + "*")):
            with open(name, "rb") as file:
                rings[os.path.basename(name).removeprefix(PREFIX)] = file.read()
        if not any(any(ring) for ring in rings.values()):
            return ""
        with open(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "wb") as file:
            file.write(msgspec.msgpack.encode(SavedSteps(reason, rings)))
    except OSError:
        return ""
    return path


def load_steps(path: str) -> tuple[str, np.ndarray]:
    """(reason, rows [steps, STAMPS] of core and worker together, in the order in which they were planned). What no
    process came to is 0. Raises ConfigError when it is no such file."""
    try:
        with open(path, "rb") as file:
            saved = msgspec.msgpack.decode(file.read(), type=SavedSteps)
        rings = {name.partition("-")[0]: np.frombuffer(ring, np.int64).reshape(RING_STEPS, len(STAMPS))
                 for name, ring in saved.rings.items()}
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise ConfigError(f"{path} is no file of saved steps: {error}") from None
    empty = np.zeros((RING_STEPS, len(STAMPS)), np.int64)
    core, worker = rings.get("engine_core", empty), rings.get("worker", empty)
    is_same = (core[:, STEP] == worker[:, STEP]) & (worker[:, RECEIVED] >= core[:, PLAN_BEGIN])
    rows = np.where(is_same[:, None], np.maximum(core, worker), core)
    rows = rows[rows[:, PLAN_BEGIN] > 0]
    return saved.reason, rows[np.argsort(rows[:, PLAN_BEGIN], kind="stable")]
