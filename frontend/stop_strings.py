"""Stop strings in text that arrives in pieces.

What is promised, whatever the pieces are: the text given out is the whole text cut at the first match, no character
that may begin a stop string is given out before it is certain that it does not, and the cost is linear in the text. The
first match is the one that *ends* first (of several that end there, the longest): where the request would have stopped
had its text come one character at a time. Knows neither tokens nor requests.

The matcher is Aho and Corasick's automaton (1975): a state is the longest end of the text that begins a stop string, so
the state's depth is exactly how many characters must be held back.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence


class _Automaton:
    """All stop strings of a request as one trie. Immutable and shared; state 0 is the empty prefix."""

    __slots__ = ("depth", "fail", "first_chars", "found", "held", "next")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.next: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.fail = [0]                          # the state of the longest proper end of this one
        self.found: list[str | None] = [None]    # the longest stop string that ends here
        self.held = [0]                          # characters that may yet grow into a match
        for stop in stops:
            state = 0
            for char in stop:
                if char not in self.next[state]:
                    self.next[state][char] = len(self.next)
                    self.next.append({})
                    self.depth.append(self.depth[state] + 1)
                    self.fail.append(0)
                    self.found.append(None)
                    self.held.append(0)
                state = self.next[state][char]
            self.found[state] = stop
        self.first_chars = frozenset(self.next[0])
        self._link()

    def _link(self) -> None:
        """Failure links, shallow states first: the link of a state leads to a shallower one, which is then done."""
        queue = [0]
        for state in queue:
            # A whole stop string that no longer one begins with cannot grow: only a shorter end of it can.
            self.held[state] = self.depth[state] if self.next[state] else self.held[self.fail[state]]
            for char, child in self.next[state].items():
                queue.append(child)
                link = self.fail[state]
                while link and char not in self.next[link]:
                    link = self.fail[link]
                target = self.next[link].get(char, 0)
                self.fail[child] = target if target != child else 0
                if self.found[child] is None:
                    self.found[child] = self.found[self.fail[child]]


@functools.lru_cache(maxsize=256)
def _automaton(stops: tuple[str, ...]) -> _Automaton:
    return _Automaton(stops)


class StopChecker:
    """The stop strings of one choice of one request.

    `stopped_by` is the stop string that ended the text, None before.
    """

    __slots__ = ("_automaton", "_held", "_include_stop", "_state", "stopped_by")

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        """`include_stop` gives the stop string out too, as the end of the text. Raises ValueError for an empty one."""
        if "" in stops:
            raise ValueError("a stop string is empty; it must have at least one character")
        self._automaton = _automaton(tuple(stops))
        self._include_stop = include_stop
        self._state = 0
        self._held = ""              # text not given out: the end that may begin a stop string
        self.stopped_by: str | None = None

    @property
    def is_idle(self) -> bool:
        """No text is held back: none of it may begin a stop string."""
        return not self._state and self.stopped_by is None

    def feed(self, text: str, active: bool = True) -> tuple[str, str | None]:
        """Add text; returns what may be given out, and the stop string once one is complete (then nothing more comes).

        A match counts if its last character is in text fed with active=True; it may begin in text fed before. So with
        min_tokens the text of the first tokens is fed inactive, in calls of its own.
        """
        if self.stopped_by is not None:
            return "", self.stopped_by
        automaton, state = self._automaton, self._state
        if not state and automaton.first_chars.isdisjoint(text):
            return text, None
        next_, fail, found = automaton.next, automaton.fail, automaton.found
        for position, char in enumerate(text):
            while state and char not in next_[state]:
                state = fail[state]
            state = next_[state].get(char, 0)
            if active and found[state] is not None:
                return self._stop(self._held + text[:position + 1], found[state])
        text = self._held + text
        self._state = state
        num_free = len(text) - automaton.held[state]
        self._held = text[num_free:]
        return text[:num_free], None

    def _stop(self, text: str, stop: str | None) -> tuple[str, str | None]:
        self.stopped_by, self._held = stop, ""
        return (text if self._include_stop or stop is None else text[:-len(stop)]), stop

    def flush(self) -> str:
        """The end of the text: what was held back, which is no stop string after all."""
        text, self._held, self._state = self._held, "", 0
        return text
