"""The Messages API: shapes, events, errors, and token counts."""
from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from frontend.openai.anthropic import NEUTRAL, MessagesRequest
from frontend.openai.app import build_app
from ipc.errors import EngineDeadError, OverloadedError
from ipc.structured_outputs import StructuredOutputs
from tests.frontend.fake_llm import MODEL, FakeLLM, answer_text, post

PATH = "/v1/messages"
USER: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]


def create(llm: FakeLLM | None = None, path: str = PATH, **fields: Any) -> httpx.Response:
    body = {"messages": USER, **({"max_tokens": 3, "seed": 1} if path == PATH else {}), **fields}
    return asyncio.run(post(build_app(llm or FakeLLM()), path, body))


def parse_events(text: str) -> list[dict[str, Any]]:
    found = []
    for block in text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def test_a_message_has_anthropics_shape() -> None:
    response = create(system="Be brief.")
    body = response.json()
    assert body.pop("id").startswith("msg_")
    assert body == {"type": "message", "role": "assistant", "model": MODEL, "stop_reason": "max_tokens",
                    "stop_sequence": None, "content": [{"type": "text", "text": answer_text(1, 0, 3)}],
                    "usage": {"input_tokens": 13, "output_tokens": 3, "cache_read_input_tokens": 4,
                              "cache_creation_input_tokens": 0}}
    assert response.headers["request-id"] == response.headers["x-request-id"]


def test_a_stream_has_the_events_in_order() -> None:
    found = parse_events(create(stream=True).text)
    assert [event["type"] for event in found] == [
        "message_start", "content_block_start", "ping", *["content_block_delta"] * 3, "content_block_stop",
        "message_delta", "message_stop"]
    assert found[0]["message"]["content"] == [] and found[0]["message"]["usage"]["input_tokens"] == 4
    assert "".join(event["delta"]["text"] for event in found[3:6]) == answer_text(1, 0, 3)
    assert found[-2] == {"type": "message_delta", "delta": {"stop_reason": "max_tokens", "stop_sequence": None},
                         "usage": {"output_tokens": 3}}


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_sequence_is_named(stream: bool) -> None:
    stop = answer_text(1, 0, 3)[1:]
    response = create(stop_sequences=[stop], max_tokens=9, stream=stream)
    end = parse_events(response.text)[-2]["delta"] if stream else response.json()
    assert (end["stop_reason"], end["stop_sequence"]) == ("stop_sequence", stop)


def test_blocks_are_joined_neighbours_merged_and_a_last_answer_continued() -> None:
    llm = FakeLLM()
    blocks = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}]
    assert create(llm, system=blocks, messages=[*USER, {"role": "user", "content": blocks},
                                                {"role": "assistant", "content": "So"}]).status_code == 200
    messages, options = llm.chats[-1]
    assert messages == [{"role": "system", "content": "a\nb"}, {"role": "user", "content": "hi\na\nb"},
                        {"role": "assistant", "content": "So"}]
    assert options["continue_final_message"] and not options["add_generation_prompt"]


FORM = {"type": "json_schema", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}


@pytest.mark.parametrize("fields", [{"output_config": {"format": FORM}}, {"output_format": FORM}])
def test_a_schema_of_the_answer_reaches_the_engine(fields: dict[str, Any]) -> None:
    llm = FakeLLM()
    assert create(llm, **fields).status_code == 200
    assert llm.calls[-1]["params"].structured_outputs == StructuredOutputs(json=FORM["schema"])  # type: ignore[arg-type]


def test_an_effort_reaches_a_template_that_has_levels() -> None:
    llm = FakeLLM()
    llm.has_levels = True
    assert create(llm, output_config={"effort": "high"}).status_code == 200
    assert llm.chats[-1][1]["reasoning_effort"] == "high"
    body = {"messages": USER, "output_config": {"effort": "high"}}
    refused = asyncio.run(post(build_app(FakeLLM()), "/v1/messages/count_tokens", body))
    assert refused.status_code == 400 and "output_config.effort: the template" in refused.json()["error"]["message"]


@pytest.mark.parametrize("fields, name", [
    ({"messages": []}, "messages"), ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
    ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": None}, "max_tokens"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"tools": [{"name": "f g"}]}, "tools[0].name"),
    ({"tools": [{"type": "bash_20250124", "name": "b"}]}, "tools[0].type"),
    ({"tools": [{"name": "f", "input_schema": 3}]}, "tools[0].input_schema"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"), ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
    ({"messages": [*USER, {"role": "assistant", "content": [
        {"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]}, "tool_result"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]},
     "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
     "messages[0].content[0].tool_use_id"), ({"thinking": {"type": "enabled"}}, "thinking"), ({"top_p": 2}, "top_p"),
    ({"output_config": {"effort": "high"}}, "output_config.effort: the template has no levels"),
    ({"output_config": {"effort": 3}}, "output_config.effort must be text"),
    ({"output_config": {"task_budget": {}}}, "output_config.task_budget is not supported"),
    ({"output_config": {"format": {"type": "text"}}}, 'output_config.format must be {"type": "json_schema"'),
    ({"output_format": {"type": "json_schema"}}, "output_format must be"),
    ({"output_config": {"format": FORM}, "output_format": FORM}, "give one of them"),
    ({"output_config": {"format": FORM}, "tools": [{"name": "f", "input_schema": {"type": "object"}}],
      "tool_choice": {"type": "any"}}, "tool_choice")])
def test_what_is_not_supported_is_refused_by_name(fields: dict[str, Any], name: str) -> None:
    response = create(**fields)
    body = response.json()
    assert response.status_code == 400 and body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error" and name in body["error"]["message"]


def test_neutral_values_are_accepted() -> None:
    for name, values in NEUTRAL.items():
        assert name not in MessagesRequest.__struct_fields__
        for value in (None, *values):
            response = create(**{name: value})
            assert response.status_code == 200 and "x-ignored-fields" not in response.headers, (name, value)


def test_errors_are_in_anthropics_words() -> None:
    llm = FakeLLM()
    for failure, status, kind in ((OverloadedError("full", 2), 429, "rate_limit_error"),
                                  (EngineDeadError("gone"), 503, "overloaded_error"), (KeyError(), 500, "api_error")):
        llm.error = failure
        response = create(llm)
        assert (response.status_code, response.json()["error"]["type"]) == (status, kind)
    assert create(model="other").json()["error"]["type"] == "not_found_error"
    llm = FakeLLM()
    llm.fail_after = (1, EngineDeadError("gone"))
    last = parse_events(create(llm, stream=True).text)[-1]
    assert last == {"type": "error", "error": {"type": "overloaded_error", "message": "gone"}}


def test_tokens_are_counted_as_the_call_would() -> None:
    fields: dict[str, Any] = {"system": "Be brief.", "messages": USER}
    usage = create(**fields).json()["usage"]
    counted = create(path=PATH + "/count_tokens", **fields).json()
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
