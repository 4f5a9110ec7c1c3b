"""Why is my request waiting: the state of one request and the one reason, with its numbers."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine_core.admission import free_blocks_needed
from engine_core.request import Request

if TYPE_CHECKING:
    from engine_core.scheduler import Scheduler


def explain(scheduler: Scheduler, request: Request) -> dict[str, Any]:
    """State, reason and token accounts of a live request."""
    rows, row = scheduler.rows, request.row
    running = row >= 0
    computed = int(rows.computed[row]) if running else request.num_swapped_tokens
    known = int(rows.known[row]) if running else request.num_known_tokens
    return {"state": request.status.name.lower(), "reason": _reason(scheduler, request),
            "num_prompt_tokens": request.num_prompt_tokens, "num_output_tokens": known - request.num_prompt_tokens,
            "num_computed_tokens": computed, "num_blocks": len(request.blocks),
            "num_cached_tokens": request.num_cached_tokens, "num_reused_tokens": request.num_reused_tokens,
            "num_recomputed_tokens": request.num_recomputed_tokens, "num_swapped_tokens": request.num_swapped_tokens,
            "num_preemptions": request.num_preemptions,
            "max_tokens": request.max_total_tokens - request.num_prompt_tokens}


def _reason(scheduler: Scheduler, request: Request) -> str:
    rows = scheduler.rows
    if request.row >= 0:
        left = int(rows.length[request.row] - rows.planned[request.row])
        alone = _alone(scheduler)
        if alone and request is not alone[0]:
            return f"waits while {len(alone)} requests of a failed step replay alone"
        if request in scheduler.prefilling:
            return f"in mid-prompt, {left} tokens to compute"
        return "computes one token a step"
    ahead = 0
    for other in scheduler.waiting:
        if other is request:
            break
        ahead += not other.is_held
    return waiting_reason(scheduler, request, ahead)


def _alone(scheduler: Scheduler) -> list[Request]:
    """Requests of a failed step that others wait for now."""
    return [request for request in scheduler.suspects if not (request.is_held or request.is_finished)]


def waiting_reason(scheduler: Scheduler, request: Request, ahead: int) -> str:
    """Why a request that is not running waits. `ahead`: how many waiting ones are admitted before it."""
    rows, blocks, config = scheduler.rows, scheduler.blocks, scheduler.config
    if request.num_in_flight:
        return "preempted; its newest token is still being computed"
    if request.is_held:
        return "the worker has just started and compiles its grammar"
    if ahead and config.policy != "lpm":
        return f"{ahead} waiting {'request ranks' if ahead == 1 else 'requests rank'} ahead of it"
    if alone := _alone(scheduler):
        return f"{len(alone)} requests of a failed step replay alone first"
    if rows.n >= rows.seats:
        return f"all {rows.seats} seats are taken (--max-num-seqs, --max-num-batched-tokens)"
    needs = free_blocks_needed(scheduler, request)
    if needs > blocks.num_free:
        return f"needs {needs} blocks, {blocks.num_free} are free, {ahead} requests ahead"
    return f"next in line for the token budget of {config.max_num_batched_tokens} a step, {ahead} requests ahead"
