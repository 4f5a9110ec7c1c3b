"""The stages that change logits: logits processors -> logit_bias -> penalties -> masks. sampler.py says why so.

Each stage runs only when a row of the step asks for it and writes only that row, so the others are unchanged bit for
bit. Does not know how tokens are drawn.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from ipc.errors import FAULT
from worker.sampling.jit_threads import RowKernels
from worker.sampling.masks import add_bias, bad_tokens, keep_only
from worker.sampling.row_options import RowOptions

if TYPE_CHECKING:
    from worker.request_state import RequestState

NO_PAIRS = np.empty(0, np.int64), np.empty(0, np.int32)

# (index into the step's rows, options of that row)
Entries = list[tuple[int, RowOptions]]


def apply_stages(logits: Tensor, state: RequestState, rows: np.ndarray, entries: Entries,
                 kernels: RowKernels | None) -> tuple[np.ndarray, np.ndarray]:
    """Change logits [L, V] of the rows with options, in place. Returns pairs (entry, token) that bad words exclude.

    A processor that raises ends its own request: `failure` of the options says why.
    """
    _run_processors(logits, state, rows, entries)
    biased = [(i, o) for i, o in entries if len(o.bias_ids)]
    if biased:
        add_bias(logits, [i for i, _ in biased], [o.bias_ids for _, o in biased], [o.bias_values for _, o in biased])
    penalised = [(i, o.penalty_slot) for i, o in entries if o.penalty_slot >= 0]
    if penalised:
        index, slots = np.array(penalised, np.int64).T.copy()
        state.penalties.apply(logits, index, rows[index], slots, state.tokens, state.known, state.num_prompt, kernels)
    limited = [(i, o.allowed) for i, o in entries if o.allowed is not None]
    if limited:
        keep_only(logits, [i for i, _ in limited], [ids for _, ids in limited])
    with_words = [(i, o.bad_words) for i, o in entries if o.bad_words is not None]
    if not with_words:
        return NO_PAIRS
    at = rows[[i for i, _ in with_words]]
    return bad_tokens([i for i, _ in with_words], [words for _, words in with_words], state.tokens, at,
                      state.num_prompt[at], state.known[at])


def _run_processors(logits: Tensor, state: RequestState, rows: np.ndarray, entries: Entries) -> None:
    for i, options in entries:
        row = int(rows[i])
        for processor in options.processors:
            prompt = state.tokens[row, :state.num_prompt[row]]
            output = state.tokens[row, state.num_prompt[row]:state.known[row]]
            try:
                result = processor(prompt, output, logits[i])
                if result is not None and result is not logits[i]:
                    logits[i] = result
            except Exception as error:          # code of the embedding program: whatever it raises, one request ends
                options.failure = FAULT, f"a logits processor raised {type(error).__name__}: {error}"
                break
