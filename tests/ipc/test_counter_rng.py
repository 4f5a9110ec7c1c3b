"""Noise from the counter RNG: known answers, independence of the batch, range and uniformity."""

from __future__ import annotations

import numpy as np
import pytest

from ipc.counter_rng import philox4x32, uniform

# The generator's published known-answer vectors for philox4x32 with 10 rounds: counter, key, output.
KNOWN = [
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize("counter, key, expected", KNOWN)
def test_philox_gives_the_published_known_answers(counter: list[int], key: list[int], expected: list[int]) -> None:
    out = philox4x32(np.array([counter], np.uint32), np.array([key], np.uint32))
    assert out[0].tolist() == expected


def test_known_answers_are_the_same_in_one_batch() -> None:
    counters, keys, expected = (np.array(column, np.uint32) for column in zip(*KNOWN, strict=True))
    assert np.array_equal(philox4x32(counters, keys), expected)


def test_the_documented_layout_is_the_one_used() -> None:
    seed, child, index = 0x299F31D0A4093822, 5, (7 << 32) | 9
    words = philox4x32(np.array([[9, 7, 5, 1]], np.uint32), np.array([[0xA4093822, 0x299F31D0]], np.uint32))[0]
    noise = uniform([seed], [child], [index], lanes=8)[0]
    for lane in range(4):
        assert noise[4 + lane] == np.float32((2 * (int(words[lane]) >> 9) + 1) * 2.0**-24)


def test_a_row_draws_the_same_noise_alone_and_in_any_batch() -> None:
    rng = np.random.default_rng(0)
    seeds = rng.integers(0, 1 << 64, 50, dtype=np.uint64)
    children, index = rng.integers(0, 128, 50, dtype=np.int32), rng.integers(0, 1 << 40, 50)
    together = uniform(seeds, children, index, lanes=3)
    for r in range(50):
        alone = uniform(seeds[r : r + 1], children[r : r + 1], index[r : r + 1], lanes=1)
        assert alone[0, 0] == together[r, 0]


def test_each_of_seed_child_and_index_changes_the_noise() -> None:
    base = uniform([1], [0], [0])[0, 0]
    variants = [uniform([2], [0], [0]), uniform([1 + (1 << 32)], [0], [0]), uniform([1], [1], [0]),
                uniform([1], [0], [1]), uniform([1], [0], [1 << 32])]
    assert len({float(base), *(float(v[0, 0]) for v in variants)}) == 6


def test_noise_is_float32_strictly_between_zero_and_one() -> None:
    noise = uniform(np.full(1000, 3, np.uint64), np.zeros(1000, np.int32), np.arange(1000), lanes=100)
    assert noise.dtype == np.float32 and noise.shape == (1000, 100)
    assert noise.min() > 0.0 and noise.max() < 1.0
    largest = np.float32(2 * ((1 << 23) - 1) + 1) * np.float32(2.0**-24)
    assert largest == np.float32(1.0 - 2.0**-24) and largest < 1.0


def test_noise_over_output_indices_is_uniform() -> None:
    """Chi-square over 100 bins, fixed seed; for a random seed it would fail with probability 1e-6."""
    noise = uniform(np.full(100_000, 42, np.uint64), np.zeros(100_000, np.int32), np.arange(100_000))[:, 0]
    counts = np.histogram(noise, bins=100, range=(0, 1))[0]
    assert ((counts - 1000.0) ** 2 / 1000.0).sum() < 180.8  # 1 - 1e-6 quantile, 99 degrees of freedom


def test_an_empty_batch_gives_an_empty_array() -> None:
    assert uniform([], [], []).shape == (0, 1)
