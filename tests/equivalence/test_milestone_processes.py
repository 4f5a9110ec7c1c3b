"""Five requests through the real three processes, in four configurations that stress the scheduler: every greedy output
equals the request alone, and an idle engine has every block free. The same in one process is test_milestone.py."""
from __future__ import annotations

import asyncio
from typing import Any

import pytest

from frontend import AsyncLLM, RequestOutput, SamplingParams
from tests.conftest import RunningEngine
from tests.processes.tools import wait_idle

pytestmark = pytest.mark.timeout(120)

BLOCK_SIZE = 8
SHARED = list(b"A system prompt.")              # two full blocks
PROMPTS = [list(b"One."), [*SHARED, *b" Say two."], list(b"A third request, longer than the pool's share of it."),
           [*SHARED, *b" Say four, please."], list(b"Five is here!")]
MAX_TOKENS = [40, 24, 17, 30, 9]
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "small-chunks-and-budget": dict(max_num_batched_tokens=12, long_prefill_token_threshold=5),
    "12-blocks-recompute": dict(num_gpu_blocks_override=12, preemption_mode="recompute"),
    "12-blocks-swap": dict(num_gpu_blocks_override=12, preemption_mode="swap", swap_space="1MiB"),
    "no-cache-two-seats": dict(enable_prefix_caching=False, max_num_seqs=2),
}


async def finish(llm: AsyncLLM, index: int) -> RequestOutput:
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS[index], ignore_eos=True)
    async for output in llm.generate(PROMPTS[index], params, output_kind="final"):
        assert output.finished and output.outputs[0].finish_reason == "length"
    return output


async def one_by_one(llm: AsyncLLM) -> list[list[int]]:
    outputs = []
    for index in range(len(PROMPTS)):
        await llm.reset_prefix_cache()
        outputs.append((await finish(llm, index)).outputs[0].token_ids)
    return outputs


@pytest.fixture(scope="module")
def alone(engine: RunningEngine) -> list[list[int]]:
    """Each request by itself in an engine of the reference backend, with nothing cached."""
    return engine.loop.run(one_by_one(engine.llm))


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_every_output_equals_the_request_alone(name: str, tiny_model: str, alone: list[list[int]], temp: str) -> None:
    async def run() -> tuple[list[list[int]], dict[str, Any], int]:
        options = dict(block_size=BLOCK_SIZE, kv_cache_memory="1MiB", attention_backend="cpu", num_threads=1)
        async with AsyncLLM(tiny_model, **(options | CONFIGURATIONS[name])) as llm:
            results = await asyncio.gather(*(finish(llm, index) for index in range(len(PROMPTS))))
            outputs, stats = [result.outputs[0].token_ids for result in results], await wait_idle(llm)
            again = await finish(llm, 3)                # after all, with whatever is still cached
            assert again.outputs[0].token_ids == outputs[3]
            await wait_idle(llm)
            return outputs, stats, again.num_cached_tokens

    outputs, stats, num_cached = asyncio.run(run())
    assert [len(tokens) for tokens in outputs] == MAX_TOKENS
    assert outputs == alone
    assert len({tuple(tokens[:9]) for tokens in outputs}) == len(PROMPTS)       # the model is no constant
    if "12-blocks" in name:
        assert stats["num_preemptions"] > 0
        assert (stats["num_swapped_out_blocks"] > 0) == ("swap" in name)
        assert stats["num_free_host_slots"] == (1 << 20) // (2 * 2 * BLOCK_SIZE * 2 * 16 * 4) * ("swap" in name)
    if name == "no-cache-two-seats":
        assert stats["num_hit_tokens"] == stats["num_adopted_tokens"] == 0
        assert num_cached == 0
    elif name == "small-chunks-and-budget":
        assert num_cached >= 2 * BLOCK_SIZE
