"""sleep and wake_up on real processes: memory goes and comes back, requests wait and go on as if nothing had been."""
from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from frontend import AsyncLLM, SamplingParams
from tests.processes.tools import OPTIONS, wait_idle

pytestmark = pytest.mark.timeout(120)

GREEDY = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


def resident_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


async def tokens_of(llm: AsyncLLM, prompt: str, started: asyncio.Event | None = None) -> list[int]:
    found: list[int] = []
    async for output in llm.generate(prompt, GREEDY, output_kind="delta"):
        found += output.outputs[0].token_ids
        if started is not None and len(found) > 5:
            started.set()
    return found


@pytest.mark.parametrize("level", [1, 2])
def test_requests_go_on_after_a_sleep(tiny_model: str, temp: str, level: int) -> None:
    async def run() -> None:
        options = {**OPTIONS, "attention_backend": "reference", "num_gpu_blocks_override": 20_000}
        async with AsyncLLM(tiny_model, **options) as llm:
            whole = await tokens_of(llm, "Count on")
            started = asyncio.Event()
            running = asyncio.create_task(tokens_of(llm, "Count on", started))
            await started.wait()
            before = resident_mib(llm.pids[1])
            await llm.sleep(level)
            assert await llm.is_sleeping() and not running.done()
            assert resident_mib(llm.pids[1]) < before
            with pytest.raises(ValueError, match="sleeps already"):
                await llm.sleep(level)
            waiting = asyncio.create_task(tokens_of(llm, "Or wait"))
            await asyncio.sleep(0.3)
            assert not waiting.done() and not running.done()
            await llm.wake_up()
            assert not await llm.is_sleeping()
            assert await running == whole
            assert await waiting == await tokens_of(llm, "Or wait")
            stats = await wait_idle(llm)
            assert stats["num_preemptions"] >= 1
            await llm.wake_up()                 # does nothing
    asyncio.run(run())


def test_a_core_that_ends_during_a_sleep_comes_back_awake(tiny_model: str, temp: str) -> None:
    async def run() -> None:
        async with AsyncLLM(tiny_model, **OPTIONS) as llm:
            whole = await tokens_of(llm, "Count on")
            await llm.sleep(2)
            waiting = asyncio.create_task(tokens_of(llm, "Count on"))
            await asyncio.sleep(0.1)
            os.kill(llm.pids[2], signal.SIGKILL)
            assert await asyncio.wait_for(waiting, 30) == whole
            assert not await llm.is_sleeping()
    asyncio.run(run())


def test_a_worker_that_is_stopped_while_it_sleeps_is_replaced_by_the_call_to_wake_up(tiny_model: str,
                                                                                      temp: str) -> None:
    """Nobody looked for an answer to anything but a plan: the call never returned."""
    async def run() -> None:
        async with AsyncLLM(tiny_model, **OPTIONS) as llm:
            await llm.sleep(1)
            os.kill(llm.pids[1], signal.SIGSTOP)
            await asyncio.wait_for(llm.wake_up(), 60)
            assert len(await tokens_of(llm, "Count on")) == 200
    asyncio.run(run())


def test_a_sleeping_worker_answers_the_calls_of_the_profiler(tiny_model: str, temp: str) -> None:
    async def run() -> None:
        async with AsyncLLM(tiny_model, **OPTIONS) as llm:
            await llm.sleep(1)
            await asyncio.wait_for(llm.start_profile(), 60)
            with pytest.raises(ValueError, match="records already"):
                await asyncio.wait_for(llm.start_profile(), 60)
            assert (await asyncio.wait_for(llm.stop_profile(), 60))["traceEvents"]
            assert await llm.is_sleeping()
            await llm.wake_up()
            assert len(await tokens_of(llm, "Count on")) == 200
    asyncio.run(run())
