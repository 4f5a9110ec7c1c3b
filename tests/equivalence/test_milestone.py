"""Core and worker in one process, joined by the codec: five requests of different lengths, two of which share two
blocks, in four configurations that stress the scheduler, in both loops, on both attention backends. Every greedy output
equals the request alone, and idle means every block is free. Through real processes: test_milestone_processes.py.
"""
from __future__ import annotations

import collections
import functools
from typing import Any

import numpy as np
import pytest
import torch

from ipc.errors import FAULT
from ipc.messages import FINISH_ERROR, FINISH_LENGTH
from bench.simulation import VOCAB, over_the_wire
from tests.engine_core.tools import Engine
from tests.equivalence.tiny_llama import make_tiny_llama
from worker.attention.registry import get_backend
from worker.kv_pool import KVPool
from worker.model_runner import ModelRunner, Step
from worker.models.flat_model import FlatModel
from worker.spec_decode.ngram import NgramDrafter

BLOCK_SIZE, MAX_MODEL_LEN = 4, 64
SHARED = [3, 1, 4, 1, 5, 9, 2, 6]               # two full blocks
PROMPTS = {1: [7, 7, 8], 2: [*SHARED, 40, 41, 42], 3: [(11 * i) % VOCAB for i in range(17)], 4: [*SHARED, 33],
           5: [2] * 6}
MAX_TOKENS = {1: 24, 2: 14, 3: 11, 4: 19, 5: 8}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "small-chunks-and-budget": dict(num_blocks=64, max_num_batched_tokens=7, long_prefill_token_threshold=3),
    "12-blocks-recompute": dict(num_blocks=12),
    "12-blocks-swap": dict(num_blocks=12, num_host_blocks=24, preemption_mode="swap"),
    "no-cache-two-seats": dict(num_blocks=64, caching=False, max_num_seqs=2),
    "three-plans-in-flight": dict(num_blocks=64, max_plans_in_flight=3),
    "drafts": dict(num_blocks=64, num_speculative_tokens=3),
    "12-blocks-drafts-swap": dict(num_blocks=12, num_host_blocks=24, preemption_mode="swap", num_speculative_tokens=2),
}
pytestmark = pytest.mark.usefixtures("one_thread")


@functools.cache
def tiny_model() -> FlatModel:
    return make_tiny_llama(MAX_MODEL_LEN, seed=3)


class Oracle(NgramDrafter):
    """Drafts that are right for a while: what the request says alone, with its last token changed."""

    def __init__(self, backend_name: str, num_tokens: int) -> None:
        super().__init__(num_tokens, 3, 1)
        self.outputs = {tuple(PROMPTS[i]): tokens for i, tokens in alone(backend_name).items()}

    def propose(self, tokens: np.ndarray) -> np.ndarray:
        for prompt, outputs in self.outputs.items():
            if tuple(tokens[:len(prompt)].tolist()) == prompt:
                found = np.array(outputs[len(tokens) - len(prompt):][:self.num_tokens], np.int32)
                found[-1:] = (found[-1:] + 1) % VOCAB
                return found
        return super().propose(tokens)


class RealEngine(Engine):
    """An Engine whose worker is the real one."""

    def __init__(self, backend_name: str, *, num_blocks: int, num_host_blocks: int = 0, graphs: str = "off",
                 block_size: int = BLOCK_SIZE, is_resident: bool = False, **options: Any) -> None:
        super().__init__(num_blocks, block_size, num_host_blocks=num_host_blocks, max_model_len=MAX_MODEL_LEN,
                         partial=True, **options)
        model, backend = tiny_model(), get_backend(backend_name)
        num_drafts = self.core.config.num_speculative_tokens
        pool = KVPool(backend, num_blocks, block_size, model.kv_spec(), torch.float32)
        self.worker = ModelRunner(model, backend, pool, num_host_blocks, seats=self.rows.seats,
                                  max_tokens=self.core.config.max_num_batched_tokens, max_model_len=MAX_MODEL_LEN,
                                  eos_token_ids=[], graphs=graphs, is_resident=is_resident,
                                  drafter=Oracle(backend_name, num_drafts) if num_drafts else None)


class OverlappingEngine(RealEngine):
    """As the worker's loop does it: a plan is launched before the one in front of it is finished."""

    def run(self, limit: int = 1000) -> int:
        launched: collections.deque[Step] = collections.deque()
        for count in range(limit):
            while self.core.can_plan() and (plan := self.core.plan()) is not None:
                self.core.plan_sent(0)
                launched.append(self.worker.launch(over_the_wire(plan), 0, lambda: self._finish(launched, 0)))
                self._finish(launched, 1)
            if not launched:
                self.take()
                return count
            self._finish(launched, 0)
        raise AssertionError(f"not idle after {limit} steps")

    def _finish(self, launched: collections.deque[Step], left: int) -> None:
        while len(launched) > left:
            self.commit(over_the_wire(self.worker.finish(launched.popleft())))


@functools.cache
def alone(backend_name: str) -> dict[int, list[int]]:
    """Each request by itself, nothing cached, nothing in chunks."""
    found = {}
    for request_id, prompt in PROMPTS.items():
        engine = RealEngine(backend_name, num_blocks=64, caching=False)
        engine.add(request_id, prompt, max_tokens=MAX_TOKENS[request_id])
        engine.run()
        found[request_id] = engine.tokens[request_id]
    return found


@pytest.mark.parametrize("backend_name", ["reference", "cpu"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_every_output_equals_the_request_alone(name, is_async, backend_name):
    engine = RealEngine(backend_name, async_scheduling=is_async, **CONFIGURATIONS[name])
    for request_id, prompt in PROMPTS.items():
        engine.add(request_id, prompt, max_tokens=MAX_TOKENS[request_id])
    engine.run()
    assert engine.tokens == alone(backend_name)
    assert all(end.reason == FINISH_LENGTH for end in engine.ends.values())
    assert (engine.stats.num_preemptions > 0) == name.startswith("12-blocks")
    assert (engine.stats.num_swapped_out_blocks > 0) == name.endswith("swap")
    assert (engine.stats.num_accepted_tokens > 0) == ("drafts" in name)
    assert (engine.stats.num_hit_tokens + engine.stats.num_adopted_tokens >= 8) == (name != "no-cache-two-seats")
    engine.assert_idle()


@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.parametrize("backend_name, kind", [("cpu", RealEngine), ("reference", OverlappingEngine),
                                                ("cpu", OverlappingEngine)])
def test_padded_static_steps_give_the_same_tokens(backend_name, kind, name):
    """Batches made on the device, decodes padded with rows of slot -1 and length 0; results read a step late."""
    engine = kind(backend_name, async_scheduling=kind is OverlappingEngine, graphs="static", **CONFIGURATIONS[name])
    for request_id, prompt in PROMPTS.items():
        engine.add(request_id, prompt, max_tokens=MAX_TOKENS[request_id])
    engine.run()
    assert engine.tokens == alone(backend_name)
    engine.assert_idle()


@pytest.mark.parametrize("params", [dict(temperature=0.8), dict(frequency_penalty=0.7), dict(min_tokens=5)])
def test_rows_that_need_the_host_give_the_same_tokens_beside_a_step_in_flight(params):
    """Some rows of the batch draw or have options, the others are sampled on the device until those come."""
    outputs = []
    for kind, graphs in ((RealEngine, "off"), (OverlappingEngine, "static")):
        engine = kind("cpu", num_blocks=64, async_scheduling=True, graphs=graphs)
        for request_id, prompt in PROMPTS.items():
            engine.add(request_id, prompt, max_tokens=MAX_TOKENS[request_id], **(params if request_id == 4 else {}))
        engine.run()
        outputs.append(dict(engine.tokens))
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_requests_that_come_while_others_run_equal_the_requests_alone(is_async):
    """One at a time, every few steps, twice: the second round finds the first in the cache."""
    engine = RealEngine("cpu", num_blocks=14, async_scheduling=is_async, max_num_batched_tokens=9)
    waiting = [(round_id * 10 + request_id, prompt) for round_id in (0, 1) for request_id, prompt in PROMPTS.items()]
    while waiting or engine.core.can_plan() or engine.in_flight:
        if waiting and engine.core.step % 3 == 0:
            request_id, prompt = waiting.pop(0)
            engine.add(request_id, prompt, max_tokens=MAX_TOKENS[request_id % 10])
        while engine.core.can_plan() and (plan := engine.core.plan()) is not None:
            engine.core.plan_sent(0)
            engine.in_flight.append(plan)
        if engine.in_flight:
            engine.finish_step()
    expected = alone("cpu")
    assert engine.tokens == {request_id: expected[request_id % 10]
                             for request_id in engine.tokens} and len(engine.tokens) == 10
    engine.assert_idle()


def test_both_backends_give_the_same_tokens():
    assert alone("reference") == alone("cpu")


def test_the_model_of_these_tests_reads_its_cache():
    """Else wrong keys and values would not show: another first token gives another output."""
    outputs = []
    for first in (3, 4):
        engine = RealEngine("reference", num_blocks=64)
        engine.add(1, [first, *SHARED[1:], 33], max_tokens=19)
        engine.run()
        outputs.append(engine.tokens[1])
    assert outputs[0] == alone("reference")[4] != outputs[1]
    assert all(len(set(tokens)) > 3 for tokens in alone("reference").values())


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_values_that_are_not_finite_end_their_request_and_leave_the_others_exact(is_async):
    """The embedding of one token is NaN."""
    expected = alone("cpu")
    model = tiny_model()
    clean = model.embed_tokens.detach().clone()
    try:
        with torch.no_grad():
            model.embed_tokens[49] = float("nan")
        engine = RealEngine("cpu", num_blocks=64, async_scheduling=is_async)
        for request_id in (1, 2, 4):
            engine.add(request_id, PROMPTS[request_id], max_tokens=MAX_TOKENS[request_id])
        engine.add(9, [*SHARED, 1, 49, 2], max_tokens=9)
        engine.run()
    finally:
        with torch.no_grad():
            model.embed_tokens.copy_(clean)
    assert (engine.ends[9].reason, engine.ends[9].error_code) == (FINISH_ERROR, FAULT) and engine.tokens[9] == []
    assert {i: engine.tokens[i] for i in (1, 2, 4)} == {i: expected[i] for i in (1, 2, 4)}
    assert engine.stats.num_failed_steps == 0
    engine.assert_idle()
