"""API keys: no route without one, no way around one, and nothing shared between two."""
from __future__ import annotations

import asyncio
import hmac
from typing import Any

import httpx
import msgspec
import pytest

from frontend.openai import auth
from frontend.openai.app import OpenAIApp, build_app
from frontend.openai.auth import Access
from frontend.openai.routes import Endpoint
from ipc.config import FrontendSection
from ipc.errors import ConfigError
from tests.frontend.fake_llm import FakeLLM, RawClient, post

KEYS = FrontendSection(api_keys=("alice-key-1", "bob-key-22"), admin_api_keys=("root-key-333",))
OPEN = {"/health", "/ping", "/ready", "/", "/docs", "/timeline"}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def call(app: OpenAIApp, method: str, path: str, key: str | None = None, **headers: str) -> httpx.Response:
    async def run() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            given = {"authorization": f"Bearer {key}"} if key else {}
            content = {"content-type": "application/json"} if method == "POST" else {}
            return await client.request(method, path, content=b"{}" if method == "POST" else None,
                                        headers=given | content | headers)
    return asyncio.run(run())


def routes(app: OpenAIApp) -> list[tuple[str, str, Access]]:
    found = []
    for route in app.router.routes:
        endpoint: Any = route.app                       # type: ignore[attr-defined]
        assert isinstance(endpoint, Endpoint)
        path = endpoint.row.path.replace("{model_id:path}", "x").replace("{response_id}", "x")
        found += [(method, path, endpoint.row.access) for method in endpoint.row.methods]
    return found


def test_every_route_but_the_probes_and_the_empty_pages_asks_for_a_key() -> None:
    app = build_app(FakeLLM(), section=KEYS)
    assert {path for _, path, access in routes(app) if access is Access.OPEN} == OPEN
    for method, path, access in routes(app):
        for key in (None, "wrong-key-1", "alice-key-", "alice-key-11"):
            response = call(app, method, path, key)
            if access is Access.OPEN:
                assert response.status_code == 200, path
                continue
            assert response.status_code == 401, (path, key)
            assert response.headers["www-authenticate"] == "Bearer"
            error = response.json()["error"]
            assert error["type"] in ("AuthenticationError", "authentication_error")
            assert "alice" not in error["message"]


def test_each_key_opens_the_api_and_only_the_admin_key_the_control_routes() -> None:
    app = build_app(FakeLLM(), section=KEYS)
    for key in (*KEYS.api_keys, *KEYS.admin_api_keys):
        assert call(app, "GET", "/v1/models", key).status_code == 200
    for method, path, access in routes(app):
        if access is Access.ADMIN:
            assert call(app, method, path, "alice-key-1").status_code == 401
            assert call(app, method, path, "root-key-333").status_code == 200
    assert call(app, "GET", "/v1/models", None, **{"x-api-key": "bob-key-22"}).status_code == 200
    assert call(app, "GET", "/v1/models", None, authorization="Basic alice-key-1").status_code == 401


def test_without_an_admin_key_there_are_no_control_routes() -> None:
    llm = FakeLLM()
    for section in (FrontendSection(), FrontendSection(api_keys=KEYS.api_keys)):
        response = call(build_app(llm, section=section), "POST", "/pause", "alice-key-1")
        assert response.status_code == 404 and "--admin-api-key" in response.json()["error"]["message"]
    assert not llm.is_paused


@pytest.mark.parametrize("path", [
    "//v1/models", "/V1/models", "/v1/../v1/models", "/health/../v1/models", "/v1%2fmodels", "/v1/models/",
    "/health;/v1/models", "http://x/v1/models", "/./v1/models"])
def test_no_spelling_of_a_path_gets_around_the_key(path: str) -> None:
    async def run() -> RawClient:
        client = RawClient(build_app(FakeLLM(), section=KEYS), path, {})
        client.scope["method"] = "GET"
        client.scope["headers"].append((b"host", b"127.0.0.1/health"))
        await client.run()
        return client
    assert asyncio.run(run()).sent[0]["status"] in (401, 404)


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared, original = [], hmac.compare_digest

    def compare(left: bytes, right: bytes) -> bool:
        compared.append((left, right))
        return original(left, right)

    app = build_app(FakeLLM(), section=KEYS)
    monkeypatch.setattr(auth.hmac, "compare_digest", compare)
    call(app, "GET", "/v1/models", "alice-key-1")
    assert len(compared) == 3 and all(len(side) == 32 for pair in compared for side in pair)


def test_callers_with_different_keys_never_share_the_cache() -> None:
    llm = FakeLLM()
    app = build_app(llm, section=KEYS)

    def salt(key: str, **fields: Any) -> str:
        asyncio.run(post(app, "/v1/chat/completions", {**CHAT, **fields}, authorization=f"Bearer {key}"))
        asyncio.run(post(app, "/v1/completions", {"prompt": "x", "max_tokens": 1, **fields},
                         authorization=f"Bearer {key}"))
        assert llm.calls[-1]["cache_salt"] == llm.calls[-2]["cache_salt"]
        return str(llm.calls[-1]["cache_salt"])

    salts = [salt("alice-key-1"), salt("bob-key-22"), salt("alice-key-1", cache_salt="x"),
             salt("bob-key-22", cache_salt="x"), salt("alice-key-1", cache_salt=salt("bob-key-22"))]
    assert len(set(salts)) == 5 and salt("alice-key-1") == salts[0]
    assert not any("key" in one for one in salts)


def test_the_cache_is_shared_between_keys_when_asked() -> None:
    llm = FakeLLM()
    app = build_app(llm, section=msgspec.structs.replace(KEYS, share_prefix_cache=True))
    for key, fields in (("alice-key-1", {}), ("bob-key-22", {}), ("bob-key-22", {"cache_salt": "x"})):
        asyncio.run(post(app, "/v1/chat/completions", {**CHAT, **fields}, authorization=f"Bearer {key}"))
    assert [one["cache_salt"] for one in llm.calls] == ["", "", "/x"]


def test_without_keys_a_cache_salt_is_what_the_request_says() -> None:
    llm = FakeLLM()
    app = build_app(llm)
    for fields, expected in (({}, ""), ({"cache_salt": "a"}, "/a")):
        assert asyncio.run(post(app, "/v1/chat/completions", {**CHAT, **fields})).status_code == 200
        assert llm.calls[-1]["cache_salt"] == expected
    for bad in ("", "x" * 129, "é", "a\n", 3):
        response = asyncio.run(post(app, "/v1/chat/completions", {**CHAT, "cache_salt": bad}))
        assert response.status_code == 400 and response.json()["error"]["param"] == "cache_salt"


def test_keys_are_never_shown() -> None:
    assert "alice" not in repr(KEYS) and "alice" not in str(KEYS) and "<2 hidden>" in repr(KEYS)
    with pytest.raises(ConfigError) as error:
        FrontendSection(api_keys=("se cret key",))
    assert "cret" not in str(error.value)


def test_pause_lets_new_requests_wait_until_resume() -> None:
    llm = FakeLLM()
    app = build_app(llm, section=KEYS)

    async def run() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test",
                                     headers={"authorization": "Bearer root-key-333"}) as client:
            assert (await client.post("/pause")).json() == {"status": "paused", "is_paused": True}
            waiting = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT))
            await asyncio.sleep(0.02)
            assert not waiting.done()
            assert (await client.get("/load")).json()["server_load"] == 1
            assert (await client.post("/resume")).json()["is_paused"] is False
            return await waiting
    assert asyncio.run(run()).status_code == 200


def test_reset_prefix_cache_reaches_the_engine() -> None:
    llm = FakeLLM()
    assert call(build_app(llm, section=KEYS), "POST", "/reset_prefix_cache", "root-key-333").status_code == 200
    assert llm.num_resets == 1
    answer = call(build_app(llm, section=KEYS), "POST", "/dump_recording", "root-key-333")
    assert answer.json() == {"path": "/run/flight.msgpack"}
    assert call(build_app(llm, section=KEYS), "POST", "/dump_recording").status_code in (401, 403)


def test_only_pages_of_allowed_origins_may_call() -> None:
    app = build_app(FakeLLM(), section=FrontendSection(api_keys=KEYS.api_keys, allowed_origins=("https://a.example",)))
    preflight = {"origin": "https://a.example", "access-control-request-method": "POST",
                 "access-control-request-headers": "authorization,x-y"}
    response = call(app, "OPTIONS", "/v1/chat/completions", None, **preflight)
    assert response.status_code == 204
    assert response.headers["access-control-allow-origin"] == "https://a.example"
    assert response.headers["access-control-allow-headers"] == "authorization,x-y"
    assert "POST" in response.headers["access-control-allow-methods"]
    refused = call(app, "OPTIONS", "/v1/chat/completions", None, **{**preflight, "origin": "https://b.example"})
    assert "access-control-allow-origin" not in refused.headers
    answered = call(app, "GET", "/v1/models", None, origin="https://a.example")
    assert answered.status_code == 401 and answered.headers["access-control-allow-origin"] == "https://a.example"
    default = call(build_app(FakeLLM()), "GET", "/v1/models", None, origin="https://a.example")
    assert not any(name.startswith("access-control") for name in default.headers)
    with pytest.raises(ConfigError, match="named origins"):
        FrontendSection(allowed_origins=("*",), allow_credentials=True)


def test_a_short_key_is_for_clients_only() -> None:
    """Tutorials start servers with keys like EMPTY; control routes need one that nobody guesses."""
    assert FrontendSection(api_keys=("EMPTY",)).api_keys == ("EMPTY",)
    with pytest.raises(ConfigError, match="8 to 256"):
        FrontendSection(admin_api_keys=("EMPTY",))
    with pytest.raises(ConfigError, match="1 to 256"):
        FrontendSection(api_keys=("",))
