"""Chat completions against a fake engine: bytes of streams, usage, fields, disconnects."""
from __future__ import annotations

import asyncio
import logging
from array import array
from typing import Any

import pytest

from frontend.openai.app import build_app
from frontend.openai.limits import Limits
from ipc.errors import EngineDeadError, RequestFailedError
from tests.frontend.fake_llm import MODEL, FakeLLM, RawClient, answer_text, events, post

PATH = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


def ask(llm: FakeLLM, **fields: Any) -> Any:
    return asyncio.run(post(build_app(llm), PATH, {"model": MODEL, "messages": USER, **fields}))


def test_an_answer_has_openais_shape_and_counts_usage() -> None:
    response = ask(FakeLLM(), seed=1, max_tokens=4)
    body = response.json()
    assert response.status_code == 200
    assert body.pop("id").startswith("chatcmpl-")
    assert isinstance(body.pop("created"), int)
    assert body.pop("system_fingerprint").startswith("fp_")
    assert body == {
        "object": "chat.completion", "model": MODEL,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": answer_text(1, 0, 4), "refusal": None},
                     "finish_reason": "length", "stop_reason": None, "logprobs": None}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9,
                  "prompt_tokens_details": {"cached_tokens": 1}}}


def test_stream_bytes_are_exactly_these() -> None:
    llm = FakeLLM()
    llm.script = ["He", "llo\n", "", "“\u2028”"]
    response = ask(llm, stream=True, max_tokens=4, stream_options={"include_usage": True})
    first = events(response)[0]
    head = (f'data: {{"id":"{first["id"]}","object":"chat.completion.chunk","created":{first["created"]},'
            f'"model":"org/tiny","system_fingerprint":"{first["system_fingerprint"]}","choices":[')
    end = '],"usage":null}\n\n'
    running = ',"logprobs":null,"finish_reason":null}'
    assert response.text == (
        head + '{"index":0,"delta":{"role":"assistant","content":""}' + running + end
        + head + '{"index":0,"delta":{"content":"He"}' + running + end
        + head + '{"index":0,"delta":{"content":"llo\\n"}' + running + end
        + head + '{"index":0,"delta":{"content":"“\\u2028”"},"logprobs":null,"finish_reason":"length",'
        '"stop_reason":null}' + end
        + head + '],"usage":{"prompt_tokens":5,"completion_tokens":4,"total_tokens":9,'
        '"prompt_tokens_details":{"cached_tokens":1}}}\n\n'
        + "data: [DONE]\n\n")
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"


def test_a_stream_without_include_usage_never_mentions_usage() -> None:
    chunks = events(ask(FakeLLM(), stream=True, max_tokens=3))
    assert all("usage" not in chunk for chunk in chunks)
    assert [len(chunk["choices"]) for chunk in chunks] == [1, 1, 1, 1]


def test_continuous_usage_stats_put_usage_into_every_chunk() -> None:
    chunks = events(ask(FakeLLM(), stream=True, max_tokens=3,
                        stream_options={"include_usage": True, "continuous_usage_stats": True}))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 1, 2, 3, 3]
    assert chunks[-1]["choices"] == []


def test_choices_of_a_stream_are_interleaved_and_equal_the_answer_without_stream() -> None:
    fields: dict[str, Any] = {"n": 3, "seed": 7, "max_tokens": 5}
    texts = ["", "", ""]
    roles = []
    for chunk in events(ask(FakeLLM(), stream=True, **fields)):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "")
            roles.append(choice["delta"].get("role"))
    assert texts == [answer_text(7, choice, 5) for choice in range(3)]
    assert roles[0] == "assistant" and roles.count("assistant") == 3
    whole = ask(FakeLLM(), **fields).json()["choices"]
    assert [choice["message"]["content"] for choice in whole] == texts
    assert [choice["index"] for choice in whole] == [0, 1, 2]


def test_the_chunk_that_ends_a_choice_without_text_has_an_empty_delta() -> None:
    llm = FakeLLM()
    llm.script = ["a", "END"]
    chunks = events(ask(llm, stream=True, stop="END", max_tokens=5))
    assert chunks[-1]["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop",
                                        "stop_reason": "END"}


def test_every_supported_field_reaches_the_engine() -> None:
    llm = FakeLLM()
    fields = {"n": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "seed": 3,
              "max_completion_tokens": 6, "max_tokens": 9, "min_tokens": 2, "stop": ["x9"], "stop_token_ids": [5],
              "ignore_eos": True, "include_stop_str_in_output": True, "skip_special_tokens": False, "priority": -4,
              "user": "u", "store": True, "metadata": {"a": "b"}, "parallel_tool_calls": True, "service_tier": "auto"}
    response = ask(llm, **fields)
    assert response.status_code == 200 and "x-ignored-fields" not in response.headers
    params = llm.calls[0]["params"]
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p, params.seed) == (
        2, 0.5, 0.9, 40, 0.1, 3)
    assert (params.max_tokens, params.min_tokens, params.stop, params.stop_token_ids) == (6, 2, ["x9"], [5])
    assert params.ignore_eos and params.include_stop_str_in_output and not params.skip_special_tokens
    assert llm.calls[0]["priority"] == -4


def test_null_means_the_default_for_every_field() -> None:
    names = ["n", "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "max_completion_tokens", "stop",
             "stop_token_ids", "stream", "stream_options", "logprobs", "logit_bias", "tools", "response_format",
             "priority", "model"]
    assert ask(FakeLLM(), **dict.fromkeys(names)).status_code == 200


def test_without_max_tokens_the_answer_may_fill_the_context() -> None:
    llm = FakeLLM()
    assert ask(llm).json()["usage"]["total_tokens"] == llm.max_model_len
    assert llm.calls[0]["params"].max_tokens == llm.max_model_len - 5


def test_min_tokens_is_checked_against_the_filled_in_limit() -> None:
    """A null max_tokens once let any min_tokens through to the core."""
    response = ask(FakeLLM(), min_tokens=1000)
    assert response.status_code == 400 and response.json()["error"]["param"] == "min_tokens"


def test_template_options_reach_the_template() -> None:
    llm = FakeLLM()
    ask(llm, chat_template_kwargs={"enable_thinking": False})
    ask(llm, continue_final_message=True)
    ask(llm, add_generation_prompt=False)
    assert [options for _, options in llm.chats] == [
        {"add_generation_prompt": True, "continue_final_message": False,
         "chat_template_kwargs": {"enable_thinking": False}},
        {"add_generation_prompt": False, "continue_final_message": True, "chat_template_kwargs": None},
        {"add_generation_prompt": False, "continue_final_message": False, "chat_template_kwargs": None}]


def test_developer_messages_are_system_messages_and_content_is_left_as_sent() -> None:
    llm = FakeLLM()
    parts = [{"type": "text", "text": "x"}]
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts},
                {"role": "assistant", "content": None}]
    llm.render_chat = lambda sent, **_: llm.chats.append((sent, {})) or array("i", [1]).tobytes()  # type: ignore
    assert ask(llm, messages=messages, max_tokens=1).status_code == 200
    assert llm.chats[0][0] == [{"role": "system", "content": "be brief"}, *messages[1:]]


def test_a_long_chat_is_rendered_too() -> None:
    """Above 2 kB the template runs in a thread."""
    response = ask(FakeLLM(), messages=[{"role": "user", "content": "x" * 5000}])
    assert response.status_code == 400
    assert "5003 tokens" in response.json()["error"]["message"] and "64" in response.json()["error"]["message"]


@pytest.mark.parametrize("failure", [RequestFailedError("logits were NaN"), EngineDeadError("worker 0 ended")])
def test_an_error_inside_a_stream_is_an_event_and_then_done(failure: Exception) -> None:
    llm = FakeLLM()
    llm.fail_after = (2, failure)
    response = ask(llm, stream=True, max_tokens=9)
    chunks = events(response)
    assert response.status_code == 200
    assert [list(chunk) for chunk in chunks[-1:]] == [["error"]]
    assert chunks[-1]["error"]["message"] == str(failure)
    assert sum("choices" in chunk for chunk in chunks) == 3


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_aborts_its_request(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    llm = FakeLLM()
    llm.gate = asyncio.Event()
    app = build_app(llm)

    async def scenario() -> None:
        client = RawClient(app, PATH, {"messages": USER, "stream": stream})
        task = asyncio.create_task(client.run())
        while not llm.calls:
            await asyncio.sleep(0)
        client.leave()
        await asyncio.wait_for(task, 5)
        assert client.sent == []

    with caplog.at_level(logging.INFO, logger="frontend"):
        asyncio.run(scenario())
    assert llm.num_aborted == 1
    assert app.state.counters.num_client_disconnects == 1
    assert app.state.counters.num_active == 0
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "client disconnected" in caplog.text


def test_a_client_that_leaves_in_mid_stream_gets_nothing_more() -> None:
    llm = FakeLLM()
    app = build_app(llm)

    async def scenario() -> None:
        client = RawClient(app, PATH, {"messages": USER, "stream": True})
        task = asyncio.create_task(client.run())
        await client.news.wait()
        client.leave()
        await asyncio.wait_for(task, 5)
        assert b"[DONE]" not in client.body

    asyncio.run(scenario())
    assert llm.num_aborted == 1


def test_a_silent_stream_gets_comments_also_before_the_first_token() -> None:
    llm = FakeLLM()
    llm.gate = asyncio.Event()
    app = build_app(llm, limits=Limits(keep_alive_s=0.01))

    async def scenario() -> bytes:
        client = RawClient(app, PATH, {"messages": USER, "stream": True, "max_tokens": 1})
        task = asyncio.create_task(client.run())
        while client.body.count(b": keep-alive\n\n") < 2:
            client.news.clear()
            await asyncio.wait_for(client.news.wait(), 5)
        assert llm.gate is not None
        llm.gate.set()
        await asyncio.wait_for(task, 5)
        return client.body

    body = asyncio.run(scenario())
    assert body.startswith(b": keep-alive\n\n: keep-alive\n\n")
    assert body.endswith(b"data: [DONE]\n\n")


def test_a_server_that_stops_says_so_inside_the_stream() -> None:
    llm = FakeLLM()
    app = build_app(llm)

    async def scenario() -> bytes:
        client = RawClient(app, PATH, {"messages": USER, "stream": True})
        task = asyncio.create_task(client.run())
        await client.news.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return client.body

    body = asyncio.run(scenario())
    assert b'{"error":{"message":"the server is shutting down"' in body and body.endswith(b"data: [DONE]\n\n")
    assert llm.num_aborted == 1
