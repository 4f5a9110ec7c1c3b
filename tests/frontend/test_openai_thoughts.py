"""What a model thinks, in the Responses and the Messages API: apart from the answer, streamed and whole."""
from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from frontend.openai.app import build_app
from tests.frontend.fake_llm import FakeLLM, events, post
from tests.frontend.test_openai_anthropic import parse_events as message_events
from tests.frontend.test_openai_responses import parse_events as response_events
from tests.frontend.test_openai_tools import CALL, answering
from tests.frontend.test_openai_tools_elsewhere import MESSAGES, RESPONSES, SCHEMA

TEXT = f"<think>\nwhere?\n</think>\n\nThere.{CALL}"
PLAIN = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 500, "stop_sequences": ["\0"]}


def ask(path: str, body: dict[str, Any], text: str = TEXT, size: int = 3, llm: FakeLLM | None = None,
        **fields: Any) -> httpx.Response:
    return asyncio.run(post(build_app(llm or answering(text, True, size)), path, {**body, **fields}))


def respond(**fields: Any) -> httpx.Response:
    return ask("/v1/responses", RESPONSES, **fields)


def message(**fields: Any) -> httpx.Response:
    return ask("/v1/messages", MESSAGES, **fields)


@pytest.mark.parametrize("size", [1, 5, 400])
def test_a_response_has_its_thoughts_as_an_item_of_their_own(size: int) -> None:
    thoughts, said, call = respond(size=size).json()["output"]
    assert (thoughts["type"], thoughts["status"], thoughts["summary"]) == ("reasoning", "completed", [])
    assert thoughts["content"] == [{"type": "reasoning_text", "text": "where?"}]
    assert said["content"][0]["text"] == "There." and call["type"] == "function_call"

    events = response_events(respond(size=size, stream=True).text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    output = events[-1]["response"]["output"]
    assert output[0]["content"] == thoughts["content"] and output[1]["content"][0]["text"] == "There."
    of_item = [event for event in events if event.get("item_id") == output[0]["id"]]
    deltas = [event["delta"] for event in of_item if event["type"] == "response.reasoning_text.delta"]
    assert "".join(deltas) == "where?"
    assert [event["type"] for event in of_item if "delta" not in event] == [
        "response.content_part.added", "response.reasoning_text.done", "response.content_part.done"]
    assert {event["output_index"] for event in of_item} == {0} and {event["content_index"] for event in of_item} == {0}


@pytest.mark.parametrize("size", [1, 5, 400])
def test_a_message_has_its_thoughts_as_a_block_of_their_own(size: int) -> None:
    whole = message(size=size).json()["content"]
    assert whole[0] == {"type": "thinking", "thinking": "where?", "signature": ""}
    assert whole[1] == {"type": "text", "text": "There."} and whole[2]["type"] == "tool_use"

    events = message_events(message(size=size, stream=True).text)
    starts = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert starts == ["thinking", "text", "tool_use"]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta" and event["index"] == 0]
    assert {delta["type"] for delta in deltas} == {"thinking_delta"}
    assert "".join(delta["thinking"] for delta in deltas) == "where?"
    assert [event["index"] for event in events if event["type"] == "content_block_stop"] == [0, 1, 2]


def test_without_tools_too_and_thoughts_cut_by_the_length_stay_thoughts() -> None:
    whole = ask("/v1/messages", PLAIN, "<think>a</think>b").json()["content"]
    assert [block["type"] for block in whole] == ["thinking", "text"]
    events = message_events(ask("/v1/messages", PLAIN, "<think>a</think>b", stream=True).text)
    assert [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"] == [
        "thinking", "text"]
    cut = ask("/v1/messages", PLAIN, "<think>on and on", max_tokens=4).json()
    assert cut["content"] == [{"type": "thinking", "thinking": "on an", "signature": ""}]
    assert cut["stop_reason"] == "max_tokens"
    response = respond(text="<think>on and on", max_output_tokens=4).json()
    assert [(item["type"], item["status"]) for item in response["output"]] == [("reasoning", "incomplete")]


@pytest.mark.parametrize("stream", [False, True])
def test_disabled_and_omitted_thinking_is_left_out(stream: bool) -> None:
    answer = message(thinking={"type": "disabled"}, stream=stream).text
    assert "There." in answer or stream
    assert "where" not in answer and "thinking" not in answer
    assert "where" in message(thinking={"type": "adaptive"}, size=50).text
    hidden = message(thinking={"type": "adaptive", "display": "omitted"}, stream=stream).text
    assert "where" not in hidden and "thinking" not in hidden


ENABLED = {"type": "enabled", "budget_tokens": 100}


@pytest.mark.parametrize("stream", [False, True])
def test_enabled_and_disabled_turn_the_switch_of_a_template_that_has_one(stream: bool) -> None:
    llm = answering(TEXT, True, 50)
    llm.has_thinking_switch = True
    given = {"chat_template_kwargs": {"enable_thinking": False, "more": 1}}
    for fields in ({"thinking": ENABLED}, {"thinking": {"type": "disabled"}}, {"thinking": {"type": "adaptive"}}, {},
                   {"thinking": ENABLED, **given}):
        assert message(llm=llm, stream=stream, **fields).status_code == 200
        assert ask("/v1/messages/count_tokens", {**PLAIN, **fields}, llm=llm).status_code == 200
    on, off = {"enable_thinking": True}, {"enable_thinking": False}
    found = [options.get("chat_template_kwargs") for _, options in llm.chats]
    assert found == [on, on, off, off, None, None, None, None, *[given["chat_template_kwargs"]] * 2]
    assert "where" in message(llm=llm, thinking=ENABLED, stream=stream).text


def test_a_model_without_thoughts_refuses_to_be_asked_for_them_and_a_switch_is_not_invented() -> None:
    plain = answering("There.")
    refusal = message(llm=plain, thinking=ENABLED)
    assert refusal.status_code == 400 and "knows no thoughts" in refusal.json()["error"]["message"]
    assert message(llm=plain, thinking={"type": "disabled"}).status_code == 200
    assert message(llm=answering(TEXT, True), thinking=ENABLED).status_code == 200     # tags, but no switch
    assert plain.chats[0][1].get("chat_template_kwargs") is None


@pytest.mark.parametrize(("thinking", "words"), [
    ({"type": "enabled"}, "budget_tokens is None"), ({"type": "enabled", "budget_tokens": 500}, "below max_tokens 500"),
    ({"type": "enabled", "budget_tokens": 0}, "above 0"), ({"type": "enabled", "budget_tokens": True}, "above 0"),
    ({"type": "disabled", "budget_tokens": 5}, "goes with type enabled"), ({"type": "x"}, "'x'; known are adaptive"),
    ({"type": "adaptive", "effort": "high"}, "thinking.effort is not supported"), ({}, "'None'; known are"),
    ({"type": "adaptive", "display": "all"}, "thinking.display is 'all'")])
def test_what_is_wrong_with_thinking_is_named(thinking: dict[str, Any], words: str) -> None:
    refusal = ask("/v1/messages", {**PLAIN, "thinking": thinking})
    assert refusal.status_code == 400 and words in refusal.json()["error"]["message"]


def test_thoughts_that_come_back_reach_the_template() -> None:
    llm = answering("x", True)
    call = {"type": "function_call", "call_id": "c1", "name": "get", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c1", "output": "sun"}
    item = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    assert respond(llm=llm, input=[{"role": "user", "content": "hi"}, item, call, result]).status_code == 200
    blocks = [{"type": "thinking", "thinking": "hm", "signature": ""},
              {"type": "tool_use", "id": "c1", "name": "get", "input": {}}]
    turns = [*PLAIN["messages"], {"role": "assistant", "content": blocks},
             {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "sun"}]}]
    assert message(llm=llm, messages=turns).status_code == 200
    for messages, _ in llm.chats:
        assert [turn["role"] for turn in messages] == ["user", "assistant", "tool"]
        assert messages[1]["reasoning_content"] == "hm" and messages[1]["tool_calls"][0]["id"] == "c1"
    assert llm.chats[0][1]["tools"][0]["function"]["parameters"] == SCHEMA
    bad = message(messages=[*PLAIN["messages"], {"role": "assistant", "content": [{"type": "thinking"}]}])
    assert bad.status_code == 400 and bad.json()["error"]["message"].count("thinking must be text")


def test_a_response_that_is_continued_brings_its_thoughts() -> None:
    llm = answering("<think>hm</think>Yes", True)

    async def task() -> httpx.Response:
        app = build_app(llm)
        first = await post(app, "/v1/responses", RESPONSES)
        return await post(app, "/v1/responses", {**RESPONSES, "previous_response_id": first.json()["id"]})
    assert asyncio.run(task()).status_code == 200
    assert llm.chats[1][0][1] == {"role": "assistant", "content": "Yes", "reasoning_content": "hm"}


THOUGHT = "<think>\nabc\n</think>\n\nThere."       # 20 characters to the end of the closing tag


@pytest.mark.parametrize("size, tokens", [(1, 20), (5, 4), (400, 1)])
@pytest.mark.parametrize("stream", [False, True])
def test_usage_says_how_many_tokens_were_thoughts(size: int, tokens: int, stream: bool) -> None:
    """The token that completes the closing tag counts, also with what it has behind it."""
    chat = {"messages": PLAIN["messages"], "stop": "\0", "max_tokens": 500, "n": 2}
    if stream:
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    answer = ask("/v1/chat/completions", chat, THOUGHT, size)
    usage = (events(answer)[-1] if stream else answer.json())["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 2 * tokens}
    answer = respond(text=THOUGHT, size=size, stream=stream)
    response = response_events(answer.text)[-1]["response"] if stream else answer.json()
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": tokens}


@pytest.mark.parametrize("text, count", [("There.", 0), ("<think>on and on", 4), ("<think></think>x", 15)])
def test_without_thoughts_none_are_counted_and_unended_ones_count_all(text: str, count: int) -> None:
    fields = {"messages": PLAIN["messages"], "stop": "\0", "max_tokens": 4 if "on" in text else 500}
    usage = ask("/v1/chat/completions", fields, text, 4 if "on" in text else 1).json()["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == count
    plain = asyncio.run(post(build_app(answering(text, False)), "/v1/chat/completions", fields)).json()["usage"]
    assert "completion_tokens_details" not in plain


def test_a_background_response_counts_its_thoughts() -> None:
    async def task() -> dict[str, Any]:
        app = build_app(answering(THOUGHT, True, 1))
        made = (await post(app, "/v1/responses", {**RESPONSES, "background": True})).json()
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://t") as client:
            for _ in range(500):
                await asyncio.sleep(0.01)
                made = (await client.get(f"/v1/responses/{made['id']}")).json()
                if made["status"] != "in_progress":
                    break
        return made
    assert asyncio.run(task())["usage"]["output_tokens_details"] == {"reasoning_tokens": 20}
