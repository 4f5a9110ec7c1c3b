"""The pieces of the compiled sampler: powers of two, lists of a row's logits, cuts without a sort."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba")
from numba import njit  # noqa: E402

from worker.jit import features, lanes, vector  # noqa: E402
from worker.sampling import jit_chunks, jit_cut  # noqa: E402

LOWEST = np.finfo(np.float32).min


def power_of_two(form: Any) -> Any:
    @njit
    def run(x, out, n):  # type: ignore[no-untyped-def]
        for i in range(n // 16):
            vector.store_f32(out + 64 * i, form(vector.load_f32(x + 64 * i)))
    return run


@pytest.mark.parametrize("name", ["exp2_generic", "exp2_avx512"])
def test_powers_of_two_are_exact_to_float32_and_zero_where_they_vanish(name: str) -> None:
    if name == "exp2_avx512" and "avx512f" not in features.cpu_features():
        pytest.skip("this processor has no AVX-512")
    x = np.concatenate([-np.random.default_rng(0).exponential(20, 16_000), [0, -0.5, -1, -126, -151, -1e30, -np.inf,
                                                                          np.nan], np.zeros(8)]).astype(np.float32)
    out = np.empty_like(x)
    power_of_two(getattr(lanes, name))(x.ctypes.data, out.ctypes.data, len(x))
    normal = x > -125.9
    exact = np.exp2(x[normal].astype(np.float64))
    assert np.abs(out[normal] / exact - 1).max() < 2.5e-7
    assert out[[16_000, 16_002]].tolist() == [1.0, 0.5]
    assert (out[16_004:16_008] == 0).all() and (out[x < -150] == 0).all()


@njit
def run_cut(values, weights, n, low, hint, high, target, room):  # type: ignore[no-untyped-def]
    return jit_cut.cut(values.ctypes.data, weights.ctypes.data, n, np.float32(low), np.float32(hint), np.float32(high),
                       target, room.ctypes.data, room.ctypes.data + 4 * (n + 16))


def cut(values: np.ndarray, weights: np.ndarray, low: float, hint: float, target: float) -> float:
    n = -(-len(values) // 16) * 16
    padded = np.full((2, n), -np.inf, np.float32)
    padded[0, :len(values)], padded[1] = values, 0
    padded[1, :len(values)] = weights
    before = padded.copy()
    found = run_cut(padded[0], padded[1], n, low, hint, values.max(), target, np.empty(2 * (n + 16), np.float32))
    assert np.array_equal(padded, before)
    return float(found)


@pytest.mark.parametrize("shape", ["normal", "ties", "equal", "huge", "tiny", "negative"])
@pytest.mark.parametrize("n", [1, 15, 16, 33, 500, 5000])
def test_a_cut_is_where_the_running_sum_of_the_sorted_list_reaches_the_target(n: int, shape: str) -> None:
    """Weights are whole numbers, so that every sum is exact. The cut keeps the same values as the sorted list's."""
    rng = np.random.default_rng(n)
    values = rng.normal(0, 3, n).astype(np.float32)
    values = {"normal": values, "ties": np.round(values), "equal": np.full(n, np.float32(-2.5)), "huge": values * 1e37,
              "tiny": values * np.float32(1e-38), "negative": -np.abs(values) - 100}[shape].astype(np.float32)
    weights = rng.integers(1, 9, n).astype(np.float32)
    order = np.argsort(-values, kind="stable")
    sums = np.cumsum(weights[order])
    for target in (1.0, float(sums[n // 2]), float(sums[-1]), sums[-1] + 1.0):
        at = min(int(np.searchsorted(sums, target)), n - 1)
        exact = float(values[order[at]])
        for low in (LOWEST, float(values.min()), exact):
            for hint in (-np.inf, exact, float(np.median(values))):
                found = cut(values, weights, low, hint, target)
                assert ((values >= np.float32(found)) == (values >= exact)).all(), (low, hint, target)


@njit
def run_list(x, width, limit, scratch, found, starts):  # type: ignore[no-untyped-def]
    tail, chunk_max = scratch.ctypes.data, scratch.ctypes.data + 1024
    jit_chunks.fill_tail(x.ctypes.data, width, 0, tail)
    _, largest = jit_chunks.scan(x.ctypes.data, width, tail, chunk_max)
    return largest, jit_chunks.collect(x.ctypes.data, width, tail, chunk_max, np.float32(limit), found.ctypes.data,
                                       starts.ctypes.data)


@pytest.mark.parametrize("width", [1, 255, 256, 257, 3000])
def test_a_list_has_the_logits_above_its_limit_chunk_by_chunk(width: int) -> None:
    x = np.random.default_rng(width).normal(0, 2, width).astype(np.float32)
    chunks = -(-width // 256)
    for limit in (LOWEST, 0.5, float(x.max())):
        found, starts = np.empty(width + 16 * chunks + 32, np.float32), np.empty(chunks + 1, np.int64)
        largest, n = run_list(x, width, limit, np.empty(512 + chunks, np.float32), found, starts)
        assert largest == x.max() and starts[0] == 0 and starts[-1] == n and not (starts % 16).any()
        for c in range(chunks):
            part, chunk = found[starts[c]:starts[c + 1]], x[256 * c:256 * c + 256]
            kept = chunk[chunk >= np.float32(limit)]
            assert np.array_equal(part[:len(kept)], kept) and np.isneginf(part[len(kept):]).all()
