"""A flight recording of running processes, dumped on demand, makes every decision again."""
from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from engine_core import replay
from frontend import AsyncLLM, SamplingParams

REFERENCE = {"num_gpu_blocks_override": 512, "attention_backend": "reference", "num_threads": 1, "log_level": "warning"}


async def one(llm: AsyncLLM, prompt: list[int], **params: object) -> None:
    async for _ in llm.generate(prompt, SamplingParams(temperature=0, ignore_eos=True, **params)):
        pass


def test_a_recording_of_real_processes_replays(tiny_model: str, temp: str, tmp_path: Path,
                                               capsys: pytest.CaptureFixture[str]) -> None:
    async def run() -> str:
        options = {**REFERENCE, "num_gpu_blocks_override": 12, "block_size": 8, "num_speculative_tokens": 3}
        async with AsyncLLM(tiny_model, flight_recorder_dir=str(tmp_path), **options) as llm:
            await asyncio.gather(*(one(llm, [i, 5, 6] * 4, max_tokens=24) for i in range(6)))
            path = await llm.dump_recording()
            await one(llm, [1, 2, 3], max_tokens=4)         # it goes on
            return path
    path = asyncio.run(run())
    assert Path(path).parent == tmp_path and os.stat(path).st_mode & 0o777 == 0o600
    assert replay.main([path]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["equal"] is True and told["plans"] > 20


def test_without_a_recorder_the_command_says_so(tiny_model: str, temp: str) -> None:
    async def run() -> None:
        async with AsyncLLM(tiny_model, **{**REFERENCE, "flight_recorder": False}) as llm:
            with pytest.raises(ValueError, match="no flight recorder"):
                await llm.dump_recording()
    asyncio.run(run())
