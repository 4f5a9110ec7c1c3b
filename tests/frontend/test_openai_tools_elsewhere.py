"""Tools of the Responses and the Messages API: definitions, choices, results, calls streamed and whole."""
from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from frontend.openai.app import build_app
from tests.frontend.fake_llm import FakeLLM, post
from tests.frontend.test_openai_anthropic import parse_events as message_events
from tests.frontend.test_openai_responses import parse_events as response_events
from tests.frontend.test_openai_tools import CALL, TOOL, answering

SCHEMA = TOOL["function"]["parameters"]         # type: ignore[index]
RESPONSES: dict[str, Any] = {"input": "hi", "tools": [{"type": "function", "name": "get", "parameters": SCHEMA,
                                                        "strict": True}], "stop": ["\0"]}
MESSAGES: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 500,
                            "stop_sequences": ["\0"], "tools": [{"name": "get", "input_schema": SCHEMA}]}
TEXT = f"I look.\n{CALL}\n{CALL}"
ARGUMENTS = '{"city": "Rome"}'


def ask(llm: FakeLLM, path: str, body: dict[str, Any], **fields: Any) -> httpx.Response:
    return asyncio.run(post(build_app(llm), path, {**body, **fields}))


def respond(llm: FakeLLM, **fields: Any) -> httpx.Response:
    return ask(llm, "/v1/responses", RESPONSES, **fields)


def message(llm: FakeLLM, **fields: Any) -> httpx.Response:
    return ask(llm, "/v1/messages", MESSAGES, **fields)


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


@pytest.mark.parametrize("size", [1, 3, 50, 400])
def test_a_response_has_its_calls_as_items_streamed_and_whole(size: int) -> None:
    llm = answering(TEXT, size=size)
    body = respond(llm).json()
    said, *calls = body["output"]
    assert said["content"][0]["text"] == "I look." and body["status"] == "completed"
    assert [(call["type"], call["name"], call["arguments"], call["status"]) for call in calls] == [
        ("function_call", "get", ARGUMENTS, "completed")] * 2
    assert len({call["call_id"] for call in calls}) == 2 and body["tools"] == RESPONSES["tools"]
    assert llm.chats[0][1]["tools"] == [{"type": "function", "function": {"name": "get", "parameters": SCHEMA}}]

    events = response_events(respond(answering(TEXT, size=size), stream=True).text)
    output = events[-1]["response"]["output"]
    assert without_ids(output) == without_ids(body["output"])
    added = [event for event in events if event["type"] == "response.output_item.added"]
    done = [event for event in events if event["type"] == "response.output_item.done"]
    assert [event["item"]["id"] for event in added] == [item["id"] for item in output]
    assert [event["item"] for event in done] == output and added[1]["item"]["call_id"] == output[1]["call_id"]
    for index, item in enumerate(output):
        kind = "output_text" if item["type"] == "message" else "function_call_arguments"
        mine = [event for event in events if event.get("item_id") == item["id"]]
        assert {event["output_index"] for event in mine} == {index}
        text = "".join(event["delta"] for event in mine if event["type"] == f"response.{kind}.delta")
        assert text == (item.get("arguments") or item["content"][0]["text"])
        [end] = [event for event in mine if event["type"] == f"response.{kind}.done"]
        assert end.get("arguments", end.get("text")) == text


@pytest.mark.parametrize("size", [1, 3, 50, 400])
def test_a_message_has_its_calls_as_blocks_streamed_and_whole(size: int) -> None:
    llm = answering(TEXT, size=size)
    body = message(llm).json()
    assert body["stop_reason"] == "tool_use" and without_ids(body["content"]) == [
        {"type": "text", "text": "I look."}, *[{"type": "tool_use", "name": "get", "input": {"city": "Rome"}}] * 2]
    assert llm.chats[0][1]["tools"] == [{"type": "function", "function": {"name": "get", "parameters": SCHEMA}}]

    events = message_events(message(answering(TEXT, size=size), stream=True).text)
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"] | {"json": ""})
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            delta = event["delta"]
            blocks[-1]["json" if delta["type"] == "input_json_delta" else "text"] += delta.get(
                "partial_json", delta.get("text"))
    found = []
    for block in blocks:
        text = block.pop("json")
        found.append({**block, "input": json.loads(text)} if block["type"] == "tool_use" else block)
    assert without_ids(found) == without_ids(body["content"])
    assert [event["index"] for event in events if event["type"] == "content_block_stop"] == [0, 1, 2]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text, mine, theirs", [
    ('[{"name": "get", "parameters": {"city": "Rome"}}]', "required",
     {"type": "any", "disable_parallel_tool_use": True}),
    (ARGUMENTS, {"type": "function", "name": "get"}, {"type": "tool", "name": "get"})])
def test_a_demanded_call_is_enforced_by_a_grammar(text: str, mine: Any, theirs: Any, stream: bool) -> None:
    llm = answering(text)
    answer = respond(llm, tool_choice=mine, parallel_tool_calls=False, stream=stream)
    [item] = response_events(answer.text)[-1]["response"]["output"] if stream else answer.json()["output"]
    assert (item["name"], item["arguments"]) == ("get", ARGUMENTS)
    other = answering(text)
    answer = message(other, tool_choice=theirs, stream=stream)
    if stream:
        [start] = [event for event in message_events(answer.text) if event["type"] == "content_block_start"]
        assert start["content_block"]["name"] == "get"
    else:
        assert without_ids(answer.json()["content"]) == [{"type": "tool_use", "name": "get", "input": {"city": "Rome"}}]
    forms = [call["params"].structured_outputs.json for call in (*llm.calls, *other.calls)]
    assert forms[0] == forms[1]


def test_results_come_back_under_the_ids_of_their_calls() -> None:
    llm = answering(TEXT)
    app = build_app(llm)

    async def run() -> tuple[dict[str, Any], dict[str, Any]]:
        first = (await post(app, "/v1/responses", RESPONSES)).json()
        calls = [item for item in first["output"] if item["type"] == "function_call"]
        results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"} for call in calls]
        await post(app, "/v1/responses", {**RESPONSES, "input": [{"role": "user", "content": "hi"}, *first["output"],
                                                                 *results]})
        whole = llm.chats[-1][0]
        await post(app, "/v1/responses", {**RESPONSES, "input": results, "previous_response_id": first["id"]})
        assert llm.chats[-1][0] == whole
        said = (await post(app, "/v1/messages", MESSAGES)).json()
        uses = [block for block in said["content"] if block["type"] == "tool_use"]
        await post(app, "/v1/messages", {**MESSAGES, "messages": [
            *MESSAGES["messages"], {"role": "assistant", "content": said["content"]}, {"role": "user", "content": [
                *({"type": "tool_result", "tool_use_id": use["id"], "content": [{"type": "text", "text": "sunny"}]}
                  for use in uses), {"type": "text", "text": "And now?"}]}]})
        return {"messages": whole, "ids": [call["call_id"] for call in calls]}, {
            "messages": llm.chats[-1][0], "ids": [use["id"] for use in uses]}
    mine, theirs = asyncio.run(run())
    for found in (mine, theirs):
        asked, said, *results = found["messages"]
        assert (asked["role"], said["role"], said["content"]) == ("user", "assistant", "I look.")
        assert [call["id"] for call in said["tool_calls"]] == found["ids"]
        for call in said["tool_calls"]:
            assert call["function"]["name"] == "get" and json.loads(call["function"]["arguments"]) == {"city": "Rome"}
        assert [(result["role"], result["tool_call_id"], result["content"]) for result in results[:2]] == [
            ("tool", call_id, "sunny") for call_id in found["ids"]]
    assert theirs["messages"][-1] == {"role": "user", "content": "And now?"} and len(mine["messages"]) == 4


def test_a_call_that_the_length_cuts_is_told_as_it_is() -> None:
    text = '<tool_call>\n{"name": "get", "arguments": {"city": "Ro'
    llm = answering(text, size=1)
    body = respond(llm, max_output_tokens=len(text)).json()
    [item] = body["output"]
    assert (item["status"], item["arguments"], body["status"]) == ("incomplete", '{"city": "Ro', "incomplete")
    said = message(answering(text, size=1), max_tokens=len(text)).json()
    assert said["stop_reason"] == "max_tokens" and said["content"][0]["input"] == {"INVALID_JSON": '{"city": "Ro'}


def test_tools_count_as_tokens_of_the_prompt_and_none_hides_them() -> None:
    llm = FakeLLM()
    body = {name: MESSAGES[name] for name in ("messages", "tools")}
    assert ask(llm, "/v1/messages/count_tokens", body).status_code == 200 and llm.chats[-1][1]["tools"]
    message(llm, tool_choice={"type": "none"})
    respond(llm, tool_choice="none")
    assert all("tools" not in options for _, options in llm.chats[1:])
