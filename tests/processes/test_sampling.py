"""Public reports about sampling parameters and log-probabilities, against the real three processes."""
from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from frontend import SamplingParams
from ipc.errors import RequestError
from tests.conftest import RunningEngine
from tests.processes.test_server import call
from bench.tiny_model import VOCAB

pytestmark = pytest.mark.timeout(60)
MESSAGES = [{"role": "user", "content": "hi"}]


def final(engine: RunningEngine, prompt: Any, **params: Any) -> Any:
    async def run() -> Any:
        last = None
        async for output in engine.llm.generate(prompt, SamplingParams(**params)):
            last = output
        return last
    return engine.loop.run(run())


@pytest.mark.parametrize("token, status", [(VOCAB, 400), (-1, 400), (1 << 31, 400), (1 << 63, 400), (5 * 10 ** 18, 400),
                                           (VOCAB - 1, 200)])
def test_token_ids_are_bounded_by_the_width_of_the_logits_at_every_field(engine, token, status):
    """Reported for vLLM (16529) and SGLang (7670): an id out of range ended the engine."""
    for fields in ({"logit_bias": {str(token): 100}}, {"allowed_token_ids": [token]}, {"stop_token_ids": [token]}):
        reply = call(engine, "POST", "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2, **fields})
        assert reply.status == status, (fields, reply.data)
        assert status == 200 or reply.json["error"]["param"] == next(iter(fields))
    with pytest.raises(RequestError) if status == 400 else pytest.MonkeyPatch.context():
        final(engine, "hi", max_tokens=2, bad_words_token_ids=[[token]])


def test_the_largest_bias_chooses_the_last_token(engine):
    output = final(engine, "hi", max_tokens=4, logit_bias={VOCAB - 1: 100.0}, ignore_eos=True).outputs[0]
    assert output.token_ids == [VOCAB - 1] * 4


def test_echo_with_logprobs_and_top_k_1_is_valid_json_without_infinities(engine):
    """Reported for vLLM (10234) and SGLang (5984): -inf made a 500."""
    body = {"prompt": "one two three four", "echo": True, "logprobs": 1, "temperature": 1, "top_k": 1, "max_tokens": 3}
    for _ in range(2):                          # the second finds nothing in the cache
        reply = call(engine, "POST", "/v1/completions", body)
        answer = json.loads(reply.data, parse_constant=lambda name: pytest.fail(name))
        columns = answer["choices"][0]["logprobs"]
        assert reply.status == 200 and columns["token_logprobs"][0] is None is columns["top_logprobs"][0]
        assert all(-9999.0 <= value <= 0 for value in columns["token_logprobs"][1:])
        assert len({len(column) for column in columns.values()}) == 1
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        text = answer["choices"][0]["text"]
        assert all(text.startswith(token, offset) for token, offset in zip(columns["tokens"], columns["text_offset"]))


def test_scores_of_a_prompt_are_the_same_with_max_tokens_0_and_1_and_across_chunks(engine):
    prompt = "the answer is in the word " * 12
    zero, one = (call(engine, "POST", "/v1/completions", {
        "prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": n, "temperature": 0}).json["choices"][0]
        for n in (0, 1))
    assert zero["text"] == prompt and one["text"].startswith(prompt)
    assert zero["logprobs"]["token_logprobs"] == one["logprobs"]["token_logprobs"][:-1]


def test_outputs_have_vllms_shapes(engine):
    output = final(engine, "hello", max_tokens=5, temperature=0.0, logprobs=2, prompt_logprobs=0)
    choice = output.outputs[0]
    assert len(choice.logprobs) == 5 and output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert [next(iter(entry)) for entry in choice.logprobs] == choice.token_ids
    assert all(entry[token].rank == 1 for entry, token in zip(choice.logprobs, choice.token_ids))
    assert "".join(entry[token].decoded_token for entry, token in zip(choice.logprobs, choice.token_ids)) == choice.text
    assert choice.cumulative_logprob == pytest.approx(sum(entry[t].logprob for entry, t in zip(choice.logprobs,
                                                                                              choice.token_ids)))


def test_a_bad_word_is_never_written_wherever_its_pieces_could_join(engine):
    plain = final(engine, "hello", max_tokens=24, temperature=0.0).outputs[0].text
    words = [word for word in plain.split() if word.isalpha()][:3] or [plain[:2]]
    text = final(engine, "hello", max_tokens=24, temperature=0.0, bad_words=words).outputs[0].text
    assert text != plain


def test_vectors_come_from_the_same_engine_and_have_length_1(engine):
    reply = call(engine, "POST", "/v1/embeddings", {"input": ["the", "word", "the"]})
    vectors = [np.array(item["embedding"]) for item in reply.json["data"]]
    assert reply.status == 200 and all(np.linalg.norm(v) == pytest.approx(1) for v in vectors)
    assert np.allclose(vectors[0], vectors[2], atol=1e-5) and not np.allclose(vectors[0], vectors[1], atol=1e-2)
    direct = engine.loop.run(engine.llm.encode("the"))
    assert np.allclose(direct.outputs.data, vectors[0], atol=1e-5)
    mean = engine.loop.run(engine.llm.encode("the word", pooling="mean"))
    assert np.linalg.norm(mean.outputs.data) == pytest.approx(1)
