"""The pieces of the compiled sampler: powers of two, lists of a row's logits, cuts without a sort."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba")
from numba import njit  # noqa: E402

from worker.jit import features, lanes, vector  # noqa: E402
from worker.sampling import jit_chunks, jit_cut, jit_lists, jit_masked  # noqa: E402

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


def weights(form: Any) -> Any:
    @njit
    def run(x, out, n, top, scale):  # type: ignore[no-untyped-def]
        least = vector.splat(lanes.least_difference(scale))
        for i in range(n // 16):
            lane = vector.load_f32(x + 64 * i)
            vector.store_f32(out + 64 * i, form(lane, vector.splat(top), vector.splat(scale), least))
    return run


@pytest.mark.parametrize("scale", [0.0144, 1.4426951, 1e9, 1.4426951e30])
@pytest.mark.parametrize("name", ["weight_generic", "weight_avx512"])
def test_weights_are_exact_to_float32_and_zero_where_they_vanish(name: str, scale: float) -> None:
    if name == "weight_avx512" and "avx512f" not in features.cpu_features():
        pytest.skip("this processor has no AVX-512")
    top = np.float32(-37.5)
    below = np.random.default_rng(0).exponential(20, 16_000) / scale
    x = (top - np.concatenate([below, [0, 128 / scale, 1e30, np.inf], np.zeros(12)])).astype(np.float32)
    out = np.empty_like(x)
    weights(getattr(lanes, name))(x.ctypes.data, out.ctypes.data, len(x), top, np.float32(scale))
    power = (x.astype(np.float64) - top) * np.float32(scale)
    normal = power > -125.9
    # The generic form rounds the exponent to a float32.
    assert np.abs(out[normal] / np.exp2(power[normal]) - 1).max() < (2e-7 if name == "weight_avx512" else 6e-6)
    assert out[16_000] == 1.0 and (out[power < -127.1] == 0).all()


@njit
def run_largest_allowed(x, width, bits, tail, words):  # type: ignore[no-untyped-def]
    return jit_masked.largest_allowed(x.ctypes.data, width, bits.ctypes.data, tail.ctypes.data, words.ctypes.data)


@pytest.mark.parametrize("width", [1, 31, 255, 256, 257, 3000, 8192, 20_001])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 1.0])
def test_the_largest_under_a_mask_is_the_first_of_the_allowed(width: int, share: float) -> None:
    """Of many equal ones; bits beyond the width are 1, and a NaN that is not allowed does not count."""
    rng = np.random.default_rng(width)
    for _ in range(20):
        x = np.round(rng.normal(0, 2, width)).astype(np.float32)
        bits = rng.integers(-(1 << 31), 1 << 31, -(-width // 32)).astype(np.int32)
        bits[rng.random(len(bits)) < 0.9 * (share == 1.0)] = -1
        bits[rng.random(len(bits)) >= share] = 0
        bits[-1] |= np.int32(-1) << np.int32(width % 32) if width % 32 else 0
        allowed = np.unpackbits(bits.view(np.uint8), bitorder="little")[:width].astype(bool)
        x[~allowed & (rng.random(width) < 0.1)] = np.nan
        words = np.full(width + 400, 1 << 20, np.int32)
        token, largest = run_largest_allowed(x, width, bits, np.empty(256, np.float32), words)
        if not allowed.any():
            assert np.isneginf(largest)
            continue
        masked = np.where(allowed, x, -np.inf)
        assert (token, largest) == (masked.argmax(), masked.max())
        x[rng.choice(np.flatnonzero(allowed))] = np.nan
        assert np.isnan(run_largest_allowed(x, width, bits, np.empty(256, np.float32), words)[1])


@njit
def run_cut(values, weights, n, low, high, target, room):  # type: ignore[no-untyped-def]
    return jit_cut.cut(values.ctypes.data, weights.ctypes.data, n, np.float32(low), np.float32(high), target,
                       room.ctypes.data, room.ctypes.data + 4 * (n + 16))


def cut(values: np.ndarray, weights: np.ndarray, low: float, target: float) -> float:
    n = -(-len(values) // 16) * 16
    padded = np.full((2, n), -np.inf, np.float32)
    padded[0, :len(values)], padded[1] = values, 0
    padded[1, :len(values)] = weights
    before = padded.copy()
    found = run_cut(padded[0], padded[1], n, low, values.max(), target, np.empty(2 * (n + 16), np.float32))
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
            found = cut(values, weights, low, target)
            assert ((values >= np.float32(found)) == (values >= exact)).all(), (low, target)


@njit
def run_list(x, width, limit, scratch, found, starts):  # type: ignore[no-untyped-def]
    tail, chunk_max = scratch.ctypes.data, scratch.ctypes.data + 1024
    jit_chunks.fill_tail(x.ctypes.data, width, 0, tail)
    _, largest = jit_chunks.scan(x.ctypes.data, width, tail, chunk_max)
    return largest, jit_lists.collect(x.ctypes.data, width, tail, chunk_max, np.float32(limit), found.ctypes.data,
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
