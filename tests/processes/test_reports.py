"""Ten faults that users of other engines have reported, as end-to-end tests. Each test's name says what must hold; its
docstring says what went wrong there. After each, a plain request is served, every block is free, nothing restarted."""
from __future__ import annotations

import asyncio
import http.client
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from frontend import AsyncLLM, SamplingParams
from frontend.tokenizer import BYTE_TO_CHAR
from tests.conftest import RunningEngine
from tests.processes.tools import (FLAGS, HARD_TIMEOUT_S, OPTIONS, ServerProcess, assert_nothing_left, survivors,
                                   wait_idle, wait_until)
from tests.script_model import write_script_model

pytestmark = pytest.mark.timeout(120)

VOCAB = 300
REFERENCE = {**OPTIONS, "attention_backend": "reference"}


def post(port: int, path: str, body: dict[str, Any], **headers: str) -> tuple[int, bytes, http.client.HTTPMessage]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HARD_TIMEOUT_S)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json", **headers})
        response = connection.getresponse()
        return response.status, response.read(), response.headers
    finally:
        connection.close()


def complete(port: int, prompt: Any, **fields: Any) -> tuple[int, Any]:
    status, data, _ = post(port, "/v1/completions", {"prompt": prompt, "max_tokens": 8, "temperature": 0, **fields})
    return status, json.loads(data)


@pytest.fixture
def served(engine: RunningEngine) -> Iterator[RunningEngine]:
    yield engine
    assert complete(engine.server.port, "Hello")[0] == 200
    engine.loop.run(wait_idle(engine.llm))
    assert engine.server.num_restarts == 0


def test_an_empty_prompt_is_refused_and_the_engine_goes_on(served: RunningEngine) -> None:
    """It killed the engine, where the tokenizer adds no first token (vllm#7632, #7283, #1130)."""
    port = served.server.port
    assert [complete(port, prompt)[0] for prompt in ([""], [[]], "a")] == [400, 400, 200]


@pytest.fixture(scope="module")
def script_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Says DEF G HI J K after "<", and a text in bytes after ">"."""
    def pieces(text: str) -> list[str]:
        return [BYTE_TO_CHAR[byte] for byte in text.encode()]
    folder = tmp_path_factory.mktemp("script")
    model = write_script_model(folder, [["<", "DEF", "G", "HI", "J", "K"], [">", *pieces("A 世ab😀")],
                                        ["^", *pieces("é")]])
    temp = tmp_path_factory.mktemp("t")
    server = ServerProcess(model, str(temp), *FLAGS, "--max-model-len", "64")
    try:
        yield server.wait_ready()
        assert server.end() == 0 and server.num_restarts == 0, server.screen
    finally:
        server.kill()


def deltas(server: ServerProcess, prompt: str, **fields: Any) -> tuple[list[str], str]:
    """(texts of the chunks that have any, finish_reason) of a stream."""
    body = {"prompt": prompt, "max_tokens": 20, "temperature": 0, "stream": True, **fields}
    data = post(server.port, "/v1/completions", body)[1].decode()
    chunks = [json.loads(event[6:])["choices"][0] for event in data.split("\n\n") if event.startswith("data: {")]
    return [c["text"] for c in chunks if c["text"]], chunks[-1]["finish_reason"]


@pytest.mark.parametrize("stop", ["DEFGHIJ", "DE"])
def test_a_stop_string_over_several_tokens_or_inside_one_is_never_sent(script_server: ServerProcess, stop: str) -> None:
    """Its beginning was streamed before the rest came; inside a token it was missed (vllm#3574, #3572, #2577)."""
    status, answer = complete(script_server.port, "<", stop=stop)
    assert (status, answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == (200, "", "stop")
    assert deltas(script_server, "<", stop=stop) == ([], "stop")
    assert complete(script_server.port, "<", stop="GH")[1]["choices"][0]["text"] == "DEF"
    assert complete(script_server.port, "<", max_tokens=5)[1]["choices"][0]["text"] == "DEFGHIJK"


def test_a_logit_bias_is_bounded_by_the_width_of_the_logits(served: RunningEngine) -> None:
    """An id beyond it killed the engine (vllm#16529, #6866; sglang#7670)."""
    def ask(token: int, value: float) -> tuple[int, bytes]:
        return post(served.server.port, "/v1/chat/completions", {
            "messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "logit_bias": {str(token): value},
            "temperature": 0, "ignore_eos": True})[:2]
    assert [ask(VOCAB, -100)[0], ask(-1, 1)[0], ask(VOCAB - 1, 100)[0]] == [400, 400, 200]

    async def first_token() -> int:
        params = SamplingParams(max_tokens=1, temperature=0, logit_bias={VOCAB - 1: 100.0}, ignore_eos=True)
        return [output async for output in served.llm.generate("x", params)][-1].outputs[0].token_ids[0]
    assert served.loop.run(first_token()) == VOCAB - 1


def test_one_request_id_for_several_requests_mixes_nothing(served: RunningEngine) -> None:
    """A second one with the id of the first crashed it, or got the first one's late output (vllm#10583, #15041)."""
    port, prompts = served.server.port, ("First", "Second", "Third")
    alone = [complete(port, prompt, max_tokens=30)[1]["choices"][0]["text"] for prompt in prompts]
    connections = []
    for index, prompt in enumerate(prompts):
        if index == 2:
            first = connections[0].getresponse()
            texts = [json.loads(first.read())["choices"][0]["text"]]
            time.sleep(0.001)
        connections.append(http.client.HTTPConnection("127.0.0.1", port, timeout=HARD_TIMEOUT_S))
        connections[-1].request("POST", "/v1/completions",
                                json.dumps({"prompt": prompt, "max_tokens": 30, "temperature": 0}),
                                {"Content-Type": "application/json", "X-Request-Id": "same"})
    for connection in connections[1:]:
        response = connection.getresponse()
        assert response.headers["x-request-id"] == "same"
        texts.append(json.loads(response.read())["choices"][0]["text"])
    for connection in connections:
        connection.close()
    assert texts == alone


def test_requests_of_rising_priority_in_a_tiny_pool_all_finish(tiny_model: str, temp: str) -> None:
    """A victim that the step had already served tripped an assertion (vllm#23347). Six blocks of four tokens."""
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)      # each alone grows to the whole pool
    prompts = [[5, 6, 7], [8, 9, 10], [11, 12, 13]]

    async def one(llm: AsyncLLM, index: int, priority: int) -> list[int]:
        outputs = [o async for o in llm.generate(prompts[index], params, priority=priority)]
        return list(outputs[-1].outputs[0].token_ids)

    async def run() -> None:
        options = {**REFERENCE, "num_gpu_blocks_override": 6, "block_size": 4, "scheduling_policy": "priority"}
        async with AsyncLLM(tiny_model, **options) as llm:
            alone = [await one(llm, i, 0) for i in range(3)]
            tasks = []
            for i in range(3):
                tasks.append(asyncio.create_task(one(llm, i, 2 - i)))
                await asyncio.sleep(0.001)
            assert await asyncio.gather(*tasks) == alone
            assert (await wait_idle(llm))["num_preemptions"] > 0
    asyncio.run(run())


def test_a_frontend_that_is_killed_leaves_nothing_when_it_is_not_to_be_replaced(tiny_model: str, temp: str) -> None:
    """Core and worker lived on without their server and kept the device's memory (vllm#55510, #34643, #43060)."""
    server = ServerProcess(tiny_model, temp, *FLAGS, "--no-restart").wait_ready()
    body = json.dumps({"prompt": "Go on", "max_tokens": 4000, "ignore_eos": True, "stream": True}).encode()
    streams = []
    for _ in range(4):
        sock = socket.create_connection(("127.0.0.1", server.port), HARD_TIMEOUT_S)
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                     b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert sock.recv(12) == b"HTTP/1.1 200"
        streams.append(sock)
    os.kill(server.pids["frontend"], signal.SIGKILL)
    assert_nothing_left(temp)
    assert server.wait() == 3
    for sock in streams:
        sock.close()
    again = ServerProcess(tiny_model, temp, *FLAGS)
    again.wait_ready()
    assert again.end() == 0
    with socket.socket() as sock:                   # as any server binds it
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", server.port))
    assert_nothing_left(temp)


@pytest.mark.parametrize("num_engines, num_rounds", [(3, 1), pytest.param(8, 20, marks=pytest.mark.slow)])
@pytest.mark.timeout(1800)
def test_engines_that_start_at_the_same_moment_all_get_ready(tiny_model: str, tmp_path: Path, num_engines: int,
                                                             num_rounds: int) -> None:
    """A port was picked, given up and then bound: two engines picked the same one (vllm#28498, #24756, #7196)."""
    for turn in range(num_rounds):
        temps = [tmp_path / f"{turn}-{i}" for i in range(num_engines)]
        for temp in temps:
            temp.mkdir()
        servers = [ServerProcess(tiny_model, str(temp), *FLAGS) for temp in temps]
        try:
            ports = {server.wait_ready().port for server in servers}
            assert len(ports) == num_engines
            for server in servers:
                server.process.send_signal(signal.SIGINT)
            assert [server.wait() for server in servers] == [0] * num_engines
        finally:
            for server in servers:
                server.kill()
        for temp in temps:
            assert_nothing_left(str(temp))


def test_characters_split_over_tokens_are_neither_doubled_nor_replaced(script_server: ServerProcess) -> None:
    """Text after an unfinished character came twice, or a replacement character stayed (sglang#31598, dynamo#12630)."""
    parts, reason = deltas(script_server, ">", max_tokens=11)
    assert "".join(parts) == "A 世ab😀" and "😀" in parts and reason == "length"
    assert "\ufffd" not in "".join(parts)
    assert deltas(script_server, "^", max_tokens=1) == (["\ufffd"], "length")
    assert complete(script_server.port, ">", max_tokens=10)[1]["choices"][0]["text"] == "A 世ab\ufffd"


def test_echo_with_logprobs_of_a_masked_distribution_is_valid_json(served: RunningEngine) -> None:
    """Minus infinity in the answer was no JSON: 500 (vllm#10234, sglang#5984)."""
    status, data, _ = post(served.server.port, "/v1/completions", {
        "prompt": "four words are here", "echo": True, "logprobs": 1, "temperature": 1, "top_k": 1, "max_tokens": 4})

    def refuse(name: str) -> None:
        raise AssertionError(name)
    answer = json.loads(data, parse_constant=refuse)
    assert status == 200, answer
    values = answer["choices"][0]["logprobs"]
    assert values["token_logprobs"][0] is None and all(v is not None for v in values["token_logprobs"][1:])
    assert all(v > -1e5 for top in values["top_logprobs"] if top for v in top.values())


def test_a_tied_head_is_the_embedding_and_a_missing_one_is_named(tiny_model: str, temp: str, tmp_path: Path) -> None:
    """The head was left random or taken from the wrong tensor (vllm#5621, #6758, #53019; sglang#1508)."""
    def folder(tie: bool, head: bool) -> str:
        path = tmp_path / f"{tie}-{head}"
        shutil.copytree(tiny_model, path)
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": tie}))
        weights = load_file(path / "model.safetensors")
        if not head:
            del weights["lm_head.weight"]
        save_file(weights, path / "model.safetensors")
        return str(path)

    async def tokens(model: str) -> list[int]:
        params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
        async with AsyncLLM(model, **REFERENCE) as llm:
            return list([o async for o in llm.generate([5, 6, 7], params)][-1].outputs[0].token_ids)

    tied = asyncio.run(tokens(folder(True, False)))
    assert asyncio.run(tokens(folder(True, True))) == tied
    assert asyncio.run(tokens(folder(False, True))) != tied
    server = ServerProcess(folder(False, False), temp, *FLAGS)
    assert server.wait() == 1
    assert "lm_head.weight" in server.screen.splitlines()[-1] and "Traceback" not in server.screen
    wait_until(lambda: not survivors(temp))
