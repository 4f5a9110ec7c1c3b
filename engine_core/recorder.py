"""The flight recorder: the core's input messages of the last minutes, so that any decision can be run again.

A bounded ring of segments. Each begins with a snapshot of the core, taken when nothing is in flight, and holds what
came after: the frames as they arrived, and a checksum of every plan that went out. Because the core is a pure function
of its messages, `replay` makes the same plans again, without a model. Costs a list append per message.
"""
from __future__ import annotations

import os
import zlib
from collections import deque
from typing import Any

import msgspec

from engine_core.core import EngineCore
from engine_core.snapshot import Frozen, Origin, take
from ipc.codec import HEADER

HANDLE, COMMIT, ABORT_STEP, PLAN, GONE, WORKER_LOST, WORKER_REPLACED, GRAMMAR_PREPARED = range(8)

SEGMENT_EVENTS = 8192
SEGMENT_BYTES = 4 << 20
NUM_SEGMENTS = 8

Event = tuple[int, int, list[bytes]]            # what, frontend number (of a plan: its checksum), frames


def checksum(frame: bytes) -> int:
    """Of a plan's first frame without its header."""
    return zlib.crc32(memoryview(frame)[HEADER.size:])


class Segment(msgspec.Struct, array_like=True):
    """A snapshot and the events after it."""
    snapshot: bytes
    events: list[Event]


class Recording(msgspec.Struct):
    """A dumped ring, oldest segment first."""
    origin: Origin
    segments: list[Segment]


class Recorder:
    """Call `note_*` in the order in which the core is called."""

    def __init__(self, core: EngineCore, origin: Origin, *, segment_events: int = SEGMENT_EVENTS,
                 segment_bytes: int = SEGMENT_BYTES, num_segments: int = NUM_SEGMENTS) -> None:
        self._core, self._origin = core, origin
        self._segment_events, self._segment_bytes = segment_events, segment_bytes
        self._segments: deque[tuple[Frozen, list[Any]]] = deque(maxlen=num_segments)
        self._events: list[Any] = []
        self._num_bytes = 0
        self._begin()

    def _begin(self) -> None:
        self._events = []
        self._num_bytes = 0
        self._segments.append((take(self._core), self._events))

    @property
    def is_due(self) -> bool:
        """The segment is full: no plan should be made until nothing is in flight and `turn` was called."""
        return len(self._events) >= self._segment_events or self._num_bytes >= self._segment_bytes

    def turn(self) -> bool:
        """Begin a new segment if one is due and nothing is in flight. False: still due, wait for results."""
        if not self.is_due:
            return True
        if self._core.scheduler.rows.in_flight:
            return False
        self._begin()
        return True

    def note(self, what: int, number: int, frames: Any) -> None:
        """One message that the core is about to be given; frames as received, without the routing id."""
        self._events.append((what, number, frames))
        self._num_bytes += len(frames[0]) if len(frames) == 1 else sum(map(len, frames))

    def note_plan(self, frame: bytes) -> None:
        """The core made this plan (its first frame; b"" when it made none). Only its body counts: a header numbers."""
        self._events.append((PLAN, checksum(frame), ()))

    def dump(self, path: str) -> str:
        """Write what is kept, readable by the user alone (it holds prompts). Returns the path."""
        segments = [Segment(snapshot.encode(),
                            [(what, number, [bytes(f) for f in frames]) for what, number, frames in events])
                    for snapshot, events in self._segments]
        data = msgspec.msgpack.encode(Recording(self._origin, segments))
        with open(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)
        return path


class NoRecorder(Recorder):
    """With --no-flight-recorder: keeps nothing."""

    def _begin(self) -> None:
        return

    def note(self, what: int, number: int, frames: Any) -> None:
        return

    def note_plan(self, frame: bytes) -> None:
        return

    def dump(self, path: str) -> str:
        return "off (--no-flight-recorder)"
