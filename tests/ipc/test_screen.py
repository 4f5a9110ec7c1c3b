"""What a start looks like."""
from __future__ import annotations

import io

import pytest

from ipc.messages import Phase
from ipc.screen import Screen, Stopwatch


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_elsewhere_only_finished_phases_are_printed() -> None:
    stream = io.StringIO()
    screen = Screen(stream)
    screen.phase("worker 0", Phase("worker", "load weights", 0.0))
    screen.phase("worker 0", Phase("worker", "load weights", 0.5, 1.0))
    screen.phase("worker 0", Phase("worker", "load weights", 1.0, 2.44, "512 MiB, float32"))
    assert stream.getvalue() == "worker 0      load weights              2.4 s  512 MiB, float32\n"
    assert [(p.who, p.name, p.seconds) for p in screen.finished] == [("worker 0", "load weights", 2.44)]


def test_a_terminal_shows_a_bar_that_gives_way_to_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    screen = Screen(stream)
    screen.phase("worker 0", Phase("worker", "load weights", 0.5, 1.3))
    assert stream.getvalue() == "worker 0      load weights           ████████░░░░░░░░  50%    1.3 s  "
    screen.line("a line")
    assert stream.getvalue().endswith("\r\x1b[2Ka line\n")


def test_a_bar_never_wraps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    Screen(stream).phase("worker 0", Phase("worker", "load weights", 0.5, 1.3, "x" * 200))
    assert len(stream.getvalue()) == 39


def test_a_closed_stream_does_not_end_the_engine() -> None:
    stream = io.StringIO()
    screen = Screen(stream)
    stream.close()
    screen.line("nobody reads this")


def test_a_phase_said_to_have_ended_twice_counts_once() -> None:
    screen = Screen(io.StringIO())
    for _ in range(2):
        screen.phase("worker 0", Phase("worker", "load weights", 1.0, 2.0))
    assert len(screen.finished) == 1


def test_a_stopwatch_counts_a_phase_of_this_process_unless_it_failed() -> None:
    screen = Screen(io.StringIO())
    with Stopwatch(screen, "launch", "find model") as phase:
        phase.detail = "a folder"
    with pytest.raises(ValueError), Stopwatch(screen, "launch", "fail"):
        raise ValueError
    assert [phase.name for phase in screen.finished] == ["find model"]
