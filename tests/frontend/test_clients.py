"""The openai and anthropic client libraries against the real server over the fake engine."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ipc.config import FrontendSection
from ipc.errors import EngineDeadError, OverloadedError
from tests.frontend.fake_llm import MODEL, FakeLLM, answer_text
from tests.frontend.live_server import LiveServer

KEY = "alice-key-1"


@pytest.fixture(scope="module")
def live() -> Iterator[tuple[LiveServer, FakeLLM]]:
    llm = FakeLLM()
    with LiveServer(llm, FrontendSection(api_keys=(KEY,))) as server:
        yield server, llm


@pytest.fixture
def openai_client(live: tuple[LiveServer, FakeLLM]) -> Iterator[Any]:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{live[0].url}/v1", api_key=KEY, max_retries=0, timeout=20) as client:
        yield client
    live[1].error = live[1].fail_after = None


@pytest.fixture
def anthropic_client(live: tuple[LiveServer, FakeLLM]) -> Iterator[Any]:
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=live[0].url, api_key=KEY, max_retries=0, timeout=20) as client:
        yield client
    live[1].error = live[1].fail_after = None


def test_openai_responses(openai_client: Any) -> None:
    options: dict[str, Any] = dict(model=MODEL, input="hi", max_output_tokens=4, extra_body={"seed": 1})
    response = openai_client.responses.create(**options)
    assert response.output_text == answer_text(1, 0, 4) and response.status == "incomplete"
    assert response.usage.output_tokens == 4 and response.usage.input_tokens_details.cached_tokens == 1
    assert openai_client.responses.retrieve(response.id) == response
    options |= {"extra_body": {"seed": 1, "stop": answer_text(1, 0, 5)[4:]}, "max_output_tokens": 9}
    with openai_client.responses.stream(**options) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert final.status == "completed" and final.output_text == "".join(deltas)
    assert final.output_text == response.output_text
    background = openai_client.responses.create(**options, background=True)
    assert openai_client.responses.cancel(background.id).status in ("cancelled", "completed")
    openai_client.responses.delete(response.id)


def test_openai_errors_have_their_classes(openai_client: Any, live: tuple[LiveServer, FakeLLM]) -> None:
    import openai
    with pytest.raises(openai.NotFoundError, match="resp_none"):
        openai_client.responses.retrieve("resp_none")
    with pytest.raises(openai.BadRequestError, match="web_search"):
        openai_client.responses.create(model=MODEL, input="x", tools=[{"type": "web_search"}])
    with pytest.raises(openai.AuthenticationError, match="no API key of this server"):
        openai_client.with_options(api_key="wrong-key").models.list()
    live[1].error = OverloadedError("the queue is full", 7)
    with pytest.raises(openai.RateLimitError, match="the queue is full") as error:
        openai_client.responses.create(model=MODEL, input="x")
    assert error.value.response.headers["retry-after"] == "7"


def test_anthropic_messages(anthropic_client: Any) -> None:
    options: dict[str, Any] = dict(model=MODEL, max_tokens=4, system="Be brief.", extra_body={"seed": 1},
                                   messages=[{"role": "user", "content": "hi"}])
    message = anthropic_client.messages.create(**options)
    assert message.content[0].text == answer_text(1, 0, 4) and message.stop_reason == "max_tokens"
    assert message._request_id
    with anthropic_client.messages.stream(**options) as stream:
        assert "".join(stream.text_stream) == message.content[0].text
        final = stream.get_final_message()
    assert final.usage == message.usage and final.stop_reason == "max_tokens"
    count = anthropic_client.messages.count_tokens(model=MODEL, system="Be brief.", messages=options["messages"])
    assert count.input_tokens == message.usage.input_tokens + message.usage.cache_read_input_tokens


def test_anthropic_errors_have_their_classes(anthropic_client: Any, live: tuple[LiveServer, FakeLLM]) -> None:
    import anthropic
    options: dict[str, Any] = dict(model=MODEL, max_tokens=4, messages=[{"role": "user", "content": "hi"}])
    with pytest.raises(anthropic.BadRequestError, match="web_search_20250305"):
        anthropic_client.messages.create(**options, tools=[{"type": "web_search_20250305", "name": "web_search"}])
    with pytest.raises(anthropic.NotFoundError, match="'other' is not served here"):
        anthropic_client.messages.create(**{**options, "model": "other"})
    with pytest.raises(anthropic.AuthenticationError):
        anthropic_client.with_options(api_key="wrong-key").messages.create(**options)
    live[1].fail_after = (1, EngineDeadError("worker 0 was killed"))
    with pytest.raises(anthropic.APIStatusError, match="worker 0 was killed"):
        list(anthropic_client.messages.create(**options, stream=True))


@pytest.fixture
def thinking(live: tuple[LiveServer, FakeLLM]) -> Iterator[None]:
    live[1].has_reasoning, live[1].script = True, ["<th", "ink>", "h", "m", "</think>", "Yes", "\0"]
    yield
    live[1].has_reasoning, live[1].script = False, None


def test_the_openai_client_puts_reasoning_together(openai_client: Any, thinking: None) -> None:
    options: dict[str, Any] = dict(model=MODEL, input="hi", extra_body={"stop": "\0"})
    with openai_client.responses.stream(**options) as stream:
        deltas = [event.delta for event in stream if event.type == "response.reasoning_text.delta"]
        final = stream.get_final_response()
    assert deltas == ["h", "m"] and final.output_text == "Yes"
    assert [item.type for item in final.output] == ["reasoning", "message"]
    assert final.output[0].content[0].text == "hm"
    again = [{"role": "user", "content": "hi"}, *final.output, {"role": "user", "content": "more"}]
    assert openai_client.responses.create(**{**options, "input": again}).output[0].content[0].text == "hm"


def test_the_anthropic_client_puts_thinking_together(anthropic_client: Any, thinking: None) -> None:
    options: dict[str, Any] = dict(model=MODEL, max_tokens=9, stop_sequences=["\0"],
                                   messages=[{"role": "user", "content": "hi"}])
    with anthropic_client.messages.stream(**options) as stream:
        deltas = [event.thinking for event in stream if event.type == "thinking"]
        final = stream.get_final_message()
    assert deltas == ["h", "m"] and [block.type for block in final.content] == ["thinking", "text"]
    enabled = anthropic_client.messages.create(**options, thinking={"type": "enabled", "budget_tokens": 8})
    assert [block.type for block in enabled.content] == ["thinking", "text"]
    assert (final.content[0].thinking, final.content[1].text) == ("hm", "Yes")
    again = [*options["messages"], {"role": "assistant", "content": final.content}, {"role": "user", "content": "more"}]
    assert anthropic_client.messages.create(**{**options, "messages": again}).content[0].thinking == "hm"
