"""One prompt: from the argument, from a pipe, as JSON, on the real server."""
from __future__ import annotations

import io
import json
import sys

import pytest

from frontend.cli import complete
from tests.conftest import RunningEngine

GREEDY = ["--max-tokens", "6", "--temperature", "0"]


def test_the_text_and_nothing_else_goes_to_standard_output(engine: RunningEngine,
                                                           capsys: pytest.CaptureFixture[str]) -> None:
    assert complete.main(["Hello", "--url", engine.server.url, *GREEDY]) == 0
    first = capsys.readouterr()
    assert first.out.strip() and first.err == ""
    assert complete.main(["Hello", "--echo", "--url", engine.server.url, *GREEDY]) == 0
    assert capsys.readouterr().out == "Hello" + first.out
    assert complete.main(["one", "two", "--echo", "--url", engine.server.url, *GREEDY]) == 0
    assert capsys.readouterr().out.startswith("one two")        # words without quotes are one prompt


def test_a_prompt_comes_from_a_pipe_and_json_has_the_figures(engine: RunningEngine, monkeypatch: pytest.MonkeyPatch,
                                                             capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello"))
    assert complete.main(["--json", "--chat", "--url", engine.server.url, *GREEDY]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["model"], result["output_tokens"], result["finish_reason"]) == ("tiny", 6, "length")
    assert result["prompt_tokens"] > 6 and result["ttft_s"] > 0


def test_usage_errors_are_two(engine: RunningEngine, monkeypatch: pytest.MonkeyPatch,
                              capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert complete.main(["--url", engine.server.url]) == 2
    assert "a prompt is empty: standard input had nothing" in capsys.readouterr().err
    assert complete.main(["x", "--url", engine.server.url, "--top-p", "7"]) == 2
    assert "top_p is 7" in capsys.readouterr().err
    with pytest.raises(SystemExit) as error:
        complete.main(["x", "--max-token", "3"])
    assert error.value.code == 2 and "did you mean --max-tokens?" in capsys.readouterr().err


def test_a_model_that_is_not_there_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert complete.main(["x", "--model", "./nothing"]) == 1
    assert "launch.py complete: model './nothing'" in capsys.readouterr().err
