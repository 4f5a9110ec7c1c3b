"""Drafts: tokens that a row's worker proposes, to be computed and verified in one step with its newest token.

The worker proposes with a result (`spec_token_ids`), the next plan verifies, the result after it says how many were
right (`accepted`). Verified tokens are those the request would have got anyway, so drafts change its speed and nothing
else. A row with drafts is planned only when its last result is in: drafts continue the newest token, which a plan in
flight would change. Until the result, the row's `planned` and `length` are upper bounds; `drafted` says by how much.
Source: Leviathan et al. 2023 (verification in one pass); vLLM V1's spec_token_ids.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from engine_core.request import Request
from engine_core.rows import PlanRecord, Rows
from engine_core.stop import StopChecker

if TYPE_CHECKING:
    from engine_core.scheduler import Scheduler, Step


def rows_on_hold(rows: Rows) -> np.ndarray:
    """bool [n]: rows that wait for a result before they are planned again."""
    n = rows.n
    return rows.holds[:n] & (rows.length[:n] > rows.known[:n])


def plan_drafts(scheduler: Scheduler, rows_with_drafts: list[int], step: Step, budget: int) -> int:
    """Take the drafts of these rows into the step, as far as the budget allows. Each row's own token is paid for, and
    the blocks are there. Returns what is left of the budget."""
    rows, blocks = scheduler.rows, scheduler.blocks
    for row in rows_with_drafts:
        request = rows.request[row]
        if request is None:
            raise RuntimeError(f"row {row} of {rows.n} has no request")
        drafts = request.spec_token_ids[:max(0, budget)]
        needed = blocks.blocks_for(int(rows.planned[row]) + 1 + len(drafts)) - len(request.blocks)
        scheduler.extend(step, request, blocks.allocate(max(needed, 0)) or [])
        step.drafts.append((request, drafts))
        budget -= len(drafts)
    return budget


def blocks_for_drafts(scheduler: Scheduler, rows_with_drafts: list[int]) -> int:
    """Most free blocks that `plan_drafts` takes."""
    rows, blocks = scheduler.rows, scheduler.blocks
    return sum(max(0, blocks.blocks_for(int(rows.planned[row] + rows.num_spec[row]) + 1)
                   - int(rows.capacity[row]) // blocks.block_size) for row in rows_with_drafts)


def drop_drafts(rows: Rows, which: list[int]) -> None:
    """These rows compute their newest token only."""
    for row in which:
        request = rows.request[row]
        if request is not None:
            request.spec_token_ids = []
    rows.num_spec[which] = 0


def promise_drafts(rows: Rows, step: Step, counts: np.ndarray) -> np.ndarray:
    """Enter the step's drafts into `counts` and the columns; int64 [n], drafts per row."""
    drafted = np.zeros(rows.n, np.int64)
    for request, drafts in step.drafts:
        row = request.row
        drafted[row] = len(drafts)
        request.spec_token_ids = []
        rows.num_spec[row] = 0
        rows.holds[row] = True
    counts += drafted
    rows.length[:rows.n] += drafted
    rows.drafted[:rows.n] += drafted
    return drafted


def accepted_by_row(record: PlanRecord, accepted: np.ndarray, vocab_size: int) -> dict[int, list[int]]:
    """Tokens after the first, per row of the plan. `accepted` int32, pairs (row, token).

    Raises RuntimeError when a row got more than the plan drafted for it, or a token that does not exist.
    """
    found: dict[int, list[int]] = {}
    for row, token in accepted.reshape(-1, 2).tolist():
        found.setdefault(row, []).append(token)
    for row, tokens in found.items():
        if record.drafted is None or not 0 <= row < record.num_rows or len(tokens) > int(record.drafted[row]):
            raise RuntimeError(f"step {record.step}: row {row} returned {len(tokens)} tokens besides its first, more "
                               "than drafts were planned for it")
        if not 0 <= min(tokens) <= max(tokens) < vocab_size:
            raise RuntimeError(f"step {record.step}: row {row} returned {tokens}; the model has {vocab_size} ids")
    return found


def enter_accepted(scheduler: Scheduler, stop: StopChecker, row: int, tokens: list[int]) -> tuple[int, int, int]:
    """Append verified tokens to a row whose first token is in, up to its end. (how many, reason or -1, stop token)."""
    rows, request = scheduler.rows, scheduler.rows.request[row]
    if request is None:
        raise RuntimeError(f"row {row} of {rows.n} has no request")
    for i, token in enumerate(tokens):
        known = int(rows.known[row])
        rows.ring[row, known % rows.ring_width] = token
        rows.known[row] = known + 1
        end = stop.check_one(token, known + 1, int(rows.floor[row]), int(rows.limit[row]),
                             request.params.ignore_eos, request.stop_token_ids)
        if end is not None:
            return i + 1, *end
    return len(tokens), -1, -1


def settle_drafted(scheduler: Scheduler, row: int, request: Request) -> None:
    """A verified row: what is known is certain again, and blocks behind it go back."""
    rows, blocks = scheduler.rows, scheduler.blocks
    known = int(rows.known[row])
    rows.computed[row] = rows.planned[row] = known - 1
    rows.length[row], rows.drafted[row] = known, 0
    keep = blocks.blocks_for(known)
    if len(request.blocks) > keep:
        blocks.trim(request.blocks, keep)
        rows.capacity[row] = keep * blocks.block_size


def take_proposals(scheduler: Scheduler, record: PlanRecord, now: np.ndarray | slice, proposals: np.ndarray) -> None:
    """Keep what the worker proposes for the next step. `now`: current rows of the plan's rows that sampled;
    `proposals` int32, pairs (row of the plan, token). A proposal for a row that a later plan computes is stale: that
    row waits for its next result, whose proposal is not. No more are kept than the request may still put out."""
    rows, most = scheduler.rows, scheduler.config.num_speculative_tokens
    rows.holds[now] = False
    for then, token in proposals.reshape(-1, 2).tolist():
        row = int(record.current[then]) if record.is_moved else then
        request = rows.request[row] if 0 <= row < rows.n else None
        if request is None:
            continue
        rows.holds[row] = True
        room = min(most, int(rows.limit[row] - rows.known[row]) - 1)
        if rows.length[row] == rows.known[row] and len(request.spec_token_ids) < room:
            request.spec_token_ids = [*request.spec_token_ids, token]
            rows.num_spec[row] = len(request.spec_token_ids)
