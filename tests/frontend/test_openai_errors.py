"""Refusals: every one an OpenAI error body that names the field, the limit or the fix."""
from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import httpx
import pytest

from frontend.openai.app import build_app
from frontend.openai.errors import STATUS_AND_TYPE
from frontend.openai.limits import Limits, check_json_depth
from frontend.openai.protocol import NEUTRAL_VALUES, ChatRequest, CompletionRequest
from ipc.errors import EngineDeadError, OverloadedError, RequestError, RequestFailedError
from tests.frontend.fake_llm import MODEL, FakeLLM, get, post

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def chat(body: Any, llm: FakeLLM | None = None, limits: Limits | None = None, **headers: str) -> httpx.Response:
    if isinstance(body, dict):
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, **body}
    return asyncio.run(post(build_app(llm or FakeLLM(), limits=limits), CHAT, body, **headers))


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status
    assert response.headers["x-request-id"] and response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert list(error) == ["message", "type", "param", "code"] and error["code"] == status
    return dict(error)


@pytest.mark.parametrize("fields, param", [
    ({"temperature": "hot"}, "temperature"), ({"temperature": -0.1}, "temperature"), ({"n": 0}, "n"),
    ({"n": 1.5}, "n"), ({"n": True}, "n"), ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"), ({"max_completion_tokens": "2"}, "max_completion_tokens"),
    ({"top_p": 1.1}, "top_p"), ({"top_p": 0}, "top_p"), ({"top_k": -2}, "top_k"), ({"min_p": 2}, "min_p"),
    ({"seed": 2**64}, "seed"), ({"seed": 10**40}, "seed"), ({"stop": [1]}, "stop[0]"), ({"stop": ""}, "stop"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"), ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [260]}, "stop_token_ids"), ({"stop_token_ids": [5 * 10**18]}, "stop_token_ids"),
    ({"min_tokens": 3}, "min_tokens"), ({"stream": "yes"}, "stream"), ({"priority": 2**31}, "priority"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"messages": []}, "messages"), ({"messages": "hi"}, "messages"), ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"role": "bot", "content": "x"}]}, "messages[0].role"), ({"messages": [{}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": "x", "audio": {}}]}, "messages[0].audio"),
    ({"chat_template_kwargs": 3}, "chat_template_kwargs"), ({"request_id": "x" * 129}, "request_id"),
])
def test_a_bad_value_is_refused_with_its_field(fields: dict[str, Any], param: str) -> None:
    error = error_of(chat(fields), 400)
    assert error["param"] == param and error["type"] == "BadRequestError"
    assert param.split("[")[0].split(".")[-1] in error["message"]


def test_a_missing_field_is_named() -> None:
    assert error_of(chat(b"{}"), 400)["param"] == "messages"
    assert error_of(asyncio.run(post(build_app(FakeLLM()), COMPLETIONS, {})), 400)["param"] == "prompt"


@pytest.mark.parametrize("fields", [
    {"top_logprobs": 5},
    {"echo": True}, {"suffix": "x"}, {"best_of": 2}, {"use_beam_search": True},
    {"chat_template": "{{ x }}"}, {"thinking_token_budget": 5}])
def test_a_documented_field_that_is_not_supported_is_refused_by_name(fields: dict[str, Any]) -> None:
    name = next(iter(fields))
    error = error_of(chat(fields), 400)
    assert error["param"] == name and error["message"].startswith(f"{name} is ")


def test_neutral_values_of_every_unsupported_field_are_accepted_silently() -> None:
    for name, values in NEUTRAL_VALUES.items():
        if name in ChatRequest.__struct_fields__:
            continue
        for value in (None, *values):
            response = chat({name: value})
            assert response.status_code == 200, (name, value, response.text)
            assert "x-ignored-fields" not in response.headers


def test_completion_only_names_are_known_to_both_routes() -> None:
    """A name is a struct field of a route or in the table; else it would count as nobody's field there."""
    names = set(ChatRequest.__struct_fields__) ^ set(CompletionRequest.__struct_fields__)
    assert names - NEUTRAL_VALUES.keys() == {"messages", "prompt"}


def test_undocumented_fields_are_ignored_and_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="frontend"):
        response = chat({"temprature": 0.1, "x,y\n": 1})
        chat({"temprature": 0.2})
    assert response.status_code == 200
    assert response.headers["x-ignored-fields"] == "temprature,x?y?"
    assert caplog.text.count("unknown field temprature is ignored; did you mean temperature?") == 1


def test_a_field_of_another_endpoint_is_not_taken_for_a_typing_error(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="frontend"):
        asyncio.run(post(build_app(FakeLLM()), "/detokenize", {"tokens": [1], "chat_template_kwargs": {}, "tokns": 1}))
    assert "chat_template_kwargs is ignored\n" in caplog.text and "did you mean tokens?" in caplog.text


@pytest.mark.parametrize("body", [b"", b"{", b'{"messages": [}', b"[1]", b'"x"', b'{"model": "\xff"}', b"NaN",
                                  b'{"messages":[{"role":"user","content":"\xff"}]}', b'{"temperature": NaN}'])
def test_broken_json_is_a_400(body: bytes) -> None:
    error_of(chat(body), 400)


def test_deep_json_is_refused_before_it_is_decoded() -> None:
    deep = b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    assert "at most 64" in error_of(chat(deep), 400)["message"]
    nested = b'{"a":' + b"[" * 63 + b"]" * 63 + b"}"
    check_json_depth(nested, 64)
    with pytest.raises(RequestError, match="65 levels"):
        check_json_depth(b"[" + nested + b"]", 64)


def test_brackets_inside_strings_do_not_count_as_depth() -> None:
    for text in ("[" * 500, '"' + "[" * 500, "\\" + "[" * 500, '\\"' + "[" * 500, "\\\\" + "{" * 500):
        check_json_depth(json.dumps({"a": [text, {"b": text}]}).encode(), 64)


@pytest.mark.parametrize("piece", [b"[],", b'"",', b'"\\"[",'])
def test_large_bodies_of_brackets_quotes_or_escapes_pass_the_depth_check(piece: bytes) -> None:
    """Eight megabytes of the shapes that a character loop or a backtracking expression would take minutes for."""
    check_json_depth(b"[" + piece * ((8 << 20) // len(piece)) + b"0]", 64)


def test_a_large_body_is_refused_by_its_announced_and_by_its_real_size() -> None:
    limits = Limits(max_body_bytes=1000)
    assert "1000" in error_of(chat(b"x" * 1001, limits=limits), 413)["message"]

    async def chunks() -> Any:
        for _ in range(5):
            yield b"x" * 300

    async def scenario() -> httpx.Response:
        transport = httpx.ASGITransport(build_app(FakeLLM(), limits=limits))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post(CHAT, content=chunks())

    response = asyncio.run(scenario())
    error_of(response, 413)
    assert response.headers["connection"] == "close"


def test_other_media_types_are_refused() -> None:
    error_of(chat({}, content_type="text/plain"), 415)
    assert chat({}, content_type="application/json; charset=utf-8").status_code == 200


def test_request_ids_are_echoed_capped_or_made() -> None:
    assert chat({}, x_request_id="10.0.0.1:80").headers["x-request-id"] == "10.0.0.1:80"
    assert chat({"request_id": "from the body"}).headers["x-request-id"] == "from the body"
    assert len(chat({}).headers["x-request-id"]) == 32
    error = error_of(chat({}, x_request_id="x" * 129), 400)
    assert error["param"] == "x-request-id" and "128" in error["message"]
    error_of(chat({}, x_request_id=""), 400)


def test_unknown_models_routes_and_methods_are_error_objects() -> None:
    error = error_of(chat({"model": "gpt-9"}), 404)
    assert error["param"] == "model" and MODEL in error["message"] and error["type"] == "NotFoundError"
    app = build_app(FakeLLM())
    error_of(asyncio.run(get(app, "/v1/nothing")), 404)
    error_of(asyncio.run(get(app, "/v1/models/other")), 404)
    error_of(asyncio.run(get(app, CHAT + "/")), 404)
    response = asyncio.run(get(app, CHAT))
    assert error_of(response, 405)["type"] == "MethodNotAllowedError"
    assert response.headers["allow"] == "POST, OPTIONS"


@pytest.mark.parametrize("failure, status, kind", [
    (RequestError("too long: 70 of 63", "prompt"), 400, "BadRequestError"),
    (OverloadedError("queue is full", 2.2), 429, "RateLimitError"),
    (RequestFailedError("logits were NaN"), 500, "InternalServerError"),
    (EngineDeadError("worker 0: out of memory"), 503, "ServiceUnavailableError")])
@pytest.mark.parametrize("stream", [False, True])
def test_failures_of_the_engine_have_their_status_and_text(failure: Exception, status: int, kind: str,
                                                           stream: bool) -> None:
    llm = FakeLLM()
    llm.error = failure
    response = chat({"stream": stream}, llm)
    error = error_of(response, status)
    assert (error["type"], error["message"]) == (kind, str(failure))
    assert response.headers.get("retry-after") == ("3" if status == 429 else None)


def test_a_bug_of_ours_is_a_500_without_internals(caplog: pytest.LogCaptureFixture) -> None:
    llm = FakeLLM()
    llm.error = KeyError("/secret/path")
    error = error_of(chat({}, llm, x_request_id="find-me"), 500)
    assert "secret" not in error["message"]
    assert "find-me" in caplog.text and "/secret/path" in caplog.text


def test_every_error_class_has_one_row_in_the_table() -> None:
    assert len({status for status, _ in STATUS_AND_TYPE.values()}) == 10
    assert all(400 <= status < 600 and kind.endswith("Error") for status, kind in STATUS_AND_TYPE.values())


def test_routes_tell_starting_serving_and_dead_apart() -> None:
    llm = FakeLLM()
    app = build_app(llm)

    def codes() -> tuple[int, int, int]:
        health, ready = (asyncio.run(get(app, path)) for path in ("/health", "/ready"))
        return health.status_code, ready.status_code, chat({}, llm).status_code

    llm.state = {"ready": False, "dead": False, "phase": "loading weights", "reason": ""}
    assert codes() == (503, 503, 503)           # scripts wait for /health, then send requests
    assert asyncio.run(get(app, "/ready")).json()["phase"] == "loading weights"
    assert "loading weights" in error_of(chat({}, llm), 503)["message"]
    llm.state = {"ready": False, "dead": False, "restarting": True, "reason": "worker 0 was killed"}
    assert codes() == (200, 503, 200)           # what is sent meanwhile waits
    llm.state = {"ready": True, "dead": False}
    assert codes() == (200, 200, 200)
    llm.state = {"ready": False, "dead": True, "reason": "worker 0 was killed"}
    assert codes() == (503, 503, 503)
    assert "worker 0 was killed" in error_of(chat({}, llm), 503)["message"]


def test_the_model_card_has_no_length_before_there_is_one() -> None:
    llm = FakeLLM()
    llm.max_model_len = 0
    assert asyncio.run(get(build_app(llm), "/v1/models")).json()["data"][0]["max_model_len"] is None


def test_counters_count_refusals() -> None:
    llm = FakeLLM()
    app = build_app(llm)
    asyncio.run(post(app, CHAT, b"{"))
    llm.error = EngineDeadError("gone")
    asyncio.run(post(app, CHAT, {"messages": [{"role": "user", "content": "x"}]}))
    counters = app.state.counters
    assert (counters.num_requests, counters.num_client_errors, counters.num_server_errors, counters.num_active) == (
        2, 1, 1, 0)
