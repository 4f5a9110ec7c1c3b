"""The HTTP server as three real processes: what clients do on the wire, and what a start says that cannot be."""
from __future__ import annotations

import http.client
import json
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from frontend import SamplingParams
from tests.conftest import RunningEngine
from tests.processes.tools import (ENDLESS_TOKENS, FLAGS, HARD_TIMEOUT_S, ServerProcess, assert_nothing_left, run_dirs,
                                   wait_idle, wait_until)

pytestmark = pytest.mark.timeout(60)


class Reply:
    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status, self.headers, self.data = response.status, response.headers, response.read()

    @property
    def json(self) -> Any:
        return json.loads(self.data)


def call(engine: RunningEngine, method: str, path: str, body: Any = None, **headers: str) -> Reply:
    connection = http.client.HTTPConnection("127.0.0.1", engine.server.port, timeout=HARD_TIMEOUT_S)
    try:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection.request(method, path, data, {"Content-Type": "application/json", **headers})
        return Reply(connection.getresponse())
    finally:
        connection.close()


def complete(engine: RunningEngine, **fields: Any) -> Reply:
    body = {"prompt": "Hello", "max_tokens": 5, "temperature": 0, "ignore_eos": True, **fields}
    return call(engine, "POST", "/v1/completions", body)


@pytest.fixture(autouse=True)
def serves_afterwards(engine: RunningEngine) -> Iterator[None]:
    """After whatever a test did, one plain request is answered, every block is free, and the processes are the same."""
    yield
    assert complete(engine).status == 200
    engine.loop.run(wait_idle(engine.llm))
    assert all(psutil.pid_exists(pid) for pid in engine.server.pids.values())


def test_health_readiness_and_version(engine: RunningEngine) -> None:
    assert call(engine, "GET", "/health").json["status"] == "ok"
    ready = call(engine, "GET", "/ready")
    assert (ready.status, ready.json["status"], ready.json["phase"]) == (200, "ready", "serving")
    assert call(engine, "GET", "/version").json["version"].count(".") == 2
    assert call(engine, "GET", "/v1/models").json["data"][0]["id"] == "tiny"


def test_only_one_tcp_port_is_open_and_the_run_directory_is_private(engine: RunningEngine) -> None:
    ports = {(connection.laddr.ip, connection.laddr.port) for pid in engine.server.pids.values()
             for connection in psutil.Process(pid).net_connections("inet")
             if connection.status == psutil.CONN_LISTEN}
    assert ports == {("127.0.0.1", engine.server.port)}
    [folder] = run_dirs(engine.server.temp)
    assert os.stat(folder).st_mode & 0o777 == 0o700
    sockets = [entry.name for entry in Path(folder).iterdir() if entry.is_socket()]
    assert sorted(sockets) == ["core-1", "worker-0-1"]


def test_the_frontend_and_the_core_have_no_torch(engine: RunningEngine) -> None:
    def has_torch(name: str) -> bool:
        return "libtorch" in Path(f"/proc/{engine.server.pids[name]}/maps").read_text()
    assert [name for name in engine.server.pids if has_torch(name)] == ["worker"]


def test_errors_have_one_body_and_the_request_id(engine: RunningEngine) -> None:
    for reply, status, text in (
            (complete(engine, model="gpt-4"), 404, "'gpt-4' is not served here"),
            (complete(engine, prompt=""), 400, "prompt"), (complete(engine, prompt=[]), 400, "prompt"),
            (complete(engine, prompt=[[]]), 400, "prompt"), (complete(engine, prompt=[300]), 400, "0 to 299"),
            (complete(engine, suffix="end"), 400, "suffix"),
            (call(engine, "POST", "/v1/completions", b"{"), 400, "JSON"),
            (call(engine, "GET", "/v1/nothing"), 404, "/v1/nothing"),
            (call(engine, "GET", "/v1/completions"), 405, "POST")):
        assert reply.status == status and text in reply.json["error"]["message"], reply.data
        assert reply.json["error"]["code"] == status and reply.headers["x-request-id"]


def test_an_undocumented_field_is_ignored_by_name(engine: RunningEngine) -> None:
    reply = complete(engine, temprature=1)
    assert reply.status == 200 and reply.headers["x-ignored-fields"] == "temprature"


def test_two_requests_with_one_request_id_do_not_meet(engine: RunningEngine) -> None:
    bodies = [{"prompt": text, "max_tokens": 20, "temperature": 0, "ignore_eos": True} for text in ("First", "Second")]
    alone = [call(engine, "POST", "/v1/completions", body).json["choices"][0]["text"] for body in bodies]
    connections = [http.client.HTTPConnection("127.0.0.1", engine.server.port, timeout=HARD_TIMEOUT_S) for _ in bodies]
    for connection, body in zip(connections, bodies):
        connection.request("POST", "/v1/completions", json.dumps(body),
                           {"Content-Type": "application/json", "X-Request-Id": "mine"})
    replies = [Reply(connection.getresponse()) for connection in connections]
    for connection in connections:
        connection.close()
    assert [reply.json["choices"][0]["text"] for reply in replies] == alone and alone[0] != alone[1]
    assert [reply.headers["x-request-id"] for reply in replies] == ["mine", "mine"]


@pytest.mark.parametrize("stream", [True, False])
def test_clients_that_reset_their_connections_free_everything(engine: RunningEngine, stream: bool) -> None:
    body = json.dumps({"prompt": ["Go on", "and on"], "max_tokens": ENDLESS_TOKENS, "ignore_eos": True, "n": 2,
                       "stream": stream}).encode()
    head = (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
            % len(body))
    sockets = []
    for length in (len(head) + len(body), len(head) + 20, 30, 0, len(head) + len(body)):
        sock = socket.create_connection(("127.0.0.1", engine.server.port), HARD_TIMEOUT_S)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))      # close sends a reset
        sock.sendall((head + body)[:length])
        sockets.append(sock)
    if stream:
        for sock in (sockets[0], sockets[-1]):
            assert sock.recv(12) == b"HTTP/1.1 200"
    wait_until(lambda: engine.loop.run(engine.llm.stats())["num_running"] == 8)
    for sock in sockets:
        sock.close()
    assert engine.loop.run(wait_idle(engine.llm))["num_free_blocks"] == 512


def test_an_attached_frontend_and_the_server_share_the_prefix_cache(engine: RunningEngine) -> None:
    async def direct() -> tuple[str, int]:
        params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
        output = [output async for output in engine.llm.generate(prompt, params)][-1]
        return output.outputs[0].text, output.num_cached_tokens

    prompt = "A prompt that both of them are asked, over more than two blocks of tokens"
    engine.loop.run(engine.llm.reset_prefix_cache())
    text, num_cached = engine.loop.run(direct())
    reply = complete(engine, prompt=prompt).json
    assert num_cached == 0 and reply["choices"][0]["text"] == text
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32


# ---------------------------------------------------------------- starts that cannot be

@pytest.mark.parametrize("options, text", [
    (("--port", "{port}"), "launch.py: port {port} on 127.0.0.1 is taken; choose another with --port"),
    (("--host", "192.0.2.1"), "launch.py: cannot listen on 192.0.2.1, port 0: "),
    (("--block-size", "0"), "launch.py: --block-size is 0; allowed is 1 to 1024"),
    (("--max-model-len", "4097"), "launch.py: --max-model-len is 4097; the model's limit is 4096"),
])
def test_a_start_that_cannot_be_is_one_line(engine: RunningEngine, temp: str, tiny_model: str, options: tuple[str, ...],
                                            text: str) -> None:
    port = engine.server.port
    server = ServerProcess(tiny_model, temp, *FLAGS, *(
        option.format(port=port) for option in options))
    assert server.wait() == 1, server.screen
    lines = [line for line in server.screen.splitlines() if line.startswith("launch.py:")]
    assert len(lines) == 1 and lines[0].startswith(text.format(port=port)), server.screen
    assert "Traceback" not in server.screen
    if "--max-model-len" not in options:
        assert "load weights" not in server.screen          # early: before any process is started
    assert_nothing_left(temp)


def test_a_model_that_is_not_there_is_one_line(temp: str) -> None:
    server = ServerProcess("./nowhere", temp)
    assert server.wait() == 1
    assert server.screen.splitlines()[-1] == "launch.py: model './nowhere': no such file or folder"


def test_a_cut_checkpoint_is_one_line_that_names_the_file(temp: str, tiny_model: str, tmp_path: Path) -> None:
    for path in Path(tiny_model).iterdir():
        data = path.read_bytes()
        (tmp_path / path.name).write_bytes(data[:-1000] if path.suffix == ".safetensors" else data)
    server = ServerProcess(str(tmp_path), temp, *FLAGS)
    assert server.wait() == 1
    assert str(tmp_path / "model.safetensors") in server.screen.splitlines()[-1] and "Traceback" not in server.screen
    assert_nothing_left(temp)


