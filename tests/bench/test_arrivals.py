"""When requests of a load are due."""

import math

import pytest

from bench.arrivals import Ramp, arrival_times


def gaps(times: list[float]) -> list[float]:
    return [b - a for a, b in zip([0.0, *times], times, strict=False)]


def spread_of(values: list[float]) -> float:
    """Squared coefficient of variation."""
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / len(values) / mean**2


def test_without_a_rate_all_are_due_at_once() -> None:
    assert arrival_times(3, 0.0, 1.0, None, 0) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_are_gamma_distributed_with_the_shape_that_was_asked_for(burstiness: float) -> None:
    """The squared variation of a gamma distribution is 1 / shape. With 20,000 gaps its estimate is off by 15 % with a
    chance below 1e-6; the seed is fixed anyway."""
    times = arrival_times(20_000, 50.0, burstiness, None, 7)
    assert spread_of(gaps(times)) == pytest.approx(1 / burstiness, rel=0.15)
    assert times[-1] == pytest.approx(400.0)          # the last one is due after count / rate
    assert times == arrival_times(20_000, 50.0, burstiness, None, 7) != arrival_times(20_000, 50.0, burstiness, None, 8)


def test_infinite_burstiness_is_a_metronome() -> None:
    assert arrival_times(4, 2.0, math.inf, None, 0) == pytest.approx([0.5, 1.0, 1.5, 2.0])


def test_a_ramp_raises_the_rate_from_the_first_request_to_the_last() -> None:
    linear = gaps(arrival_times(5, 0.0, math.inf, Ramp("linear", 2.0, 10.0), 0))
    assert linear == pytest.approx([1 / 2, 1 / 4, 1 / 6, 1 / 8, 1 / 10])
    exponential = gaps(arrival_times(3, 0.0, math.inf, Ramp("exponential", 1.0, 16.0), 0))
    assert exponential == pytest.approx([1, 1 / 4, 1 / 16])
