"""--kv-cache-dtype reaches the pool of the worker, on the compiled kernels and on the torch ones."""
from __future__ import annotations

import asyncio
from typing import Any

import pytest

from frontend import AsyncLLM, SamplingParams

pytestmark = pytest.mark.timeout(120)
LAYERS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, MEMORY = 2, 2, 16, 16, 1 << 20     # of the tiny model


@pytest.mark.parametrize("backend, kv_cache_dtype", [("auto", "int8"), ("auto", "fp8"), ("cpu", "fp8_e4m3")])
def test_a_quantised_pool_holds_more_tokens_and_serves(backend: str, kv_cache_dtype: str, tiny_model: str,
                                                       temp: str) -> None:
    async def run() -> tuple[dict[str, Any], list[int]]:
        async with AsyncLLM(tiny_model, block_size=BLOCK_SIZE, kv_cache_memory=f"{MEMORY}", num_threads=1,
                            attention_backend=backend, kv_cache_dtype=kv_cache_dtype) as llm:
            params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
            prompt = list(b"A prompt of more than one block.")
            outputs = [output async for output in llm.generate(prompt, params, output_kind="final")]
            return await llm.stats(), outputs[-1].outputs[0].token_ids

    stats, tokens = asyncio.run(run())
    block_bytes = LAYERS * 2 * BLOCK_SIZE * KV_HEADS * (HEAD_DIM + 2)
    assert stats["num_blocks"] == MEMORY // block_bytes - 2 and len(tokens) == 12
