"""AsyncLLM.pause: whoever asks meanwhile waits, and hears when the engine ends."""
from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from frontend.async_llm import AsyncLLM
from ipc.errors import EngineDeadError


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
