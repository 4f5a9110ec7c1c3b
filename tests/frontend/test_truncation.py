"""A conversation that is too long loses its oldest messages."""
from __future__ import annotations

import asyncio
from typing import Any

import pytest

from frontend.openai.app import build_app
from frontend.openai.truncation import beginnings, fitting_prompt, kept
from tests.frontend.fake_llm import FakeLLM, post

TALK = [{"role": "system", "content": "S"}, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
        {"role": "tool", "content": "c"}, {"role": "system", "content": "T"}, {"role": "user", "content": "d"}]


def fit(room: int, messages: list[dict[str, Any]] = TALK, max_tokens: int | None = 10) -> tuple[str, int]:
    """What is kept where each message is ten tokens, and how often something was rendered."""
    rendered: list[str] = []

    async def render(shown: list[dict[str, Any]]) -> bytes:
        rendered.append("".join(message["content"] for message in shown))
        return bytes(4 * 10 * len(shown))

    limit = room + (10 if max_tokens else 0)
    prompt = asyncio.run(fitting_prompt(render, messages, limit, max_tokens))
    assert len(prompt) == 4 * 10 * len(rendered[-1])
    return rendered[-1], len(rendered)


@pytest.mark.parametrize(("room", "text"), [(60, "SabcTd"), (59, "STd"), (30, "STd"), (5, "STd")])
def test_the_oldest_go_first_and_the_systems_words_and_the_newest_stay(room: int, text: str) -> None:
    """Nor does an answer without its question: a template may insist on the user's turn first."""
    assert fit(room)[0] == text


@pytest.mark.parametrize(("room", "text"), [(60, "abcbcd"), (59, "bcbcd"), (50, "bcbcd"), (49, "bcd"), (29, "d")])
def test_behind_the_last_words_of_the_user_a_cut_leaves_no_result_without_its_call(room: int, text: str) -> None:
    work = [TALK[1], TALK[2], TALK[3], TALK[2], TALK[3], {"role": "assistant", "content": "d"}]
    assert fit(room, work)[0] == text


def test_what_fits_is_rendered_once_and_a_long_talk_not_once_per_message() -> None:
    assert fit(60)[1] == 1
    long = [{"role": "user", "content": chr(0x4E00 + number)} for number in range(1000)]
    text, count = fit(305, long)
    assert text == "".join(message["content"] for message in long[-30:]) and count <= 13


def test_without_a_limit_of_its_own_the_answer_gets_an_eighth_of_the_context() -> None:
    turns = [{"role": "user", "content": str(number)} for number in range(7)]
    assert fit(64, turns, None)[0] == "23456"             # 56 tokens are the prompt's


def test_a_talk_of_one_message_is_left_alone() -> None:
    assert fit(5, TALK[-1:])[0] == "d" and fit(5, TALK[:1])[0] == "S"
    assert beginnings(TALK) == [5] and kept(TALK, 5) == [TALK[0], TALK[4], TALK[5]]


def test_a_response_with_truncation_auto_is_answered_and_a_plain_one_refused() -> None:
    llm = FakeLLM()
    llm.max_model_len = 64
    talk = [{"role": "user", "content": f"{number} " + "x" * 17} for number in range(9)]
    body = {"input": talk, "instructions": "Be brief.", "max_output_tokens": 4}

    async def ask(**fields: Any) -> Any:
        return await post(build_app(llm), "/v1/responses", {**body, **fields})

    assert asyncio.run(ask()).status_code == 400
    response = asyncio.run(ask(truncation="auto"))
    assert response.status_code == 200 and response.json()["truncation"] == "auto"
    shown = llm.chats[-1][0]
    assert shown[0]["content"] == "Be brief." and shown[1:] == talk[-len(shown) + 1:] and 1 < len(shown) < 9
