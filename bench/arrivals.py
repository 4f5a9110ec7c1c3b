"""When the requests of a load are due: all at once, at a rate with gamma-distributed gaps, or at a rate that grows.

Burstiness is the shape of the gamma distribution, its mean the inverse of the rate: 1 is a Poisson process, below 1
requests come in bursts, above 1 more evenly, and infinite burstiness is a metronome. At a fixed rate the times are
scaled so that the last request is due after count / rate seconds: two seeds then send the same load in the same time.
"""

import math
import random
from itertools import accumulate
from typing import NamedTuple


class Ramp(NamedTuple):
    """A rate that goes from `start` to `end`, both above 0, over the requests."""

    strategy: str  # "linear" or "exponential"
    start: float  # requests per second
    end: float

    def rate(self, index: int, count: int) -> float:
        progress = index / max(count - 1, 1)
        if self.strategy == "linear":
            return self.start + (self.end - self.start) * progress
        return self.start * (self.end / self.start) ** progress


def arrival_times(count: int, rate: float, burstiness: float, ramp: Ramp | None, seed: int) -> list[float]:
    """Seconds after the start at which each request is due, ascending. `rate` 0: all at once."""
    if not rate and ramp is None:
        return [0.0] * count
    generator = random.Random(seed)

    def gap(mean: float) -> float:
        return mean if math.isinf(burstiness) else generator.gammavariate(burstiness, mean / burstiness)

    times = list(accumulate(gap(1 / (ramp.rate(index, count) if ramp else rate)) for index in range(count)))
    scale = count / rate / times[-1] if ramp is None and times[-1] > 0 else 1.0
    return [moment * scale for moment in times]
