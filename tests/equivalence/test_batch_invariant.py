"""--batch-invariant: what the compiled kernels compute for a request has the same bits in every schedule as alone.

Random schedules of core and worker: size of chunks and budget, seats, who is there together and since when, both loops,
one to three threads, a pool that forces preemption by recompute or by swap, prefix cache on and off. Compared are the
logits of every sampled position, bit for bit, and the tokens, greedy and drawn; in each form of the weights, over
pools of float32 and of int8.
"""
from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch

pytest.importorskip("numba")

from bench.simulation import VOCAB  # noqa: E402
from ipc.messages import FINISH_LENGTH  # noqa: E402
from tests.engine_core.tools import Engine  # noqa: E402
from tests.equivalence.tiny_llama import make_tiny_llama  # noqa: E402
from worker.batch import Batch  # noqa: E402
from worker.jit.model import JitModel  # noqa: E402
from worker.jit.team import get_team  # noqa: E402
from worker.attention.jit import JitBackend  # noqa: E402
from worker.kv_pool import KVPool  # noqa: E402
from worker.linear.source import ModelSource  # noqa: E402
from worker.model_runner import ModelRunner  # noqa: E402
from worker.models.flat_model import FlatModel  # noqa: E402
from worker.sampling.step import StepResult  # noqa: E402

FORMS = ("none", "int8", "int4")                # of the weights
POOLS = {"float32": torch.float32, "int8": torch.int8}
NUM_SCHEDULES, NUM_MORE = 34, 200               # of each form and pool: 204 and 1,200 together
MAX_MODEL_LEN = 352
Spec = tuple[list[int], dict[str, Any]]         # prompt, sampling parameters
pytestmark = pytest.mark.usefixtures("one_thread")


@functools.cache
def flat_model() -> FlatModel:
    """Three query heads to a key head."""
    return make_tiny_llama(MAX_MODEL_LEN, seed=4, hidden_size=96, intermediate_size=160, num_heads=6, head_dim=16,
                           scale=12.0)


@functools.cache
def compiled(form: str, num_threads: int) -> JitModel:
    return JitModel(ModelSource(flat_model(), form), team=get_team(num_threads))


@functools.cache
def specs() -> list[Spec]:
    """What requests are drawn from: short and long prompts, some with a common beginning; half of them draw."""
    rng = random.Random(0)
    shared = [[rng.randrange(VOCAB) for _ in range(length)] for length in (24, 90)]
    found: list[Spec] = []
    for number in range(24):
        length = rng.choice([rng.randint(1, 8), rng.randint(9, 60), rng.randint(61, 150)]) if number else 300
        prompt = [rng.randrange(VOCAB) for _ in range(length)]
        if number % 3 == 1:
            prompt = shared[number % 2] + prompt[:rng.randint(1, 40)]
        found.append((prompt, dict(max_tokens=rng.randint(1, 20), temperature=(number % 2) * 0.9, seed=number)))
    return found


class BitsEngine(Engine):
    """The real worker on the compiled model. `bits`: the logits behind each output token, (request, index) -> bytes."""

    def __init__(self, model: Any, pool: torch.dtype, num_blocks: int, block_size: int, num_host_blocks: int = 0,
                 **options: Any) -> None:
        super().__init__(num_blocks, block_size, num_host_blocks=num_host_blocks, max_model_len=MAX_MODEL_LEN,
                         **options)
        backend = JitBackend(model.team)
        self.worker: ModelRunner = ModelRunner(
            model, backend, KVPool(backend, num_blocks, block_size, model.kv_spec(), pool), num_host_blocks,
            seats=self.rows.seats, max_tokens=self.core.config.max_num_batched_tokens, max_model_len=MAX_MODEL_LEN,
            eos_token_ids=[])
        self.bits: dict[tuple[int, int], bytes] = {}
        self._sample, self._compute = self.worker.sampler.run, self.worker.sampler.compute_logits
        self._keys: list[tuple[int, int]] = []
        self.worker.sampler.run = self._note                    # type: ignore[method-assign]
        self.worker.sampler.compute_logits = self._record

    def _note(self, batch: Batch, hidden: torch.Tensor) -> StepResult:
        state, rows = self.worker.state, batch.sample_rows
        index = state.known[rows] - state.num_prompt[rows]
        self._keys = list(zip(state.request_id[rows].tolist(), index.tolist()))
        return self._sample(batch, hidden)

    def _record(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self._compute(hidden)
        for key, row in zip(self._keys, logits.numpy(), strict=True):
            assert self.bits.setdefault(key, row.tobytes()) == row.tobytes()
        return logits


Outcome = tuple[list[int], list[bytes]]         # tokens, and the logits behind each


def outcome(engine: BitsEngine, request_id: int) -> Outcome:
    tokens = engine.tokens[request_id]
    return tokens, [engine.bits[request_id, index] for index in range(len(tokens))]


@functools.cache
def alone(form: str, pool: str, block_size: int) -> list[Outcome]:
    """Each request by itself: its prompt in one step of one thread, nothing cached, nothing preempted."""
    found = []
    for prompt, params in specs():
        engine = BitsEngine(compiled(form, 1), POOLS[pool], 400 // block_size, block_size, caching=False,
                            max_num_batched_tokens=512)
        engine.add(1, prompt, **params)
        engine.run()
        found.append(outcome(engine, 1))
    return found


class Schedule:
    """Everything that a seed decides."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.picked = [rng.randrange(len(specs())) for _ in range(rng.randint(2, 9))]
        self.arrivals = sorted(rng.choice([0, rng.randint(0, 30)]) for _ in self.picked)    # steps
        self.block_size, self.num_threads = rng.choice([4, 16]), rng.randint(1, 3)
        longest = max(len(specs()[i][0]) + specs()[i][1]["max_tokens"] for i in self.picked)
        needed, budget = -(-longest // self.block_size), rng.choice([rng.randint(3, 40), rng.randint(41, 400)])
        self.options: dict[str, Any] = dict(
            num_blocks=needed + 2 + rng.randint(0, needed), num_host_blocks=rng.choice([0, 4 * needed]),
            max_num_batched_tokens=budget, long_prefill_token_threshold=rng.choice([0, rng.randint(1, budget)]),
            max_num_seqs=rng.randint(2, 8), caching=rng.random() < 0.5, async_scheduling=rng.random() < 0.5)
        self.options["partial"] = self.options["caching"] and rng.random() < 0.5
        self.options["preemption_mode"] = "swap" if self.options["num_host_blocks"] else "recompute"

    def run(self, model: Any, pool: torch.dtype) -> BitsEngine:
        engine = BitsEngine(model, pool, block_size=self.block_size, **self.options)
        waiting = list(enumerate(zip(self.arrivals, self.picked), 1))
        while waiting or engine.core.can_plan() or engine.in_flight:
            while waiting and (waiting[0][1][0] <= engine.core.step or not engine.scheduler.has_work):
                request_id, (_, index) = waiting.pop(0)
                prompt, params = specs()[index]
                engine.add(request_id, prompt, **params)
            while engine.core.can_plan() and (plan := engine.core.plan()) is not None:
                engine.core.plan_sent(0)
                engine.in_flight.append(plan)
            if engine.in_flight:
                engine.finish_step()
        engine.assert_idle()
        return engine


def run_schedules(form: str, pool: str, seeds: range) -> None:
    counts = dict.fromkeys(("recomputed", "swapped", "cached"), 0)
    for seed in seeds:
        schedule = Schedule(seed)
        engine = schedule.run(compiled(form, schedule.num_threads), POOLS[pool])
        expected = alone(form, pool, schedule.block_size)
        for request_id, index in enumerate(schedule.picked, 1):
            assert engine.ends[request_id].reason == FINISH_LENGTH
            assert outcome(engine, request_id) == expected[index], f"seed {seed}, request {request_id}"
        is_swap = schedule.options["preemption_mode"] == "swap"
        counts["swapped"] += engine.stats.num_swapped_out_blocks
        counts["recomputed"] += 0 if is_swap else engine.stats.num_preemptions
        counts["cached"] += engine.stats.num_hit_tokens
    assert all(counts.values()), counts


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("form", FORMS)
def test_every_request_has_the_bits_it_has_alone(form: str, pool: str) -> None:
    begin = 1000 * (len(POOLS) * FORMS.index(form) + list(POOLS).index(pool))
    run_schedules(form, pool, range(begin, begin + NUM_SCHEDULES))


@pytest.mark.slow
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("form", FORMS)
def test_every_request_has_the_bits_it_has_alone_in_many_more_schedules(form: str, pool: str) -> None:
    run_schedules(form, pool, range(10_000, 10_000 + NUM_MORE))


class Dependent:
    """A compiled model whose rows differ in their last bits when there are several requests."""

    def __init__(self, model: JitModel) -> None:
        self._model, self.config, self.team, self.kv_spec = model, model.config, model.team, model.kv_spec
        self.compute_logits = model.compute_logits

    def __call__(self, ids: Any, positions: Any, caches: Any, meta: Any, backend: Any, last: Any) -> torch.Tensor:
        hidden = self._model(ids, positions, caches, meta, backend, last)
        return hidden * (1 + 2.0**-20) if meta.num_reqs > 1 else hidden


def test_a_model_that_depends_on_its_batch_is_noticed() -> None:
    """Its tokens are the same; the logits are not."""
    schedule = Schedule(0)
    engine = schedule.run(Dependent(compiled("none", 1)), torch.float32)
    expected = alone("none", "float32", schedule.block_size)
    found = [outcome(engine, request_id) for request_id in range(1, 1 + len(schedule.picked))]
    assert [tokens for tokens, _ in found] == [expected[index][0] for index in schedule.picked]
    assert found != [expected[index] for index in schedule.picked]


def test_the_requests_of_these_tests_say_different_things() -> None:
    assert all(len({tuple(tokens) for tokens, _ in alone(form, "float32", 16)}) > 20 for form in FORMS)
    assert alone("none", "float32", 16) != alone("none", "int8", 16)
