"""The openai Python client: chat, stream, tools, parse, logprobs, responses, errors, timeouts, cancellation."""

from __future__ import annotations

import asyncio
import json
import sys

import openai
from pydantic import BaseModel

URL, MODEL = sys.argv[1], sys.argv[2]
HELLO = [{"role": "user", "content": "Name a colour."}]
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Weather of a city", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}}}


class City(BaseModel):
    name: str
    country: str


def check_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, max_completion_tokens=8, temperature=0,
                                            n=2, seed=1)
    assert len(answer.choices) == 2 and answer.usage.completion_tokens <= 16 and answer.id.startswith("chatcmpl-")
    whole = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=8, temperature=0)
    stream = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=8, temperature=0, stream=True,
                                            stream_options={"include_usage": True})
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content and chunks[-1].usage.completion_tokens == 8
    assert chunks[0].choices[0].delta.role == "assistant"
    parts = [{"role": "user", "content": [{"type": "text", "text": "Name a "}, {"type": "text", "text": "colour."}]}]
    assert client.chat.completions.create(model=MODEL, messages=parts, max_tokens=4, temperature=0).choices


def check_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=5, temperature=0, logprobs=True,
                                            top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert len(content) == 5 and all(len(item.top_logprobs) == 3 for item in content)
    assert content[0].logprob == max(top.logprob for top in content[0].top_logprobs)
    old = client.completions.create(model=MODEL, prompt="One, two,", max_tokens=1, temperature=0, logprobs=2, echo=True)
    told = old.choices[0].logprobs
    assert told.token_logprobs[0] is None and len(told.tokens) == len(told.token_logprobs) == len(told.text_offset)


def check_tools(client: openai.OpenAI) -> None:
    question = [{"role": "user", "content": "What is the weather in Paris?"}]
    answer = client.chat.completions.create(model=MODEL, messages=question, tools=[TOOL], tool_choice="required",
                                            max_tokens=80, temperature=0)
    [call] = answer.choices[0].message.tool_calls[:1]
    assert call.function.name == "get_weather" and isinstance(json.loads(call.function.arguments)["city"], str)
    assert answer.choices[0].finish_reason == "tool_calls"
    pieces = ""
    named = {"type": "function", "function": {"name": "get_weather"}}
    for chunk in client.chat.completions.create(model=MODEL, messages=question, tools=[TOOL], stream=True,
                                                max_tokens=80, tool_choice=named, temperature=0):
        for delta in (chunk.choices[0].delta.tool_calls or []) if chunk.choices else []:
            pieces += delta.function.arguments or ""
    assert "city" in json.loads(pieces)
    reply = [*question, answer.choices[0].message.model_dump(exclude_none=True),
             {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    assert client.chat.completions.create(model=MODEL, messages=reply, tools=[TOOL], max_tokens=5).choices


def check_parse(client: openai.OpenAI) -> None:
    question = [{"role": "user", "content": "Describe Paris as JSON."}]
    answer = client.chat.completions.parse(model=MODEL, messages=question, response_format=City, max_tokens=200,
                                           temperature=0)
    assert isinstance(answer.choices[0].message.parsed, City)
    with client.chat.completions.stream(model=MODEL, messages=HELLO, max_tokens=6, temperature=0) as stream:
        events = list(stream)
    assert any(event.type == "content.delta" for event in events)
    assert stream.current_completion_snapshot.choices[0].finish_reason == "length"


def check_responses(client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input="Name a colour.", max_output_tokens=16)
    assert first.output_text is not None and first.usage.output_tokens > 0
    second = client.responses.create(model=MODEL, input="Another.", previous_response_id=first.id,
                                     max_output_tokens=16)
    assert client.responses.retrieve(second.id).id == second.id
    stream = client.responses.create(model=MODEL, input="Hi", max_output_tokens=16, stream=True)
    kinds = [event.type for event in stream]
    assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete")
    probable = client.responses.create(model=MODEL, input="Name a colour.", max_output_tokens=4, top_logprobs=2,
                                       include=["message.output_text.logprobs"])
    entries = probable.output[0].content[0].logprobs
    assert b"".join(bytes(entry.bytes) for entry in entries).decode("utf-8", "replace") == probable.output_text
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    talk = [{"role": "user", "content": f"{number} " + "word " * 400} for number in range(30)]
    cut = client.responses.create(model=MODEL, input=talk, max_output_tokens=4, truncation="auto")
    assert 400 < cut.usage.input_tokens < 12_000, cut.usage       # all of them have more
    parsed = client.responses.parse(model=MODEL, input="Describe Paris as JSON.", text_format=City,
                                    max_output_tokens=200, temperature=0)
    assert isinstance(parsed.output_parsed, City)
    running = client.responses.create(model=MODEL, input="Count.", background=True, max_output_tokens=2000)
    assert client.responses.cancel(running.id).status == "cancelled"
    client.responses.delete(first.id)


def check_errors(client: openai.OpenAI) -> None:
    def refused(kind: type[openai.APIStatusError], **fields: object) -> openai.APIStatusError:
        try:
            client.chat.completions.create(**{"model": MODEL, "messages": HELLO, "max_tokens": 4, **fields})
        except kind as error:
            return error
        raise AssertionError(f"{fields} is not refused with {kind.__name__}")

    assert str(refused(openai.NotFoundError, model="nobody").code) == "404"       # version 3 makes it text
    error = refused(openai.BadRequestError, messages=[{"role": "user", "content": "word " * 20000}])
    assert "max_model_len" in error.message or "tokens" in error.message, error.message
    assert refused(openai.BadRequestError, temperature=-1).param == "temperature"
    assert error.request_id


def check_timeouts(client: openai.OpenAI) -> None:
    try:
        client.with_options(timeout=0.3, max_retries=0).chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=4000, extra_body={"ignore_eos": True})
    except openai.APITimeoutError:
        return
    raise AssertionError("4,000 tokens came in 0.3 s")


async def check_cancellation() -> None:
    async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none") as client:
        call = asyncio.create_task(client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=4000,
                                                                  extra_body={"ignore_eos": True}))
        await asyncio.sleep(0.3)
        call.cancel()
        stream = await client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=4000, stream=True,
                                                      extra_body={"ignore_eos": True})
        async for _ in stream:
            break
        await stream.close()
        for _ in range(100):
            load = await client.with_options(base_url=URL).get("/load", cast_to=object)
            if load["num_running"] == 0:
                return
            await asyncio.sleep(0.1)
        raise AssertionError(f"cancelled requests go on: {load}")


def main() -> None:
    with openai.OpenAI(base_url=f"{URL}/v1", api_key="none") as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        for check in (check_chat, check_logprobs, check_tools, check_parse, check_responses, check_errors,
                      check_timeouts):
            check(client)
            print(check.__name__, flush=True)
    asyncio.run(check_cancellation())
    print(f"openai {openai.__version__}: ok")


main()
