"""Log-probabilities, echo and embeddings over HTTP: OpenAI's shapes, exactly; and which parameters reach the engine."""
from __future__ import annotations

import asyncio
import base64
import json
import math
from typing import Any

import httpx
import numpy as np
import pytest

from frontend.openai.app import build_app
from frontend.openai.logprobs import FLOOR, ChoiceLogprobs
from frontend.outputs import CompletionOutput, Logprob, PoolingOutput, PoolingRequestOutput, RequestOutput
from tests.frontend.fake_llm import ByteTokenizer, FakeLLM, events, post

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
MESSAGES = [{"role": "user", "content": "hi"}]


class PieceTokenizer(ByteTokenizer):
    """Id 0 is special; others are the pieces."""
    special_ids = frozenset({0})
    pieces = [b"<end>", b"a", b"\xe4\xb8", b"\x96", " é".encode(), b"b"]

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id]

    def decode(self, token_ids: Any, skip_special_tokens: bool = True) -> str:
        ids = memoryview(token_ids).cast("i") if isinstance(token_ids, bytes) else token_ids
        return b"".join(self.pieces[i] for i in ids).decode("utf-8", "replace")


def entry(token: int, value: float, rank: int, *others: tuple[int, float]) -> dict[int, Logprob]:
    found = {token: Logprob(value, rank, "")}
    for place, (other, logprob) in enumerate(others, 1):
        found.setdefault(other, Logprob(logprob, place, ""))
    return found


class ScriptedLLM(FakeLLM):
    """Answers with fixed pieces: (text, tokens, entries)."""

    def __init__(self, pieces: list[tuple[str, list[int], list[dict[int, Logprob]]]], prompt: list[int],
                 prompt_entries: list[Any], finish: tuple[str, Any] = ("length", None)) -> None:
        super().__init__()
        self.tokenizer = PieceTokenizer()
        self.pieces, self.prompt, self.prompt_entries, self.finish = pieces, prompt, prompt_entries, finish

    async def generate(self, prompt: Any, sampling_params: Any, *, output_kind: str = "cumulative",
                       **_: Any) -> Any:
        self.calls.append({"prompt": prompt, "params": sampling_params})
        asked = sampling_params.logprobs is not None
        told = self.prompt_entries if sampling_params.prompt_logprobs is not None else None
        pieces = self.pieces
        if output_kind == "final":
            pieces = [("".join(p[0] for p in pieces), sum((p[1] for p in pieces), []), sum((p[2] for p in pieces), []))]
        for number, (text, tokens, entries) in enumerate(pieces):
            is_last = number == len(pieces) - 1
            yield RequestOutput("r", None, self.prompt, [CompletionOutput(
                0, text, list(tokens), self.finish[0] if is_last else None, self.finish[1] if is_last else None,
                list(entries) if asked else None)], is_last, usage_prompt_tokens=len(self.prompt),
                usage_completion_tokens=3, prompt_logprobs=told if number == 0 else None)

    async def encode(self, prompt: Any, *, pooling: str = "last", normalize: bool = True, **_: Any) -> Any:
        self.calls.append({"prompt": prompt, "pooling": pooling, "normalize": normalize})
        return PoolingRequestOutput("r", PoolingOutput(np.array([0.6, 0.8], np.float32)), [1, 2, 3])


def llm(**options: Any) -> ScriptedLLM:
    return ScriptedLLM([
        ("a", [1], [entry(1, -0.5, 1, (1, -0.5), (5, -1.5))]),
        ("", [2], [entry(2, -2.0, 3, (1, -0.25), (5, -math.inf))]),
        ("世 é", [3, 4], [entry(3, -0.125, 1, (3, -0.125), (1, -4.0)), entry(4, -0.75, 2, (1, -0.5), (4, -0.75))]),
    ], [5, 1], [None, entry(1, -3.0, 7, (5, -0.25), (4, -0.5))], **options)


def send(engine: FakeLLM, path: str, **body: Any) -> httpx.Response:
    return asyncio.run(post(build_app(engine), path, body))


def test_a_chat_answer_lists_tokens_whose_bytes_join_to_the_text():
    answer = send(llm(), CHAT, messages=MESSAGES, logprobs=True, top_logprobs=2).json()
    choice = answer["choices"][0]
    content = choice["logprobs"]["content"]
    assert b"".join(bytes(token["bytes"]) for token in content).decode() == choice["message"]["content"] == "a世 é"
    assert [token["token"] for token in content] == ["a", "bytes:\\xe4\\xb8", "bytes:\\x96", " é"]
    assert content[0] == {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": [
        {"token": "a", "logprob": -0.5, "bytes": [97]}, {"token": "b", "logprob": -1.5, "bytes": [98]}]}
    assert [top["token"] for top in content[1]["top_logprobs"]] == ["a", "b"], "its own token ranks third"
    assert content[1]["top_logprobs"][1]["logprob"] == FLOOR
    assert choice["logprobs"]["refusal"] is None


def test_a_chat_stream_has_the_same_entries_also_where_no_text_is_complete():
    whole = send(llm(), CHAT, messages=MESSAGES, logprobs=True, top_logprobs=1).json()["choices"][0]["logprobs"]
    chunks = events(send(llm(), CHAT, messages=MESSAGES, logprobs=True, top_logprobs=1, stream=True))
    found = [token for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]
             for token in choice["logprobs"]["content"]]
    assert found == whole["content"]
    assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks] == ["", "a", "", "世 é"]


def test_a_stop_token_is_listed_and_adds_no_bytes():
    engine = ScriptedLLM([("a", [1, 0], [entry(1, -1.0, 1), entry(0, -0.5, 1)])], [5], [None], finish=("stop", 0))
    content = send(engine, CHAT, messages=MESSAGES, logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert [(token["token"], token["bytes"], token["top_logprobs"]) for token in content] == [
        ("a", [97], []), ("<end>", [], [])]


def test_a_completion_lists_columns_and_where_each_token_begins():
    choice = send(llm(), COMPLETIONS, prompt="x", logprobs=2).json()["choices"][0]
    assert choice["text"] == "a世 é"
    assert choice["logprobs"] == {
        "tokens": ["a", "bytes:\\xe4\\xb8", "bytes:\\x96", " é"], "token_logprobs": [-0.5, -2.0, -0.125, -0.75],
        "top_logprobs": [{"a": -0.5, "b": -1.5}, {"a": -0.25, "b": FLOOR, "bytes:\\xe4\\xb8": -2.0},
                         {"bytes:\\x96": -0.125, "a": -4.0}, {"a": -0.5, " é": -0.75}],
        "text_offset": [0, 1, 1, 2]}


@pytest.mark.parametrize("stream", [False, True])
def test_echo_puts_the_prompt_first_and_its_first_value_is_null(stream):
    response = send(llm(), COMPLETIONS, prompt="ba", logprobs=1, echo=True, stream=stream)
    choices = [chunk["choices"][0] for chunk in events(response)] if stream else [response.json()["choices"][0]]
    assert "".join(choice["text"] for choice in choices) == "baa世 é"
    told = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    columns: dict[str, list[Any]] = {name: sum((piece[name] for piece in told), []) for name in told[0]}
    assert columns["tokens"][:3] == ["b", "a", "a"] and columns["text_offset"] == [0, 1, 2, 3, 3, 4]
    assert columns["token_logprobs"] == [None, -3.0, -0.5, -2.0, -0.125, -0.75]
    assert columns["top_logprobs"][0] is None and columns["top_logprobs"][1]["a"] == -3.0


def test_echo_of_token_ids_shows_their_text_and_needs_no_logprobs():
    engine = llm()
    choice = send(engine, COMPLETIONS, prompt=[5, 1], echo=True).json()["choices"][0]
    assert (choice["text"], choice["logprobs"]) == ("baa世 é", None)
    assert engine.calls[0]["params"].prompt_logprobs is None


def test_max_tokens_0_with_echo_scores_the_prompt_alone():
    """As evaluation programs ask for log-likelihoods."""
    engine = llm(finish=("stop", 4))
    answer = send(engine, COMPLETIONS, prompt="ba", logprobs=1, echo=True, max_tokens=0).json()
    choice = answer["choices"][0]
    assert engine.calls[0]["params"].max_tokens == 1
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ba", "length", None)
    assert choice["logprobs"]["token_logprobs"] == [None, -3.0] and answer["usage"]["completion_tokens"] == 0


def test_max_tokens_0_without_echo_is_refused():
    error = send(llm(), COMPLETIONS, prompt="ba", max_tokens=0)
    assert error.status_code == 400 and error.json()["error"]["param"] == "max_tokens"


def test_nothing_is_told_unless_asked():
    assert send(llm(), CHAT, messages=MESSAGES).json()["choices"][0]["logprobs"] is None
    assert send(llm(), COMPLETIONS, prompt="x").json()["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("path, body, param", [
    (CHAT, {"top_logprobs": 2}, "top_logprobs"), (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": -1}, "top_logprobs"), (CHAT, {"logprobs": 3}, "logprobs"),
    (COMPLETIONS, {"logprobs": 21}, "logprobs"), (COMPLETIONS, {"logprobs": -1}, "logprobs"),
    (COMPLETIONS, {"logit_bias": {"-1": 1}}, "logit_bias"),
    (COMPLETIONS, {"logit_bias": {str(1 << 63): 1}}, "logit_bias"),
    (COMPLETIONS, {"logit_bias": {"5": 101}}, "logit_bias"), (CHAT, {"allowed_token_ids": []}, "allowed_token_ids"),
    (CHAT, {"bad_words": [""]}, "bad_words"), (CHAT, {"repetition_penalty": 0}, "repetition_penalty"),
    (CHAT, {"presence_penalty": 2.1}, "presence_penalty"), (CHAT, {"frequency_penalty": -2.1}, "frequency_penalty")])
def test_a_bad_value_is_a_400_that_names_the_callers_field(path, body, param):
    base: dict[str, Any] = {"messages": MESSAGES} if path == CHAT else {"prompt": "x"}
    response = send(llm(), path, **base, **body)
    assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text


def test_parameters_reach_the_engine():
    engine = llm()
    values = dict(repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=-0.5, allowed_token_ids=[1, 2],
                  bad_words=["x"], logits_processors=["p"], spaces_between_special_tokens=False)
    send(engine, CHAT, messages=MESSAGES, logit_bias={"5": -1.5}, **values)
    params = engine.calls[0]["params"]
    assert {name: getattr(params, name) for name in values} == values and params.logit_bias == {5: -1.5}


def test_some_tokenizers_drop_the_space_before_the_first_token():
    class Stripping(PieceTokenizer):
        def decode(self, token_ids: Any, skip_special_tokens: bool = True) -> str:
            return super().decode(token_ids).lstrip()

    writer = ChoiceLogprobs(Stripping(), 0, True)
    content = writer.chat([4, 4], [entry(4, -1.0, 1), entry(4, -1.0, 1)]).content
    assert [bytes(token.bytes).decode() for token in content] == ["é", " é"]


@pytest.mark.parametrize("body, expected", [({}, [0.6, 0.8]), ({"encoding_format": "base64"}, None)])
def test_embeddings_come_in_order_with_usage(body, expected):
    engine = llm()
    answer = send(engine, EMBEDDINGS, input=["a", "b"], pooling="mean", **body).json()
    assert [item["index"] for item in answer["data"]] == [0, 1] and answer["object"] == "list"
    vector = answer["data"][1]["embedding"]
    if expected is None:
        vector = np.frombuffer(base64.b64decode(vector), "<f4").tolist()
    assert vector == pytest.approx([0.6, 0.8]) and answer["usage"] == {"prompt_tokens": 6, "total_tokens": 6}
    assert [call["pooling"] for call in engine.calls] == ["mean", "mean"]


@pytest.mark.parametrize("body, param", [({"input": []}, "input"), ({"input": "x", "dimensions": 4}, "dimensions"),
                                         ({"input": "x", "encoding_format": "int8"}, "encoding_format"), ({}, "input")])
def test_a_bad_embedding_call_is_a_400(body, param):
    response = send(llm(), EMBEDDINGS, **body)
    assert response.status_code == 400 and response.json()["error"]["param"] == param


def test_every_number_is_valid_json():
    text = send(llm(), COMPLETIONS, prompt="ba", logprobs=2, echo=True).text
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in the answer"))
