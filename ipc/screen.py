"""What the user sees of a start: each phase with its seconds, and a bar for the one that is under way.

    worker 0      load weights   ████████░░░░░░░░  52 %   1.3 s
    worker 0      load weights     2.4 s  135 M parameters, float32

On a terminal the bar is the last line and moves; elsewhere only finished phases are printed. Remembers the phases, so
that the demo can say where the time went. Knows no processes.
"""
from __future__ import annotations

import os
import shutil
import sys
import time
from typing import NamedTuple, TextIO

from ipc.messages import Phase

_BAR_CELLS = 16


class FinishedPhase(NamedTuple):
    who: str
    name: str
    seconds: float


class Screen:
    """Lines on stderr. A stream that is closed or full never raises: the engine does not die of its own messages."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._is_terminal = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._has_bar = False
        self._began: dict[tuple[str, str], float] = {}
        self._ended: set[tuple[str, str]] = set()
        self.finished: list[FinishedPhase] = []

    def line(self, text: str = "") -> None:
        """One line, above the bar."""
        self._write(f"{self._erase()}{text}\n")

    def phase(self, who: str, phase: Phase) -> None:
        """A process says where it is. Seconds are its own, or counted here when it does not say."""
        began = self._began.setdefault((who, phase.name), time.monotonic())
        seconds = phase.seconds or time.monotonic() - began
        if phase.fraction >= 1.0:
            if (who, phase.name) in self._ended:
                return
            self._ended.add((who, phase.name))
            self.finished.append(FinishedPhase(who, phase.name, seconds))
            self.line(f"{who:<13} {phase.name:<22} {seconds:6.1f} s  {phase.detail}".rstrip())
            return
        self._ended.discard((who, phase.name))   # a restarted process goes through it again
        if self._is_terminal:
            full = round(max(phase.fraction, 0.0) * _BAR_CELLS)
            bar = "█" * full + "░" * (_BAR_CELLS - full)
            text = f"{who:<13} {phase.name:<22} {bar} {phase.fraction:4.0%} {seconds:6.1f} s  {phase.detail}"
            self._write(self._erase() + text[:shutil.get_terminal_size().columns - 1])
            self._has_bar = True

    def _erase(self) -> str:
        if not self._has_bar:
            return ""
        self._has_bar = False
        return "\r\x1b[2K"

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError, UnicodeError):
            pass


class Stopwatch:
    """A phase of this process: `with Stopwatch(screen, "launch", "find model"):`."""

    def __init__(self, screen: Screen, who: str, name: str) -> None:
        self._screen, self._who, self._name = screen, who, name
        self.detail = ""

    def __enter__(self) -> Stopwatch:
        self._began = time.monotonic()
        self._screen.phase(self._who, Phase(self._who, self._name, 0.0))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            seconds = max(time.monotonic() - self._began, 1e-9)
            self._screen.phase(self._who, Phase(self._who, self._name, 1.0, seconds, self.detail))
