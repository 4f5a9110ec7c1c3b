"""The compiled row kernels behind plain calls: scratch memory, and rows shared among threads.

Rows do not depend on each other, so each thread takes a run of them; threads of this pool sleep when they have none.
Returns None from `load` where numba is missing: the caller then uses torch and numpy. Knows no parameters' meaning.
"""
from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from worker.jit import features

NO_WORDS, NO_INDEX = np.empty((0, 0), np.int32), np.empty(0, np.int32)     # no row has a mask
WORTH_A_THREAD = 1 << 18                        # logits; waking a thread costs as much as reading this many


_num_threads = 0                                # 0: as many as torch uses


def set_num_threads(count: int) -> None:
    """For a process whose torch is limited to one thread while another pool computes."""
    global _num_threads
    _num_threads = count


def _flat(x: np.ndarray) -> tuple[np.ndarray, int]:
    """(x as one dimension, elements from row to row). Rows may lie apart; each is whole."""
    if x.flags.c_contiguous:
        return x.reshape(-1), x.shape[1]
    stride = x.strides[0] // x.itemsize
    size = (len(x) - 1) * stride + x.shape[1]
    return np.lib.stride_tricks.as_strided(x, (size,), (x.itemsize,)), stride


class RowKernels:
    """Calls for float32 numpy arrays [L, V] whose rows are contiguous."""

    def __init__(self) -> None:
        from worker.sampling import jit_logprobs, jit_penalties, jit_rows
        self.kernels: Any = jit_rows
        self.penalties: Any = jit_penalties
        self.logprob_rows: Any = jit_logprobs.logprob_rows
        self._local = threading.local()
        self._pool: ThreadPoolExecutor | None = None
        self._pool_size = 0

    def greedy(self, x: np.ndarray, width: int, words: np.ndarray = NO_WORDS, index: np.ndarray = NO_INDEX
               ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """As sample, all temperatures 0."""
        count = len(x)
        flat, stride = _flat(x)
        results = np.empty(count, np.int32), np.empty(count, bool), np.empty(count, bool)
        if count == 1:
            self.kernels.greedy_rows(flat, stride, width, 0, 1, words, index, self._scratch(width), *results)
            return results

        def part(begin: int, end: int) -> None:
            self.kernels.greedy_rows(flat, stride, width, begin, end, words, index, self._scratch(width), *results)
        self.share(part, count, width)
        return results

    def sample(self, x: np.ndarray, width: int, temperature: np.ndarray, top_k: np.ndarray, top_p: np.ndarray,
               min_p: np.ndarray, seed: np.ndarray, child: np.ndarray, output_index: np.ndarray,
               words: np.ndarray = NO_WORDS, index: np.ndarray = NO_INDEX
               ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(tokens int32, bad, empty) [L] over the first `width` logits of each row, see SampleResult; the noise is that
        of ipc.counter_rng.uniform. words int32 [n, >= ceil(width / 32)], index int32 [L]: see jit_rows.sample_rows."""
        count = len(x)
        flat, stride = _flat(x)
        results = np.empty(count, np.int32), np.empty(count, bool), np.empty(count, bool)
        columns = (_as(temperature, np.float32), _as(top_k, np.int32), _as(top_p, np.float32), _as(min_p, np.float32),
                   _as(seed, np.uint64), _as(child, np.int32), _as(output_index, np.int64))

        def part(begin: int, end: int) -> None:
            self.kernels.sample_rows(flat, stride, width, begin, end, words, index, *columns, self._scratch(width),
                                     *results)
        self.share(part, count, width)
        return results

    def logprobs(self, x: np.ndarray, targets: np.ndarray, num_top: np.ndarray
                 ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(ids int64 [L, 1 + most], values float64 of the same shape, ranks int64 [L])."""
        count, width = x.shape
        flat, stride = _flat(x)
        shape = (count, 1 + int(num_top.max(initial=0)))
        ids, values, ranks = np.empty(shape, np.int64), np.empty(shape), np.empty(count, np.int64)
        targets, num_top = _as(targets, np.int64), _as(num_top, np.int64)

        def part(begin: int, end: int) -> None:
            self.logprob_rows(flat, stride, width, begin, end, targets, num_top, self._scratch(width), ids, values,
                              ranks)
        self.share(part, count, width)
        return ids, values, ranks

    def penalise(self, x: np.ndarray, *columns: np.ndarray) -> None:
        """jit_penalties.penalise_rows."""
        flat, stride = _flat(x)
        self.penalties.penalise_rows(flat, stride, x.shape[1], *columns)

    def count(self, *columns: np.ndarray) -> None:
        """jit_penalties.count_tokens."""
        self.penalties.count_tokens(*columns)

    def _scratch(self, width: int) -> np.ndarray:
        """This thread's memory for a row."""
        kept = getattr(self._local, "scratch", None)
        if kept is None or kept[1] < width:
            room = np.empty(self.kernels.scratch_floats(width) + 16, np.float32)
            at = -(room.ctypes.data // 4) % 16          # whole cache lines
            kept = self._local.scratch = room[at:], width
        return kept[0]

    def share(self, part: Callable[[int, int], None], count: int, width: int) -> None:
        """part(begin, end) over rows of so many logits, by as many threads as are worth it. Each takes the next few
        rows until there are none: nobody waits for a thread that is not there yet, because its core is busy, say."""
        threads = 1 if count == 1 else min(_num_threads or torch.get_num_threads(), count,
                                           max(1, count * width // WORTH_A_THREAD))
        if threads <= 1:
            part(0, count)
            return
        if self._pool is None or self._pool_size < threads - 1:
            self._pool = ThreadPoolExecutor(threads - 1, "sampler")
            self._pool_size = threads - 1
        few = max(1, min(count // (2 * threads), WORTH_A_THREAD // width))
        begins = iter(range(0, count, few))     # one `next` is one step of the interpreter: no lock

        def take() -> None:
            for begin in begins:
                part(begin, min(begin + few, count))
        others = [self._pool.submit(take) for _ in range(threads - 1)]
        take()
        for other in others:
            if not other.cancel():              # it has begun
                other.result()


def _as(column: np.ndarray, dtype: type) -> np.ndarray:
    return np.ascontiguousarray(column, dtype)


def load() -> RowKernels | None:
    """The process's kernels; None: not available here."""
    return _row_kernels() if features.missing() is None else None


@functools.cache
def _row_kernels() -> RowKernels:
    return RowKernels()


def warm_up(width: int) -> None:
    """Compile, or load what was compiled before, so that no request waits for it."""
    kernels = load()
    if kernels is None:
        return
    x, ones = np.zeros((1, width), np.float32), np.ones(1, np.float32)
    kernels.sample(x, width, ones, ones, ones, ones * 0, ones, ones, ones)
    kernels.greedy(x, width)
    kernels.logprobs(x, ones, ones)
    counts, seen = warm_up_counts(width)
    one = np.zeros(1, np.int64)
    kernels.penalise(x, one, one, counts, seen, one.copy(), ones, ones, ones)


def warm_up_counts(width: int) -> tuple[np.ndarray, np.ndarray]:
    """The part that serves a CUDA device too. Returns empty counts and lists."""
    kernels, one = load(), np.zeros(1, np.int64)
    counts, seen = np.zeros((1, width), np.int32), np.zeros((1, width), np.int32)
    if kernels is not None:
        kernels.count(np.zeros((1, 1), np.int32), one, one, one, one, one, counts, seen, one.copy())
    return counts, seen
