"""Per step: how many tokens the cache gave, how many were computed, how many cached ones were evicted.

A bounded ring of the last steps and the totals. Decides nothing.
"""
from __future__ import annotations

from typing import Any

import numpy as np

from engine_core.stats import SchedulerStats

STEPS = 1024


class CacheLog:
    """Columns of the last STEPS plans: step, cached, computed, evicted (tokens)."""

    def __init__(self) -> None:
        self._ring = np.zeros((STEPS, 4), np.int64)
        self._count = 0
        self._last_cached = self._last_evicted = 0

    def note(self, step: int, cached: int, computed: int, evicted: int) -> None:
        """A plan was made; `cached` and `evicted` are totals, of which the difference to the last plan is kept."""
        self._ring[self._count % STEPS] = (step, cached - self._last_cached, computed, evicted - self._last_evicted)
        self._count += 1
        self._last_cached, self._last_evicted = cached, evicted

    def report(self, stats: SchedulerStats) -> dict[str, Any]:
        """Totals, and the last steps oldest first."""
        kept = min(self._count, STEPS)
        order = [(self._count - kept + i) % STEPS for i in range(kept)]
        rows = self._ring[order]
        return {"num_queried_tokens": stats.num_queried_tokens, "num_hit_tokens": stats.num_hit_tokens,
                "num_resumed_hit_tokens": stats.num_resumed_hit_tokens, "num_adopted_tokens": stats.num_adopted_tokens,
                "num_replayed_tokens": stats.num_replayed_tokens,
                "num_replayed_hit_tokens": stats.num_replayed_hit_tokens,
                "num_copied_tokens": stats.num_copied_tokens, "hit_rate": stats.hit_rate,
                "steps": {name: rows[:, i].tolist()
                          for i, name in enumerate(("step", "cached", "computed", "evicted"))}}
