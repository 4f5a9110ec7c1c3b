"""Forms of the output, tools and reasoning over HTTP, streamed and whole, with an engine that says what it is told."""
from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from frontend.openai.app import build_app
from tests.frontend.fake_llm import FakeLLM, events, post

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "get", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CALL = '<tool_call>\n{"name": "get", "arguments": {"city": "Rome"}}\n</tool_call>'


def ask(llm: FakeLLM, path: str = CHAT, **fields: Any) -> httpx.Response:
    body = {"messages": MESSAGES, **fields} if path == CHAT else {"prompt": "x", **fields}
    return asyncio.run(post(build_app(llm), path, body))


def answering(text: str, has_reasoning: bool = False, size: int = 3) -> FakeLLM:
    """The text in tokens of `size` characters, ended by a stop string that nobody sees."""
    llm = FakeLLM()
    llm.max_model_len = 4096
    llm.has_reasoning = has_reasoning
    llm.script = [text[i:i + size] for i in range(0, len(text), size)] + ["\0"]
    return llm


def message_of(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """What a client puts together from a stream."""
    found: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for chunk in chunks:
        delta = chunk["choices"][0]["delta"]
        found["content"] += delta.get("content") or ""
        found["reasoning_content"] += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls", []):
            if call["index"] == len(found["tool_calls"]):
                assert call["id"] and call["type"] == "function"
                found["tool_calls"].append({"name": call["function"]["name"], "arguments": ""})
            found["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    return found


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("fields, kind, value", [
    ({"response_format": {"type": "json_object"}}, "json_object", True),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, "json", SCHEMA),
    ({"structured_outputs": {"json": SCHEMA}}, "json", SCHEMA),
    ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
    ({"guided_json": json.dumps(SCHEMA)}, "json", SCHEMA), ({"guided_regex": "a+"}, "regex", "a+"),
    ({"guided_choice": ["a", "b"]}, "choice", ["a", "b"]), ({"guided_grammar": 'start: "a"'}, "grammar", 'start: "a"')])
def test_every_way_to_ask_for_a_form_reaches_the_engine(path, fields, kind, value):
    llm = FakeLLM()
    assert ask(llm, path, **fields).status_code == 200
    spec = llm.calls[0]["params"].structured_outputs
    found = getattr(spec, kind)
    assert spec.kind == kind and (json.loads(found) if kind == "json" else found) == value


@pytest.mark.parametrize("fields, param", [
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": 3}, "response_format"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
    ({"structured_outputs": {"wish": "a"}}, "structured_outputs"), ({"guided_choice": []}, "guided_choice"),
    ({"guided_regex": "a", "guided_json": {}}, "guided_regex"), ({"guided_regex": "(" * 100}, "guided_regex"),
    ({"tools": [TOOL], "tool_choice": "required", "guided_regex": "a"}, "tool_choice"),
    ({"tools": [{"type": "function"}]}, "tools[0].function.name"), ({"tool_choice": "required"}, "tool_choice")])
def test_a_bad_form_or_tool_is_a_400_that_names_its_field(fields, param):
    response = ask(FakeLLM(), **fields)
    assert response.status_code == 400 and response.json()["error"]["param"] == param


def test_text_as_a_form_asks_for_nothing():
    llm = FakeLLM()
    assert ask(llm, response_format={"type": "text"}).status_code == 200
    assert llm.calls[0]["params"].structured_outputs is None


@pytest.mark.parametrize("size", [1, 3, 50, 400])
def test_calls_are_the_same_streamed_and_whole(size):
    text = f"I look.\n{CALL}\n{CALL}"
    fields: dict[str, Any] = dict(tools=[TOOL], stop=["\0"])
    llm = answering(text, size=size)
    choice = ask(llm, **fields).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "I look."
    calls = [call["function"] for call in choice["message"]["tool_calls"]]
    assert calls == [{"name": "get", "arguments": '{"city": "Rome"}'}] * 2
    assert len({call["id"] for call in choice["message"]["tool_calls"]}) == 2
    assert llm.chats[0][1]["tools"] == [TOOL]
    chunks = events(ask(answering(text, size=size), stream=True, **fields))
    assert message_of(chunks) == {"content": "I look.", "reasoning_content": "", "tool_calls": calls}
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert sum(chunk["choices"][0]["finish_reason"] is not None for chunk in chunks) == 1


def test_a_message_with_calls_only_has_null_content():
    message = ask(answering(CALL), tools=[TOOL], stop=["\0"]).json()["choices"][0]["message"]
    assert message["content"] is None and message["refusal"] is None and len(message["tool_calls"]) == 1


def test_without_tools_the_text_stays_as_it_is():
    for fields in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        llm = answering(CALL)
        choice = ask(llm, stop=["\0"], **fields).json()["choices"][0]
        assert choice["message"] == {"role": "assistant", "content": CALL, "refusal": None}
        assert choice["finish_reason"] == "stop" and "tools" not in llm.chats[0][1]


@pytest.mark.parametrize("choice, text", [
    ("required", '[{"name": "get", "parameters": {"city": "Rome"}}]'),
    ({"type": "function", "function": {"name": "get"}}, '{"city": "Rome"}')])
def test_a_choice_that_demands_a_call_is_enforced_by_a_grammar(choice, text):
    fields: dict[str, Any] = dict(tools=[TOOL], tool_choice=choice, stop=["\0"])
    llm = answering(text)
    message = ask(llm, **fields).json()["choices"][0]["message"]
    assert [call["function"] for call in message["tool_calls"]] == [{"name": "get", "arguments": '{"city": "Rome"}'}]
    assert llm.calls[0]["params"].structured_outputs.kind == "json"
    streamed = message_of(events(ask(answering(text), stream=True, **fields)))
    assert streamed["tool_calls"] == [{"name": "get", "arguments": '{"city": "Rome"}'}] and streamed["content"] == ""


def test_a_marker_that_is_a_special_token_is_shown_to_the_scanner():
    from frontend.tools.formats import get_format
    llm = answering('[TOOL_CALLS]get{"city": "Rome"}')
    llm.tool_format = get_format("mistral")
    message = ask(llm, tools=[TOOL], stop=["\0"]).json()["choices"][0]["message"]
    assert message["tool_calls"][0]["function"]["name"] == "get" and len(message["tool_calls"][0]["id"]) == 9
    assert not llm.calls[0]["params"].skip_special_tokens


@pytest.mark.parametrize("size", [1, 5, 400])
def test_thoughts_are_split_from_the_answer(size):
    text = f"<think>\nwhere?\n</think>\n\nThere.{CALL}"
    fields: dict[str, Any] = dict(tools=[TOOL], stop=["\0"])
    message = ask(answering(text, True, size), **fields).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("where?", "There.")
    assert len(message["tool_calls"]) == 1
    streamed = message_of(events(ask(answering(text, True, size), stream=True, **fields)))
    assert (streamed["reasoning_content"], streamed["content"]) == ("where?", "There.")
    hidden = ask(answering(text, True, size), include_reasoning=False, **fields).json()["choices"][0]["message"]
    assert "reasoning_content" not in hidden and hidden["content"] == "There."


def test_a_prompt_that_opens_the_thoughts_begins_with_them():
    llm = answering("so it is</think>Yes", True)
    messages = [{"role": "user", "content": "hi<think>"}]
    llm.render_chat = lambda *_, **__: llm.tokenizer.encode("hi <think>\n", False)      # type: ignore[method-assign]
    message = ask(llm, messages=messages, stop=["\0"]).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("so it is", "Yes")


def test_every_choice_has_its_own_parts():
    llm = answering(CALL)
    choices = ask(llm, tools=[TOOL], n=3, stop=["\0"]).json()["choices"]
    assert [len(choice["message"]["tool_calls"]) for choice in choices] == [1, 1, 1]


def test_a_form_leaves_no_room_for_thoughts():
    answer = ask(answering("<think>x</think>", True), guided_regex=".*", stop=["\0"])
    message = answer.json()["choices"][0]["message"]
    assert message["content"] == "<think>x</think>" and "reasoning_content" not in message
