"""Completions against a fake engine, and the openai client against a real server."""
from __future__ import annotations

import asyncio
import json
import socket
import threading
from array import array
from collections.abc import Generator
from typing import Any

import httpx
import pytest

from frontend.http_server import HttpServer, bind_socket, socket_from_fd
from frontend.openai.app import build_app
from tests.frontend.fake_llm import CREATED, MODEL, FakeLLM, answer_text, events, get, post

PATH = "/v1/completions"


def ask(llm: FakeLLM, prompt: Any = "hello", **fields: Any) -> httpx.Response:
    return asyncio.run(post(build_app(llm), PATH, {"prompt": prompt, **fields}))


def refused(llm: FakeLLM, prompt: Any, **fields: Any) -> str:
    response = ask(llm, prompt, **fields)
    assert response.status_code == 400 and llm.calls == []
    error = response.json()["error"]
    assert error["param"].startswith("prompt")
    return str(error["message"])


def test_an_answer_has_openais_shape_and_sixteen_tokens_by_default() -> None:
    body = ask(FakeLLM(), seed=2).json()
    assert body.pop("id").startswith("cmpl-")
    assert isinstance(body.pop("created"), int) and body.pop("system_fingerprint")
    assert body == {
        "object": "text_completion", "model": MODEL,
        "choices": [{"index": 0, "text": answer_text(2, 0, 16), "finish_reason": "length", "stop_reason": None,
                     "logprobs": None}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 16, "total_tokens": 21,
                  "prompt_tokens_details": {"cached_tokens": 1}}}


def test_stream_bytes_are_exactly_these() -> None:
    llm = FakeLLM()
    llm.script = ["a", "b"]
    response = ask(llm, stream=True, max_tokens=2)
    first = events(response)[0]
    head = (f'data: {{"id":"{first["id"]}","object":"text_completion","created":{first["created"]},"model":"org/tiny",'
            f'"system_fingerprint":"{first["system_fingerprint"]}","choices":[{{"index":0,"text":')
    assert response.text == (head + '"a","logprobs":null,"finish_reason":null}]}\n\n'
                             + head + '"b","logprobs":null,"finish_reason":"length","stop_reason":null}]}\n\n'
                             + "data: [DONE]\n\n")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", [["a", "bcd"], [[1], [2, 3, 259]]])
def test_a_batch_numbers_its_choices_prompt_by_prompt(prompt: Any, stream: bool) -> None:
    llm = FakeLLM()
    response = ask(llm, prompt, n=2, seed=5, max_tokens=3, stream=stream)
    texts = [""] * 4
    for chunk in events(response) if stream else [response.json()]:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [answer_text(5, 0, 3), answer_text(5, 1, 3)] * 2
    assert len({call["request_id"] for call in llm.calls}) == 2
    if not stream:
        assert response.json()["usage"]["prompt_tokens"] == 4
        assert response.json()["usage"]["completion_tokens"] == 12


def test_a_token_id_prompt_arrives_as_int32_bytes() -> None:
    llm = FakeLLM()
    assert ask(llm, [0, 259]).status_code == 200
    assert llm.calls[0]["prompt"] == array("i", [0, 259]).tobytes()


def test_empty_prompts_are_refused_and_the_next_request_is_served() -> None:
    """An empty prompt once ended the engine of a well-known server."""
    llm = FakeLLM()
    assert "prompt 0 is empty" in refused(llm, [""])
    assert "prompt 0 is empty" in refused(llm, "")
    assert "empty list" in refused(llm, [[]])
    assert "empty list" in refused(llm, [])
    assert "prompt 1 is an empty list" in refused(llm, [[1], []])
    assert ask(llm, "a").status_code == 200


def test_an_empty_prompt_is_one_token_when_the_tokenizer_adds_one() -> None:
    assert ask(FakeLLM(bos=256), "").json()["usage"]["prompt_tokens"] == 1
    assert refused(FakeLLM(bos=256), "", add_special_tokens=False)


@pytest.mark.parametrize("token", [-1, 260, 2**31, 2**63, 5 * 10**18, 10**30])
def test_token_ids_outside_the_model_are_refused_by_number(token: int) -> None:
    message = refused(FakeLLM(), [1, token])
    assert str(token) in message and "0 to 259" in message
    assert ask(FakeLLM(), [1, 259]).status_code == 200


@pytest.mark.parametrize("prompt, param", [
    (["a", 1], "prompt[1]"), ([1, "a"], "prompt[1]"), ([[1], "a"], "prompt[1]"), ([[1, None]], "prompt[0][1]"),
    ([1.5], "prompt[0]"), ([True], "prompt"), (None, "prompt"), ({"a": 1}, "prompt"), (3, "prompt"),
    ([1, True], "prompt[1]")])
def test_a_prompt_of_another_kind_is_refused_by_position(prompt: Any, param: str) -> None:
    response = ask(FakeLLM(), prompt)
    assert response.status_code == 400 and response.json()["error"]["param"] == param


def test_fan_out_is_capped_before_anything_is_copied() -> None:
    llm = FakeLLM()
    for prompt, n, param in (("a", 10**9, "n"), (["a"] * 65, 2, "n"), (["a"] * 129, 1, "prompt")):
        response = ask(llm, prompt, n=n)
        assert response.status_code == 400 and response.json()["error"]["param"] == param
    assert llm.calls == []
    assert len(ask(llm, ["a"] * 64, n=2, max_tokens=1).json()["choices"]) == 128


@pytest.mark.parametrize("stream", [False, True])
def test_one_bad_prompt_of_a_batch_ends_the_call_and_aborts_the_rest(stream: bool) -> None:
    llm = FakeLLM()
    response = ask(llm, ["a", "x" * 100], stream=stream, max_tokens=16)
    assert response.status_code == 400 and "100 tokens" in response.json()["error"]["message"]
    assert llm.num_aborted == 1


def test_requests_with_the_same_id_are_independent_and_the_id_is_echoed() -> None:
    """Client ids once were keys: streams of two clients with one id mixed."""
    llm = FakeLLM()
    app = build_app(llm)

    async def scenario() -> list[httpx.Response]:
        return list(await asyncio.gather(*(post(app, PATH, {"prompt": "a", "seed": seed, "max_tokens": 20},
                                                x_request_id="same") for seed in (1, 2))))

    responses = asyncio.run(scenario())
    assert [r.json()["choices"][0]["text"] for r in responses] == [answer_text(seed, 0, 20) for seed in (1, 2)]
    assert [r.headers["x-request-id"] for r in responses] == ["same", "same"]
    assert len({r.json()["id"] for r in responses} | {call["request_id"] for call in llm.calls}) == 4
    assert all("same" not in call["request_id"] for call in llm.calls)


# -- a real server -----------------------------------------------------------------------------------------------------

class ServerThread:
    """HttpServer in a loop of its own."""

    def __init__(self, llm: FakeLLM) -> None:
        self.llm = llm
        self.app = build_app(llm)
        bound = bind_socket("127.0.0.1", 0)
        self.server = HttpServer(self.app, socket_from_fd(bound.detach()))
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(10)

    def __enter__(self) -> ServerThread:
        self.thread.start()
        self.run(self.server.start())
        self.port = self.server.port
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self.server.stop())
        self.run(self.loop.shutdown_default_executor())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@pytest.fixture
def server() -> Generator[ServerThread, None, None]:
    with ServerThread(FakeLLM()) as running:
        yield running


def test_the_openai_client_is_served(server: ServerThread) -> None:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=server.url + "/v1", api_key="k", max_retries=0) as client:
        assert [(m.id, m.created, m.max_model_len) for m in client.models.list()] == [(MODEL, CREATED, 64)]
        assert client.models.retrieve(MODEL).id == MODEL

        messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
        server.llm.render_chat = lambda *_, **__: b"\1\0\0\0"   # type: ignore[method-assign]
        chat = client.chat.completions.create(model=MODEL, messages=messages, seed=4, n=2, max_completion_tokens=6)
        assert [c.message.content for c in chat.choices] == [answer_text(4, choice, 6) for choice in (0, 1)]
        assert chat.usage.prompt_tokens_details.cached_tokens == 0
        again = client.chat.completions.create(model=MODEL, messages=messages, seed=4, n=2, max_completion_tokens=6)
        assert [c.message.content for c in again.choices] == [c.message.content for c in chat.choices]

        stream = client.chat.completions.create(model=MODEL, messages=messages, seed=4, max_tokens=6, stream=True,
                                                stream_options={"include_usage": True})
        chunks = list(stream)
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == answer_text(4, 0, 6)
        assert chunks[-2].choices[0].finish_reason == "length"
        assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 6

        text = answer_text(9, 0, 16)
        stop = text[5:7]
        done = client.completions.create(model=MODEL, prompt="a", seed=9, stop=[stop])
        assert done.choices[0].text == text[:text.index(stop)] and done.choices[0].finish_reason == "stop"
        streamed = client.completions.create(model=MODEL, prompt=[1, 2], seed=9, stream=True)
        assert "".join(chunk.choices[0].text for chunk in streamed) == text

        with pytest.raises(openai.NotFoundError) as missing:
            client.chat.completions.create(model="other", messages=messages)
        assert missing.value.body["param"] == "model" and missing.value.request_id
        with pytest.raises(openai.BadRequestError) as bad:
            client.completions.create(model=MODEL, prompt="a", temperature=-1,
                                      extra_headers={"x-request-id": "mine"})
        assert (bad.value.body["code"], bad.value.type, bad.value.param) == (400, "BadRequestError", "temperature")
        assert bad.value.request_id == "mine"
        server.llm.fail_after = (3, RuntimeError("secret"))
        with pytest.raises(openai.APIError, match="internal error") as inside:
            list(client.completions.create(model=MODEL, prompt="a", stream=True))
        assert "secret" not in str(inside.value)


def test_closing_a_stream_aborts_the_request(server: ServerThread) -> None:
    server.llm.max_model_len = 10**6
    with httpx.stream("POST", server.url + PATH, json={"prompt": "a", "stream": True, "max_tokens": 10**5}) as response:
        next(response.iter_bytes())

    async def wait_for_abort() -> None:
        while server.llm.num_aborted == 0:
            await asyncio.sleep(0.01)

    server.run(wait_for_abort())
    assert server.app.state.counters.num_client_disconnects == 1


def test_headers_without_end_are_refused_while_reading(server: ServerThread) -> None:
    with socket.create_connection(("127.0.0.1", server.port), 5) as client:
        client.sendall(b"GET /health HTTP/1.1\r\n")
        answer = b""
        try:
            for _ in range(20):
                client.sendall(b"x: " + b"y" * 2000)
            while data := client.recv(4096):
                answer += data
        except ConnectionError:
            pass                # a reset after the answer is as good
    assert not answer or answer.startswith(b"HTTP/1.1 431 ")
    assert httpx.get(server.url + "/health").status_code == 200
    long_header = httpx.get(server.url + "/health", headers={"x": "y" * 17000})
    assert long_header.status_code == 431


def test_a_body_without_end_gets_413_and_a_closed_connection(server: ServerThread) -> None:
    sent = 0

    def endless() -> Generator[bytes, None, None]:
        nonlocal sent
        yield b'{"prompt": "'
        while sent < 1 << 26:
            sent += 1 << 16
            yield b"x" * (1 << 16)

    try:
        response = httpx.post(server.url + PATH, content=endless(), headers={"content-type": "application/json"})
        assert response.status_code == 413
    except httpx.WriteError:    # the client was still writing when the connection closed
        assert sent < 1 << 26
    assert server.llm.calls == []


def test_stopping_ends_running_streams_with_an_error_event() -> None:
    with ServerThread(FakeLLM()) as running:
        running.llm.max_model_len = 10**6
        running.llm.token_s = 0.01
        with httpx.stream("POST", running.url + PATH,
                          json={"prompt": "a", "stream": True, "max_tokens": 10**6}) as response:
            pieces = response.iter_bytes()
            next(pieces)
            running.run(running.server.stop())
            text = b"".join(pieces).decode()
        assert text.endswith("data: [DONE]\n\n")
        assert json.loads(text.split("data: ")[-2])["error"]["message"] == "the server is shutting down"
        with pytest.raises(httpx.ConnectError):
            httpx.get(running.url + "/health")


def test_small_routes_answer() -> None:
    app = build_app(FakeLLM(), version="1.2.3")

    async def scenario() -> list[httpx.Response]:
        return [await get(app, path) for path in ("/version", "/v1/models/org/tiny", "/ping", "/health", "/ready")]

    version, model, *states = asyncio.run(scenario())
    assert version.json() == {"version": "1.2.3"}
    assert model.json()["id"] == MODEL and model.json()["max_model_len"] == 64
    assert [response.status_code for response in states] == [200, 200, 200]


def test_a_prompt_may_be_cut_from_the_left() -> None:
    llm = FakeLLM()
    app = build_app(llm)
    long = {"prompt": "abcdefgh" * 20, "max_tokens": 4, "seed": 1}

    async def run() -> None:
        assert (await post(app, "/v1/completions", long)).status_code == 400
        for limit, expected in ((3, "fgh"), (-1, ("abcdefgh" * 20)[-60:]), (64, None), (65, None), (0, None)):
            response = await post(app, "/v1/completions", {**long, "truncate_prompt_tokens": limit})
            if expected is None:                # 64 tokens leave no room for an answer, the others are out of range
                assert response.status_code == 400
            else:
                assert response.status_code == 200 and response.json()["usage"]["prompt_tokens"] == len(expected)
                assert llm.tokenizer.decode(array("i", llm.calls[-1]["prompt"])) == expected
        body = {"messages": [{"role": "user", "content": "x" * 100}], "max_tokens": 4, "truncate_prompt_tokens": 5}
        assert (await post(app, "/v1/chat/completions", body)).json()["usage"]["prompt_tokens"] == 5
    asyncio.run(run())
