"""Batch files: checks, answers, errors, going on after an interruption; then one run on a real engine."""
from __future__ import annotations

import asyncio
import functools
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from frontend.cli import run_batch
from frontend.cli.batch_file import Output, check_input, open_input, requests
from frontend.cli.common import UsageError
from frontend.cli.run_batch import Totals, call_application, run_all
from frontend.openai.app import build_app
from ipc.errors import EngineDeadError, OverloadedError
from tests.frontend.fake_llm import FakeLLM, answer_text


def line(custom_id: str, url: str = "/v1/completions", method: str = "POST", **body: Any) -> str:
    body = {"prompt": "abc", "max_tokens": 4, "seed": 1, **body}
    return json.dumps({"custom_id": custom_id, "method": method, "url": url, "body": body}) + "\n"


def write(path: Path, *lines: str) -> str:
    path.write_text("".join(lines))
    return str(path)


def answer_all(llm: FakeLLM, source: str, target: str, max_concurrency: int = 4,
               is_dead: Callable[[], bool] = lambda: False) -> tuple[Totals, dict[str, Any]]:
    """Totals, and the output by id."""
    output, totals = Output(target), Totals()
    try:
        with open_input(source) as file:
            check_input(file)
            file.seek(0)
            call = functools.partial(call_application, build_app(llm))
            asyncio.run(run_all(call, is_dead, requests(file), output, totals, max_concurrency, lambda: None))
    finally:
        output.close()
    return totals, read(target)


def read(target: str) -> dict[str, Any]:
    rows = [json.loads(text) for text in Path(target).read_text().splitlines()]
    assert len({row["custom_id"] for row in rows}) == len(rows)
    return {row["custom_id"]: row for row in rows}


def test_every_request_is_answered_as_the_server_would(tmp_path: Path) -> None:
    chat = line("c", "/v1/chat/completions", messages=[{"role": "user", "content": "x"}])
    source = write(tmp_path / "in.jsonl", line("a"), "\n", line("b", seed=2), chat.replace('"prompt": "abc", ', ""))
    totals, rows = answer_all(FakeLLM(), source, str(tmp_path / "out.jsonl"))
    assert (totals.num_ok, totals.num_failed, totals.num_skipped) == (3, 0, 0)
    body = rows["b"]["response"]["body"]
    assert rows["b"]["error"] is None and rows["b"]["response"]["status_code"] == 200
    assert body["choices"][0]["text"] == answer_text(2, 0, 4) and body["object"] == "text_completion"
    assert rows["c"]["response"]["body"]["choices"][0]["message"]["role"] == "assistant"
    assert len(rows["a"]["response"]["request_id"]) == 32 and rows["a"]["id"].startswith("batch_req_")


@pytest.mark.parametrize(("request_line", "status", "text"), [
    (line("x", max_tokens=-1), 400, "max_tokens is -1"), (line("x", "/v1/nothing"), 404, "/v1/nothing"),
    (line("x", "/health"), 404, "a path under /v1"), (line("x", "/v1/a b"), 404, "a path under /v1"),
    (line("x", "/v1/\u00fc"), 404, "a path under /v1"), (line("x", "/v1/\r\n"), 404, "a path under /v1"),
    (line("x", method="GET"), 400, "a batch request is a POST"),
    (line("x", stream=True), 400, "a batch has no streams"), (line("x", model="other"), 404, "'other' is not served"),
    ('{"custom_id": "x", "url": "/v1/completions", "body": [1]}\n', 400, "body must be a JSON object")])
def test_a_wrong_request_fails_alone_with_the_errors_of_the_api(tmp_path: Path, request_line: str, status: int,
                                                                text: str) -> None:
    source = write(tmp_path / "in.jsonl", request_line, line("good"))
    totals, rows = answer_all(FakeLLM(), source, str(tmp_path / "out.jsonl"))
    assert (totals.num_ok, totals.num_failed) == (1, 1)
    assert rows["x"]["response"]["status_code"] == status == rows["x"]["response"]["body"]["error"]["code"]
    assert text in rows["x"]["error"]["message"] and rows["x"]["error"]["code"].endswith("Error")


def test_a_second_run_answers_only_what_is_missing_and_removes_a_torn_line(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", *(line(f"r{number}") for number in range(6)))
    target = str(tmp_path / "out.jsonl")
    answer_all(FakeLLM(), source, target)
    lines = Path(target).read_text().splitlines(keepends=True)
    Path(target).write_text("".join(lines[:3]) + lines[3][:40])
    llm = FakeLLM()
    totals, rows = answer_all(llm, source, target)
    assert (totals.num_ok, totals.num_skipped, len(llm.calls), len(rows)) == (3, 3, 3, 6)


def test_an_output_that_lacks_only_its_last_line_end_is_kept_whole(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", line("a"), line("b"))
    target = str(tmp_path / "out.jsonl")
    Path(target).write_text(json.dumps({"custom_id": "a"}))
    totals, rows = answer_all(FakeLLM(), source, target)
    assert totals.num_skipped == 1 and set(rows) == {"a", "b"}


def test_no_more_than_the_concurrency_runs_at_once(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", *(line(f"r{number}") for number in range(9)))
    llm = FakeLLM()
    running: list[int] = []
    original = llm.generate

    async def generate(*args: Any, **kwargs: Any) -> Any:
        running.append(1)
        most.append(len(running))
        async for output in original(*args, **kwargs):
            yield output
        running.pop()

    most: list[int] = []
    llm.generate = generate                                     # type: ignore[method-assign]
    answer_all(llm, source, str(tmp_path / "out.jsonl"), max_concurrency=3)
    assert max(most) == 3


def test_an_engine_that_dies_leaves_its_requests_for_the_next_run(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", line("a"), line("b"))
    target = str(tmp_path / "out.jsonl")
    llm = FakeLLM()
    llm.error = EngineDeadError("worker 0 was killed")
    with pytest.raises(EngineDeadError, match="worker 0 was killed"):
        answer_all(llm, source, target, is_dead=lambda: True)
    assert Path(target).read_text() == ""
    assert answer_all(FakeLLM(), source, target)[0].num_ok == 2


def test_a_full_queue_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_batch, "RETRY_S", 0.001)
    llm = FakeLLM()
    llm.error = OverloadedError("the queue is full")
    original, calls = llm.generate, []

    def generate(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            llm.error = None
        return original(*args, **kwargs)

    llm.generate = generate                                     # type: ignore[method-assign]
    source = write(tmp_path / "in.jsonl", line("a"))
    assert answer_all(llm, source, str(tmp_path / "out.jsonl"))[0].num_ok == 1 and len(calls) == 4


@pytest.mark.parametrize(("lines", "text"), [
    ([line("a"), line("a")], "line 2: custom_id 'a' was there before"), (["{\n"], "line 1: "), ([], "has no requests"),
    (['{"url": "/v1/completions", "body": {}}\n'], "custom_id")])
def test_a_file_that_is_no_batch_is_refused_before_anything_starts(tmp_path: Path, lines: list[str], text: str) -> None:
    with open_input(write(tmp_path / "in.jsonl", *lines)) as file, pytest.raises(UsageError, match=text):
        check_input(file)


@pytest.mark.parametrize("content", ['{"architectures": []}', "some text\n", '{"custom_id": "a"}\nmore\n'])
def test_a_file_that_is_no_batch_output_is_never_touched(tmp_path: Path, content: str) -> None:
    """A model's config.json named as the output once lost its content: its one line has no line end."""
    path = tmp_path / "precious.json"
    path.write_text(content)
    with pytest.raises(UsageError, match="exists and is no batch output"):
        Output(str(path))
    assert path.read_text() == content
    Output(str(path), overwrite=True).close()
    assert path.read_text() == ""


def test_files_that_are_not_named_or_not_there_are_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_batch.main(["-i", "x.jsonl"]) == 2
    assert "--output-file is missing" in capsys.readouterr().err
    assert run_batch.main(["-i", "/nowhere/x.jsonl", "-o", "y"]) == 2
    assert "--input-file /nowhere/x.jsonl: No such file" in capsys.readouterr().err


def test_a_batch_runs_on_a_real_engine_from_pipe_to_pipe(tiny_model: str, temp: str, tmp_path: Path,
                                                         monkeypatch: pytest.MonkeyPatch,
                                                         capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    class Input(io.TextIOWrapper):
        pass
    monkeypatch.setattr("sys.stdin", Input(io.BytesIO("".join([line("a"), line("b", prompt=[1, 2])]).encode())))
    assert run_batch.main(["-i", "-", "-o", "-", "--model", tiny_model, "--num-gpu-blocks-override", "64"]) == 0
    captured = capfdbinary.readouterr()
    rows = [json.loads(text) for text in captured.out.splitlines()]
    assert {row["custom_id"]: row["response"]["body"]["usage"]["completion_tokens"] for row in rows} == {"a": 4, "b": 4}
    assert b"2 answered, 0 refused" in captured.err and b"requests:" not in captured.err   # no bar off a terminal
