"""Penalties of rows by the tokens they contain, compiled. The counts' layout is penalties.py's."""
from __future__ import annotations

import numpy as np

from worker.jit.vector import entry

_F0 = np.float32(0.0)


@entry
def penalise_rows(x, stride, width, rows, slots, counts, seen, num_seen, repetition, frequency, presence):  # type: ignore[no-untyped-def]
    """Row rows[i] by the tokens of slot slots[i]: seen[slot, :num_seen[slot]] are the tokens of prompt or output,
    counts[slot, token] how often each was put out."""
    for i in range(len(rows)):
        row, slot = x[rows[i] * stride:rows[i] * stride + width], slots[i]
        factor, per_use, once = np.float32(repetition[i]), np.float32(frequency[i]), np.float32(presence[i])
        for j in range(num_seen[slot]):
            token = seen[slot, j]
            v = row[token]
            v = v * factor if v <= _F0 else v / factor
            used = counts[slot, token] - 1
            if used > 0:
                v = v - per_use * np.float32(used) - once
            row[token] = v


@entry
def count_tokens(tokens, num_prompt, rows, slots, begin, end, counts, seen, num_seen):  # type: ignore[no-untyped-def]
    """Enter tokens[rows[i], begin[i]:end[i]] into slot slots[i]. counts: 0 never seen, 1 + times put out otherwise."""
    for i in range(len(rows)):
        row, slot = rows[i], slots[i]
        for p in range(begin[i], end[i]):
            token = tokens[row, p]
            if counts[slot, token] == 0:
                counts[slot, token] = 1
                seen[slot, num_seen[slot]] = token
                num_seen[slot] += 1
            if p >= num_prompt[i]:
                counts[slot, token] += 1
