"""A flight recording of running processes, dumped on demand, makes every decision again."""
from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from engine_core import replay
from frontend import AsyncLLM, SamplingParams

ROOT = Path(__file__).resolve().parents[2]
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


def test_the_steps_before_a_kill_are_saved_and_shown(tiny_model: str, temp: str, tmp_path: Path) -> None:
    async def run() -> int:
        async with AsyncLLM(tiny_model, flight_recorder_dir=str(tmp_path), **REFERENCE) as llm:
            running = [asyncio.create_task(one(llm, [i, 5, 6], max_tokens=200)) for i in range(4)]
            while len(llm.timeline.window()) < 20:
                await asyncio.sleep(0.01)
            os.kill(llm.pids[1], signal.SIGKILL)
            async with await AsyncLLM.attach_to(llm.run_dir) as other:      # it sees what was before it
                await asyncio.gather(*running)
                while len(other.timeline.window()) < len(llm.timeline.window()):
                    await asyncio.sleep(0.01)
                assert other.timeline.window()[0].tolist()[:3] == llm.timeline.window()[0].tolist()[:3]
            return len(llm.timeline.window())
    assert asyncio.run(run()) >= 200
    [path] = tmp_path.glob("threefold-steps-*.msgpack")
    done = subprocess.run([sys.executable, str(ROOT / "launch.py"), "profile", "--steps", str(path), "--trace",
                           str(tmp_path / "trace.json")], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "scheduler" in done.stdout and "last steps" in done.stdout
    assert "Then: worker 0 (pid" in done.stdout and "ended with signal SIGKILL" in done.stdout
    assert len(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) > 100


def test_without_a_recorder_the_command_says_so(tiny_model: str, temp: str) -> None:
    async def run() -> None:
        async with AsyncLLM(tiny_model, **{**REFERENCE, "flight_recorder": False}) as llm:
            with pytest.raises(ValueError, match="no flight recorder"):
                await llm.dump_recording()
    asyncio.run(run())
