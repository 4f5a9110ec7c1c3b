"""Whether a program is worth waking the team for: measured, per program and number of rows.

Waking a thread and waiting for it costs tens of microseconds, more while other processes use its core; a small step is
done sooner by the calling thread alone. A step that takes longer is always the team's: what the team gains is then far
more than waking costs, and a clock that meets another process's work, or a context that has grown since, would mislead.
Both ways give the same bits, so the choice may change at any time.
"""
from __future__ import annotations

SMALL_NS = 1_000_000                            # of the team; a longer step is not tried alone
TRIALS = 4                                      # of each way before the first choice
RETRY_EVERY = 128                               # steps after which the other way is tried again
SMOOTHING = 0.25


class ThreadChoice:
    """For one program. `alone(rows)` before a run, `observe` after it."""

    def __init__(self) -> None:
        self._costs: dict[int, list[float]] = {}        # bucket of rows -> smoothed ns [team, alone]
        self._counts: dict[int, list[int]] = {}         # bucket -> runs [team, alone]

    def alone(self, rows: int) -> bool:
        """Whether to run without the team now."""
        bucket = rows.bit_length()
        costs, counts = self._costs.setdefault(bucket, [0.0, 0.0]), self._counts.setdefault(bucket, [0, 0])
        if costs[0] > SMALL_NS:
            return False
        for way in (0, 1):
            if counts[way] < TRIALS:
                return bool(way)
        best = int(costs[1] < costs[0])
        return bool(1 - best if sum(counts) % RETRY_EVERY == 0 else best)

    def observe(self, rows: int, alone: bool, took_ns: int) -> None:
        bucket, way = rows.bit_length(), int(alone)
        costs, counts = self._costs[bucket], self._counts[bucket]
        old = costs[way]
        # A run that was interrupted says nothing about the next one: it counts as twice the usual at most.
        took = min(float(took_ns), 2 * old) if counts[way] >= 2 else float(took_ns)
        costs[way] = took if counts[way] < 2 else old + SMOOTHING * (took - old)
        counts[way] += 1
