"""Answers from a server: against one that each test scripts, and against the real one."""
from __future__ import annotations

import contextlib
import http.server
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from frontend.cli.common import StartError
from frontend.cli.source import ServerSource, read_chunk
from ipc.errors import EngineDeadError, RequestError, RequestFailedError
from tests.conftest import RunningEngine

Reply = tuple[int, bytes]


@contextlib.contextmanager
def server(answer: Callable[[dict[str, Any]], Reply]) -> Iterator[tuple[str, list[str]]]:
    """(url, Authorization headers seen)."""
    seen: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(200, b'{"data": [{"id": "m1"}, {"id": "m2"}]}')

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.reply(*answer(json.loads(body)))

        def reply(self, status: int, body: bytes) -> None:
            seen.append(self.headers.get("Authorization", ""))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    listener = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.server_port}/v1", seen
    finally:
        listener.shutdown()
        thread.join()
        listener.server_close()


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def test_chunks_become_pieces_with_counts_even_where_the_server_sends_none() -> None:
    def answer(body: dict[str, Any]) -> Reply:
        assert body["model"] == "m1" and body["messages"] == [{"role": "user", "content": "hi"}] and body["top_k"] == 3
        deltas = [{"role": "assistant"}, {"reasoning_content": "hm"}, {"content": "a"}, {"content": "b"}]
        usage = {"prompt_tokens": 7, "completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}
        return 200, b": comment\n\n" + b"".join(event(choices=[{"delta": delta}]) for delta in deltas) + event(
            choices=[{"delta": {}, "finish_reason": "stop"}]) + event(choices=[], usage=usage) + b"data: [DONE]\n\n"

    with server(answer) as (url, seen):
        source = ServerSource(url, api_key="secret")
        pieces = list(source.chat([{"role": "user", "content": "hi"}], {"top_k": 3}))
    assert "".join(piece.text for piece in pieces) == "ab" and pieces[1].reasoning == "hm"
    assert [piece.num_output_tokens for piece in pieces] == [0, 1, 2, 3, 3, 9]
    assert pieces[-1][2:5] == (7, 4, 9) and pieces[-2].finish_reason == "stop"
    assert seen == ["Bearer secret"] * 2 and source.where == url.removesuffix("/v1")


@pytest.mark.parametrize(("reply", "error", "text"), [
    ((400, b'{"error": {"message": "too long"}}'), RequestError, "HTTP 400: too long"),
    ((401, b'{"error": "Unauthorized"}'), RequestError, "HTTP 401: Unauthorized"),
    ((500, b"boom"), RequestFailedError, "HTTP 500: boom"),
    ((200, event(error={"message": "worker died"})), RequestFailedError, "worker died"),
    ((200, event(choices=[{"text": "x"}])), EngineDeadError, "before the answer was complete"),
    ((200, b"data: {broken\n\n"), EngineDeadError, "broke")])
def test_what_goes_wrong_has_its_own_exception(reply: Reply, error: type[Exception], text: str) -> None:
    with server(lambda body: reply) as (url, _), pytest.raises(error, match=text):
        list(ServerSource(url).complete("x", {}))


def test_no_server_and_no_url_are_refused_in_one_line() -> None:
    with pytest.raises(StartError, match="no server answers at http://127.0.0.1:1: .*python launch.py --model"):
        ServerSource("127.0.0.1:1")
    for url in ("ftp://x", "http://", "127.0.0.1:99999", "http://127.0.0.1:many", "http://[::1", "http://x/\u00fc"):
        with pytest.raises(StartError, match="write it like http://127.0.0.1:8000"):
            ServerSource(url)
    with pytest.raises(StartError, match="API key"):
        ServerSource("127.0.0.1:1", api_key="a\nb")


def test_a_chunk_without_anything_is_an_empty_piece() -> None:
    assert read_chunk({"choices": []}).text == "" and read_chunk({"choices": [], "usage": None}).num_output_tokens == -1


def test_the_real_server_streams_and_stops_when_the_iterator_is_closed(engine: RunningEngine) -> None:
    source = ServerSource(engine.server.url)
    assert source.models == ["tiny"]
    params = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    pieces = list(source.chat([{"role": "user", "content": "Hi"}], params))
    assert pieces[-1].num_output_tokens == 12 and pieces[-1].num_prompt_tokens > 5
    stream = source.complete("Go on", {**params, "max_tokens": 300})
    next(stream)
    stream.close()                                       # type: ignore[attr-defined]
    text = "".join(piece.text for piece in source.complete("Hello", params))
    assert text and text == "".join(piece.text for piece in source.complete("Hello", params))
