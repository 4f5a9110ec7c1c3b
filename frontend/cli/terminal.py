"""The terminal of the chat: a status line at the bottom while an answer streams, dimmed text, and nothing of it
elsewhere.

The status line is outside the scrolling region (DECSTBM), so streamed text never mixes with it. Off a terminal, or with
TERM=dumb, every call but `text` does nothing. Knows no models.
"""
from __future__ import annotations

import os
import shutil
import sys
import time
from typing import TextIO

_REDRAW_S = 0.1


class Terminal:
    """Writes answers on `out`; use `answer()` around one."""

    def __init__(self, out: TextIO | None = None) -> None:
        self.out = out if out is not None else sys.stdout
        self.is_terminal = self.out.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._rows = 0                           # > 0: the region is set
        self._drawn_at = 0.0
        self._is_dim = False

    def text(self, text: str, *, is_dim: bool = False) -> None:
        """Part of an answer, shown at once."""
        if self.is_terminal and is_dim != self._is_dim:
            text = ("\x1b[2m" if is_dim else "\x1b[0m") + text
            self._is_dim = is_dim
        self.out.write(text)
        self.out.flush()

    def begin(self) -> None:
        """Reserve the last row."""
        if not self.is_terminal:
            return
        rows = shutil.get_terminal_size().lines
        if rows >= 5:
            self._rows, self._drawn_at = rows, 0.0
            # A line feed makes room if the cursor is on the last row; setting the region homes it, so it is kept.
            self._write(f"\n\x1b7\x1b[1;{rows - 1}r\x1b8\x1b[1A")

    def status(self, text: str) -> None:
        """Replace the last row, at most ten times a second."""
        now = time.monotonic()
        if not self._rows or now - self._drawn_at < _REDRAW_S:
            return
        self._drawn_at = now
        size = shutil.get_terminal_size()
        if size.lines != self._rows:             # the window was resized
            self._rows = size.lines
            self._write(f"\x1b7\x1b[1;{self._rows - 1}r\x1b8")
        self._write(f"\x1b7\x1b[{self._rows};1H\x1b[2K\x1b[7m {text[:size.columns - 2]} \x1b[0m\x1b8"
                    + ("\x1b[2m" if self._is_dim else ""))

    def end(self) -> None:
        """Give the last row back. Idempotent."""
        if self._is_dim:
            self.text("", is_dim=False)
        if self._rows:
            self._write(f"\x1b7\x1b[{self._rows};1H\x1b[2K\x1b[r\x1b8")
            self._rows = 0

    def dim(self, text: str) -> str:
        """For one line about an answer."""
        return f"\x1b[2m{text}\x1b[0m" if self.is_terminal else text

    def _write(self, codes: str) -> None:
        self.out.write(codes)
        self.out.flush()
