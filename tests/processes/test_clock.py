"""Moments that different processes stamped never contradict what must have happened first."""
from __future__ import annotations

import asyncio

import numpy as np
import pytest

from frontend import AsyncLLM, SamplingParams
from frontend.timeline import COLUMN
from tests.processes.tools import OPTIONS

# Each could not be before the one in front of it. The worker's and the core's own moments alternate.
CHAIN = ("plan_begin", "plan_end", "plan_sent", "worker_received", "worker_prepared", "worker_launched", "worker_done",
         "commit_begin", "commit_end", "outputs_sent", "received", "handled", "written")


def contradictions(rows: np.ndarray) -> list[str]:
    found = []
    for before, after in zip(CHAIN, CHAIN[1:]):
        wrong = rows[rows[:, COLUMN[after]] < rows[:, COLUMN[before]]]
        found += [f"step {row[COLUMN['step']]}: {after} before {before}" for row in wrong[:3]]
    previous, now = rows[:-1], rows[1:]
    for name, other in (("plan_begin", "plan_sent"), ("worker_received", "worker_done"),
                        ("commit_begin", "commit_end")):
        overlap = now[now[:, COLUMN[name]] < previous[:, COLUMN[other]]]
        found += [f"step {row[COLUMN['step']]}: {name} before the last step's {other}" for row in overlap[:3]]
    return found


async def watch(model: str, num_steps: int) -> tuple[int, list[str]]:
    """Run an engine for so many steps and look at every one of them."""
    async with AsyncLLM(model, **OPTIONS) as llm:
        params = SamplingParams(max_tokens=400, ignore_eos=True)
        seen = count = 0
        last = np.zeros((0, len(COLUMN)), np.int64)
        found: list[str] = []
        steps: list[int] = []
        while seen < num_steps:
            async for _ in llm.generate([1 + seen % 200] * 4, params, output_kind="final"):
                pass
            await asyncio.sleep(0)
            rows, count = llm.timeline.after(count)
            found += contradictions(np.concatenate([last, rows]))
            steps += rows[:, COLUMN["step"]].tolist()
            last, seen = rows[-1:], seen + len(rows)
        assert steps == list(range(steps[0], steps[0] + len(steps)))        # none is missing, none came twice
        return seen, found


def test_no_step_contradicts_causality(tiny_model: str, temp: str) -> None:
    seen, found = asyncio.run(watch(tiny_model, 3_000))
    assert seen >= 3_000 and found == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hundred_thousand_steps_do_not_contradict_causality(tiny_model: str, temp: str) -> None:
    seen, found = asyncio.run(watch(tiny_model, 100_000))
    assert seen >= 100_000 and found == []
