"""Forms of the output and tool choices through the whole server, as a client sees them."""
from __future__ import annotations

import asyncio
import concurrent.futures
import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from bench import schema_corpus, schemas
from ipc.errors import RequestError
from ipc.sampling_params import SamplingParams
from ipc.structured_outputs import StructuredOutputs
from tests.conftest import RunningEngine

MESSAGES: Any = [{"role": "user", "content": "Tell me."}]
NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}, "n": NUMBER, "tag": {"enum": ["red", "grün"]}},
          "required": ["ok", "n", "tag"], "additionalProperties": False}
TOOLS: Any = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]


@pytest.fixture(scope="module")
def client(engine: RunningEngine) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{engine.server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_schema_is_kept_by_every_choice_streamed_and_whole(client):
    options: Any = dict(model="tiny", messages=MESSAGES, n=3, seed=5, temperature=1.0, max_tokens=300, response_format={
        "type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}})
    answer = client.chat.completions.create(**options)
    texts = [choice.message.content or "" for choice in answer.choices]
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert all(choice.finish_reason == "stop" for choice in answer.choices)
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(stream=True, **options):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


def test_forms_mixed_with_free_requests_are_each_kept(client):
    forms: list[tuple[dict[str, Any], str | None]] = [
        ({"guided_regex": "[0-9]{3}-[a-f]{2}"}, "[0-9]{3}-[a-f]{2}"), ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({}, None), ({"structured_outputs": {"grammar": 'root ::= "<" [a-c] [a-c] ">"'}}, "<[abc]{2}>")] * 3

    def ask(form: dict[str, Any]) -> str:
        answer = client.completions.create(model="tiny", prompt="x", max_tokens=40, temperature=1.0, extra_body=form)
        return str(answer.choices[0].text)
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        texts = list(pool.map(ask, [form for form, _ in forms]))
    for text, (_, pattern) in zip(texts, forms):
        assert pattern is None or re.fullmatch(pattern, text), (text, pattern)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
def test_a_demanded_call_has_valid_arguments(client, choice):
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, tools=TOOLS, tool_choice=choice, seed=3,
                                            temperature=1.0, max_tokens=400, parallel_tool_calls=False)
    assert answer.choices[0].finish_reason == "tool_calls"
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.function.name == "look" and answer.choices[0].message.content is None
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)


def test_a_broken_grammar_is_a_400_before_a_stream_begins(client):
    for options in (dict(stream=True), dict(stream=False)):
        with pytest.raises(openai.BadRequestError, match="uniqueItems"):
            client.completions.create(model="tiny", prompt="x", extra_body={
                "guided_json": {"type": "array", "uniqueItems": True}}, **options)
    assert client.completions.create(model="tiny", prompt="x", max_tokens=2).choices[0].text


def test_the_library_checks_grammars_too(engine):
    async def ask(**form: Any) -> str:
        params = SamplingParams(max_tokens=30, structured_outputs=StructuredOutputs(**form))
        text = ""
        async for output in engine.llm.generate("x", params):
            text = output.outputs[0].text
        return text
    assert engine.loop.run(ask(choice=["red", "blue"])) in ("red", "blue")
    assert engine.loop.run(ask(json={"enum": [17]})).strip() == "17"
    with pytest.raises(RequestError, match="regex"):
        engine.loop.run(ask(regex="["))


@pytest.mark.slow
def test_the_demo_model_keeps_every_schema_it_finishes():
    """Temperature 1, all at once; an end by length apart."""
    found = asyncio.run(schemas.run("smollm2-135m", schema_corpus.corpus(), 1, 200))
    assert found["wrong"] == [] and found["num_finished"] > found["num_schemas"] // 2 > 50
