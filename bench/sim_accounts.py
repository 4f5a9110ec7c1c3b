"""The engine's totals, counted again from outside: from the plans, the results and the ends that were seen.

A counter that is wrong decides nothing and so shows nowhere else. Kept by bench.simulation, compared when it is idle.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from engine_core.stats import SchedulerStats
from ipc.messages import FINISH_ABORT, FINISH_ERROR, Finished, ModelRunnerOutput, SchedulerOutput


def _pairs(column: Any) -> np.ndarray:
    return np.frombuffer(column, np.int32).reshape(-1, 2)


class Accounts:
    """Of one core, from its start."""

    def __init__(self) -> None:
        self.num_steps = self.num_computed = self.num_first_tokens = self.num_failed = 0
        self.num_adopted = self.num_queried = self.num_cached = self.num_copies = 0
        self.num_swapped_out = self.num_swapped_in = 0
        self.saw_reset = False  # a plan repeated all rows: what was new in it cannot be told
        self._admitted: set[int] = set()

    def planned(self, plan: SchedulerOutput) -> None:
        self.num_swapped_out += len(_pairs(plan.swap_out))
        self.num_swapped_in += len(_pairs(plan.swap_in))
        self.num_copies += len(_pairs(plan.copies))
        self.num_adopted += int(_pairs(plan.advance)[:, 1].sum())
        self.saw_reset |= plan.reset
        for new in plan.new:
            if new.request_id not in self._admitted:
                self._admitted.add(new.request_id)
                self.num_queried += new.num_tokens
            self.num_cached += new.num_computed_tokens

    def committed(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> None:
        self.num_steps += 1
        counts = _pairs(plan.counts)
        self.num_computed += plan.num_rows - len(counts) + int(counts[:, 1].sum())
        self.num_first_tokens += int((np.frombuffer(result.tokens, np.int32) >= 0).sum())

    def differences(self, stats: SchedulerStats, block_size: int, ends: Iterable[Finished] | None) -> list[str]:
        """Totals that are not what was seen. `ends`: of all requests; None: some are not known here."""
        seen = [
            ("num_steps", stats.num_steps, self.num_steps),
            ("num_computed_tokens", stats.num_computed_tokens, self.num_computed),
            ("num_failed_steps", stats.num_failed_steps, self.num_failed),
            ("num_swapped_out_blocks", stats.num_swapped_out_blocks, self.num_swapped_out),
            ("num_swapped_in_blocks", stats.num_swapped_in_blocks, self.num_swapped_in),
            (
                "num_sampled_tokens - num_accepted_tokens + num_wasted_tokens",
                stats.num_sampled_tokens - stats.num_accepted_tokens + stats.num_wasted_tokens,
                self.num_first_tokens,
            ),
            (
                "num_copied_tokens",
                stats.num_copied_tokens,
                min(max(stats.num_copied_tokens, self.num_copies), self.num_copies * (block_size - 1)),
            ),
        ]
        if not self.saw_reset:
            queried = stats.num_queried_tokens + stats.num_replayed_tokens
            seen.append(("num_queried_tokens", queried, self.num_queried))
            seen.append(("num_adopted_tokens", stats.num_adopted_tokens, self.num_adopted))
            if self.num_swapped_in == 0:
                seen.append(("num_cached_tokens", stats.num_cached_tokens, self.num_cached + self.num_adopted))
        if ends is not None:
            told = list(ends)
            seen.append(("num_preemptions", stats.num_preemptions, sum(end.num_preemptions for end in told)))
            if self.num_failed == 0 and all(end.reason != FINISH_ERROR for end in told):
                served = sum(end.reason != FINISH_ABORT for end in told)
                seen.append(("num_finished", stats.num_finished, served))
        return [f"{name} is {said}, seen were {counted}" for name, said, counted in seen if said != counted]
