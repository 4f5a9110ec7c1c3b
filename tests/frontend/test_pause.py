"""AsyncLLM.pause: whoever asks meanwhile waits, and hears when the engine ends."""
from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from frontend.async_llm import AsyncLLM
from frontend.openai.app import build_app
from ipc.config import FrontendSection
from ipc.errors import EngineDeadError
from tests.frontend.fake_llm import FakeLLM


def test_waiting_ends_with_resume_or_with_the_engine() -> None:
    async def run() -> None:
        llm = AsyncLLM("any")
        client: Any = SimpleNamespace(dead=None)
        llm._client = client
        llm.pause()
        llm.pause()
        assert llm.is_paused
        waiting = asyncio.create_task(llm._wait_resumed())
        await asyncio.sleep(0.01)
        assert not waiting.done()
        llm.resume()
        await waiting
        assert not llm.is_paused
        llm.pause()
        waiting = asyncio.create_task(llm._wait_resumed())
        await asyncio.sleep(0.01)
        client.dead = EngineDeadError("worker 0 was killed")
        with pytest.raises(EngineDeadError, match="worker 0 was killed"):
            await waiting
    asyncio.run(run())


def test_sleep_over_http_has_a_level_and_an_admin_key() -> None:
    llm = FakeLLM()
    app = build_app(llm, section=FrontendSection(admin_api_keys=("admin-key-0",)))
    key = {"authorization": "Bearer admin-key-0"}

    async def call(method: str, path: str, headers: dict[str, str] = key) -> tuple[int, Any]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            response = await client.request(method, path, headers=headers)
            return response.status_code, response.json()

    async def run() -> None:
        assert (await call("POST", "/sleep", {}))[0] == 401 and llm.sleep_level == 0
        status, body = await call("POST", "/sleep?level=3")
        assert status == 400 and body["error"]["param"] == "level"
        assert await call("POST", "/sleep?level=2") == (200, {"is_sleeping": True}) and llm.sleep_level == 2
        status, body = await call("POST", "/sleep")
        assert status == 400 and "sleeps already" in body["error"]["message"]
        assert await call("GET", "/is_sleeping") == (200, {"is_sleeping": True})
        assert await call("POST", "/wake_up") == (200, {"is_sleeping": False})
        assert await call("GET", "/is_sleeping") == (200, {"is_sleeping": False})
    asyncio.run(run())
