"""A request's own timings: only for who asks, in usage and in a header."""
from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from frontend.openai.app import build_app
from frontend.outputs import RequestMetrics
from ipc.config import FrontendSection
from tests.frontend.fake_llm import FakeLLM, events, post

# Arrived at 100 s; 2 ms tokenize, 30 ms queue, 500 ms prefill, 1,250 ms decode.
METRICS = RequestMetrics(100.0, 100.002, 100.032, 100.532, 101.782)
WANTED = {"tokenize_ms": 2.0, "queue_ms": 30.0, "prefill_ms": 500.0, "decode_ms": 1250.0}


def ask(path: str, section: FrontendSection | None = None, **body: Any) -> httpx.Response:
    llm = FakeLLM()
    llm.metrics = METRICS
    full = {"max_tokens": 3, **({"prompt": "12345678"} if path == "/v1/completions" else
                                {"messages": [{"role": "user", "content": "hi"}]}), **body}
    return asyncio.run(post(build_app(llm, section=section), path, full))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_who_asks_finds_the_parts_in_usage_and_in_the_header(path: str) -> None:
    response = ask(path, return_timings=True)
    assert response.json()["usage"]["timings"] == WANTED
    cached = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert response.headers["server-timing"] == (
        f'tokenize;dur=2.0, queue;dur=30.0, prefill;dur=500.0, decode;dur=1250.0, cache;desc="{cached} tokens"')


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_who_does_not_ask_finds_nothing(path: str) -> None:
    response = ask(path)
    assert response.status_code == 200 and "server-timing" not in response.headers and "timings" not in response.text


def test_the_server_decides_for_requests_that_say_nothing() -> None:
    section = FrontendSection(return_timings=True)
    assert "timings" in ask("/v1/completions", section).json()["usage"]
    assert "timings" not in ask("/v1/completions", section, return_timings=False).text


def test_a_stream_has_what_is_known_at_its_first_token_and_all_at_its_end() -> None:
    response = ask("/v1/completions", return_timings=True, stream=True, stream_options={"include_usage": True})
    assert "queue;dur=30.0, prefill;dur=500.0" in response.headers["server-timing"]
    chunks = events(response)
    assert chunks[-1]["usage"]["timings"] == WANTED and all(not chunk["usage"] for chunk in chunks[:-1])
