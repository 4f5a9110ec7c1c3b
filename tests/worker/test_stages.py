"""Everything that changes logits, and what is told about them: against plain float64 numpy, for every parameter and for
random combinations, compiled and not; rows that did not ask are unchanged bit for bit.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from ipc.counter_rng import uniform
from ipc.errors import FAULT, INVALID
from ipc.messages import EMPTY, NewRow, SchedulerOutput
from ipc.sampling_params import SamplingParams
from worker.batch import BatchBuilder
from worker.request_state import RequestState
from worker.sampling.jit_threads import load
from worker.sampling.logprobs import compute_logprobs
from worker.sampling.masks import BadWords, apply_bitmask, bad_tokens
from worker.sampling.processors import register
from worker.sampling.sampler import Sampler
from worker.sampling.step import StepResult, StepSampler

WIDTH, EOS = 600, [17]
KERNELS = [pytest.param(True, marks=pytest.mark.skipif(load() is None, reason="numba is not installed")), False]


class Rows:
    """A worker's rows and sampler over logits that the test gives."""

    def __init__(self, requests: list[tuple[list[int], int, dict[str, Any]]], *, use_kernels: bool = True,
                 num_valid: int | None = None, seats: int = 64) -> None:
        self.state = RequestState(seats, 200, 16)
        self.builder = BatchBuilder(self.state, 4096)
        self.logits = torch.empty(0)
        self.sampler = StepSampler(self.state, lambda hidden: self.logits[hidden[:, 0].long()].clone(), EOS, num_valid)
        self.sampler.sampler = Sampler(num_valid, use_kernels=use_kernels)
        self.steps = 0
        self.add(requests)

    def add(self, requests: list[tuple[list[int], int, dict[str, Any]]], moves: Sequence[int] = ()) -> None:
        """(tokens, of which the prompt, parameters): all computed but the last."""
        new = [NewRow(100 + self.steps * 64 + i, len(tokens), prompt, len(tokens) - 1, 13, SamplingParams(
            **{"seed": i, "max_tokens": 100, **params})) for i, (tokens, prompt, params) in enumerate(requests)]
        gone = len(moves) // 2
        plan = SchedulerOutput(1, self.state.n - gone + len(new), new=new, moves=pack(list(moves)),
                               new_tokens=pack([t for tokens, _, _ in requests for t in tokens]),
                               new_blocks=pack([0] * 13 * len(new)))
        self.state.apply(plan)

    def step(self, logits: np.ndarray) -> StepResult:
        """One token for every row from logits [rows, V]."""
        self.steps += 1
        self.logits = torch.from_numpy(logits)
        batch = self.builder.build(SchedulerOutput(1, self.state.n))
        assert batch is not None
        result = self.sampler.run(batch, torch.arange(self.state.n, dtype=torch.float32)[:, None])
        self.builder.advance(batch, result.tokens)
        return result


def test_tokens_that_the_model_noted_are_taken_only_where_nothing_changes_the_logits():
    """Greedy rows without options; one that has some makes the sampler read all."""
    def best_of(logits: torch.Tensor, width: int) -> tuple[np.ndarray, np.ndarray]:
        return np.full(len(logits), 7), np.ones(len(logits), np.float32)

    logits = np.zeros((2, 40), np.float32)
    logits[:, 9] = 1.0
    for params, is_noted in (({}, True), ({"temperature": 1e-4}, False), ({"min_tokens": 3}, False),
                             ({"logit_bias": {3: 0.5}}, False), ({"logprobs": 1}, False)):
        rows = Rows([([1, 2], 2, {"temperature": 0.0}), ([3, 4], 2, {"temperature": 0.0, **params})])
        rows.sampler.best_of = best_of
        assert rows.step(logits).tokens.tolist() == ([7, 7] if is_noted else [9, 9])
        rows.sampler.best_of = lambda logits, width: None
        assert rows.step(logits).tokens.tolist() == [9, 9]


def pack(values: list[int]) -> memoryview:
    return np.array(values, np.int32).data.cast("B") if values else EMPTY


def final_logits(x: np.ndarray, tokens: list[int], prompt: int, p: SamplingParams, num_valid: int) -> np.ndarray:
    """The plain definition, float64."""
    x = x.astype(np.float64)
    for token, bias in p.logit_bias.items():
        x[token] += np.float32(bias)
    output = tokens[prompt:]
    for token in set(tokens):
        x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
    for token in set(output):
        x[token] -= p.frequency_penalty * output.count(token) + p.presence_penalty
    if p.allowed_token_ids is not None:
        x[[t for t in range(len(x)) if t not in p.allowed_token_ids]] = -np.inf
    for word in p.bad_words_token_ids:
        before = word[:-1]
        if output[len(output) - len(before):] == before and len(output) >= len(before):
            x[word[-1]] = -np.inf
    if len(output) + 1 < p.min_tokens:
        x[p.stop_token_ids + EOS] = -np.inf
    x[num_valid:] = -np.inf
    return x


def probabilities(x: np.ndarray, p: SamplingParams) -> np.ndarray:
    """After temperature and filters. A token whose logit lies within rounding of a boundary gets a NaN."""
    if p.temperature == 0:
        return (x == x.max()).astype(float)
    weights = np.exp((x - x.max()) / p.temperature)
    kept, near = weights > 0, np.zeros(len(x), bool)

    def keep_from(limit: float) -> None:
        nonlocal kept, near
        near |= kept & (np.abs(x - limit) < 1e-5)
        kept &= x >= limit - 1e-5
    if p.min_p > 0:
        keep_from(x.max() + p.temperature * math.log(p.min_p))
    if 0 < p.top_k < kept.sum():
        keep_from(np.sort(x[kept])[-p.top_k])
    if p.top_p < 1:
        order = np.argsort(-x, kind="stable")
        sums = np.cumsum(weights[order] * kept[order])
        keep_from(x[order[min(int(np.searchsorted(sums, p.top_p * sums[-1])), len(x) - 1)]])
    result = np.where(kept, weights, 0.0)
    return result / result.sum()


def random_params(draw: np.random.Generator) -> dict[str, Any]:
    found: dict[str, Any] = {"temperature": float(draw.choice([0.0, 0.6, 1.0, 1.8]))}
    options: dict[str, Any] = {
        "top_k": int(draw.integers(1, 300)), "top_p": float(draw.uniform(0.05, 1.0)),
        "min_p": float(draw.choice([0.001, 0.05, 0.3])), "repetition_penalty": float(draw.uniform(0.6, 1.8)),
        "presence_penalty": float(draw.uniform(-2, 2)), "frequency_penalty": float(draw.uniform(-2, 2)),
        "logit_bias": {int(t): float(draw.uniform(-5, 5)) for t in draw.choice(WIDTH, 5, replace=False)},
        "allowed_token_ids": [int(t) for t in draw.choice(WIDTH - 50, 200)],
        "bad_words_token_ids": [[int(t) for t in draw.integers(0, 30, size)] for size in (1, 1, 2, 2, 3)],
        "min_tokens": int(draw.integers(1, 12)), "stop_token_ids": [3, 4]}
    for name, value in options.items():
        if draw.random() < 0.35:
            found[name] = value
    return found


@pytest.mark.parametrize("use_kernels", KERNELS)
@pytest.mark.parametrize("seed", range(4))
def test_random_combinations_draw_what_a_plain_float64_sampler_draws(seed: int, use_kernels: bool) -> None:
    """Five steps of 40 rows with small vocabularies of tokens, so that penalties and bad words have something to do."""
    draw = np.random.default_rng(seed)
    requests = []
    for _ in range(40):
        prompt = [int(t) for t in draw.integers(0, 30, draw.integers(1, 20))]
        output = [int(t) for t in draw.integers(0, 30, draw.integers(0, 15))]
        requests.append(([*prompt, *output], len(prompt), random_params(draw)))
    rows = Rows(requests, use_kernels=use_kernels, num_valid=WIDTH - 20)
    for _ in range(5):
        x = draw.normal(0, 2, (len(requests), WIDTH)).astype(np.float32)
        result = rows.step(x)
        assert not result.failed and not result.bad_rows.size
        for r, (tokens, prompt, values) in enumerate(requests):
            params = SamplingParams(max_tokens=100, **values)
            final = final_logits(x[r], tokens, prompt, params, WIDTH - 20)
            p = probabilities(final, params)
            token = int(result.tokens[r])
            assert p[token] > 0, values
            if params.temperature > 0:
                u = float(uniform([r], [0], [len(tokens) - prompt])[0, 0])
                upper = p[:token + 1].sum()
                assert upper - p[token] - 1e-5 <= u <= upper + 1e-5, values
            tokens.append(token)


@pytest.mark.parametrize("values", [
    dict(repetition_penalty=1.7), dict(presence_penalty=1.5), dict(frequency_penalty=-0.8),
    dict(logit_bias={1: 2.0, 5: -3.0}), dict(allowed_token_ids=[1, 2, 3, 9]), dict(bad_words_token_ids=[[2], [4, 6]]),
    dict(top_k=7, repetition_penalty=1.3, logit_bias={9: 1.0}), dict(top_p=0.7, frequency_penalty=0.5, min_p=0.01)])
def test_drawn_tokens_have_the_distribution_of_the_parameters(values: dict[str, Any]) -> None:
    """Chi-square over 20,000 rows with seeds of their own. False alarm: 1e-6 for each of the eight."""
    width, draws, tokens, prompt = 24, 20_000, [1, 5, 9, 4], 2
    x = np.random.default_rng(1).normal(0, 1.5, width).astype(np.float32)
    rows = Rows([(tokens, prompt, {**values, "seed": 10_000 + i}) for i in range(draws)], seats=draws)
    result = rows.step(np.repeat(x[None], draws, 0))
    params = SamplingParams(max_tokens=100, **values)
    saved = EOS.copy()
    p = probabilities(final_logits(x, tokens, prompt, params, width), params)
    assert saved == EOS
    counts = np.bincount(result.tokens, minlength=width)
    assert counts[p == 0].sum() == 0
    expected, observed = p[p > 0] * draws, counts[p > 0]
    large = expected >= 5
    expected = np.append(expected[large], expected[~large].sum())
    observed = np.append(observed[large], observed[~large].sum())
    expected, observed = expected[expected > 0], observed[expected > 0]
    free = len(expected) - 1
    limit = free * (1 - 2 / (9 * free) + 4.7534 * math.sqrt(2 / (9 * free))) ** 3   # Wilson-Hilferty, 1 - 1e-6
    assert ((observed - expected) ** 2 / expected).sum() < limit


@pytest.mark.parametrize("use_kernels", KERNELS)
def test_rows_that_did_not_ask_are_unchanged_bit_for_bit(use_kernels: bool) -> None:
    draw = np.random.default_rng(5)
    x = draw.normal(0, 2, (6, WIDTH)).astype(np.float32)
    asking = dict(repetition_penalty=1.5, logit_bias={1: 1.0}, allowed_token_ids=[1, 2], bad_words_token_ids=[[1]])
    rows = Rows([([1, 2, 3], 2, asking if r % 2 else {}) for r in range(6)], use_kernels=use_kernels)
    seen: list[torch.Tensor] = []
    sample = rows.sampler.sampler.sample
    rows.sampler.sampler.sample = lambda logits, columns: (seen.append(logits), sample(logits, columns))[1]  # type: ignore[method-assign]
    rows.step(x)
    assert seen[0][::2].numpy().tobytes() == x[::2].tobytes()
    assert (seen[0][1::2].numpy() != x[1::2]).any(axis=1).all()


def test_a_step_without_options_runs_none_of_the_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    def unexpected(*_: object) -> None:
        raise RuntimeError("a stage ran")

    for name in ("apply_stages", "compute_logprobs"):
        monkeypatch.setattr(f"worker.sampling.step.{name}", unexpected)
    rows = Rows([([1, 2], 2, {}), ([3], 1, {"temperature": 0.0})])
    assert len(rows.step(np.zeros((2, WIDTH), np.float32)).tokens) == 2


def test_the_order_of_the_stages_is_processors_bias_penalties_masks() -> None:
    """The processor sees the raw logits; the penalty damps the bias; a mask is final, whatever was added before."""
    seen = []

    def processor(prompt: np.ndarray, output: np.ndarray, logits: torch.Tensor) -> torch.Tensor:
        seen.append((prompt.tolist(), output.tolist(), float(logits[7])))
        return logits + 1.0

    register("plus-one", processor)
    x = np.zeros((1, WIDTH), np.float32)
    x[0, 7] = 2.0
    rows = Rows([([7, 8], 1, dict(temperature=0.0, logits_processors=["plus-one"], logit_bias={7: 5.0, 9: 100.0},
                                  repetition_penalty=2.0, bad_words_token_ids=[[9]], logprobs=0))])
    captured: list[np.ndarray] = []
    sample = rows.sampler.sampler.sample
    rows.sampler.sampler.sample = lambda logits, columns: (captured.append(logits.numpy().copy()),  # type: ignore[method-assign]
                                                           sample(logits, columns))[1]
    result = rows.step(x)
    assert seen == [([7], [8], 2.0)]
    assert captured[0][0, 7] == (2 + 1 + 5) / 2 and captured[0][0, 8] == 0.5
    assert result.tokens.tolist() == [7]
    value = np.frombuffer(result.logprobs[0].values, np.float32)[0]
    assert value == pytest.approx(2 - math.log(math.exp(2) + WIDTH - 1), abs=1e-6)      # of the raw logits


def test_penalty_counts_follow_their_row_when_rows_move_leave_and_return() -> None:
    draw = np.random.default_rng(9)
    penalty = dict(temperature=0.0, repetition_penalty=1.4, frequency_penalty=0.7, presence_penalty=0.2)
    histories = [[int(t) for t in draw.integers(0, 40, 6)] for _ in range(4)]
    rows = Rows([(tokens, 3, penalty) for tokens in histories])
    live = [tokens.copy() for tokens in histories]

    def check() -> None:
        x = draw.normal(0, 1, (len(live), WIDTH)).astype(np.float32)
        result = rows.step(x)
        for r, tokens in enumerate(live):
            expected = final_logits(x[r], tokens, 3, SamplingParams(max_tokens=99, **penalty), WIDTH)
            assert result.tokens[r] == expected.argmax()
            tokens.append(int(result.tokens[r]))
    check()
    rows.add([(live[0].copy(), 3, penalty)], moves=[0, 3])          # row 0 leaves, 3 takes its place, 0 returns last
    live[:] = [live[3], live[1], live[2], live[0]]
    for _ in range(3):
        check()
    assert rows.state.penalties.num_slots == 4
    rows.state.clear()
    assert not rows.state.penalties.counts.any() and len(rows.state.penalties._free) == 4


@pytest.mark.parametrize("use_kernels", KERNELS)
@pytest.mark.parametrize("width", [1, 5, 255, 256, 257, 3000])
def test_logprobs_are_the_log_softmax_with_ranks_and_the_likeliest_in_order(width: int, use_kernels: bool) -> None:
    draw = np.random.default_rng(width)
    x = np.round(draw.normal(0, 3, (30, width)), 2).astype(np.float32)
    x[3, :width // 2] = -np.inf
    targets, num_top = draw.integers(0, width, 30), draw.integers(0, 21, 30)
    targets[3] = width - 1
    found = compute_logprobs(torch.from_numpy(x), targets, num_top, load() if use_kernels else None)
    exact = x.astype(np.float64) - np.log(np.exp(x.astype(np.float64)).sum(axis=1, keepdims=True))
    for r in range(30):
        top = min(int(num_top[r]), width)
        assert found.ids[r, 0] == targets[r] and found.ranks[r] == 1 + (x[r] > x[r, targets[r]]).sum()
        ids = found.ids[r, 1:1 + top]
        finite = int(np.isfinite(x[r]).sum())
        assert np.array_equal(x[r, ids][:finite], np.sort(x[r])[::-1][:min(top, finite)])
        assert len(set(ids[:finite].tolist())) == min(top, finite)
        assert np.allclose(found.values[r, 1:1 + top][:finite], exact[r, ids][:finite], atol=2e-6)
        assert found.values[r, 0] == pytest.approx(exact[r, targets[r]], abs=2e-6)


@pytest.mark.parametrize("width", [1, 31, 32, 33, 200])
def test_a_bit_mask_excludes_exactly_the_zero_bits_of_its_rows(width: int) -> None:
    draw = np.random.default_rng(width)
    words = -(-width // 32)
    bits = draw.integers(-(1 << 31), 1 << 31, (3, words)).astype(np.int32)
    bits[1], bits[2, 0] = -1, 0
    x = draw.normal(0, 1, (5, width)).astype(np.float32)
    logits = torch.from_numpy(x.copy())
    apply_bitmask(logits, np.array([4, 0, 2]), bits)
    expected = x.copy()
    for i, row in enumerate((4, 0, 2)):
        kept = np.unpackbits(bits[i].view(np.uint8), bitorder="little")[:width].astype(bool)
        expected[row, ~kept] = -np.inf
    assert np.array_equal(logits.numpy(), expected)


def test_failures_stay_with_their_rows() -> None:
    def broken(prompt: np.ndarray, output: np.ndarray, logits: torch.Tensor) -> None:
        raise KeyError("inside")

    register("broken", broken)
    x = np.zeros((5, WIDTH), np.float32)
    x[3, 5] = np.nan
    requests: list[dict[str, Any]] = [dict(logits_processors=["broken"]), dict(logits_processors=["unknown"]), dict(
        allowed_token_ids=[5], bad_words_token_ids=[[5]]), dict(logprobs=2), dict(logprobs=2)]
    result = Rows([([1], 1, values) for values in requests]).step(x)
    assert sorted((f.row, f.error_code) for f in result.failed) == [(0, FAULT), (1, INVALID), (2, INVALID)]
    assert result.bad_rows.tolist() == [3]
    assert result.tokens[:4].tolist() == [-1] * 4 and result.tokens[4] >= 0
    assert [news.row for news in result.logprobs] == [4]


def test_bad_words_of_any_lengths_are_found_as_a_plain_search_finds_them() -> None:
    """The words of a row, and rows, differ in length; an output may be shorter than a word, and a prompt's end does not
    count."""
    draw = np.random.default_rng(3)
    for _ in range(200):
        count = int(draw.integers(1, 6))
        lists = [[draw.integers(0, 3, draw.integers(1, 5)).tolist() for _ in range(draw.integers(1, 5))]
                 for _ in range(count)]
        tokens, rows = draw.integers(0, 3, (7, 9)).astype(np.int32), draw.permutation(7)[:count]
        begins = draw.integers(1, 6, count)
        ends = begins + draw.integers(0, 4, count)
        entries = draw.permutation(20)[:count].tolist()
        words = [BadWords.of(found) for found in lists]
        found = bad_tokens(entries, [one for one in words if one is not None], tokens, rows, begins, ends)
        expected = set()
        for i, own in enumerate(lists):
            output = tokens[rows[i], begins[i]:ends[i]].tolist()
            expected |= {(entries[i], word[-1]) for word in own if len(word) - 1 <= len(output)
                         and output[len(output) - len(word) + 1:] == word[:-1]}
        assert set(zip(*map(np.ndarray.tolist, found))) == expected
    assert BadWords.of([]) is None
