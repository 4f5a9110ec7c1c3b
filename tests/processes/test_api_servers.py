"""Several API servers on one port and one core, and programs that attach to a running engine."""
from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import signal
from typing import Any

import pytest

from frontend import AsyncLLM, SamplingParams
from ipc.attach import read_engine_file
from ipc.errors import ConfigError, EngineDeadError
from tests.processes.tools import FLAGS, ServerProcess, assert_nothing_left, run_dirs, wait_until

pytestmark = pytest.mark.timeout(120)

KEY = "admin-key-0123"


def call(server: ServerProcess, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
    """One call on a connection of its own, which the kernel gives to either process."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    try:
        headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def complete(server: ServerProcess) -> None:
    status, body = call(server, "POST", "/v1/completions", {"prompt": "the", "max_tokens": 3, "ignore_eos": True})
    assert status == 200, body


def num_requests(server: ServerProcess) -> int:
    text = call(server, "GET", "/metrics")[1].decode()
    return int(float(re.search(r"^vllm:e2e_request_latency_seconds_count\S* (\S+)$", text, re.M)[1]))


def check_stored_responses(server: ServerProcess) -> None:
    """Each one is read, continued, cancelled and deleted by whichever process is asked."""
    path = "/v1/responses"

    def create(**fields: Any) -> dict[str, Any]:
        status, body = call(server, "POST", path, {"input": "the", "max_output_tokens": 3, **fields})
        assert status == 200, body
        told: dict[str, Any] = json.loads(body)
        return told

    made = [create() for _ in range(8)]
    for one in made:
        assert [json.loads(call(server, "GET", f"{path}/{one['id']}")[1]) for _ in range(4)] == [one] * 4
        assert create(previous_response_id=one["id"])["usage"]["input_tokens"] > one["usage"]["input_tokens"]
    for one in made:
        assert call(server, "DELETE", f"{path}/{one['id']}")[0] == 200
        assert {call(server, "GET", f"{path}/{one['id']}")[0] for _ in range(4)} == {404}
    for _ in range(6):
        running = create(background=True, max_output_tokens=200, ignore_eos=True)
        status, body = call(server, "POST", f"{path}/{running['id']}/cancel")
        assert status == 200 and json.loads(body)["status"] in ("cancelled", "incomplete", "completed")
        assert json.loads(call(server, "GET", f"{path}/{running['id']}")[1]) == json.loads(body)


def test_two_servers_share_a_port_a_core_and_their_counts(tiny_model: str, temp: str) -> None:
    server = ServerProcess(tiny_model, temp, *FLAGS, "--api-servers", "2", "--admin-api-key", KEY)
    try:
        server.wait_ready()
        pids = re.search(r"^  PIDs +(.*)$", server.screen, re.M)[1]
        first, second = (int(re.search(rf"{name} (\d+)(?:,|$)", pids)[1]) for name in ("frontend", "frontend 1"))
        for _ in range(24):
            complete(server)
        assert {num_requests(server) for _ in range(12)} == {24}        # whoever answers
        for path, state in (("/pause", True), ("/resume", False)):
            assert call(server, "POST", path)[0] == 200
            assert {json.loads(call(server, "GET", "/is_paused")[1])["is_paused"] for _ in range(12)} == {state}
        check_stored_responses(server)
        assert call(server, "POST", "/pause")[0] == 200
        os.kill(second, signal.SIGKILL)
        wait_until(lambda: "serving again" in server.screen)
        assert {json.loads(call(server, "GET", "/is_paused")[1])["is_paused"] for _ in range(12)} == {True}
        assert call(server, "POST", "/resume")[0] == 200
        again = [int(pid) for pid in re.findall(r"\d+", server.screen.rpartition("PIDs")[2])]
        assert first in again and second not in again and len(again) == 5
        for _ in range(12):
            complete(server)
        assert server.end() == 0, server.screen
    finally:
        server.kill()
    assert_nothing_left(temp)


@pytest.mark.parametrize("count", [1, 2])
def test_a_pause_outlives_every_server(count: int, tiny_model: str, temp: str) -> None:
    server = ServerProcess(tiny_model, temp, *FLAGS, "--api-servers", str(count), "--admin-api-key", KEY)
    try:
        server.wait_ready()
        assert call(server, "POST", "/pause")[0] == 200
        pids = re.search(r"^  PIDs +(.*)$", server.screen, re.M)[1]
        for pid in re.findall(r"frontend(?: 1)? (\d+)", pids):
            os.kill(int(pid), signal.SIGKILL)
        wait_until(lambda: "serving again" in server.screen)
        assert {json.loads(call(server, "GET", "/is_paused")[1])["is_paused"] for _ in range(6 * count)} == {True}
        assert call(server, "POST", "/resume")[0] == 200
        assert {json.loads(call(server, "GET", "/is_paused")[1])["is_paused"] for _ in range(6 * count)} == {False}
        complete(server)
        assert server.end() == 0, server.screen
    finally:
        server.kill()
    assert_nothing_left(temp)


def test_an_attached_program_lives_through_a_new_core_and_ends_with_the_engine(tiny_model: str, temp: str) -> None:
    server = ServerProcess(tiny_model, temp, *FLAGS)
    params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)

    async def run() -> None:
        [folder] = run_dirs(temp)
        async with await AsyncLLM.attach_to(folder) as llm, await AsyncLLM.attach_to(folder) as other:
            assert llm.served_model_name == other.served_model_name
            count = 0
            async for output in llm.generate("the", params, output_kind="delta"):
                count += len(output.outputs[0].token_ids)
                if 20 <= count < 200 and read_engine_file(folder).core.epoch == 1:
                    os.kill(server.pids["engine_core"], signal.SIGKILL)
                    await asyncio.sleep(0.3)
            assert count == 400
            short = SamplingParams(max_tokens=2)
            assert [output.finished async for output in other.generate("in", short, output_kind="final")] == [True]
            assert await asyncio.to_thread(server.end) == 0
            with pytest.raises(EngineDeadError):
                async for _ in llm.generate("the", params):
                    pass
        with pytest.raises(ConfigError, match="no engine serves in"):
            await AsyncLLM.attach_to(folder)

    try:
        server.wait_ready()
        asyncio.run(run())
    finally:
        server.kill()
    assert_nothing_left(temp)
