"""Batch files answered by a server: one that each test scripts, and the real one."""
from __future__ import annotations

import contextlib
import http.server
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from frontend.cli import batch_server, run_batch
from tests.conftest import RunningEngine
from tests.frontend.cli.test_run_batch import line, read, write

ROOT = Path(__file__).resolve().parents[3]
Reply = tuple[int, bytes] | None                        # None: the connection is cut


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    answer: Callable[[dict[str, Any]], Reply]
    seen: list[tuple[str, str]]                         # path, Authorization

    def do_GET(self) -> None:
        self.reply(200, b'{"data": [{"id": "m"}]}')

    def do_POST(self) -> None:
        self.seen.append((self.path, self.headers.get("Authorization", "")))
        found = type(self).answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        if found is None:
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
        else:
            self.reply(*found)

    def reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("x-request-id", "theirs")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def server(answer: Callable[[dict[str, Any]], Reply]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    handler = type("Scripted", (Handler,), {"answer": staticmethod(answer), "seen": []})
    listener = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    listener.daemon_threads = True
    thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.server_port}", handler.seen      # type: ignore[attr-defined]
    finally:
        listener.shutdown()
        thread.join()
        listener.server_close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_batch, "RETRY_S", 0.001)


def test_lines_go_to_the_server_as_they_are_and_its_answers_and_errors_into_the_file(tmp_path: Path) -> None:
    good = [line(f"r{n}", prompt=f"p{n}") for n in range(20)]
    source = write(tmp_path / "in.jsonl", *good, line("bad", prompt="bad"), line("page", prompt="page"),
                   line("nowhere", url="/metrics"), line("umlaut", url="/v1/\u00fc"), line("blank", url="/v1/a b"))

    def answer(body: dict[str, Any]) -> Reply:
        if body["prompt"] == "bad":
            return 400, b'{"error": {"message": "no", "type": "BadRequestError"}}'
        return (500, b"<html>") if body["prompt"] == "page" else (200, json.dumps({"echo": body["prompt"]}).encode())

    with server(answer) as (url, seen):
        target = str(tmp_path / "out.jsonl")
        assert run_batch.main(["-i", source, "-o", target, "--url", url + "/v1", "--api-key", "k",
                               "--max-concurrency", "5"]) == 0
    rows = read(target)
    assert len(rows) == 25 and set(seen) == {("/v1/completions", "Bearer k")} and len(seen) == 22
    assert all(rows[f"r{n}"]["response"]["body"] == {"echo": f"p{n}"} for n in range(20))
    assert rows["r0"]["response"]["request_id"] == "theirs"
    assert rows["bad"]["error"] == {"code": "BadRequestError", "message": "no"}
    assert rows["page"]["error"]["message"] == "<html>" and rows["nowhere"]["response"]["status_code"] == 404
    assert [rows[name]["response"]["status_code"] for name in ("umlaut", "blank")] == [404, 404]


def test_refusals_for_load_and_broken_connections_are_tried_again(tmp_path: Path) -> None:
    replies: dict[str, list[Reply]] = {"a": [(429, b"{}"), (200, b"{}")], "b": [None, (503, b"{}"), (200, b"{}")]}

    def answer(body: dict[str, Any]) -> Reply:
        return replies[body["prompt"]].pop(0)

    target = str(tmp_path / "out.jsonl")
    with server(answer) as (url, _):
        source = write(tmp_path / "in.jsonl", line("a", prompt="a"), line("b", prompt="b"))
        assert run_batch.main(["-i", source, "-o", target, "--url", url]) == 0
    assert [row["response"]["status_code"] for row in read(target).values()] == [200, 200]
    assert replies == {"a": [], "b": []}


def test_a_server_that_keeps_no_connection_open_answers_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request then makes a connection of its own, with the long wait for its answer."""
    monkeypatch.setattr(Handler, "protocol_version", "HTTP/1.0")
    monkeypatch.setattr(batch_server, "CONNECT_S", 0.2)
    asked: list[str] = []

    def answer(body: dict[str, Any]) -> Reply:
        asked.append(body["prompt"])
        time.sleep(0.4)                                 # longer than a connection may take
        return 200, b"{}"

    target = str(tmp_path / "out.jsonl")
    with server(answer) as (url, _):
        source = write(tmp_path / "in.jsonl", *(line(f"r{n}", prompt=f"p{n}") for n in range(3)))
        assert run_batch.main(["-i", source, "-o", target, "--url", url, "--max-concurrency", "1"]) == 0
    assert asked == ["p0", "p1", "p2"] and len(read(target)) == 3


def test_a_server_that_is_gone_leaves_its_requests_for_the_next_run(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(batch_server, "GIVE_UP_S", 0.05)
    source, target = write(tmp_path / "in.jsonl", line("a", prompt="a"), line("b", prompt="b")), str(tmp_path / "o")
    command = ["-i", source, "-o", target, "--max-concurrency", "1", "--url"]
    with server(lambda body: (200, b"{}") if body["prompt"] == "a" else None) as (url, _):
        assert run_batch.main([*command, url]) == 3
        assert "1 of 2 requests are not answered yet" in capsys.readouterr().err and set(read(target)) == {"a"}
    assert run_batch.main([*command, url]) == 1                  # nobody listens there any more
    with server(lambda body: (200, b'{"second": 1}')) as (url, seen):
        assert run_batch.main([*command, url]) == 0
    assert len(seen) == 1 and read(target)["b"]["response"]["body"] == {"second": 1}


def test_a_server_and_an_engine_exclude_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["-i", write(tmp_path / "in.jsonl", line("a")), "-o", str(tmp_path / "o"), "--url", "http://127.0.0.1:1"]
    assert run_batch.main([*command, "--max-num-seqs", "4"]) == 2 and run_batch.main([*command, "--model", "x"]) == 2
    assert "--max-num-seqs is for starting an engine" in capsys.readouterr().err
    assert run_batch.main([*command, "--max-concurrency", "0"]) == 2 and not (tmp_path / "o").exists()


def test_the_real_server_gives_the_answers_that_the_engine_gives(engine: RunningEngine, tmp_path: Path) -> None:
    lines = [line(f"r{n}", prompt=[5, n + 1], temperature=0, ignore_eos=True) for n in range(12)]
    source, target = write(tmp_path / "in.jsonl", *lines), str(tmp_path / "out.jsonl")
    assert run_batch.main(["-i", source, "-o", target, "--url", engine.server.url]) == 0
    rows = read(target)
    assert len(rows) == 12
    assert all(row["response"]["body"]["usage"]["completion_tokens"] == 4 for row in rows.values())


def test_ctrl_c_ends_at_once_and_keeps_what_was_answered(tmp_path: Path) -> None:
    release = threading.Event()

    def answer(body: dict[str, Any]) -> Reply:
        if body["prompt"] == "slow":
            release.wait(60)
        return 200, b"{}"

    source, target = write(tmp_path / "in.jsonl", line("a"), line("b", prompt="slow")), tmp_path / "out.jsonl"
    with server(answer) as (url, seen):
        command = [sys.executable, str(ROOT / "launch.py"), "run-batch", "-i", source, "-o", str(target), "--url", url]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            end = time.monotonic() + 60
            while (len(seen) < 2 or not target.exists() or not target.read_text()) and time.monotonic() < end:
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            _, text = process.communicate(timeout=30)            # the slow answer would take longer
        finally:
            process.kill()
            process.wait()
            release.set()
    assert process.returncode == 130 and "1 of 2 requests are not answered yet" in text
    assert set(read(str(target))) == {"a"}
