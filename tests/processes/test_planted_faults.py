"""`profile` names the cause: a delay is planted in one process of a real engine, and the sentence must name that one.
"""
from __future__ import annotations

import asyncio
import time
import types
from typing import Any

import pytest

from frontend import AsyncLLM, SamplingParams, request_stream
from frontend.cli.profile import Load, run_load
from frontend.step_report import analyse
from ipc.progress import MIN_SILENCE_S
from tests.processes.planting import Plant
from tests.processes.tools import OPTIONS

LOAD = Load(concurrency=4, requests=12, prompt_tokens=16, output_tokens=40)

SLEEP = "time.sleep(0.003)"


async def sentence(model: str, load: Load = LOAD) -> str:
    async with AsyncLLM(model, **OPTIONS) as llm:
        return analyse((await run_load(llm, load)).rows).verdict


def test_a_slow_scheduler_is_named(tiny_model: str, temp: str, plant: Plant) -> None:
    plant("engine_core.scheduler", "Scheduler", "schedule", before=SLEEP)
    assert asyncio.run(sentence(tiny_model)).startswith("The scheduler bounds it")


def test_a_slow_preparation_in_the_worker_is_named(tiny_model: str, temp: str, plant: Plant) -> None:
    plant("worker.batch", "BatchBuilder", "build", before=SLEEP)
    assert asyncio.run(sentence(tiny_model)).startswith("The worker's host side bounds it")


def test_a_slow_detokenizer_is_named(tiny_model: str, temp: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """AsyncLLM's frontend is this process. 3 ms a token, four requests at once: 12 ms a step."""
    make = request_stream.make_detokenizer

    def slowed(*arguments: Any) -> Any:
        detokenizer = make(*arguments)

        def feed(tokens: Any) -> str:
            time.sleep(0.003)
            return detokenizer.feed(tokens)

        return types.SimpleNamespace(feed=feed, flush=detokenizer.flush)

    monkeypatch.setattr(request_stream, "make_detokenizer", slowed)
    found = asyncio.run(sentence(tiny_model))
    assert found.startswith("The frontend bounds it") and "detokenizing" in found


def test_throttled_requests_are_named(tiny_model: str, temp: str) -> None:
    async def throttled() -> str:
        async with AsyncLLM(tiny_model, **OPTIONS) as llm:
            params = SamplingParams(max_tokens=2, ignore_eos=True)
            for number in range(12):
                async for _ in llm.generate([1 + number] * 8, params):
                    pass
                await asyncio.sleep(0.2)
            return analyse(llm.timeline.window()).verdict

    assert asyncio.run(throttled()).startswith("Requests bound it")


def test_a_profiler_that_takes_long_to_start_is_no_hang(tiny_model: str, temp: str, plant: Plant) -> None:
    """Its thread works for longer than an idle worker may owe an answer; the worker's loop turns meanwhile."""
    async def run() -> None:
        async with AsyncLLM(tiny_model, **OPTIONS) as llm:
            pids = llm.pids
            await asyncio.wait_for(llm.start_profile(), 60)
            assert llm.pids == pids
            await llm.stop_profile()
    plant("worker.profiler", "OperatorProfiler", "_load", before=f"time.sleep({MIN_SILENCE_S + 3})")
    asyncio.run(run())
