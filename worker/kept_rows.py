"""What a new core is told of the rows of the old one: tokens whose keys and values are in the pool, and where.

Left out: rows that nobody may reuse (their prompt is computed whole, the prefix cache was reset, their values were not
finite), and what other rows have in or after a block of such a row.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from ipc.messages import KeptRow, WorkerReady

if TYPE_CHECKING:
    from worker.request_state import RequestState


def with_kept_rows(ready: WorkerReady, state: RequestState, is_sound: bool) -> WorkerReady:
    """`ready` with the rows of `state`; with none when the last step failed, for it may have written anything."""
    if not state.n or not is_sound:
        return ready
    size = state.block_size
    tables = [state.block_table[row, :-(-int(state.computed[row]) // size)] for row in range(state.n)]
    excluded = np.unique(np.concatenate([np.empty(0, np.int32), *(
        table for row, table in enumerate(tables) if not state.is_reusable[row])]))
    kept: list[KeptRow] = []
    tokens, blocks = [], []
    for row, table in enumerate(tables):
        is_excluded = np.isin(table, excluded)
        num_blocks = int(is_excluded.argmax()) if is_excluded.any() else table.size
        num_tokens = min(int(state.computed[row]), num_blocks * size)
        if num_tokens and state.is_reusable[row]:
            kept.append(KeptRow(int(state.request_id[row]), num_tokens))
            tokens.append(state.tokens[row, :num_tokens])
            blocks.append(table[:num_blocks])
    if not kept:
        return ready
    return msgspec.structs.replace(ready, kept=kept, kept_tokens=_packed(tokens), kept_blocks=_packed(blocks))


def _packed(columns: list[np.ndarray]) -> memoryview:
    return np.concatenate(columns).astype(np.int32).data.cast("B")
