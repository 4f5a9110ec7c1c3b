"""Log-probabilities of a response's text, whole and streamed."""
from __future__ import annotations

from array import array
from typing import Any

import pytest

from tests.frontend.test_openai_logprobs import MESSAGES, ScriptedLLM, entry, llm, send
from tests.frontend.test_openai_responses import parse_events

PATH = "/v1/responses"
WANTED = {"input": "hi", "include": ["message.output_text.logprobs"]}


def entries_of(response: Any) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    found: list[dict[str, Any]] = response.json()["output"][-1]["content"][0]["logprobs"]
    return found


def test_they_are_those_of_chat_completions() -> None:
    chat = send(llm(), "/v1/chat/completions", messages=MESSAGES, logprobs=True, top_logprobs=2).json()
    assert entries_of(send(llm(), PATH, **WANTED, top_logprobs=2)) == chat["choices"][0]["logprobs"]["content"]
    alone = entries_of(send(llm(), PATH, **WANTED))
    assert [item["logprob"] for item in alone] == [-0.5, -2.0, -0.125, -0.75]
    assert all(item["top_logprobs"] == [] for item in alone)


@pytest.mark.parametrize("fields", [{}, {"top_logprobs": 0}, {"include": ["reasoning.encrypted_content"]}])
def test_nobody_who_did_not_ask_gets_any(fields: dict[str, Any]) -> None:
    engine = llm()
    assert entries_of(send(engine, PATH, input="hi", **fields)) == []
    assert engine.calls[0]["params"].logprobs is None


def test_a_stream_tells_each_with_its_text_and_all_at_the_end() -> None:
    events = parse_events(send(llm(), PATH, **WANTED, top_logprobs=1, stream=True).text)
    told = [[item["token"] for item in event["logprobs"]] for event in events
            if event["type"] == "response.output_text.delta"]
    assert told == [["a"], ["bytes:\\xe4\\xb8", "bytes:\\x96", " é"]]
    whole = entries_of(send(llm(), PATH, **WANTED, top_logprobs=1))
    done = next(event for event in events if event["type"] == "response.output_text.done")
    assert done["logprobs"] == whole == events[-1]["response"]["output"][0]["content"][0]["logprobs"]


class Thinker(ScriptedLLM):
    """Its prompts are of its own tokens."""

    def render_chat(self, messages: list[dict[str, Any]], **options: Any) -> bytes:
        return array("i", [5]).tobytes()


def thinker(cut: bool) -> Thinker:
    """<think> and </think> are tokens 1 and 2 here, a blank line is 3, the answer 4 and 5, the end 0."""
    texts = {1: "<think>x", 2: "</think>", 3: "\n\n", 4: "Yes", 5: "!", 0: ""}
    pieces = [(texts[token], [token], [entry(token, -token / 8, 1)]) for token in ((1,) if cut else (1, 2, 3, 4, 5, 0))]
    engine = Thinker(pieces, [5], [None], ("length", None) if cut else ("stop", 0))
    engine.tokenizer.pieces = [texts[token].encode() for token in sorted(texts)]      # type: ignore[attr-defined]
    engine.has_reasoning = True
    return engine


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_and_the_end_have_none(stream: bool) -> None:
    response = send(thinker(False), PATH, **WANTED, stream=stream)
    output = parse_events(response.text)[-1]["response"]["output"] if stream else response.json()["output"]
    assert [item["type"] for item in output] == ["reasoning", "message"]
    assert [item["token"] for item in output[1]["content"][0]["logprobs"]] == ["Yes", "!"]
    assert output[1]["content"][0]["text"] == "Yes!"
    response = send(thinker(True), PATH, **WANTED, stream=stream)
    output = parse_events(response.text)[-1]["response"]["output"] if stream else response.json()["output"]
    assert [item["type"] for item in output] == ["reasoning"]
