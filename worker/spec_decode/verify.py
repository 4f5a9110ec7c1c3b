"""Which drafts were right: those that equal what the row samples at their place anyway.

The noise of a sampled token is a function of (seed, choice, output index), so it is known before the token is: each
position of a row with drafts is sampled as it would be alone, and a draft is right when it is the token sampled there.
Greedy or not, the output is the one without drafts, token for token (exact-match verification; Leviathan et al. 2023
accept by probability instead, which keeps the distribution only).
"""
from __future__ import annotations

import numpy as np

from worker.request_state import RequestState


def accept(state: RequestState, rows: np.ndarray, offsets: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """int64 [L'] indices of the logits whose tokens stand, in order.

    rows, offsets int64 [L]: the logits' row and which token after the newest they choose; tokens int32 [L], -1: bad.
    A row's drafts are in `state.tokens` from `known` on. The first token of a row always stands, bad or not; a later
    one when every token before it equals its draft and it is not bad.
    """
    drafts = state.flat_tokens[state.token_base[rows] + state.known[rows] + offsets]
    is_right = (offsets < state.num_drafts[rows]) & (tokens == drafts)
    stands = np.ones(len(rows), bool)
    first = (offsets == 0).nonzero()[0]
    for i, begin in enumerate(first.tolist()):
        end = int(first[i + 1]) if i + 1 < len(first) else len(rows)
        wrong = (~is_right[begin:end]).nonzero()[0]
        if wrong.size:
            stands[begin + int(wrong[0]) + 1:end] = False
    stands &= (tokens >= 0) | (offsets == 0)
    return stands.nonzero()[0]
