"""Splits what a model thinks from what it answers: the text between two tags, while it comes.

Never gives out part of a tag, so any cutting of the text gives the same. Knows no model: whether one thinks is read off
its chat template.
"""
from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Sequence

from frontend.tools.scanner import held_back

BEGIN, END = "<think>", "</think>"
BLANKS = " \t\r\n"


def detect_reasoning(templates: Iterable[str]) -> bool:
    """Whether the model writes its thoughts between these tags."""
    return any(END in template or BEGIN in template for template in templates)


class ReasoningSplitter:
    """`is_open`: the prompt ends inside the thoughts. Blanks around the tags belong to neither part."""

    def __init__(self, is_open: bool = False) -> None:
        self._state = "thinking" if is_open else "start"
        self._buffer = ""
        self._trims = is_open                   # blanks at the beginning of a part are dropped
        self.has_thoughts = is_open

    @property
    def is_thinking(self) -> bool:
        """The closing tag has not come."""
        return self._state == "thinking"

    @property
    def has_answer(self) -> bool:
        """What comes now is said, not thought."""
        return self._state == "answer"

    def feed(self, text: str, is_final: bool = False) -> tuple[str, str]:
        """(thoughts, answer) that are new."""
        self._buffer += text
        thoughts = answer = ""
        if self._state == "start":
            stripped = self._buffer.lstrip(BLANKS)
            if stripped.startswith(BEGIN):
                self._buffer = stripped[len(BEGIN):]
                self._state, self._trims, self.has_thoughts = "thinking", True, True
            elif is_final or (stripped and not BEGIN.startswith(stripped)):
                self._state = "answer"
        if self._state == "thinking":
            thoughts = self._think(is_final)
        if self._state == "answer":
            answer = self._buffer
            if self._trims:
                answer = answer.lstrip(BLANKS)
                self._trims = not answer
            self._buffer = ""
        return thoughts, answer

    def _think(self, is_final: bool) -> str:
        if self._trims:
            self._buffer = self._buffer.lstrip(BLANKS)
        found = self._buffer.find(END)
        end = found if found >= 0 else len(self._buffer) - (0 if is_final else held_back(self._buffer, END))
        thoughts = self._buffer[:end].rstrip(BLANKS)
        self._trims = self._trims and not thoughts
        if found >= 0:
            self._buffer = self._buffer[found + len(END):]
            self._state, self._trims = "answer", True
        else:
            self._buffer = "" if is_final else self._buffer[len(thoughts):]
        return thoughts


def num_thinking_tokens(token_ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> int:
    """Tokens of an output that begins with thoughts, up to the one that completes the closing tag."""
    last = bisect.bisect_left(range(len(token_ids)), True, key=lambda last: END in decode(token_ids[:last + 1]))
    return min(last + 1, len(token_ids))
