"""int8 and fp8 pools through core and worker: the compiled model gives each request the same tokens alone, in any
batch, in both loops, after recompute, swap and reuse of a part of a block; every backend gives those of the reference.
"""
from __future__ import annotations

import functools
from typing import Any

import pytest

from ipc.messages import FINISH_LENGTH
from tests.engine_core.tools import Engine
from tests.equivalence.test_milestone import BLOCK_SIZE, CONFIGURATIONS, MAX_MODEL_LEN, MAX_TOKENS, PROMPTS
from tests.equivalence.tiny_llama import make_tiny_llama
from worker.attention.registry import get_backend
from worker.kv_pool import KVPool
from worker.kv_quant import KV_DTYPES
from worker.model_runner import ModelRunner
from worker.models.flat_model import FlatModel

POOLS = ("int8", "fp8")


@functools.cache
def flat_model() -> FlatModel:
    """Of widths that the compiled kernels take."""
    return make_tiny_llama(MAX_MODEL_LEN, seed=4, intermediate_size=64)


@functools.cache
def model_of(backend_name: str) -> Any:
    if backend_name != "jit":
        return flat_model()
    pytest.importorskip("numba")
    from worker.jit.model import JitModel
    from worker.linear.source import ModelSource
    return JitModel(ModelSource(flat_model()))


class QuantizedEngine(Engine):
    """The real worker over a pool of this dtype."""

    def __init__(self, backend_name: str, pool: str, *, num_blocks: int, num_host_blocks: int = 0,
                 **options: Any) -> None:
        super().__init__(num_blocks, BLOCK_SIZE, num_host_blocks=num_host_blocks, max_model_len=MAX_MODEL_LEN,
                         partial=True, **options)
        model, backend = model_of(backend_name), get_backend(backend_name)
        caches = KVPool(backend, num_blocks, BLOCK_SIZE, model.kv_spec(), KV_DTYPES[pool])
        self.worker: ModelRunner = ModelRunner(model, backend, caches, num_host_blocks, seats=self.rows.seats,
                                  max_tokens=self.core.config.max_num_batched_tokens, max_model_len=MAX_MODEL_LEN,
                                  eos_token_ids=[])


@functools.cache
def alone(backend_name: str, pool: str) -> dict[int, list[int]]:
    found = {}
    for request_id, prompt in PROMPTS.items():
        engine = QuantizedEngine(backend_name, pool, num_blocks=64, caching=False)
        engine.add(request_id, prompt, max_tokens=MAX_TOKENS[request_id])
        engine.run()
        found[request_id] = engine.tokens[request_id]
    return found


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_every_output_of_the_compiled_kernels_equals_the_request_alone(name, is_async, pool):
    engine = QuantizedEngine("jit", pool, async_scheduling=is_async, **CONFIGURATIONS[name])
    for request_id, prompt in PROMPTS.items():
        engine.add(request_id, prompt, max_tokens=MAX_TOKENS[request_id])
    engine.run()
    assert engine.tokens == alone("jit", pool)
    assert all(end.reason == FINISH_LENGTH for end in engine.ends.values())
    assert (engine.stats.num_preemptions > 0) == name.startswith("12-blocks")
    assert (engine.stats.num_swapped_out_blocks > 0) == name.endswith("swap")
    engine.assert_idle()


@pytest.mark.parametrize("pool", POOLS)
def test_all_backends_give_the_references_tokens(pool):
    expected = alone("reference", pool)
    assert alone("cpu", pool) == alone("jit", pool) == expected
    assert sum(len(set(tokens)) for tokens in expected.values()) > 30


def test_the_codes_take_part():
    """Else a pool that is not read would pass: the two formats round differently, which shows in some output."""
    assert alone("reference", "int8") != alone("reference", "fp8")
