"""Text of a model into content and tool calls, while it comes.

A scanner sees each character once and never gives out part of a marker, so any cutting of the text gives the same
content, names and arguments. Blanks before a marker belong to nobody. What looks like a call but has no name comes out
as content.
"""
from __future__ import annotations

import dataclasses
import secrets
import string
from typing import Protocol

from frontend.tools.formats import LIST, ToolFormat
from frontend.tools.json_call import BLANKS, CallScanner, ValueScanner

MAX_NAME_CHARS = 256
_TEXT, _GAP, _CALL, _NAME, _ARGUMENTS, _PLAIN = range(6)
_ALPHABET = string.ascii_letters + string.digits


@dataclasses.dataclass(slots=True)
class CallDelta:
    """New text of a call. The first one of an index has id and name."""
    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


Piece = str | CallDelta                         # content, or news of a call


class Scanner(Protocol):
    """What the answers need of a parser."""
    num_calls: int

    def feed(self, text: str) -> list[Piece]:
        """New text."""
        ...

    def finish(self) -> list[Piece]:
        """The text has ended: what was held back."""
        ...


def make_id(num_chars: int) -> str:
    """Of a call; Mistral's templates insist on nine letters and digits."""
    letters = "".join(secrets.choice(_ALPHABET) for _ in range(num_chars))
    return letters if num_chars < 16 else f"call_{letters}"


def held_back(text: str, marker: str) -> int:
    """How many characters at the end of `text` may be the beginning of `marker`."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


class ToolScanner:
    """Calls in one of the formats."""

    def __init__(self, tool_format: ToolFormat, names: frozenset[str] = frozenset()) -> None:
        """`names` of the tools: a bare object of another name is an answer in JSON, no call."""
        self.format, self.names = tool_format, names
        self.num_calls = 0
        self._buffer, self._at = "", 0
        self._out: list[Piece] = []
        self._state = _TEXT if tool_format.begin else _GAP
        self._is_start = True                   # nothing but blanks so far
        self._gap: list[str] = []               # read since the marker, if no call follows
        self._call = CallScanner()
        self._value = ValueScanner()
        self._name: list[str] = []
        self._is_final = False

    def feed(self, text: str) -> list[Piece]:
        self._buffer = self._buffer[self._at:] + text
        self._at = 0
        steps = (self._text, self._in_gap, self._in_call, self._in_name, self._in_arguments, self._plain)
        while self._at < len(self._buffer) and steps[self._state]():
            pass
        out, self._out = self._out, []
        return out

    def finish(self) -> list[Piece]:
        self._is_final = True
        out = self.feed("")
        rest, self._buffer, self._at = self._buffer[self._at:], "", 0
        if self._state == _CALL and self._call.name is None:
            rest = "".join(self._gap) + "".join(self._call.raw) + rest
        elif self._state == _NAME:
            rest = "".join(self._gap) + "".join(self._name) + rest
        elif self._state == _GAP:
            is_marker = any(marker.startswith(rest) for marker in (self.format.end, self.format.begin))
            rest = ("" if is_marker else rest) if self.num_calls else "".join(self._gap) + rest
        if rest.strip() or (rest and not self.num_calls):
            out.append(rest)
        return out

    # ------------------------------------------------------------ one step: True when there may be more to do

    def _text(self) -> bool:
        buffer, at = self._buffer, self._at
        begin = self.format.begin
        if self._is_start and self.format.is_bare:
            stripped = buffer[at:].lstrip(BLANKS)
            if not stripped:
                return False
            if stripped[0] == "{":
                self._is_start = False
                self._state, self._gap = _GAP, []
                return True
        found = buffer.find(begin, at)
        end = found if found >= 0 else len(buffer) - (0 if self._is_final else held_back(buffer[at:], begin))
        stop = end
        if found >= 0 or not self._is_final:    # blanks before a marker, or what may become one
            stop = at + len(buffer[at:end].rstrip(BLANKS))
        if found < 0 and self._is_final and self.num_calls and not buffer[at:].strip(BLANKS):
            self._at = len(buffer)
            return False
        if stop > at:
            self._is_start = False
            self._out.append(buffer[at:stop])
        if found < 0:
            self._at = stop
            return False
        self._gap = [buffer[stop:found + len(begin)]]
        self._at = found + len(begin)
        self._state, self._is_start = _GAP, False
        return True

    def _in_gap(self) -> bool:
        """Behind a marker or a call: another call, or the end of calls."""
        buffer, at = self._buffer, self._at
        char = buffer[at]
        if char in BLANKS or char in ",;[]":
            rest = buffer[at:at + len(self.format.begin)]
            if char == "[" and self.format.begin.startswith("["):
                if self.format.begin == rest:
                    return self._skip(len(rest))
                if self.format.begin.startswith(rest) and not self._is_final:
                    return False
            return self._skip(1)
        if char == "{":
            self._state, self._call = _CALL, CallScanner()
            return True
        for marker, next_state in ((self.format.end, _TEXT), (self.format.begin, _GAP)):
            if marker and marker[0] == char:
                rest = buffer[at:at + len(marker)]
                if rest == marker:
                    self._skip(len(marker))
                    self._state = next_state
                    if next_state == _TEXT:
                        self._gap = []
                    return True
                if marker.startswith(rest) and not self._is_final:
                    return False
        if self.format.is_named and (char.isalnum() or char in "_-"):
            self._state, self._name = _NAME, []
            return True
        self._give_up()
        return True

    def _skip(self, count: int) -> bool:
        self._gap.append(self._buffer[self._at:self._at + count])
        self._at += count
        return True

    def _give_up(self) -> None:
        """No call follows: the rest is content, and so is the marker if it has no call at all."""
        gap = "".join(self._gap)
        if gap.strip(BLANKS) and not self._has_call_since_marker():
            self._out.append(gap)
        self._gap = []
        self._state = _TEXT if self.format.begin else _PLAIN

    def _plain(self) -> bool:
        """No marker can come any more."""
        self._out.append(self._buffer[self._at:])
        self._at = len(self._buffer)
        return False

    def _has_call_since_marker(self) -> bool:
        return bool(self._gap) and self._gap[0] == ""

    def _in_call(self) -> bool:
        call = self._call
        self._at = call.feed(self._buffer, self._at)
        text = call.take()
        if call.name is not None and not call.is_told:
            is_bare = not "".join(self._gap).strip(BLANKS) and self.format.is_bare
            if is_bare and self.names and call.name not in self.names:
                call.name, call.is_broken = None, True
            else:
                call.is_told = True
                self._begin_call(call.name, text)
        elif text:
            self._out.append(CallDelta(self.num_calls - 1, text))
        if call.is_done or call.is_broken:
            if call.name is None:
                self._out.append("".join(self._gap) + "".join(call.raw))
                self._gap = []
                self._state = _TEXT if self.format.begin else _PLAIN
            else:
                self._gap, self._state = [""], _GAP
        return True

    def _begin_call(self, name: str, arguments: str) -> None:
        self._out.append(CallDelta(self.num_calls, arguments, make_id(self.format.id_chars), name))
        self.num_calls += 1

    def _in_name(self) -> bool:
        """name{...}, name[ARGS]{...} or name[CALL_ID]...[ARGS]{...}."""
        end = self._buffer.find("{", self._at)
        piece = self._buffer[self._at:end if end >= 0 else len(self._buffer)]
        self._name.append(piece)
        self._at += len(piece)
        name = "".join(self._name)
        if end >= 0 and len(name) <= MAX_NAME_CHARS:
            plain = name.partition("[")[0].strip(BLANKS)
            if not plain or any(char in BLANKS for char in plain):
                self._not_a_name(name)
                return True
            self._begin_call(plain, "")
            self._value, self._state = ValueScanner(), _ARGUMENTS
            return True
        if len(name) > MAX_NAME_CHARS:
            self._not_a_name(name)
            return True
        self._name = [name]
        return False

    def _not_a_name(self, text: str) -> None:
        self._out.append("".join(self._gap) + text)
        self._gap, self._name = [], []
        self._state = _TEXT

    def _in_arguments(self) -> bool:
        end, is_end = self._value.feed(self._buffer, self._at)
        if end > self._at:
            self._out.append(CallDelta(self.num_calls - 1, self._buffer[self._at:end]))
        self._at = end
        if is_end:
            self._gap, self._state = [""], _GAP
        return is_end


class ListScanner(ToolScanner):
    """The list of calls that the grammar of tool_choice "required" allows."""

    def __init__(self) -> None:
        super().__init__(LIST)


class NamedScanner:
    """The whole text is the arguments of one call: tool_choice names the function, a grammar enforces its schema."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_calls = 0

    def feed(self, text: str) -> list[Piece]:
        if not text:
            return []
        if self.num_calls:
            return [CallDelta(0, text)]
        self.num_calls = 1
        return [CallDelta(0, text, make_id(24), self.name)]

    def finish(self) -> list[Piece]:
        return []
