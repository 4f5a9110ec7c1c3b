"""Reads one call, a JSON object with a name and arguments, character by character, and gives out the arguments as they
come.

One pass, no look-back, so any cutting of the text into pieces gives the same. Not a validator: text of a model that is
no JSON is followed as far as brackets and quotes tell. Knows nothing of what is around the object.
"""
from __future__ import annotations

import json

NAME_KEYS = ("name", "function")
ARGUMENT_KEYS = ("arguments", "parameters")
BLANKS = " \t\r\n"
_KEY, _COLON, _VALUE, _INSIDE, _COMMA = range(5)


class ValueScanner:
    """Finds the end of one JSON value. Feed it from the value's first character on."""

    __slots__ = ("depth", "is_string", "_is_escaped", "_in_string", "_is_scalar", "_begun")

    def __init__(self) -> None:
        self.depth = 0
        self.is_string = self._is_escaped = self._in_string = self._is_scalar = self._begun = False

    def feed(self, text: str, at: int) -> tuple[int, bool]:
        """(where the value's characters in `text` end, whether the value ends there)."""
        for index in range(at, len(text)):
            char = text[index]
            if self._in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif char == "\\":
                    self._is_escaped = True
                elif char == '"':
                    self._in_string = False
                    if self.depth == 0:
                        return index + 1, True
            elif self._is_scalar:
                if char in ",}]" or char in BLANKS:
                    return index, True
            elif char == '"':
                self._in_string = True
                self.is_string = not self._begun
            elif char in "{[":
                self.depth += 1
            elif char in "}]":
                self.depth -= 1
                if self.depth <= 0:
                    return index + 1, True
            elif self.depth == 0:
                self._is_scalar = True
            self._begun = True
        return len(text), False


class CallScanner:
    """One object. After each feed: `name` once it is known, and `take()` for new text of the arguments."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.is_done = self.is_broken = False
        self.is_told = False                    # set by whoever gave the name out
        self.raw: list[str] = []                # everything read, until the name is known
        self._arguments: list[str] = []
        self._kept: list[str] = []              # a value that is needed as a whole
        self._has_arguments = False
        self._state = -1
        self._key = ""
        self._value: ValueScanner | None = None

    def take(self) -> str:
        """New text of the arguments; empty until the name is known."""
        if self.name is None:
            return ""
        text, self._arguments = "".join(self._arguments), []
        return text

    def feed(self, text: str, at: int) -> int:
        """Read from `at`; returns where it stopped: the end of `text`, behind the name, or behind the object."""
        begin, had_name = at, self.name is not None
        while at < len(text) and not self.is_done and not self.is_broken and (self.name is not None) == had_name:
            at = self._step(text, at)
        if not had_name:
            self.raw.append(text[begin:at])
        if self.is_done and not self._has_arguments and self.name is not None:
            self._arguments.append("{}")
            self._has_arguments = True
        return at

    def _step(self, text: str, at: int) -> int:
        if self._value is not None:
            return self._read_value(text, at)
        char = text[at]
        if char in BLANKS:
            return at + 1
        if self._state == -1 and char == "{":
            self._state = _KEY
        elif self._state in (_KEY, _COMMA) and char == "}":
            self.is_done = True
        elif self._state == _COMMA and char == ",":
            self._state = _KEY
        elif self._state == _COLON and char == ":":
            self._state = _VALUE
        elif (self._state == _KEY and char == '"') or (self._state == _VALUE and char not in ",:}]"):
            self._value = ValueScanner()
            return at
        else:
            self.is_broken = True
            return at
        return at + 1

    def _read_value(self, text: str, at: int) -> int:
        if self._value is None:
            raise RuntimeError("no value is being read")
        end, is_end = self._value.feed(text, at)
        piece = text[at:end]
        is_arguments = self._state == _VALUE and self._key in ARGUMENT_KEYS and not self._has_arguments
        if is_arguments and self._value.is_string:
            self._kept.append(piece)            # JSON inside a string: given out when it is whole
        elif is_arguments:
            self._arguments.append(piece)
        elif self._state == _KEY or self._key in NAME_KEYS:
            self._kept.append(piece)
        if is_end:
            self._value = None
            self._end_value(is_arguments)
        return end

    def _end_value(self, is_arguments: bool) -> None:
        kept, self._kept = "".join(self._kept), []
        if self._state == _KEY:
            self._key = str(_decoded(kept))
            self._state = _COLON
            return
        self._state = _COMMA
        if is_arguments:
            self._has_arguments = True
            if kept:
                inner = _decoded(kept)
                self._arguments = [inner if inner.strip().startswith("{") else kept]
        elif self._key in NAME_KEYS and self.name is None:
            name = _decoded(kept)
            if name and kept.startswith('"'):
                self.name = name


def _decoded(text: str) -> str:
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return ""
    return value if isinstance(value, str) else ""
