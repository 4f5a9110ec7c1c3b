"""The Responses API: shapes, events, the store, and the openai client."""
from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from frontend.openai.app import build_app
from frontend.openai.errors import ResponseNotFoundError
from frontend.openai.response_store import ResponseStore, StoredResponse
from frontend.openai.responses_protocol import NEUTRAL, ResponseBody, ResponsesRequest
from ipc.config import FrontendSection
from ipc.errors import EngineDeadError, OverloadedError
from tests.frontend.fake_llm import MODEL, FakeLLM, RawClient, answer_text, post

PATH = "/v1/responses"


def create(llm: FakeLLM | None = None, **fields: Any) -> httpx.Response:
    body = {"input": "hi", "max_output_tokens": 3, "seed": 1, **fields}
    return asyncio.run(post(build_app(llm or FakeLLM()), PATH, body))


def parse_events(text: str) -> list[dict[str, Any]]:
    found = []
    for block in text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def test_a_response_has_openais_shape() -> None:
    llm = FakeLLM()
    response = create(llm, instructions="Be brief.", metadata={"a": "b"})
    body = response.json()
    assert body["id"].startswith("resp_") and body["object"] == "response" and body["model"] == MODEL
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    [item] = body["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "incomplete")
    assert item["content"] == [{"type": "output_text", "text": answer_text(1, 0, 3), "annotations": [], "logprobs": []}]
    assert body["usage"]["output_tokens"] == 3 and body["metadata"] == {"a": "b"}
    assert llm.chats[-1][0] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]


def test_the_form_of_the_output_is_asked_for_under_text() -> None:
    llm = FakeLLM()
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    text = {"format": {"type": "json_schema", "name": "thing", "strict": True, "schema": schema}}
    assert create(llm, text=text).json()["text"] == text
    assert json.loads(llm.calls[-1]["params"].structured_outputs.json) == schema
    create(llm, text={"format": {"type": "json_object"}})
    assert llm.calls[-1]["params"].structured_outputs.json_object
    create(llm, text={"format": {"type": "text"}, "verbosity": "medium"})
    assert llm.calls[-1]["params"].structured_outputs is None


def test_a_stream_has_the_events_in_order_and_the_same_text() -> None:
    found = parse_events(create(stream=True, stop="never").text)
    kinds = [event["type"].removeprefix("response.") for event in found]
    assert kinds == ["created", "in_progress", "output_item.added", "content_part.added", *["output_text.delta"] * 3,
                     "output_text.done", "content_part.done", "output_item.done", "incomplete"]
    text = answer_text(1, 0, 3)
    assert "".join(event["delta"] for event in found if "delta" in event) == text
    assert found[-4]["text"] == text and found[-1]["response"]["output"][0]["content"][0]["text"] == text
    assert found[0]["response"]["status"] == "in_progress" and found[0]["response"]["output"] == []
    assert {event["item_id"] for event in found if "item_id" in event} == {found[-1]["response"]["output"][0]["id"]}


def test_a_stream_that_fails_ends_with_response_failed() -> None:
    llm = FakeLLM()
    llm.fail_after = (2, EngineDeadError("worker 0 was killed"))
    last = parse_events(create(llm, stream=True, max_output_tokens=9).text)[-1]
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "worker 0 was killed"}
    llm.error = OverloadedError("queue is full", 2.0)
    refused = create(llm, stream=True)
    assert refused.status_code == 429 and refused.headers["retry-after"] == "2"


def test_input_items_become_messages() -> None:
    llm = FakeLLM()
    items = [{"role": "developer", "content": "d"}, {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
             {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
             {"role": "user", "content": "c"}]
    assert create(llm, input=items).status_code == 200
    assert [(message["role"], message["content"]) for message in llm.chats[-1][0]] == [
        ("system", "d"), ("user", "a"), ("assistant", "b"), ("user", "c")]


@pytest.mark.parametrize("fields, param", [
    ({"input": []}, "input"), ({"input": 3}, "input"), ({"input": [{"type": "item_reference"}]}, "input[0].type"),
    ({"input": [{"role": "king", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    ({"max_output_tokens": 0}, "max_output_tokens"), ({"temperature": -1}, "temperature"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"), ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tool_choice": "required"}, "tool_choice"), ({"input": [{"type": "function_call"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call_output", "call_id": "a", "output": 3}]}, "input[0].output"),
    ({"tools": [{"type": "function", "name": "f"}], "tool_choice":
        {"type": "function", "name": "g"}}, "tool_choice"),
    ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"text": {"format": {"type": "poem"}}}, "text.format"), ({"text": {"format": 3}}, "text.format"),
    ({"truncation": "middle"}, "truncation"), ({"max_tool_calls": 0}, "max_tool_calls"),
    ({"include": ["message.output_text.colour"]}, "include"), ({"top_logprobs": 21}, "top_logprobs"),
    ({"include": ["message.output_text.logprobs"], "tools": [{"type": "function", "name": "f"}]}, "include"),
    ({"background": True, "stream": True}, "background"), ({"background": True, "store": False}, "store"),
    ({"priority": 2**40}, "priority"), ({"cache_salt": ""}, "cache_salt")])
def test_what_is_not_supported_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    response = create(**fields)
    assert response.status_code == 400 and response.json()["error"]["param"] == param


def test_neutral_values_are_accepted() -> None:
    for name, values in NEUTRAL.items():
        assert name not in ResponsesRequest.__struct_fields__
        for value in (None, *values):
            response = create(**{name: value})
            assert response.status_code == 200 and "x-ignored-fields" not in response.headers, (name, value)


def test_a_conversation_goes_on_by_id_without_the_old_instructions() -> None:
    llm = FakeLLM()
    app = build_app(llm)

    async def run() -> dict[str, Any]:
        body = {"input": "one", "instructions": "old", "seed": 1, "max_output_tokens": 2}
        first: dict[str, Any] = (await post(app, PATH, body)).json()
        second = await post(app, PATH, {"input": "two", "previous_response_id": first["id"]})
        assert second.json()["previous_response_id"] == first["id"]
        return first
    asyncio.run(run())
    assert [message["content"] for message in llm.chats[-1][0]] == ["one", answer_text(1, 0, 2), "two"]
    missing = create(previous_response_id="resp_none")
    assert missing.status_code == 404 and missing.json()["error"]["param"] == "previous_response_id"


def test_responses_are_read_and_deleted_by_their_caller_only() -> None:
    app = build_app(FakeLLM(), section=FrontendSection(api_keys=("alice-key-1", "bob-key-22")))

    async def run() -> None:
        options: Any = {"transport": httpx.ASGITransport(app), "base_url": "http://t"}
        async with httpx.AsyncClient(**options, headers={"x-api-key": "alice-key-1"}) as one:
            async with httpx.AsyncClient(**options, headers={"x-api-key": "bob-key-22"}) as other:
                made = (await one.post(PATH, json={"input": "x", "max_output_tokens": 1})).json()
                url = f"{PATH}/{made['id']}"
                assert (await one.get(url)).json() == made
                for answer in (await other.get(url), await other.delete(url), await other.post(url + "/cancel"),
                               await other.post(PATH, json={"input": "x", "previous_response_id": made["id"]})):
                    assert answer.status_code == 404
                assert (await one.get(url + "?stream=true")).status_code == 400
                assert (await one.post(url + "/cancel")).status_code == 400
                assert (await one.delete(url)).json() == {"id": made["id"], "object": "response", "deleted": True}
                assert (await one.get(url)).status_code == 404
                unstored = (await one.post(PATH, json={"input": "x", "store": False})).json()
                assert (await one.get(f"{PATH}/{unstored['id']}")).status_code == 404
    asyncio.run(run())


def test_background_responses_run_without_a_client_and_can_be_cancelled() -> None:
    llm = FakeLLM()
    llm.gate = asyncio.Event()
    app = build_app(llm)

    async def run() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://t") as client:
            body = {"input": "x", "background": True, "max_output_tokens": 4, "seed": 1}
            first, second, third = [(await client.post(PATH, json=body)).json() for _ in range(3)]
            assert first["status"] == "in_progress" and first["output"] == []
            await asyncio.sleep(0.01)
            for _ in range(2):                  # the second time there is nothing left to do
                cancelled = (await client.post(f"{PATH}/{second['id']}/cancel")).json()
                assert cancelled["status"] == "cancelled"
            assert (await client.delete(f"{PATH}/{third['id']}")).status_code == 200
            assert llm.gate is not None
            llm.gate.set()
            for _ in range(200):
                done = (await client.get(f"{PATH}/{first['id']}")).json()
                if done["status"] != "in_progress":
                    break
                await asyncio.sleep(0.005)
            assert done["status"] == "incomplete" and done["output"][0]["content"][0]["text"] == answer_text(1, 0, 4)
            assert (await client.post(f"{PATH}/{second['id']}/cancel")).json()["status"] == "cancelled"
            assert llm.num_aborted == 2
            llm.error = EngineDeadError("gone")
            failed = (await client.post(PATH, json=body)).json()
            await asyncio.sleep(0.01)
            assert (await client.get(f"{PATH}/{failed['id']}")).json()["error"]["message"] == "gone"
    asyncio.run(run())


def test_a_client_that_leaves_a_stream_aborts_it() -> None:
    llm = FakeLLM()
    llm.gate = asyncio.Event()

    async def run() -> None:
        client = RawClient(build_app(llm), PATH, {"input": "x", "stream": True})
        task = asyncio.create_task(client.run())
        await asyncio.sleep(0.02)
        client.leave()
        await task
    asyncio.run(run())
    assert llm.num_aborted == 1


def entry(name: str, size: int = 10) -> StoredResponse:
    return StoredResponse(ResponseBody(id=name, created_at=0, model="m", status="completed"), b"x" * size)


def test_the_store_forgets_the_oldest_finished_ones_by_number_and_bytes() -> None:
    store = ResponseStore(max_entries=3, max_bytes=10_000)
    running = entry("running")
    running.task = object()                     # type: ignore[assignment]
    store.put("", running)
    for name in "abc":
        store.put("", entry(name))
    with pytest.raises(ResponseNotFoundError, match="'a'"):
        store.get("", "a")
    assert store.get("", "running") is running and len(store) == 3
    store.put("", entry("big", 8_900))
    with pytest.raises(ResponseNotFoundError):
        store.get("", "b")
    store.put("", store.get("", "big"))         # kept anew: counted once
    assert store.get("", "big").size < 10_000
    limited = ResponseStore(max_running=1)
    limited.put("", running)
    with pytest.raises(OverloadedError, match="at most 1"):
        limited.check_running()
