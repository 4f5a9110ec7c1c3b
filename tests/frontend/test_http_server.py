"""What the server does below the application: TLS, the cap on connections, and keep-alive bytes while paused."""
from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import socket
import ssl
import subprocess
import time
from pathlib import Path

import pytest

from frontend import http_server
from frontend.http_protocol import LimitedHttpProtocol
from ipc.errors import ConfigError
from tests.frontend.fake_llm import MODEL, FakeLLM
from tests.frontend.live_server import LiveServer


BODY = json.dumps({"prompt": "a", "max_tokens": 40, "stream": True}).encode()
STREAM = (b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
          % len(BODY) + BODY)


def connect(server: LiveServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=10)


def read_all(sock: socket.socket) -> bytes:
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := sock.recv(1 << 20):
            data += piece
    return data


def test_one_connection_more_than_allowed_is_answered_and_closed() -> None:
    llm = FakeLLM()
    llm.token_s = 30.0                          # so that the connections are in use
    with LiveServer(llm, max_connections=2) as server:
        held = [connect(server) for _ in range(2)]
        for connection in held:
            connection.sendall(STREAM.replace(b'"stream": true', b'"n": 1        '))
        while len(llm.calls) < 2:
            time.sleep(0.01)
        refused = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
        refused.request("GET", "/health")
        response = refused.getresponse()
        assert response.status == 503 and response.headers["retry-after"] == "1"
        assert "--max-connections" in json.loads(response.read())["error"]["message"]
        refused.close()
        held.pop().close()
        for _ in range(100):                    # until the server has seen the close
            again = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
            again.request("GET", "/health")
            status = again.getresponse().status
            again.close()
            if status == 200:
                break
        assert status == 200
        held.pop().close()


def test_a_stream_is_whole_when_the_client_reads_late() -> None:
    """Events are written at once while the connection takes them; then they wait, and none is lost or out of order."""
    llm = FakeLLM()
    llm.max_model_len = 4000
    llm.script = [f"<{number}>".ljust(4000 if number % 3 else 900, ".") for number in range(1500)]
    with LiveServer(llm) as server:
        body = json.dumps({"prompt": "a", "max_tokens": 1500, "stream": True})
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        time.sleep(0.3)                         # 4 MB wait, more than the sockets hold
        lines = [line for line in connection.getresponse().read().split(b"\n\n") if line]
        connection.close()
    assert lines.pop() == b"data: [DONE]"
    chunks = [json.loads(line.removeprefix(b"data: ")) for line in lines]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "".join(llm.script)


def test_an_idle_connection_makes_room_for_a_new_one() -> None:
    with LiveServer(FakeLLM(), max_connections=3) as server:
        silent, half, idle = (connect(server) for _ in range(3))
        half.sendall(b"GET /health HTTP/1.1\r\nhost")
        idle.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert idle.recv(4096).startswith(b"HTTP/1.1 200")
        fourth = connect(server)
        fourth.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert fourth.recv(4096).startswith(b"HTTP/1.1 200")
        assert silent.recv(10) == b""           # it had been idle longest
        for sock in (silent, half, idle, fourth):
            sock.close()


def test_a_request_that_does_not_arrive_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LimitedHttpProtocol, "request_read_s", 0.2)
    with LiveServer(FakeLLM()) as server:
        silent, half, body = (connect(server) for _ in range(3))
        half.sendall(STREAM[:30])
        body.sendall(STREAM[:-5])
        assert read_all(silent) == b""
        for sock in (half, body):
            assert read_all(sock).startswith(b"HTTP/1.1 408 ")
        for sock in (silent, half, body):
            sock.close()


def test_a_long_answer_is_not_taken_for_a_slow_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when half of a second request has come meanwhile."""
    monkeypatch.setattr(LimitedHttpProtocol, "request_read_s", 0.1)
    llm = FakeLLM()
    llm.token_s = 0.01
    with LiveServer(llm) as server, connect(server) as sock:
        sock.sendall(STREAM + STREAM[:40])
        data = b""
        while b"[DONE]" not in data:
            piece = sock.recv(1 << 16)
            assert piece, data
            data += piece
        assert b"408" not in data


def test_a_client_that_does_not_read_is_cut_off_and_its_request_ends(monkeypatch: pytest.MonkeyPatch,
                                                                     caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(LimitedHttpProtocol, "slow_reader_s", 0.3)
    llm = FakeLLM()
    llm.script = ["x" * 500_000] * 60           # more than all buffers on the way hold
    with LiveServer(llm) as server:
        reads, stalls = connect(server), connect(server)
        stalls.sendall(STREAM)
        reads.sendall(STREAM)
        data = b""
        while b"[DONE]" not in data:            # one that reads is served meanwhile
            data = data[-10:] + reads.recv(1 << 20)
        deadline = time.monotonic() + 10
        while llm.num_aborted == 0:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert not read_all(stalls).endswith(b"[DONE]\n\n")
        for sock in (reads, stalls):
            sock.close()
    assert sum("took less than" in record.message for record in caplog.records) == 1


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed; it makes the certificate")
def test_https_with_a_certificate_and_a_bad_one_is_an_early_error(tmp_path: Path) -> None:
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                    "-keyout", key, "-out", cert, "-days", "2", "-subj", "/CN=localhost",
                    "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
    with LiveServer(FakeLLM(), ssl_certfile=str(cert), ssl_keyfile=str(key)) as server:
        context = ssl.create_default_context(cafile=str(cert))
        connection = http.client.HTTPSConnection("127.0.0.1", server.port, timeout=10, context=context)
        connection.request("GET", "/v1/models")
        assert json.loads(connection.getresponse().read())["data"][0]["id"] == MODEL
        connection.close()
    with pytest.raises(ConfigError, match="--ssl-certfile .* cannot be loaded"), \
            LiveServer(FakeLLM(), ssl_certfile=str(key)):
        pass


def test_a_request_that_came_before_the_idle_time_was_noticed_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was stopped finds both at once, and the client could not know."""
    monkeypatch.setattr(http_server, "IDLE_CONNECTION_S", 0.2)
    def ask(sock: socket.socket) -> None:
        sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        data = b""
        while not data.endswith(b"}"):
            piece = sock.recv(4096)
            assert piece, data
            data += piece

    with LiveServer(FakeLLM()) as server, connect(server) as sock:
        for _ in range(3):
            ask(sock)
            server.block(0.4)
        ask(sock)
        assert read_all(sock) == b""            # nothing came: it is closed


def test_a_refusal_reaches_a_client_that_is_still_sending() -> None:
    """Bytes that arrive at a closed connection reset it, and the client loses an answer it has not read."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-request-id: \x7f\r\ncontent-length: 1000000\r\n\r\n"
    with LiveServer(FakeLLM()) as server:
        for _ in range(3):
            with connect(server) as sock:
                sock.sendall(head)
                time.sleep(0.05)                # the refusal is there, and is not read yet
                for _ in range(10):
                    sock.sendall(b"x" * 10_000)
                    time.sleep(0.005)
                data = b""
                while piece := sock.recv(4096):
                    data += piece
                assert data.startswith(b"HTTP/1.1 400 ") and b"no HTTP/1.1 request" in data


def test_a_refused_connection_ends_although_its_client_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frontend.http_protocol.LINGER_S", 0.2)
    with LiveServer(FakeLLM()) as server, connect(server) as sock:
        sock.sendall(b"no request\r\n\r\n")
        assert read_all(sock).startswith(b"HTTP/1.1 400 ")
        deadline = time.monotonic() + 10
        with pytest.raises(ConnectionError):    # reset, once our side is gone too
            while time.monotonic() < deadline:
                sock.sendall(b"x")
                time.sleep(0.05)
        assert LimitedHttpProtocol._num_lingering == 0


def test_only_so_many_refused_connections_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frontend.http_protocol.LINGERING", 3)
    with LiveServer(FakeLLM()) as server:
        socks = [connect(server) for _ in range(8)]
        for sock in socks:
            sock.sendall(b"no request\r\n\r\n")
            assert read_all(sock).startswith(b"HTTP/1.1 400 ")
        assert LimitedHttpProtocol._num_lingering <= 3
        for sock in socks:
            sock.close()
