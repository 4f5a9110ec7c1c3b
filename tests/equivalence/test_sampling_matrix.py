"""Every sampling parameter in every mode of the engine: {sync, async} x {recompute, swap} x {cache on, off}, in small
chunks, in a pool that forces preemption, among other requests. Each request gets what it gets alone: tokens,
log-probabilities, prompt log-probabilities and vectors.

With the tiny Llama numbers may differ in their last bits, because a matrix product depends on the rows beside it; with
a model that looks its hidden states up in a table, everything is equal bit for bit.
"""
from __future__ import annotations

import collections
import functools
import itertools
from typing import Any

import numpy as np
import pytest
import torch

from ipc.errors import INVALID
from ipc.messages import FINISH_ERROR, FINISH_STOP, Outputs
from bench.simulation import VOCAB, unpack
from tests.equivalence.test_milestone import RealEngine
from worker.sampling.processors import register

SHARED = [3, 1, 4, 1, 5, 9, 2, 6]


def ban_the_last_token(prompt: np.ndarray, output: np.ndarray, logits: Any) -> None:
    logits[int(output[-1]) if len(output) else int(prompt[-1])] = float("-inf")


register("ban-last", ban_the_last_token)
FEATURES: dict[str, dict[str, Any]] = {
    "greedy": dict(),
    "temperature": dict(temperature=1.0),
    "top-k": dict(temperature=1.3, top_k=5),
    "top-p": dict(temperature=1.0, top_p=0.8),
    "min-p": dict(temperature=1.0, min_p=0.05),
    "repetition": dict(repetition_penalty=1.5),
    "presence": dict(temperature=0.7, presence_penalty=1.5),
    "frequency": dict(frequency_penalty=1.2),
    "bias": dict(temperature=1.0, logit_bias={7: 3.0, 8: -100.0}),
    "allowed": dict(temperature=1.0, allowed_token_ids=[2, 3, 5, 7, 11, 13]),
    "bad-words": dict(bad_words_token_ids=[[4], [9, 9], [1, 2, 3]]),
    "min-tokens": dict(temperature=1.0, min_tokens=6, stop_token_ids=list(range(0, 40))),
    "processor": dict(temperature=1.0, logits_processors=["ban-last"]),
    "logprobs": dict(temperature=1.0, logprobs=5, presence_penalty=0.5),
    "prompt-logprobs": dict(prompt_logprobs=3),
    "pool-last": dict(pooling="last", max_tokens=1),
    "pool-mean": dict(pooling="mean", max_tokens=1),
    "tiny-temperature": dict(temperature=1e-30),
    "filters": dict(temperature=1.5, top_k=20, top_p=0.9, min_p=0.01),
    "choice": dict(temperature=1.0, choice=3),
    "stop-ids": dict(temperature=1.0, stop_token_ids=list(range(0, VOCAB, 9)), max_tokens=40),
    "eos": dict(temperature=1.0, ignore_eos=False, max_tokens=40),
    "eos-min-tokens": dict(temperature=1.0, ignore_eos=False, min_tokens=7, max_tokens=40),
    "all": dict(temperature=1.2, top_k=30, top_p=0.95, min_p=0.001, repetition_penalty=1.2, presence_penalty=0.3,
                frequency_penalty=0.2, logit_bias={7: 2.0}, allowed_token_ids=list(range(0, VOCAB, 2)),
                bad_words_token_ids=[[4], [6, 8]], min_tokens=3, stop_token_ids=[2], logprobs=2, prompt_logprobs=1,
                logits_processors=["ban-last"]),
}
EOS = tuple(range(5, VOCAB, 9))
MODES = list(itertools.product([False, True], ["recompute", "swap"], [True, False]))


class TableModel:
    """hidden [N, 4] is a row of a table, logits [L, V] one of another: no row depends on its neighbours."""

    def __init__(self, template: Any) -> None:
        generator = torch.Generator().manual_seed(11)
        self.hidden = torch.randn(997, 4, generator=generator)
        self.hidden[:, 0] = torch.arange(997)
        self.logits = torch.randn(997, VOCAB, generator=generator) * 2
        self.kv_spec = template.kv_spec

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor, *rest: Any) -> torch.Tensor:
        hidden = self.hidden[(ids * 31 + positions * 7) % 997]
        return hidden if rest[-1] is None else hidden[rest[-1].rows]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.logits[hidden[:, 0].long()]


class ExtrasEngine(RealEngine):
    """Keeps what comes besides tokens. `exact`: with the TableModel."""

    def __init__(self, *, exact: bool = True, **options: Any) -> None:
        self.extras: dict[int, dict[tuple[str, int], Any]] = collections.defaultdict(dict)
        super().__init__("cpu", eos=EOS, **options)
        self.worker.sampler.eos_token_ids = list(EOS)
        if exact:
            model = TableModel(self.worker.model)
            self.worker.model = model
            self.worker.sampler.compute_logits = model.compute_logits

    def take(self) -> None:
        for _, outputs in self.core.take_outputs(0):
            self._keep(outputs)
        super().take()

    def _keep(self, outputs: Outputs) -> None:
        for kind in ("logprobs", "prompt_logprobs"):
            for news in getattr(outputs, kind):
                key = kind, news.position
                assert key not in self.extras[news.request_id], "each position once"
                values = unpack(news.values, np.float32)
                self.extras[news.request_id][key] = (news.rank, *unpack(news.token_ids), *values)
        for news in outputs.pooled:
            self.extras[news.request_id]["pooled", 0] = tuple(unpack(news.vector, np.float32))


def requests() -> dict[int, tuple[list[int], dict[str, Any]]]:
    """One of each feature, some with a common beginning; with other seeds and lengths."""
    found = {}
    for number, params in enumerate(FEATURES.values(), 1):
        prompt = [*SHARED, number] if number % 3 else [(7 * number + 3 * i) % VOCAB for i in range(5 + number % 7)]
        found[number] = prompt, {"max_tokens": 6 + number % 5, "seed": number, **params}
    return found


def collect(engine: ExtrasEngine, request_id: int) -> tuple[Any, ...]:
    end = engine.ends[request_id]
    return engine.tokens[request_id], dict(engine.extras[request_id]), end.reason, end.stop_token_id, end.message


@functools.cache
def alone(exact: bool = True) -> dict[int, tuple[Any, ...]]:
    found = {}
    for request_id, (prompt, params) in requests().items():
        engine = ExtrasEngine(exact=exact, num_blocks=64, caching=False)
        engine.add(request_id, prompt, **params)
        engine.run()
        found[request_id] = collect(engine, request_id)
    return found


def assert_same(found: tuple[Any, ...], expected: tuple[Any, ...], exact: bool, what: str) -> None:
    if exact:
        assert found == expected, what
        return
    assert (found[0], *found[2:]) == (expected[0], *expected[2:]) and found[1].keys() == expected[1].keys(), what
    for key, values in expected[1].items():
        assert found[1][key] == pytest.approx(values, abs=1e-4), (what, key)


@pytest.mark.parametrize("exact", [True, False], ids=["table", "llama"])
@pytest.mark.parametrize("is_async, preemption, caching", MODES)
def test_every_parameter_gives_in_every_mode_what_it_gives_alone(is_async, preemption, caching, exact):
    engine = ExtrasEngine(exact=exact, num_blocks=14, num_host_blocks=40, preemption_mode=preemption,
                          async_scheduling=is_async,
                          caching=caching, max_num_batched_tokens=13, long_prefill_token_threshold=4, max_num_seqs=6)
    for request_id, (prompt, params) in requests().items():
        engine.add(request_id, prompt, **params)
    engine.run(3000)
    assert engine.stats.num_preemptions > 0
    for request_id, name in enumerate(FEATURES, 1):
        assert_same(collect(engine, request_id), alone(exact)[request_id], exact, name)
    engine.assert_idle()
    state = engine.worker.state
    assert state.num_with_options == sum(options is not None for options in state.options[:state.n])
    state.clear()                               # the last rows leave with the next plan
    assert not state.num_with_options and not state.penalties.counts.any()
    assert len(state.penalties._free) == state.penalties.num_slots <= 6


def test_requests_that_may_stop_early_do_so_in_the_matrix():
    names = dict(enumerate(FEATURES, 1))
    ends = {names[request_id]: found for request_id, found in alone().items()}
    for name in ("stop-ids", "eos", "eos-min-tokens"):
        tokens, _, reason, stop_token, _ = ends[name]
        assert reason == FINISH_STOP and tokens[-1] == stop_token
        assert stop_token in (EOS if name.startswith("eos") else FEATURES[name]["stop_token_ids"])
    assert len(ends["eos-min-tokens"][0]) >= 7 and set(ends["eos-min-tokens"][0][:6]).isdisjoint(EOS)


@pytest.mark.parametrize("chunk", [1, 2, 3, 8])
def test_chunks_of_any_size_tell_each_prompt_position_once(chunk):
    engine = ExtrasEngine(num_blocks=64, max_num_batched_tokens=chunk, long_prefill_token_threshold=chunk)
    prompt, params = requests()[15]
    for request_id in (15, 115):                # the second finds the first one's blocks, and may not use them
        engine.add(request_id, prompt, **params)
        engine.run()
        assert collect(engine, request_id) == alone()[15]
    told = sorted(position for kind, position in engine.extras[115] if kind == "prompt_logprobs")
    assert told == list(range(1, len(prompt)))
    assert engine.stats.num_hit_tokens == 0


def test_a_mean_is_the_mean_of_all_positions_and_the_last_is_the_last():
    engine = ExtrasEngine(exact=False, num_blocks=64)
    prompt = [5, 6, 7, 8, 9, 10]
    engine.add(1, prompt, pooling="mean", pooling_normalize=False, max_tokens=1)
    for number in range(1, 7):
        engine.add(10 + number, prompt[:number], pooling="last", pooling_normalize=False, max_tokens=1)
    engine.run()
    vectors = {i: np.array(engine.extras[i]["pooled", 0]) for i in (1, *range(11, 17))}
    assert np.allclose(vectors[1], np.mean([vectors[i] for i in range(11, 17)], axis=0), atol=1e-5)
    assert all(engine.tokens[i] == [0] for i in vectors)


def test_an_unknown_processor_and_an_empty_choice_end_their_own_request_only():
    engine = ExtrasEngine(num_blocks=64, async_scheduling=True)
    engine.add(1, [1, 2, 3], logits_processors=["nobody"])
    engine.add(2, [1, 2, 3], allowed_token_ids=[4], bad_words_token_ids=[[4]])
    engine.add(3, [1, 2, 3], temperature=0.0)
    engine.run()
    assert engine.ends[1].reason == engine.ends[2].reason == FINISH_ERROR
    assert engine.ends[1].error_code == engine.ends[2].error_code == INVALID
    assert "nobody" in engine.ends[1].message and "ban-last" in engine.ends[1].message
    assert "no token is left" in engine.ends[2].message
    assert len(engine.tokens[3]) == 4
    engine.assert_idle()


def test_a_failed_step_changes_nothing_and_repeats_no_position():
    engine = ExtrasEngine(num_blocks=64, max_num_batched_tokens=5, long_prefill_token_threshold=3)
    picked = [6, 8, 14, 15]
    for request_id in picked:
        prompt, params = requests()[request_id]
        engine.add(request_id, prompt, **params)
    for _ in range(6):
        engine.step()
    engine.plan()
    engine.fail()
    engine.run()
    for request_id in picked:
        assert collect(engine, request_id) == alone()[request_id]


def run_random_mix(seed: int) -> int:
    """Requests of all kinds come while others run and leave; every row changes owner many times. Each gets what it
    gets alone. The number of batches with more than one row."""
    num_mixed = 0
    draw = np.random.default_rng(seed)
    engine = ExtrasEngine(num_blocks=int(draw.integers(12, 40)), num_host_blocks=20, max_num_seqs=4,
                          preemption_mode=str(draw.choice(["recompute", "swap"])), async_scheduling=bool(seed % 2),
                          max_num_batched_tokens=int(draw.integers(4, 20)))
    waiting = [int(i) for i in draw.permutation(np.repeat(np.arange(1, len(FEATURES) + 1), 3))]
    kinds: dict[int, int] = {}
    while waiting or engine.core.can_plan() or engine.in_flight:
        if waiting and (engine.core.step % 2 == 0 or not engine.core.requests):
            kind = waiting.pop()
            kinds[1000 * len(waiting) + kind] = kind
            prompt, params = requests()[kind]
            engine.add(1000 * len(waiting) + kind, prompt, **params)
        while engine.core.can_plan() and (plan := engine.core.plan()) is not None:
            engine.core.plan_sent(0)
            engine.in_flight.append(plan)
            num_mixed += plan.num_rows > 1
        if engine.in_flight:
            engine.finish_step()
    engine.take()
    for request_id, kind in kinds.items():
        assert collect(engine, request_id) == alone()[kind], list(FEATURES)[kind - 1]
    engine.assert_idle()
    return num_mixed


@pytest.mark.parametrize("seed", range(12))
def test_random_mixes_with_recycled_rows_equal_solo_runs(seed):
    assert run_random_mix(seed) > 20


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_thousand_mixed_batches_equal_solo_runs():
    num_mixed, seed = 0, 100
    while num_mixed < 10_000:
        num_mixed += run_random_mix(seed)
        seed += 1
