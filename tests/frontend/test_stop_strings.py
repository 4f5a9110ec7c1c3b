"""Stop strings: never partly given out, whatever the pieces of the text are."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.stop_strings import StopChecker

REPEATABLE = settings(derandomize=True, deadline=None, max_examples=400)
TEXTS = st.text(alphabet="abc", max_size=40)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=6), min_size=1, max_size=5)


def first_match(text: str, stops: list[str], active_from: int = 0) -> tuple[int, str] | None:
    """The slow definition: the first end at which any stop string lies, the longest one there."""
    for end in range(active_from + 1, len(text) + 1):
        here = [stop for stop in stops if text[:end].endswith(stop)]
        if here:
            return end, max(here, key=len)
    return None


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:end] for start, end in zip(edges, edges[1:])]


def run(checker: StopChecker, pieces: list[str]) -> tuple[str, str | None]:
    shown = ""
    for piece in pieces:
        text, stopped_by = checker.feed(piece)
        shown += text
        if stopped_by is not None:
            return shown, stopped_by
    return shown + checker.flush(), None


@REPEATABLE
@given(TEXTS, STOPS, st.lists(st.integers(0, 1000), max_size=8), st.booleans())
def test_streamed_text_is_the_whole_text_cut_at_the_first_match(
    text: str, stops: list[str], cuts: list[int], include_stop: bool
) -> None:
    match = first_match(text, stops)
    expected = (text, None)
    if match is not None:
        expected = (text[:match[0] if include_stop else match[0] - len(match[1])], match[1])
    assert run(StopChecker(stops, include_stop), pieces_of(text, cuts)) == expected


@REPEATABLE
@given(TEXTS, STOPS)
def test_only_what_may_begin_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    checker, shown = StopChecker(stops), ""
    for position, char in enumerate(text):
        piece, stopped_by = checker.feed(char)
        if stopped_by is not None:
            return
        shown += piece
        seen = text[:position + 1]
        held = max((n for stop in stops for n in range(len(stop)) if seen.endswith(stop[:n])), default=0)
        assert shown == seen[:len(seen) - held]


@REPEATABLE
@given(TEXTS, TEXTS, STOPS)
def test_a_match_counts_if_it_ends_after_min_tokens(before: str, after: str, stops: list[str]) -> None:
    checker = StopChecker(stops)
    shown, stopped_by = checker.feed(before, active=False)
    assert stopped_by is None
    rest, stopped_by = run(checker, [after])
    match = first_match(before + after, stops, active_from=len(before))
    expected = (before + after, None) if match is None else ((before + after)[:match[0] - len(match[1])], match[1])
    assert (shown + rest, stopped_by) == expected


@pytest.mark.parametrize(("stop", "pieces"), [
    ("DEFGHIJ", ["DEF", "G", "HI", "J", "K"]),
    ("DE", ["DEF", "G"]),
])
def test_a_stop_string_over_several_tokens_or_inside_one_is_never_streamed(stop: str, pieces: list[str]) -> None:
    """Other engines streamed the first tokens of a stop string, or missed one inside a token."""
    assert run(StopChecker([stop]), pieces) == ("", stop)
    assert run(StopChecker([stop]), ["".join(pieces)]) == ("", stop)
    assert run(StopChecker([stop], include_stop=True), pieces) == (stop, stop)


def test_held_text_comes_out_at_the_end() -> None:
    """Other engines lost the tail when a request ended by length while text was held back."""
    checker = StopChecker(["###END"])
    assert checker.feed("done ###EN") == ("done ", None)
    assert checker.flush() == "###EN"
    assert checker.flush() == ""


def test_of_two_stop_strings_that_end_together_the_longer_one_cuts() -> None:
    assert run(StopChecker(["b", "ab"]), ["xa", "b"]) == ("x", "ab")


def test_the_stop_string_that_ends_first_wins_over_one_that_began_earlier() -> None:
    assert run(StopChecker(["abcd", "bc"]), ["xabcd"]) == ("xa", "bc")


def test_after_a_match_nothing_more_comes() -> None:
    checker = StopChecker(["x"])
    assert checker.feed("axb") == ("a", "x")
    assert checker.feed("more") == ("", "x")
    assert (checker.flush(), checker.stopped_by) == ("", "x")


def test_no_stop_strings_let_everything_through_and_an_empty_one_is_refused() -> None:
    assert StopChecker([]).feed("abc") == ("abc", None)
    with pytest.raises(ValueError, match="empty"):
        StopChecker(["a", ""])
