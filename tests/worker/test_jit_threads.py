"""Rows of a sampling step are shared among threads; a thread that is late is not waited for."""
from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

pytest.importorskip("numba")
from worker.sampling import jit_threads  # noqa: E402
from worker.sampling.jit_threads import WORTH_A_THREAD, RowKernels  # noqa: E402
from worker.sampling.sampler import Sampler, SamplingColumns  # noqa: E402

WIDTH = WORTH_A_THREAD


@pytest.mark.parametrize("count", [1, 2, 7, 64])
def test_every_row_is_taken_once(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(jit_threads, "_num_threads", 3)
    taken: list[int] = []
    RowKernels().share(lambda begin, end: taken.extend(range(begin, end)), count, WIDTH)
    assert sorted(taken) == list(range(count))


def test_nobody_waits_for_a_thread_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit_threads, "_num_threads", 2)
    kernels, release, threads = RowKernels(), threading.Event(), set()

    def part(begin: int, end: int) -> None:
        threads.add(threading.get_ident())
    kernels.share(part, 8, WIDTH)               # makes the pool
    assert kernels._pool is not None
    busy = kernels._pool.submit(release.wait, 30)
    threads.clear()
    kernels.share(part, 8, WIDTH)
    assert threads == {threading.get_ident()} and not busy.done()
    release.set()


def test_an_error_in_any_thread_is_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit_threads, "_num_threads", 2)
    main, is_taken = threading.get_ident(), threading.Event()

    def part(begin: int, end: int) -> None:
        if threading.get_ident() != main:
            is_taken.set()
            raise ValueError("no such row")
        is_taken.wait(30)
    with pytest.raises(ValueError, match="no such row"):
        RowKernels().share(part, 8, WIDTH)


@pytest.mark.parametrize("poison", [0.0, 1e30, -1e30, float("nan")])
@pytest.mark.parametrize("width", [1, 40, 300, 9000])
def test_what_lies_in_the_scratch_memory_changes_no_token(monkeypatch: pytest.MonkeyPatch, width: int,
                                                          poison: float) -> None:
    """Filters that ask for more than there is, above all: top_k beyond what min_p or a mask leaves."""
    rng, count = np.random.default_rng(width), 200
    x = rng.normal(0, 2, (count, width)).astype(np.float32)
    x[rng.random(x.shape) < rng.choice([0.0, 0.6, 0.99], (count, 1))] = -np.inf
    params = SamplingColumns(
        temperature=rng.choice([0.3, 1.0, 1.7], count).astype(np.float32),
        top_k=rng.choice([0, 1, 3, 17, 50, 300], count).astype(np.int32),
        top_p=rng.choice([1e-6, 0.5, 0.9, 1.0], count).astype(np.float32),
        min_p=rng.choice([0.0, 1e-5, 0.05, 0.5, 1.0], count).astype(np.float32),
        seed=rng.integers(0, 1 << 63, count).astype(np.uint64), child=np.zeros(count, np.int32),
        output_index=rng.integers(0, 1000, count))
    monkeypatch.setattr(RowKernels, "_scratch", lambda kernels, width: np.full(
        kernels.kernels.scratch_floats(width) + 16, poison, np.float32))
    compiled, plain = Sampler(), Sampler(use_kernels=False)
    if compiled.kernels is None:
        pytest.skip("numba is not installed")
    ours, theirs = (sampler.sample(torch.from_numpy(x.copy()), params) for sampler in (compiled, plain))
    assert ours.bad_rows.tolist() == theirs.bad_rows.tolist() and not ours.bad_rows.all()
    assert (ours.tokens != theirs.tokens).sum() <= 2    # a rounding may decide
