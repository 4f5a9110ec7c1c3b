"""What the server does below the application: TLS, the cap on connections, and keep-alive bytes while paused."""
from __future__ import annotations

import http.client
import json
import shutil
import socket
import ssl
import subprocess
import time
from pathlib import Path

import pytest

from ipc.errors import ConfigError
from tests.frontend.fake_llm import MODEL, FakeLLM
from tests.frontend.live_server import LiveServer


def test_one_connection_more_than_allowed_is_answered_and_closed() -> None:
    with LiveServer(FakeLLM(), max_connections=2) as server:
        held = [socket.create_connection(("127.0.0.1", server.port), timeout=10) for _ in range(2)]
        for connection in held:
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
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
    llm.script = [f"<{number}>".ljust(4000, ".") for number in range(1500)]
    with LiveServer(llm) as server:
        body = json.dumps({"prompt": "a", "max_tokens": 1500, "stream": True})
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        time.sleep(0.3)                         # 6 MB wait, more than the sockets hold
        lines = [line for line in connection.getresponse().read().split(b"\n\n") if line]
        connection.close()
    assert lines.pop() == b"data: [DONE]"
    chunks = [json.loads(line.removeprefix(b"data: ")) for line in lines]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "".join(llm.script)


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
