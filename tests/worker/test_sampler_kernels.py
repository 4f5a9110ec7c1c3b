"""The compiled rows against torch and numpy: random logits, parameters and masks, whatever lies in the scratch memory.

Above all filters that ask for more than there is: top_k beyond what min_p, a mask or the model leaves.
"""
from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("numba")
from worker.sampling.jit_threads import RowKernels, load  # noqa: E402
from worker.sampling.logprobs import compute_logprobs  # noqa: E402
from worker.sampling.sampler import Sampler, SamplingColumns  # noqa: E402

WIDTHS = (1, 2, 17, 255, 257, 513, 1000, 8193, 33_000, 49_153)


def random_logits(rng: np.random.Generator, count: int, width: int) -> np.ndarray:
    """Rows of ties, of equal values, far from zero, far apart, with NaN; many have few that are finite, some of them in
    one place."""
    x = rng.normal(0, rng.choice([0.1, 2, 30, 1e4]), (count, width)).astype(np.float32)
    kind = rng.integers(0, 5)
    if kind == 0:
        x = np.round(x)
    elif kind == 1:
        x -= np.float32(100)
    elif kind == 2:
        x[:] = 1.5
    elif kind == 3:
        x[rng.random(x.shape) < 0.001] = rng.choice([np.nan, np.inf])
    x[rng.random(x.shape) < rng.choice([0.0, 0.6, 0.99, 0.9999], (count, 1))] = -np.inf
    for row in np.flatnonzero(rng.random(count) < 0.2):
        x[row, int(rng.integers(1, width + 1)):] = -np.inf
    return x


def random_columns(rng: np.random.Generator, count: int, width: int) -> SamplingColumns:
    params = SamplingColumns(
        temperature=rng.choice([0.0, 1e-9, 0.3, 1.0, 1.7, 50.0], count).astype(np.float32),
        top_k=rng.choice([0, 1, 2, 17, 50, 300, 5000, 10**6], count).astype(np.int32),
        top_p=rng.choice([1e-6, 0.1, 0.9, 0.999, 1.0, 1.0], count).astype(np.float32),
        min_p=rng.choice([0.0, 0.0, 1e-5, 0.05, 0.5, 1.0], count).astype(np.float32),
        seed=rng.integers(0, 1 << 63, count).astype(np.uint64), child=rng.integers(0, 3, count).astype(np.int32),
        output_index=rng.integers(0, 1000, count))
    if rng.random() < 0.5:
        params.words = rng.integers(-(1 << 31), 1 << 31, (4, -(-width // 32))).astype(np.int32)
        params.words[rng.random(params.words.shape) < 0.5] = 0
        params.words[0] = 0
        params.word_index = rng.integers(-1, 4, count).astype(np.int32)
    return params


@pytest.fixture(params=[0.0, 1e30, -1e30, float("nan")])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> RowKernels:
    """Whose scratch memory is full of one value before each call."""
    monkeypatch.setattr(RowKernels, "_scratch", lambda kernels, width: np.full(
        kernels.kernels.scratch_floats(width) + 16, request.param, np.float32))
    found = load()
    assert found is not None
    return found


@pytest.mark.parametrize("width", WIDTHS)
def test_rows_are_sampled_as_with_torch(kernels: RowKernels, width: int) -> None:
    rng = np.random.default_rng(width)
    compiled, plain = Sampler(), Sampler(use_kernels=False)
    for _ in range(8 if width < 10_000 else 3):
        x, params = random_logits(rng, 24, width), random_columns(rng, 24, width)
        ours, theirs = (sampler.sample(torch.from_numpy(x.copy()), params) for sampler in (compiled, plain))
        for name in ("tokens", "bad_rows", "empty_rows"):
            assert getattr(ours, name).tolist() == getattr(theirs, name).tolist(), name


@pytest.mark.parametrize("width", WIDTHS)
def test_logprobs_are_those_of_torch(kernels: RowKernels, width: int) -> None:
    rng = np.random.default_rng(width)
    for _ in range(5 if width < 10_000 else 2):
        x = random_logits(rng, 24, width)
        x = x[np.isfinite(x).any(axis=1) & ~np.isnan(x).any(axis=1) & ~np.isposinf(x).any(axis=1)]
        targets, num_top = rng.integers(0, width, len(x)), rng.integers(0, min(20, width) + 1, len(x))
        ours, theirs = (compute_logprobs(torch.from_numpy(x), targets, num_top, which) for which in (kernels, None))
        assert ours.ranks.tolist() == theirs.ranks.tolist()
        for row, count in enumerate(num_top):
            np.testing.assert_allclose(ours.values[row, :1 + count], theirs.values[row, :1 + count], atol=2e-4,
                                       rtol=1e-4)


def test_a_mask_of_no_row_masks_nothing() -> None:
    """Rows whose grammar has ended, alone in a step."""
    params = SamplingColumns.greedy(2)
    params.words, params.word_index = np.zeros((1, 1), np.int32), np.full(2, -1, np.int32)
    for use_kernels in (True, False):
        logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
        assert Sampler(use_kernels=use_kernels).sample(logits, params).tokens.tolist() == [1, 0]
