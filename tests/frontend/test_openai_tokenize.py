"""Tokenize and detokenize, the description of the API, and the small read-only routes."""
from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from frontend.openai.app import build_app
from frontend.openai.routes import Endpoint
from tests.frontend.fake_llm import FakeLLM, get, post


def tokenize(path: str = "/tokenize", bos: int | None = None, **fields: Any) -> httpx.Response:
    return asyncio.run(post(build_app(FakeLLM(bos=bos)), path, fields))


def test_a_prompt_and_a_conversation_become_token_ids() -> None:
    assert tokenize(prompt="hi").json() == {"count": 2, "max_model_len": 64, "tokens": [104, 105], "token_strs": None}
    assert tokenize(prompt="", bos=1).json()["tokens"] == [1]
    plain = tokenize(prompt="a", bos=1, add_special_tokens=False, return_token_strs=True).json()
    assert plain["tokens"] == [97] and plain["token_strs"] == ["<97>"]
    assert tokenize(messages=[{"role": "user", "content": "x"}], bos=1).json()["tokens"] == list(b"u:x;")
    assert tokenize(prompt="x" * 5000).json()["count"] == 5000


def test_tools_are_shown_to_the_template() -> None:
    llm = FakeLLM()
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    body = {"messages": [{"role": "user", "content": "x"}], "tools": [tool]}
    assert asyncio.run(post(build_app(llm), "/tokenize", body)).json()["count"] == 4
    assert llm.chats[0][1]["tools"] == [tool]
    body["tools"] = [{"type": "web_search"}]
    assert asyncio.run(post(build_app(llm), "/tokenize", body)).json()["error"]["param"] == "tools[0].type"


def test_token_ids_become_text() -> None:
    assert tokenize("/detokenize", tokens=[104, 105]).json() == {"prompt": "hi"}
    assert tokenize("/detokenize", tokens=[]).json() == {"prompt": ""}


@pytest.mark.parametrize("path, fields, param", [
    ("/tokenize", {}, "prompt"), ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
    ("/tokenize", {"messages": []}, "messages"), ("/tokenize", {"prompt": 3}, "prompt"),
    ("/tokenize", {"prompt": "a", "tools": [{}]}, "tools"), ("/detokenize", {}, "tokens"),
    ("/tokenize", {"messages": [{"role": "user", "content": "x"}], "add_special_tokens": True}, "add_special_tokens"),
    ("/detokenize", {"tokens": [260]}, "tokens"), ("/detokenize", {"tokens": [-1]}, "tokens"),
    ("/detokenize", {"tokens": [2**63]}, "tokens"), ("/detokenize", {"tokens": ["a"]}, "tokens[0]")])
def test_bad_calls_are_refused_by_name(path: str, fields: dict[str, Any], param: str) -> None:
    response = tokenize(path, **fields)
    assert response.status_code == 400 and response.json()["error"]["param"] == param


def test_the_description_names_every_route_and_resolves() -> None:
    app = build_app(FakeLLM())
    api = asyncio.run(get(app, "/openapi.json")).json()
    rows = [route.app.row for route in app.router.routes if isinstance(route.app, Endpoint)]  # type: ignore[attr-defined]
    described = {(method, path) for path, methods in api["paths"].items() for method in methods}
    expected = {(method.lower(), row.path.replace(":path", "")) for row in rows for method in row.methods}
    assert described == expected - {("get", "/openapi.json")}
    names: set[str] = set()

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            names.update([node["$ref"].removeprefix("#/components/schemas/")] if "$ref" in node else [])
            for value in node.values():
                walk(value)
        elif isinstance(node, list):
            for value in node:
                walk(value)
    walk(api)
    assert names == set(api["components"]["schemas"])
    chat = api["components"]["schemas"]["ChatRequest"]
    assert chat["required"] == ["messages"] and "temperature" in chat["properties"]
    assert "anyOf" in api["components"]["schemas"]["CompletionRequest"]["properties"]["prompt"]


def test_load_and_version() -> None:
    app = build_app(FakeLLM(), version="1.2.3")
    assert asyncio.run(get(app, "/version")).json() == {"version": "1.2.3"}
    assert asyncio.run(get(app, "/load")).json() == {"server_load": 0, "num_running": 0, "num_waiting": 0,
                                                     "is_paused": False}
