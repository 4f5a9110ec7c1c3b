"""The kernels of the sampler against their torch references."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from worker.kernels.edit_logits import mask_bits, mask_bits_reference, penalise, penalise_reference
from worker.kernels.logprobs import chosen_logprobs, chosen_logprobs_reference
from worker.kernels.sample_rows import BAD, EMPTY, kept_reference, sample_rows, sample_rows_reference
from worker.sampling import placement
from worker.sampling.logprobs import Logprobs, compute_logprobs
from worker.sampling.masks import keep_only
from worker.sampling.penalties import PenaltyCounts
from worker.sampling.sampler import Sampler, SampleResult, SamplingColumns


def columns(rng: np.random.Generator, count: int) -> list[torch.Tensor]:
    """Each parameter on and off: temperature, top_k, top_p, min_p, seeds, children, output index."""
    return [torch.from_numpy(column) for column in (
        rng.choice([0.0, 0.3, 1.0, 1.7, 1e-9], count).astype(np.float32),
        rng.choice([0, 1, 2, 17, 300, 10**6], count).astype(np.int32),
        rng.choice([1e-6, 0.5, 0.9, 0.999, 1.0, 1.0], count).astype(np.float32),
        rng.choice([0.0, 0.0, 0.01, 0.2, 1.0], count).astype(np.float32),
        rng.integers(-(2**63), 2**63, count), rng.integers(0, 4, count).astype(np.int32), rng.integers(0, 1000, count))]


@pytest.mark.parametrize("width, shape", [(1, "normal"), (50, "ties"), (50, "negative"), (1030, "normal"),
                                          (1030, "peaked")])
def test_a_row_draws_the_token_of_the_float64_reference(width: int, shape: str) -> None:
    """A neighbour counts as right where the noise lies within float32 rounding of the end of its share."""
    rng = np.random.default_rng(width)
    x = rng.normal(0, 3, (8, width)).astype(np.float32)
    x = {"normal": x, "ties": np.round(x), "peaked": x + 25 * (np.arange(width) == width // 2),
         "negative": -np.abs(x) - 50}[shape].astype(np.float32)
    logits, asked = torch.from_numpy(x), columns(rng, len(x))
    tokens = sample_rows(logits, *asked)
    expected, margins = sample_rows_reference(logits, *asked)
    wrong = (tokens != expected) & (margins > 4e-6)
    assert not wrong.any(), [column[wrong] for column in (tokens, expected, *asked)]
    for row, token in enumerate(tokens.tolist()):
        if asked[0][row] > 0:
            values = [float(column[row]) for column in asked[:4]]
            assert kept_reference(logits[row], values[0], int(values[1]), values[2], values[3])[token] > 0


def test_rows_do_not_depend_on_each_other_or_on_logits_beyond_the_width() -> None:
    rng = np.random.default_rng(1)
    logits, asked = torch.from_numpy(rng.normal(0, 2, (5, 1300)).astype(np.float32)), columns(rng, 5)
    together = sample_rows(logits, *asked, width=1100)
    logits[:, 1100:] = float("nan")
    alone = [int(sample_rows(logits[r:r + 1], *(column[r:r + 1] for column in asked), width=1100)) for r in range(5)]
    assert together.tolist() == alone


def test_masked_rows_are_read_through_their_bits_and_broken_ones_are_told() -> None:
    rng = np.random.default_rng(2)
    logits, asked = torch.from_numpy(rng.normal(0, 2, (8, 1100)).astype(np.float32)), columns(rng, 8)
    words = torch.from_numpy(rng.integers(-(2**31), 2**31, (4, 35)).astype(np.int32))
    words[3], words[2] = 0, -1
    index = torch.from_numpy(rng.integers(0, 4, 8).astype(np.int32))
    masked = logits.clone()
    mask_bits_reference(masked, torch.arange(8), words[index.long()])
    expected = sample_rows(masked, *asked)
    assert sample_rows(logits, *asked, words=words, word_index=index).tolist() == expected.tolist()
    assert expected[index == 3].eq(EMPTY).all() and expected[index != 3].ge(0).all()
    logits[0, 3], logits[1, 1099] = float("nan"), float("inf")
    assert sample_rows(logits, *asked)[:3].lt(0).tolist() == [True, True, False]
    assert int(sample_rows(logits, *asked)[0]) == BAD


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 100, 5000])
def test_chosen_logprobs_are_the_log_softmax_with_ranks(width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(width)
    logits = (3 * torch.randn((7, width), generator=generator)).to(dtype)
    targets = torch.randint(0, width, (7,), generator=generator)
    values, ranks, totals = chosen_logprobs(logits, targets)
    expected, right, log_sums = chosen_logprobs_reference(logits, targets)
    torch.testing.assert_close(values, expected, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(totals, log_sums, atol=2e-5, rtol=1e-5)
    assert torch.equal(ranks, right)


def test_a_chosen_token_without_weight_leaves_the_likeliest_their_logprobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "on_device", lambda logits: True)
    logits = torch.tensor([[0.5, -np.inf, 2.0, 1.0]])
    found = compute_logprobs(logits, np.array([1]), np.array([2]), None)
    expected = torch.log_softmax(logits, 1)[0]
    assert found.ids.tolist() == [[1, 2, 3]] and found.ranks.tolist() == [4] and found.values[0, 0] == -np.inf
    np.testing.assert_allclose(found.values[0, 1:], expected[[2, 3]], atol=1e-5)


def test_penalties_change_the_tokens_that_were_seen_and_no_others() -> None:
    rng = np.random.default_rng(3)
    lengths = [0, 5, 1300, 40]
    ids = np.concatenate([rng.permutation(1500)[:n] for n in lengths]).astype(np.int32)
    columns = [torch.from_numpy(column) for column in (
        np.array([4, 1, 0, 3], np.int32), np.cumsum([0, *lengths]).astype(np.int32), ids,
        rng.integers(0, 3, len(ids)).astype(np.int32), rng.uniform(0.5, 2, (4, 3)).astype(np.float32))]
    logits = torch.from_numpy(rng.normal(0, 2, (5, 1500)).astype(np.float32))
    ours, theirs = logits.clone(), logits.clone()
    penalise(ours, *columns, longest=1300)
    penalise_reference(theirs, *columns)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
    assert torch.equal(ours[[2, 4]], logits[[2, 4]])
    assert ((ours != logits).sum(1) <= torch.tensor([1300, 5, 0, 40, 0])).all()


@pytest.mark.parametrize("width", [1, 32, 33, 2100])
def test_a_mask_writes_what_its_bits_exclude(width: int) -> None:
    rng = np.random.default_rng(width)
    words = torch.from_numpy(rng.integers(-(2**31), 2**31, (2, -(-width // 32))).astype(np.int32))
    logits, rows = torch.randn(4, width), torch.tensor([3, 1], dtype=torch.int32)
    ours, theirs = logits.clone(), logits.clone()
    mask_bits(ours, rows, words)
    mask_bits_reference(theirs, rows, words)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("every", [1, 3])
def test_the_samplers_stages_give_on_the_device_what_torch_gives(every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens, failures, penalties and log-probabilities, with masks by bits and by pairs."""
    rng = np.random.default_rng(5)
    count, width = 6, 900
    x = rng.normal(0, 2, (count, width)).astype(np.float32)
    x[3], x[4, :] = -np.inf, np.nan
    params = SamplingColumns(*(np.asarray(column) for column in (
        np.array([0.0, 0.8, 1.3] * 2, np.float32), np.array([0, 5, 0] * 2, np.int32),
        np.array([1.0, 0.9, 0.5] * 2, np.float32), np.zeros(count, np.float32), np.arange(count, dtype=np.uint64),
        np.zeros(count, np.int32), np.arange(count))))
    params.masked_rows, params.masked_tokens = np.array([5, 0], np.int32), x[[5, 0]].argmax(1).astype(np.int32)
    params.words = rng.integers(-(2**31), 2**31, (2, 29)).astype(np.int32)
    params.word_index = np.where(np.arange(count) % every == 0, 1, -1).astype(np.int32)
    tokens = rng.integers(0, width, (count, 40)).astype(np.int32)
    index, known = np.arange(count), np.full(count, 40)

    def run() -> tuple[SampleResult, torch.Tensor, Logprobs]:
        logits, penalties = torch.from_numpy(x.copy()), PenaltyCounts()
        for _ in range(count):
            penalties.take(1.3, 0.2, 0.4)
        penalties.apply(logits, index, index, index, tokens, known, known // 2, None)
        told = compute_logprobs(logits[:3], tokens[:3, 0], np.full(3, 3), None)
        keep_only(logits, [0, 2], [np.arange(0, width, 3), np.array([0, 31, 32, 450, width - 1])])
        return Sampler(use_kernels=False).sample(logits, params), logits, told
    expected, changed, told = run()
    monkeypatch.setattr(placement, "on_device", lambda logits: True)
    result, ours, found = run()
    for name in ("tokens", "bad_rows", "empty_rows"):
        assert getattr(result, name).tolist() == getattr(expected, name).tolist()
    if every > 1:                               # else the rows are read through their bits
        torch.testing.assert_close(ours, changed, atol=1e-6, rtol=1e-6, equal_nan=True)
    assert np.array_equal(found.ids, told.ids) and np.array_equal(found.ranks, told.ranks)
    assert np.allclose(found.values, told.values, atol=1e-5) and result.bad_rows.sum() == 2
