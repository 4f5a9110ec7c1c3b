"""Rows of a sampling step are shared among threads; a thread that is late is not waited for."""
from __future__ import annotations

import threading

import pytest

pytest.importorskip("numba")
from worker.sampling import jit_threads  # noqa: E402
from worker.sampling.jit_threads import WORTH_A_THREAD, RowKernels  # noqa: E402

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
