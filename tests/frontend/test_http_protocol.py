"""HTTP that is odd but legal, or not legal: bytes on a socket, and what comes back."""
from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.frontend.fake_llm import FakeLLM
from tests.frontend.live_server import LiveServer

UPGRADE = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"
VERSION = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"


def request(fields: dict[str, Any], version: bytes = b"1.1", headers: bytes = b"") -> bytes:
    body = json.dumps({"prompt": "a", "max_tokens": 4, **fields}).encode()
    return (b"POST /v1/completions HTTP/%b\r\nhost: x\r\n%bcontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            % (version, headers, len(body)) + body)


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with LiveServer(FakeLLM()) as running:
        yield running


def exchange(server: LiveServer, *pieces: bytes) -> bytes:
    """What comes back until the server closes; the last piece asks for that, or is why it does."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
        data = b""
        for piece in pieces:
            sock.sendall(piece)
            sock.settimeout(0.1)                # so that the pieces arrive apart
            with contextlib.suppress(TimeoutError):
                data += sock.recv(1 << 16)
        sock.settimeout(10)
        while piece := sock.recv(1 << 16):
            data += piece
        return data


LAST = VERSION.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")


def statuses(data: bytes) -> list[int]:
    return [int(line[9:12]) for line in data.split(b"\r\n") for line in [line[line.rfind(b"HTTP/1.1 "):]]
            if line.startswith(b"HTTP/1.1 ")]


@pytest.mark.parametrize("headers", [b"", b"connection: keep-alive\r\n"])
def test_a_stream_for_http_1_0_has_no_chunks_and_ends_with_the_connection(server: LiveServer, headers: bytes) -> None:
    head, _, body = exchange(server, request({"stream": True}, b"1.0", headers)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ") and b"connection: close" in head
    assert b"transfer-encoding" not in head and b"content-length" not in head
    events = body.split(b"\n\n")
    assert events.pop() == b"" and events.pop() == b"data: [DONE]" and len(events) >= 4
    assert all("choices" in json.loads(event.removeprefix(b"data: ")) for event in events)


def test_a_whole_answer_for_http_1_0_has_its_length(server: LiveServer) -> None:
    head, _, body = exchange(server, request({}, b"1.0")).partition(b"\r\n\r\n")
    assert b"content-length: %d" % len(body) in head and json.loads(body)["choices"]


@pytest.mark.parametrize("cuts", [(), (-1,), (20, 90, -30, -3)])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_an_offer_to_upgrade_is_declined_and_the_body_is_read(server: LiveServer, is_chunked: bool,
                                                              cuts: tuple[int, ...]) -> None:
    """The body was taken for the other protocol's, and lost: 400 for every call of Java's client."""
    data = request({}, headers=UPGRADE)
    if is_chunked:
        head, _, body = data.partition(b"\r\n\r\n")
        head = head[:head.index(b"content-length")] + b"transfer-encoding: chunked"
        data = head + b"\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    places = [0, *(cut % len(data) for cut in cuts), len(data)]
    pieces = [data[begin:end] for begin, end in zip(places, places[1:])]
    answers = exchange(server, *pieces[:-1], pieces[-1] + data + VERSION + LAST)
    assert statuses(answers) == [200, 200, 200, 200] and answers.count(b'"choices"') == 2


def test_offers_to_upgrade_without_a_body_are_requests_like_others(server: LiveServer) -> None:
    many = VERSION.replace(b"host: x\r\n", UPGRADE) * 2_000
    assert statuses(exchange(server, many + LAST)) == [200] * 2_001


@pytest.mark.parametrize("data", [b"\x16\x03\x01\x00\xa5\x01\x00\r\n\r\n", b"get /version HTTP/1.1\r\n\r\n",
                                  b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
                                  b"POST /tokenize HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab"])
def test_what_is_no_http_request_gets_an_error_body_too(server: LiveServer, data: bytes) -> None:
    head, _, body = exchange(server, data).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ") and b"connection: close" in head
    assert json.loads(body)["error"]["code"] == 400


@pytest.mark.parametrize("is_stream", [True, False])
def test_rubbish_behind_a_request_does_not_get_into_its_answer(is_stream: bool) -> None:
    llm = FakeLLM()
    llm.token_s = 0.05
    with LiveServer(llm) as server:
        data = exchange(server, request({"stream": is_stream}), b"rubbish\r\n\r\n")
    assert b" 400 " not in data and b'"error"' not in data


def test_options_and_head_are_answered(server: LiveServer) -> None:
    def ask(line: bytes, headers: bytes = b"") -> tuple[int, bytes]:
        data = exchange(server, line + b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\n" + headers + b"\r\n")
        head, _, body = data.partition(b"\r\n\r\n")
        assert body == b""
        return int(head[9:12]), head

    for path, allow in ((b"/v1/chat/completions", b"POST, OPTIONS"), (b"/health", b"GET, HEAD, OPTIONS"),
                        (b"/v1/responses/r", b"GET, HEAD, DELETE, OPTIONS"),
                        (b"*", b"GET, HEAD, POST, DELETE, OPTIONS")):
        status, head = ask(b"OPTIONS " + path)
        assert status == 204 and b"allow: " + allow in head
        assert b"content-length" not in head and b"transfer-encoding" not in head   # RFC 9110, 8.6: not with a 204
    preflight = b"origin: http://a\r\naccess-control-request-method: POST\r\n"
    status, head = ask(b"OPTIONS /v1/chat/completions", preflight)
    assert status == 204 and b"content-length" not in head
    for path, expected in ((b"/health", 200), (b"/", 200), (b"/nope", 404), (b"/v1/chat/completions", 405)):
        status, head = ask(b"HEAD " + path)
        assert status == expected and b"content-length: " in head


def test_many_requests_in_one_packet_are_not_taken_for_one_long_head(server: LiveServer) -> None:
    """The bytes of a whole packet were counted as header bytes when it ended inside a head: 431 for pipelined calls."""
    assert statuses(exchange(server, VERSION * 600 + VERSION[:10], VERSION[10:] + LAST)) == [200] * 602
