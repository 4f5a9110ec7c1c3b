"""The chat: its commands, its figures, what Ctrl-C does, and how it looks on a terminal and off one."""
from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from frontend.cli import chat
from frontend.cli.answer import Answer
from frontend.cli.chat import Chat, open_source, sampling_of
from frontend.cli.common import UsageError, run_command
from frontend.cli.source import Piece
from frontend.cli.terminal import Terminal
from ipc.errors import EngineDeadError, RequestError


class FakeSource:
    """Answers with the words of the last message, reversed; Ctrl-C comes before word `interrupt_at`."""
    name, where = "fake", "nowhere"

    def __init__(self) -> None:
        self.calls: list[list[dict[str, Any]]] = []
        self.interrupt_at = -1
        self.error: Exception | None = None
        self.reasoning = ""
        self.num_closed = 0

    def chat(self, messages: list[dict[str, Any]], params: dict[str, Any]) -> Iterator[Piece]:
        self.calls.append([dict(message) for message in messages])
        try:
            if self.error is not None:
                raise self.error
            if self.reasoning:
                yield Piece(reasoning=self.reasoning)
            for number, word in enumerate(reversed(messages[-1]["content"].split())):
                if number == self.interrupt_at:
                    raise KeyboardInterrupt
                yield Piece(word + " ", "", 10, 4, number + 1)
            yield Piece(num_output_tokens=len(messages[-1]["content"].split()), finish_reason="stop")
        finally:
            self.num_closed += 1

    def complete(self, prompt: str, params: dict[str, Any]) -> Iterator[Piece]:
        return self.chat([{"content": prompt}], params)

    def close(self) -> None:
        pass


class Screen(io.StringIO):
    """A terminal that remembers its codes."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def source() -> FakeSource:
    return FakeSource()


@pytest.fixture
def talk(source: FakeSource) -> Chat:
    return Chat(source, Terminal(io.StringIO()), {}, "be brief")


def test_a_message_is_answered_and_both_are_kept(talk: Chat, source: FakeSource) -> None:
    assert talk.handle("one two three") and talk.handle("four")
    assert talk.terminal.out.getvalue() == "three two one \nfour \n"
    assert source.calls[1] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "one two three"},
                               {"role": "assistant", "content": "three two one "}, {"role": "user", "content": "four"}]


def test_ctrl_c_stops_the_answer_keeps_what_came_and_not_the_program(talk: Chat, source: FakeSource) -> None:
    source.interrupt_at = 2
    assert talk.handle("one two three")
    assert talk.messages[-1] == {"role": "assistant", "content": "three two "} and talk.answers[0].is_stopped
    assert source.num_closed == 1 and "stopped" in talk.answers[0].figures()
    source.interrupt_at = 0
    assert talk.handle("never mind") and len(talk.messages) == 2      # nothing came: the message is taken back


def test_regen_answers_the_last_message_again(talk: Chat, source: FakeSource) -> None:
    talk.handle("one two")
    talk.handle("/regen")
    assert source.calls[0] == source.calls[1] and len(talk.messages) == 2
    talk.handle("/clear")
    talk.handle("/regen")
    assert len(source.calls) == 2 and talk.messages == []


def test_system_replaces_the_system_message(talk: Chat, source: FakeSource, capsys: pytest.CaptureFixture[str]) -> None:
    talk.handle("/system speak French")
    talk.handle("hello")
    talk.handle("/system")
    assert source.calls[0][0] == {"role": "system", "content": "speak French"}
    assert capsys.readouterr().err.splitlines()[-1] == "system: speak French"


def test_save_writes_messages_that_a_client_could_send(talk: Chat, tmp_path: Path,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    talk.handle("héllo")
    talk.handle(f"/save {tmp_path}/talk.json")
    saved = json.loads((tmp_path / "talk.json").read_text())
    assert [message["role"] for message in saved["messages"]] == ["system", "user", "assistant"]
    talk.handle("/save /no/such/folder/x")
    assert "/no/such/folder/x: No such file or directory" in capsys.readouterr().err


def test_stats_sum_tokens_and_cached_ones(talk: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    talk.handle("one two")
    talk.handle("three")
    capsys.readouterr()
    talk.handle("/stats")
    assert "together 3 tokens; 8 of 20 prompt tokens came from the cache" in capsys.readouterr().err


def test_unknown_commands_name_the_known_ones_and_quit_ends(talk: Chat, source: FakeSource,
                                                            capsys: pytest.CaptureFixture[str]) -> None:
    assert talk.handle("/sav x") and talk.handle("   ") and talk.handle("/help") and source.calls == []
    assert "no command /sav; known are /system" in capsys.readouterr().err
    assert not talk.handle("/quit") and not talk.handle("/exit")


def test_a_refused_message_is_taken_back_on_a_terminal_and_ends_a_script(talk: Chat, source: FakeSource) -> None:
    source.error = RequestError("the prompt is too long")
    with pytest.raises(RequestError):
        talk.handle("hello")
    talk.is_talkative = True
    assert talk.handle("hello") and talk.messages == []


def test_a_terminal_gets_a_status_line_dimmed_reasoning_and_its_last_row_back(source: FakeSource) -> None:
    screen = Screen()
    source.reasoning = "hmm"
    chat_on_screen = Chat(source, Terminal(screen), {}, "")
    chat_on_screen.terminal.is_terminal = True
    chat_on_screen.handle("one two")
    text = screen.getvalue()
    assert "\x1b[2mhmm\x1b[0m" in text.replace("\x1b8\x1b[2m", "\x1b8") or "\x1b[2mhmm" in text
    assert "tok/s" in text and "Ctrl-C stops" in text
    assert text.index("\x1b[r") > text.rindex("two")                  # the scrolling region is whole again


def test_lines_of_a_pipe_are_messages_and_only_answers_are_printed(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], source: FakeSource) -> None:
    monkeypatch.setattr(chat, "open_source", lambda *_: source)
    monkeypatch.setattr(sys, "stdin", io.StringIO("one two\nmore \\\nlines here\n"))
    assert chat.main(["--max-tokens", "5"]) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("two one \nhere lines more \n", "")


def test_an_engine_that_dies_ends_the_program_with_three(monkeypatch: pytest.MonkeyPatch, source: FakeSource,
                                                         capsys: pytest.CaptureFixture[str]) -> None:
    source.error = EngineDeadError("worker 0 was killed")
    monkeypatch.setattr(chat, "open_source", lambda *_: source)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    assert chat.main([]) == 3
    assert capsys.readouterr().err == "launch.py chat: worker 0 was killed\n"


def test_a_server_and_options_of_an_engine_exclude_each_other() -> None:
    with pytest.raises(UsageError, match="--url attaches to a server that runs; --max-model-len is for starting"):
        open_source(None, {"max_model_len": 5}, {"url": "http://x", "api_key": ""})


def test_sampling_options_have_the_names_of_requests() -> None:
    assert sampling_of({"sampling_seed": 3, "top_k": 4, "url": "x"}) == {"seed": 3, "top_k": 4}


def test_an_answer_counts_from_its_first_token() -> None:
    answer = Answer(began=10.0, first_at=10.5, last_at=12.5, num_output_tokens=21, num_prompt_tokens=9,
                    num_cached_tokens=8, finish_reason="length")
    assert answer.figures() == "21 tokens · 10.0 tok/s · TTFT 500 ms · prompt 9, 8 cached · ended by length"
    assert Answer(began=1e9).figures().startswith("waiting for the first token")


@pytest.mark.parametrize(("error", "status"), [
    (UsageError("x"), 2), (RequestError("x"), 2), (EngineDeadError("x"), 3), (KeyboardInterrupt(), 130),
    (BrokenPipeError(), 0)])
def test_every_failure_has_its_exit_status(error: BaseException, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())

    def command() -> int:
        raise error
    assert run_command("chat", command) == status
