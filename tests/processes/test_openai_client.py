"""The openai client library against the real server."""
from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.conftest import RunningEngine
from tests.processes.tools import ENDLESS_TOKENS, wait_idle
from bench.tiny_model import MAX_MODEL_LEN, VOCAB

pytestmark = pytest.mark.timeout(60)

MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is the time?"}]
FIXED = {"ignore_eos": True}                    # vLLM's field, through extra_body


@pytest.fixture
def client(engine: RunningEngine) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{engine.server.url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client
    engine.loop.run(wait_idle(engine.llm))


def test_a_chat_completion(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=9, temperature=0,
                                            extra_body=FIXED)
    assert answer.object == "chat.completion" and answer.model == "tiny" and answer.id.startswith("chatcmpl-")
    [choice] = answer.choices
    assert choice.message.role == "assistant" and choice.finish_reason == "length" and choice.message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 9
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 9


def test_a_chat_stream_brings_the_same_text_in_pieces(client: openai.OpenAI) -> None:
    options: Any = dict(model="tiny", messages=MESSAGES, max_completion_tokens=12, temperature=0, extra_body=FIXED)
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content and len(chunks) > 4
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1


def test_completions_of_text_ids_and_lists(client: openai.OpenAI, engine: RunningEngine) -> None:
    options: Any = dict(model="tiny", max_tokens=6, temperature=0, extra_body=FIXED)
    one = client.completions.create(prompt="One two", **options)
    assert one.object == "text_completion" and one.choices[0].text and one.choices[0].finish_reason == "length"
    ids = engine.llm.tokenizer.encode_ids("One two", True)
    assert client.completions.create(prompt=ids, **options).choices[0].text == one.choices[0].text
    many = client.completions.create(prompt=["Three", "One two"], **options)
    assert [choice.index for choice in many.choices] == [0, 1] and many.choices[1].text == one.choices[0].text
    assert many.usage is not None and many.usage.completion_tokens == 12
    streamed = list(client.completions.create(prompt="One two", stream=True, **options))
    assert "".join(chunk.choices[0].text for chunk in streamed) == one.choices[0].text


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(client: openai.OpenAI, stream: bool) -> None:
    options: Any = dict(model="tiny", prompt="Stop here", max_tokens=30, temperature=0, extra_body=FIXED)
    text = client.completions.create(**options).choices[0].text
    stop = text[7:10]
    answer: Any = client.completions.create(**options, stop=[stop], stream=stream)
    if stream:
        choices = [chunk.choices[0] for chunk in answer]
        assert "".join(choice.text for choice in choices) == text[:text.index(stop)]
        assert choices[-1].finish_reason == "stop"
    else:
        assert answer.choices[0].text == text[:text.index(stop)] and answer.choices[0].finish_reason == "stop"
        assert answer.usage.completion_tokens < 30


def test_n_choices_differ_and_a_seed_repeats_them(client: openai.OpenAI) -> None:
    options: Any = dict(model="tiny", messages=MESSAGES, max_tokens=10, extra_body=FIXED)
    texts = [[choice.message.content for choice in client.chat.completions.create(**options, n=3, seed=seed).choices]
             for seed in (1, 1, 2)]
    assert texts[0] == texts[1] and len({*texts[0], *texts[2]}) == 6
    unseeded = [client.chat.completions.create(**options).choices[0].message.content for _ in range(2)]
    assert unseeded[0] != unseeded[1]
    chunks = list(client.chat.completions.create(**options, n=3, seed=1, stream=True))
    streamed = ["".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices[0].index == index)
                for index in range(3)]
    assert streamed == texts[0]


def test_the_model_list(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("tiny", "model", "threefold")
    assert model.model_extra is not None and model.model_extra["max_model_len"] == MAX_MODEL_LEN
    assert client.models.retrieve("tiny") == model
    with pytest.raises(openai.NotFoundError, match="'other' is not served here"):
        client.models.retrieve("other")


def test_an_unknown_model_is_a_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="'gpt-4' is not served here; this server has 'tiny'"):
        client.chat.completions.create(model="gpt-4", messages=MESSAGES)


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_is_a_400_with_both_numbers(client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError, match=f"{MAX_MODEL_LEN + 40} tokens.*{MAX_MODEL_LEN}"):
        client.completions.create(model="tiny", prompt=[1] * (MAX_MODEL_LEN + 40), stream=stream)
    with pytest.raises(openai.BadRequestError, match=str(MAX_MODEL_LEN)):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * MAX_MODEL_LEN}],
                                       stream=stream)


@pytest.mark.parametrize("changes, param", [
    (dict(temperature=-1), "temperature"), (dict(top_p=1.5), "top_p"), (dict(n=0), "n"), (dict(n=100_000), "n"),
    (dict(max_tokens=0), "max_tokens"), (dict(stop=[""]), "stop"), (dict(seed=1 << 70), "seed"),
    (dict(extra_body={"min_tokens": 9, "max_tokens": 3}), "min_tokens"),
    (dict(extra_body={"stop_token_ids": [VOCAB]}), None), (dict(extra_body={"top_k": "many"}), "top_k"),
    (dict(messages=[]), "messages"), (dict(messages=[{"role": "king", "content": "x"}]), "messages[0].role"),
    (dict(tools=[{"type": "function", "function": {"name": "a b"}}]), "tools[0].function.name"),
    (dict(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "what"}}}),
     "structured_outputs"),
    (dict(extra_body={"guided_regex": "[a"}), "structured_outputs"),
])
def test_a_bad_parameter_is_a_400_that_names_it(client: openai.OpenAI, changes: dict[str, Any],
                                                param: str | None) -> None:
    options: Any = {"model": "tiny", "messages": MESSAGES, **changes}
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(**options)
    assert error.value.status_code == 400 and isinstance(error.value.body, dict)
    assert error.value.body["param"] == param or param is None
    assert str((param or "stop_token_ids").split("[")[0]) in error.value.body["message"]


def test_a_client_that_leaves_a_stream_frees_its_blocks(client: openai.OpenAI, engine: RunningEngine) -> None:
    stream = client.completions.create(model="tiny", prompt="Go on", max_tokens=ENDLESS_TOKENS, temperature=0,
                                       stream=True, extra_body=FIXED)
    assert next(iter(stream)).choices[0].finish_reason is None
    stream.close()
    stats = engine.loop.run(wait_idle(engine.llm))
    assert stats["num_free_blocks"] == 512


def test_many_clients_at_once_get_what_they_would_get_alone(engine: RunningEngine) -> None:
    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=f"{engine.server.url}/v1", api_key="none", max_retries=0,
                                      timeout=20) as client:
            async def one(index: int) -> str:
                answer = await client.completions.create(model="tiny", prompt=f"Number {index}", temperature=0,
                                                         max_tokens=4 + index % 7, extra_body=FIXED)
                return answer.choices[0].text

            alone = [await one(index) for index in range(8)]
            together = await asyncio.gather(*(one(index) for index in range(24)))
            assert together[:8] == alone
    asyncio.run(run())
    engine.loop.run(wait_idle(engine.llm))
