"""When a request ends: EOS, stop token ids, its own length limit, the context limit. Vectorised over rows.

Stop strings are text and belong to the frontend. Nothing stops a request below its min_tokens except its limit.
"""
from __future__ import annotations

import numpy as np

from engine_core.rows import Rows
from ipc.messages import FINISH_LENGTH, FINISH_STOP


class StopChecker:
    """Knows the model's EOS ids; everything else stands in the rows."""

    def __init__(self, eos_token_ids: list[int], vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.is_eos = np.zeros(vocab_size, bool)
        self.is_eos[[t for t in eos_token_ids if 0 <= t < vocab_size]] = True

    def check_rows(self, rows: Rows, index: np.ndarray | slice, tokens: np.ndarray) -> list[tuple[int, int, int]]:
        """Rows `index` have just received `tokens` (`known` counts them). Returns (row, reason, stop token or -1)."""
        known = rows.known[index]
        stops = self.is_eos[tokens]
        at_limit = known >= rows.limit[index]
        maybe = bool(rows.num_with_stop_ids) or bool(stops.any())
        if not maybe:
            if not at_limit.any():
                return []
        else:
            stops &= ~rows.ignore_eos[index]
            if rows.num_with_stop_ids:
                stops |= (tokens[:, None] == rows.stop_ids[index]).any(1)
                for i in rows.has_many_stop_ids[index].nonzero()[0].tolist():
                    row = i if isinstance(index, slice) else int(index[i])
                    request = rows.request[row]
                    if request is not None and int(tokens[i]) in request.stop_token_ids:
                        stops[i] = True
            stops &= known >= rows.floor[index]
            at_limit |= stops
        done = at_limit.nonzero()[0].tolist()
        if isinstance(index, slice):
            found = done
        else:
            found = index[done].tolist()
        return [(row, FINISH_STOP, int(tokens[i])) if stops[i] and maybe else (row, FINISH_LENGTH, -1)
                for i, row in zip(done, found)]

    def check_one(self, token: int, num_known: int, floor: int, limit: int, ignore_eos: bool,
                  stop_token_ids: frozenset[int]) -> tuple[int, int] | None:
        """The same rule for one request without a row: (reason, stop token) or None."""
        if num_known >= floor and ((self.is_eos[token] and not ignore_eos) or token in stop_token_ids):
            return FINISH_STOP, token
        return (FINISH_LENGTH, -1) if num_known >= limit else None
