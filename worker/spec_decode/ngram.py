"""Drafts from the request's own text: what followed the last time these tokens were seen.

No second model: answers repeat their prompt (code edits, summaries, retrieval), and themselves. Looked up is the
longest suffix of at most `lookup_max` tokens that occurred before; its latest occurrence wins. Source: Saxena 2023
(prompt lookup decoding); vLLM's ngram proposer.
"""
from __future__ import annotations

import numpy as np

from worker.request_state import I32, RequestState

NO_DRAFTS = np.empty(0, I32)


class NgramDrafter:
    """At most `num_tokens` drafts a row, after a match of `lookup_min` to `lookup_max` tokens."""

    def __init__(self, num_tokens: int, lookup_max: int, lookup_min: int) -> None:
        self.num_tokens, self.lookup_max, self.lookup_min = num_tokens, lookup_max, lookup_min

    def propose(self, tokens: np.ndarray) -> np.ndarray:
        """int32 [at most num_tokens] for tokens int32 [T]; empty when nothing matches."""
        last, length = len(tokens) - 1, 1
        at = (tokens[:last] == tokens[last]).nonzero()[0]   # where the last `length` tokens ended before
        while length < self.lookup_max:
            longer = at[at >= length]
            longer = longer[tokens[longer - length] == tokens[last - length]]
            if not longer.size:
                break
            at, length = longer, length + 1
        if not at.size or length < self.lookup_min:
            return NO_DRAFTS
        begin = int(at[-1]) + 1
        return tokens[begin:begin + self.num_tokens]

    def step(self, state: RequestState, rows: np.ndarray) -> np.ndarray:
        """Pairs (row, token) int32 for those of `rows` that have just sampled and ask for nothing that depends on the
        tokens in between."""
        pairs: list[np.ndarray] = []
        for row in rows.tolist():
            if state.options[row] is not None:
                continue
            drafts = self.propose(state.tokens[row, :state.known[row]])
            if drafts.size:
                pairs.append(np.stack([np.full(drafts.size, row, I32), drafts], axis=1))
        return np.concatenate(pairs).reshape(-1) if pairs else NO_DRAFTS
