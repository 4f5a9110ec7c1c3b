"""Tokens of a text, a chat, and back."""
from __future__ import annotations

import io
import json
import sys

import pytest

from frontend.cli import tokenize
from frontend.cli.common import UsageError
from frontend.cli.tokenize import chat_messages, parse_ids


def run(tiny_model: str, capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert tokenize.main(["--model", tiny_model, *argv]) == 0
    return capsys.readouterr().out


def test_a_text_is_shown_as_ids_and_pieces(tiny_model: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(tiny_model, capsys, "the ä").splitlines()
    assert lines[0].split() == ["id", "piece"] and lines[1].split() == ["257", '"the"'] and lines[-1] == "4 tokens"
    assert lines[3].split()[1] == '"\\xc3"'             # half a character is no text


def test_count_and_json_and_standard_input(tiny_model: str, capsys: pytest.CaptureFixture[str],
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("the in"))
    assert run(tiny_model, capsys, "--count", "-") == "3\n"
    assert run(tiny_model, capsys, "--count", "the", "in") == "3\n"       # words without quotes are one text
    result = json.loads(run(tiny_model, capsys, "--json", "the in"))
    assert (result["count"], result["tokens"], result["token_strs"]) == (3, [257, 32, 258], ["the", " ", "in"])


def test_a_chat_goes_through_the_template(tiny_model: str, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("Hi", '[{"role": "user", "content": "Hi"}]', '{"messages": [{"role": "user", "content": "Hi"}]}'):
        result = json.loads(run(tiny_model, capsys, "--chat", "--json", text))
        assert result["text"] == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        assert result["tokens"][0] == 298


def test_ids_become_text(tiny_model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tiny_model, capsys, "--decode", "[257, 32, 258]") == "the in\n"
    assert run(tiny_model, capsys, "--decode", "257", "32", "258") == "the in\n"
    assert tokenize.main(["--model", tiny_model, "--decode", "9999999"]) == 2
    assert "token ids must be 0 to" in capsys.readouterr().err


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(UsageError, match="'x' is none"):
        parse_ids("1, x")
    with pytest.raises(UsageError, match="has no messages"):
        chat_messages('{"a": 1}')
    assert chat_messages("{not json") == [{"role": "user", "content": "{not json"}]


def test_two_ways_to_read_one_text_are_refused(tiny_model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert tokenize.main(["--model", tiny_model, "--chat", "--decode", "1"]) == 2
    assert "exclude each other" in capsys.readouterr().err
