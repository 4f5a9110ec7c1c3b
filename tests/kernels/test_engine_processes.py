"""The three processes with --attention-backend triton, whose kernels run in the interpreter on the CPU."""

from __future__ import annotations

import asyncio
import importlib.util

import pytest

from frontend import AsyncLLM
from tests.conftest import RunningEngine
from tests.equivalence.test_milestone_processes import MAX_TOKENS, finish
from tests.processes.tools import wait_idle

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
]
REQUESTS = (1, 3, 4)  # two share a prefix; the interpreter is slow


def test_the_milestones_requests_equal_the_reference_backends(
    tiny_model: str, engine: RunningEngine, temp: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small chunks beside decodes, in a pool that forces preemption. Only the worker imports Triton."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")  # numpy's, inside the interpreter

    async def alone(llm: AsyncLLM) -> list[list[int]]:
        return [(await finish(llm, index)).outputs[0].token_ids for index in REQUESTS]

    async def run() -> list[list[int]]:
        async with AsyncLLM(
            tiny_model,
            block_size=16,
            num_gpu_blocks_override=6,
            max_num_batched_tokens=12,
            attention_backend="triton",
            device="cpu",
            num_threads=1,
        ) as llm:
            results = await asyncio.gather(*(finish(llm, index) for index in REQUESTS))
            await wait_idle(llm)
            return [result.outputs[0].token_ids for result in results]

    outputs = asyncio.run(run())
    assert [len(tokens) for tokens in outputs] == [MAX_TOKENS[index] for index in REQUESTS]
    assert outputs == engine.loop.run(alone(engine.llm))


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_weights_are_narrow_in_the_torch_model_too(
    kind: str, tiny_model: str, engine: RunningEngine, temp: str
) -> None:
    """The reference of the narrow linears: eight bits give the float model's first tokens, four bits run."""
    async def run() -> list[int]:
        async with AsyncLLM(tiny_model, num_gpu_blocks_override=64, attention_backend="reference", device="cpu",
                            quantization=kind, num_threads=1) as llm:
            return (await finish(llm, 1)).outputs[0].token_ids

    tokens, full = asyncio.run(run()), engine.loop.run(finish(engine.llm, 1)).outputs[0].token_ids
    assert len(tokens) == len(full)
    assert tokens[:2] == full[:2] or kind == "int4"


def test_padded_static_steps_through_the_processes_give_the_same_tokens(
    tiny_model: str, engine: RunningEngine, temp: str
) -> None:
    """Batches made on the device, decodes padded, in the worker's own loop."""
    async def run() -> list[list[int]]:
        async with AsyncLLM(tiny_model, num_gpu_blocks_override=64, attention_backend="cpu", device="cpu",
                            cuda_graphs="static", max_num_batched_tokens=24, num_threads=1) as llm:
            results = await asyncio.gather(*(finish(llm, index) for index in REQUESTS))
            return [result.outputs[0].token_ids for result in results]

    async def alone() -> list[list[int]]:
        return [(await finish(engine.llm, index)).outputs[0].token_ids for index in REQUESTS]

    assert asyncio.run(run()) == engine.loop.run(alone())
