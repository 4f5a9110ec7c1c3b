"""Core and worker are killed in the middle of a swap: what is in host memory and what is on its way is lost or kept as
the one that lives knows it, and streams end with exactly the tokens of an undisturbed run."""
from __future__ import annotations

import asyncio

import pytest

from frontend import AsyncLLM
from tests.processes.planting import Plant
from tests.processes.test_restarts import REQUESTS, collect
from tests.processes.tools import HARD_TIMEOUT_S, OPTIONS, assert_nothing_left, wait_idle

pytestmark = pytest.mark.timeout(90)

# Three sequences of up to 20 blocks each.
SWAPPING = {**OPTIONS, "attention_backend": "reference", "num_gpu_blocks_override": 44, "preemption_mode": "swap",
            "swap_space": 64 << 20}
DEATHS = {  # who: index in pids, module, class, method whose second argument is the plan, when
    "a worker that has moved the blocks": (1, "worker.batch", "BatchBuilder", "apply", "before"),
    "a core that has not sent the plan": (2, "ipc.sockets", "Link", "send", "before"),
    "a core that has sent the plan": (2, "ipc.sockets", "Link", "send", "after"),
}


@pytest.mark.parametrize("kind", ["swap_out", "swap_in"])
@pytest.mark.parametrize("who", DEATHS)
def test_streams_survive_a_death_during_a_swap(who: str, kind: str, tiny_model: str, temp: str, plant: Plant) -> None:
    index, module, owner, method, when = DEATHS[who]
    plant(module, owner, method, **{when: plant.death(f"getattr(arguments[1], {kind!r}, None)")})

    async def run() -> None:
        async with AsyncLLM(tiny_model, **SWAPPING) as llm:
            whole = [await collect(llm, prompt, params, asyncio.Event()) for prompt, params in REQUESTS]
            num_slots = (await llm.stats())["num_free_host_slots"]
            pids = list(llm.pids)
            assert not plant.marker.exists()            # one after the other they fit
            streams = [collect(llm, prompt, params, asyncio.Event()) for prompt, params in REQUESTS]
            assert await asyncio.wait_for(asyncio.gather(*streams), HARD_TIMEOUT_S) == whole
            assert plant.marker.exists()
            async with asyncio.timeout(HARD_TIMEOUT_S):
                while llm.pids[index] == pids[index]:   # told by the supervisor, after the streams went on
                    await asyncio.sleep(0.02)
            assert [new == old for new, old in zip(llm.pids, pids)] == [i != index for i in range(3)]
            assert (await wait_idle(llm))["num_free_host_slots"] == num_slots
    asyncio.run(run())
    assert_nothing_left(temp)
