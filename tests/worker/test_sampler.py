"""The sampler: against a plain float64 one, in distribution, and the same row by row in any batch."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from ipc.counter_rng import uniform
from worker.sampling import filters
from worker.sampling.jit_threads import load
from worker.sampling.noise import CHUNK, draw
from worker.sampling.sampler import Sampler, SampleResult, SamplingColumns


@pytest.fixture(autouse=True, params=["compiled", "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test here runs with the compiled rows and with torch and numpy."""
    if request.param == "torch":
        monkeypatch.setattr("worker.sampling.sampler.load", lambda: None)
    elif load() is None:
        pytest.skip("numba is not installed")


def columns(rows: list[dict]) -> SamplingColumns:
    """One dict a row; what it does not name is off."""
    def column(name: str, default: float, dtype: type) -> np.ndarray:
        return np.array([row.get(name, default) for row in rows], dtype=dtype)

    return SamplingColumns(
        temperature=column("temperature", 1.0, np.float32), top_k=column("top_k", 0, np.int32),
        top_p=column("top_p", 1.0, np.float32), min_p=column("min_p", 0.0, np.float32),
        seed=column("seed", 0, np.uint64), child=column("child", 0, np.int32),
        output_index=column("output_index", 0, np.int64),
    )


def random_row(rng: np.random.Generator) -> dict:
    row = {"seed": int(rng.integers(0, 1 << 63)), "child": int(rng.integers(0, 4)),
           "output_index": int(rng.integers(0, 1000)), "temperature": float(rng.choice([0.0, 0.3, 1.0, 1.7]))}
    if rng.random() < 0.5:
        row["top_k"] = int(rng.choice([1, 2, 17, 300, 1500, 10**6]))
    if rng.random() < 0.5:
        row["top_p"] = float(rng.choice([1e-6, 0.1, 0.5, 0.9, 0.999]))
    if rng.random() < 0.4:
        row["min_p"] = float(rng.choice([1e-5, 0.01, 0.2, 1.0]))
    return row


def kept_float64(x: np.ndarray, row: dict) -> np.ndarray:
    """Probabilities after all filters, float64, equal logits kept or dropped together; the plain definition."""
    x = x.astype(np.float64)
    temperature = float(np.float32(row.get("temperature", 1.0)))
    p = np.exp((x - x.max()) / temperature)
    p /= p.sum()
    if row.get("min_p", 0.0) > 0:
        p[p < np.float32(row["min_p"]) * p.max() * (1 - 1e-12)] = 0
    if 0 < row.get("top_k", 0) < len(x):
        p[x < np.sort(np.where(p > 0, x, -np.inf))[-row["top_k"]]] = 0
    p /= p.sum()
    if row.get("top_p", 1.0) < 1:
        order = np.argsort(-p, kind="stable")
        crossing = np.searchsorted(np.cumsum(p[order]), float(np.float32(row["top_p"])))
        p[p < p[order[min(crossing, len(x) - 1)]]] = 0
    return p / p.sum()


def sample(logits: torch.Tensor, rows: list[dict], **kwargs: int) -> SampleResult:
    return Sampler(**kwargs).sample(logits.clone(), columns(rows))


@pytest.mark.parametrize("width", [50, 128, 700, 5000])
def test_every_parameter_combination_equals_a_plain_float64_sampler(width: int) -> None:
    """The inverse CDF of the float64 probabilities at the row's own noise: the token, or one whose boundary the noise
    touches within float32 rounding."""
    rng = np.random.default_rng(width)
    rows = [random_row(rng) for _ in range(150)]
    x = rng.normal(0, 3, (len(rows), width)).astype(np.float32)
    result = sample(torch.from_numpy(x), rows)
    assert not result.bad_rows.any() and result.tokens.dtype == np.int32
    for r, row in enumerate(rows):
        token = int(result.tokens[r])
        if row["temperature"] == 0.0:
            assert token == x[r].argmax()
            continue
        p = kept_float64(x[r], row)
        assert p[token] > 0
        u = float(uniform([row["seed"]], [row["child"]], [row["output_index"]])[0, 0])
        upper = p[: token + 1].sum()
        assert upper - p[token] - 2e-6 <= u <= upper + 2e-6


@pytest.mark.parametrize("shape", ["normal", "peaked", "flat", "two levels", "sorted", "few finite", "wide range",
                                   "heavy sample", "light sample"])
@pytest.mark.parametrize("width", [4096, 20_011])
def test_filters_of_wide_rows_of_any_shape_equal_a_plain_float64_sampler(width: int, shape: str) -> None:
    """Rows of which a part does not tell how the whole is distributed, too."""
    rng = np.random.default_rng(width)
    rows = [random_row(rng) | {"temperature": float(rng.choice([0.5, 1.0, 2.0]))} for _ in range(40)]
    x = rng.normal(0, 2.5, (len(rows), width)).astype(np.float32)
    if shape == "peaked":
        x[:, 77] += 30
        x[:, 1000:1010] += 27
    elif shape == "flat":
        x = np.round(x / 10, 1)
    elif shape == "two levels":
        x = np.where(rng.random(x.shape) < 0.01, np.float32(3.0), np.float32(-1.0))
    elif shape == "sorted":
        x = np.sort(x)
    elif shape == "few finite":
        x[rng.random(x.shape) < 0.999] = -np.inf
    elif shape == "wide range":
        x *= np.float32(1e4)
    elif shape.endswith("sample"):
        places = [512 * c + 16 * (5 * c % 16) + np.arange(16) for c in range(width // 512)]
        x[:, np.concatenate(places)] += np.float32(4 if shape == "heavy sample" else -4)
    x[:, 5] = np.float32(9.0)
    result = sample(torch.from_numpy(x), rows)
    assert not result.bad_rows.any()
    for r, row in enumerate(rows):
        p, token = kept_float64(x[r], row), int(result.tokens[r])
        u = float(uniform([row["seed"]], [row["child"]], [row["output_index"]])[0, 0])
        upper = p[: token + 1].sum()
        assert p[token] > 0
        assert upper - p[token] - 4e-6 <= u <= upper + 4e-6, (shape, row)


@pytest.mark.parametrize("row, kept", [
    ({"top_k": 3}, 3), ({"top_p": 0.6}, None), ({"min_p": 0.1}, None), ({"temperature": 0.5}, None),
    ({"top_k": 20, "top_p": 0.8, "min_p": 0.02, "temperature": 1.5}, None),
])
def test_drawn_tokens_have_the_filtered_distribution(row: dict, kept: int | None) -> None:
    """Chi-square over 20,000 output indices of one seed; a random seed would fail with probability 1e-6."""
    x = np.random.default_rng(5).normal(0, 1.5, 40).astype(np.float32)
    p, draws = kept_float64(x, row), 20_000
    rows = [{**row, "seed": 99, "output_index": i} for i in range(draws)]
    tokens = sample(torch.from_numpy(np.repeat(x[None], draws, 0)), rows).tokens
    counts = np.bincount(tokens, minlength=40)
    assert counts[p == 0].sum() == 0
    assert kept is None or (p > 0).sum() == kept
    expected = p[p > 0] * draws
    large = expected >= 5
    observed = np.append(counts[p > 0][large], counts[p > 0][~large].sum())
    expected = np.append(expected[large], expected[~large].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    free = len(expected) - 1
    limit = free * (1 - 2 / (9 * free) + 4.7534 * math.sqrt(2 / (9 * free))) ** 3  # Wilson-Hilferty, 1 - 1e-6
    assert ((observed - expected) ** 2 / expected).sum() < limit


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("width", [100, 1024, 3001, 49_152])
def test_a_row_gives_the_same_token_alone_and_in_any_batch(width: int, threads: int) -> None:
    rng = np.random.default_rng(width)
    rows = [random_row(rng) for _ in range(40)]
    x = torch.from_numpy(rng.normal(0, 1, (len(rows), width)).astype(np.float32))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = sample(x, rows).tokens
        alone = [int(sample(x[r : r + 1], [rows[r]]).tokens[0]) for r in range(len(rows))]
        order = rng.permutation(len(rows))[:23]
        shuffled = sample(x[torch.from_numpy(order)], [rows[r] for r in order]).tokens
    finally:
        torch.set_num_threads(before)
    assert together.tolist() == alone
    assert shuffled.tolist() == together[order].tolist()


def test_weights_and_thresholds_are_equal_bit_for_bit_alone_and_in_a_batch() -> None:
    rng = np.random.default_rng(3)
    n, width = 17, 33_333
    x = torch.from_numpy(rng.normal(0, 1, (n, width)).astype(np.float32))
    largest = x.amax(1).numpy().astype(np.float64)
    temperature = rng.uniform(0.2, 2, n)
    weights = filters.softmax_rows(x, largest, temperature)
    total = 1.0 / weights.amax(1).numpy().astype(np.float64)
    top_k, top_p = rng.choice([0, 5, 2000], n), rng.choice([0.3, 0.95, 1.0], n)
    limits = filters.thresholds(x, largest, temperature, top_k, top_p, np.zeros(n), total)
    for r in range(n):
        one = slice(r, r + 1)
        assert torch.equal(filters.softmax_rows(x[one], largest[one], temperature[one]), weights[one])
        columns_of_one = (largest[one], temperature[one], top_k[one], top_p[one], np.zeros(1), total[one])
        alone = filters.thresholds(x[one], *columns_of_one)
        assert alone[0] == limits[r]


@pytest.mark.parametrize("candidates", [1, 8, 64, 500])
def test_the_candidate_shortcut_gives_the_thresholds_of_the_full_sort(candidates: int) -> None:
    """Few candidates force the proof of exactness to fail often, many let it hold; rounded logits make many ties."""
    rng = np.random.default_rng(candidates)
    n, width = 200, 500
    x = torch.from_numpy(np.round(rng.normal(0, 2, (n, width)), 1).astype(np.float32))
    largest, temperature = x.amax(1).numpy().astype(np.float64), rng.uniform(0.3, 2.0, n)
    total = 1.0 / filters.softmax_rows(x, largest, temperature).amax(1).numpy().astype(np.float64)
    top_k, top_p = rng.choice([0, 1, 8, 9, 64, 499], n), rng.choice([1e-9, 0.3, 0.9, 0.999, 1.0], n)
    min_p = rng.choice([0.0, 1e-3, 0.1], n)
    args = (x, largest, temperature, top_k, top_p, min_p, total)
    assert np.array_equal(filters.thresholds(*args, candidates=candidates), filters.thresholds(*args, candidates=width))


@pytest.mark.parametrize("top_p, kept", [(0.4999, 1.0), (0.5, 1.0), (0.5001, 0.0)])
def test_top_p_keeps_the_smallest_set_that_reaches_it_exactly(top_p: float, kept: float) -> None:
    """The first token has exactly half of a total of 2 (given, so that no rounding decides)."""
    x = torch.tensor([[1.0, 0.0, -1.0]])
    limit = filters.thresholds(x, np.ones(1), np.ones(1), np.zeros(1, np.int64), np.array([top_p]), np.zeros(1),
                               row_total=np.array([2.0]), candidates=2)
    assert limit[0] == kept


def test_a_flat_row_keeps_equal_logits_together() -> None:
    """All ties: top_k 5 keeps every token, and all of them are drawn."""
    rows = [{"top_k": 5, "seed": s} for s in range(300)]
    tokens = sample(torch.zeros(300, 3000), rows).tokens
    assert tokens.max() > 2900 and len(set(tokens.tolist())) > 250


def test_top_k_one_and_a_tiny_top_p_are_greedy() -> None:
    x = torch.randn(50, 2000, generator=torch.Generator().manual_seed(1))
    for row in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}):
        assert sample(x, [{**row, "seed": s} for s in range(50)]).tokens.tolist() == x.argmax(1).tolist()


@pytest.mark.parametrize("temperature", [1e-40, 1e-30, 1e-9, 1e-4])
def test_tiny_temperatures_neither_overflow_nor_leave_the_maximum(temperature: float) -> None:
    x = torch.randn(20, 1000, generator=torch.Generator().manual_seed(2)) * 100
    result = sample(x, [{"temperature": temperature, "seed": s, "top_p": 0.9 if s % 2 else 1.0} for s in range(20)])
    assert result.tokens.tolist() == x.argmax(1).tolist() and not result.bad_rows.any()


def test_a_bad_row_is_reported_and_its_neighbours_are_exact() -> None:
    x = torch.randn(6, 4000, generator=torch.Generator().manual_seed(3))
    rows = [{"seed": r, "top_p": 0.9} if r % 2 else {"temperature": 0.0} for r in range(6)]
    good = sample(x, rows).tokens
    broken = x.clone()
    broken[1, 17], broken[2], broken[4, 3] = float("nan"), float("-inf"), float("inf")
    result = sample(broken, rows)
    assert result.bad_rows.tolist() == [False, True, True, False, True, False]
    assert result.tokens[~result.bad_rows].tolist() == good[~result.bad_rows].tolist()
    assert result.tokens[result.bad_rows].tolist() == [0, 0, 0]


def test_masked_pairs_are_never_drawn_and_other_rows_are_unchanged() -> None:
    x = torch.randn(4, 500, generator=torch.Generator().manual_seed(4))
    best = int(x[1].argmax())
    rows = [{"temperature": 0.0}, {"temperature": 0.0}, {"seed": 1}, {"seed": 2, "top_k": 1}]
    params = columns(rows)
    params.masked_rows = np.array([1, 3], np.int32)
    params.masked_tokens = np.array([best, int(x[3].argmax())], np.int32)
    logits = x.clone()
    plain, masked = sample(x, rows), Sampler().sample(logits, params)
    assert masked.tokens[[0, 2]].tolist() == plain.tokens[[0, 2]].tolist()
    assert masked.tokens[1] == x[1].topk(2).indices[1] and masked.tokens[3] == x[3].topk(2).indices[1]
    assert torch.equal(logits[[0, 2]], x[[0, 2]])


@pytest.mark.parametrize("width", [1, 31, 40, 255, 256, 257, 300, 3001, 9000])
def test_reading_through_bits_equals_minus_infinity_in_the_logits(width: int) -> None:
    """For every parameter; rows without bits are as if nobody had any. NaN behind a zero bit is not seen."""
    rng = np.random.default_rng(width)
    count, num_words = 60, -(-width // 32)
    rows = [random_row(rng) for _ in range(count)]
    x = rng.normal(0, 2, (count, width)).astype(np.float32)
    words = rng.integers(-(1 << 31), 1 << 31, (9, num_words)).astype(np.int32)
    words[rng.random(words.shape) < 0.5] = 0
    words[rng.random(words.shape) < 0.2] = -1
    words[0] = 0                                # nothing is left
    index = rng.integers(-1, 9, count).astype(np.int32)
    allowed = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, :width].astype(bool)
    masked = np.where((index >= 0)[:, None] & ~allowed[index], np.float32(-np.inf), x)
    expected = sample(torch.from_numpy(masked), rows)
    params, seen = columns(rows), x.copy()
    params.words, params.word_index = words, index
    seen[np.isneginf(masked) & (rng.random(x.shape) < 0.1)] = np.nan
    result = Sampler().sample(torch.from_numpy(seen), params)
    for name in ("tokens", "bad_rows", "empty_rows"):
        assert getattr(result, name).tolist() == getattr(expected, name).tolist(), name
    if width > 1:
        assert 0 < result.empty_rows.sum() < count


def test_ids_beyond_the_tokenizer_are_never_drawn_even_if_they_are_nan() -> None:
    x = torch.zeros(40, 200)
    x[:, 150:] = 50.0
    x[:, 199] = float("nan")
    rows = [{"seed": s, "temperature": float(s % 2)} for s in range(40)]
    result = sample(x, rows, num_valid_tokens=150)
    assert result.tokens.max() < 150 and not result.bad_rows.any()


def test_a_greedy_tie_takes_the_first_token() -> None:
    x = torch.zeros(3, 70_000)
    x[:, [5, 69_999]] = 1.0
    assert sample(x, [{"temperature": 0.0}] * 3).tokens.tolist() == [5, 5, 5]


def test_a_step_of_greedy_rows_runs_no_other_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    def unexpected(*args: object) -> None:
        raise RuntimeError("a greedy step drew noise")

    monkeypatch.setattr("worker.sampling.sampler.uniform", unexpected)
    x = torch.randn(3, 100, generator=torch.Generator().manual_seed(6))
    assert Sampler().sample(x, SamplingColumns.greedy(3)).tokens.tolist() == x.argmax(1).tolist()


def test_seed_child_and_output_index_each_change_the_draw() -> None:
    base = {"seed": 7}
    variants = [{"seed": 7 + i, "child": 0} for i in range(1, 30)], [{**base, "child": i} for i in range(1, 30)], [
        {**base, "output_index": i} for i in range(1, 30)]
    for rows in variants:
        assert len(set(sample(torch.zeros(29, 10_000), rows).tokens.tolist())) > 25


def test_slices_of_the_batch_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(8)
    rows = [random_row(rng) for _ in range(30)]
    x = torch.from_numpy(rng.normal(0, 2, (30, 1000)).astype(np.float32))
    whole = sample(x, rows).tokens
    monkeypatch.setattr("worker.sampling.sampler.SLICE_ELEMENTS", 4000)
    assert sample(x, rows).tokens.tolist() == whole.tolist()


@pytest.mark.parametrize("width", [1, CHUNK - 1, CHUNK, CHUNK + 1, 1000])
def test_the_draw_at_the_ends_of_the_noise_never_takes_a_token_of_weight_zero(width: int) -> None:
    weights = torch.zeros(2, width)
    weights[:, width // 2] = 0.1
    weights[:, max(0, width // 2 - 1)] = 0.3
    noise = np.array([2.0**-24, 1 - 2.0**-24], np.float32)
    assert draw(weights, noise).tolist() == [max(0, width // 2 - 1), width // 2]


def test_the_draw_stays_inside_the_row_when_float32_sums_round_up() -> None:
    """A chunk's float32 sum may exceed its running float64 sum; the largest noise then points behind the chunk."""
    weights = torch.rand((5000, CHUNK), generator=torch.Generator().manual_seed(9))
    weights[:, CHUNK // 2 :] = 0.0
    tokens = draw(weights, np.full(5000, 1 - 2.0**-24, np.float32))
    assert tokens.max() < CHUNK // 2


def test_an_empty_step_gives_no_tokens() -> None:
    result = sample(torch.empty(0, 100), [])
    assert len(result.tokens) == 0 and len(result.bad_rows) == 0


def test_columns_have_one_entry_a_row() -> None:
    greedy = SamplingColumns.greedy(5)
    assert all(len(getattr(greedy, f.name)) == 5 for f in dataclasses.fields(greedy)
               if not f.name.startswith(("masked", "word")))
