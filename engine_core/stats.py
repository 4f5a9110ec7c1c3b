"""Counters behind the metrics. All are totals since start; nothing here decides anything."""
from __future__ import annotations

import dataclasses


@dataclasses.dataclass(slots=True)
class SchedulerStats:
    """Tokens unless the name says otherwise."""
    num_steps: int = 0
    num_computed_tokens: int = 0                # scheduled and committed
    num_sampled_tokens: int = 0                 # given to requests
    num_wasted_tokens: int = 0                  # sampled for requests that had already ended
    num_queried_tokens: int = 0                 # of first admissions
    num_hit_tokens: int = 0                     # of those, found in the cache
    num_adopted_tokens: int = 0                 # found in the cache in mid-prompt
    num_resumed_hit_tokens: int = 0             # found in the cache by returning requests
    num_replayed_tokens: int = 0                # of requests that a former core had, when they were admitted here
    num_replayed_hit_tokens: int = 0            # of those, found in what the worker had kept
    num_copied_tokens: int = 0                  # of all hits, by copying part of a block
    num_recomputed_tokens: int = 0              # computed, then given up by a preemption
    num_preemptions: int = 0                    # events
    num_swap_preemptions: int = 0               # of them, those whose blocks went to the host
    num_swapped_out_blocks: int = 0             # blocks
    num_swapped_in_blocks: int = 0              # blocks
    num_draft_tokens: int = 0                   # proposed and verified
    num_accepted_tokens: int = 0                # of those, right
    num_failed_steps: int = 0                   # steps
    num_finished: int = 0                       # requests
    num_late_results: int = 0                   # results of steps nobody waits for

    @property
    def num_cached_tokens(self) -> int:
        """All that the cache gave, to whomever."""
        return (self.num_hit_tokens + self.num_resumed_hit_tokens + self.num_replayed_hit_tokens
                + self.num_adopted_tokens)

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that the cache gave at first admission."""
        return self.num_hit_tokens / self.num_queried_tokens if self.num_queried_tokens else 0.0
