"""Taking a running request's blocks back: which way it returns, and what either costs.

    recompute   forget its KV; when it returns, its tokens are prefilled again, less what the cache still has
    swap        copy its blocks to host memory first; on return copy back what the cache does not have
    auto        per victim the cheaper one: tokens nobody else holds x measured prefill time, against blocks x measured
                copy time

Times come from the worker's messages, so decisions replay exactly. Knows no clock.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

from engine_core.request import Request

if TYPE_CHECKING:
    from engine_core.scheduler import Scheduler, Step

PREFILL_SAMPLE_TOKENS = 32                      # steps at least this large say what a prefill token costs
SMOOTHING = 0.2


class CostModel:
    """What it costs to compute a token and to move a block, as measured so far. 0: not measured."""

    def __init__(self, swap_block_ns: int = 0) -> None:
        self.prefill_token_ns = 0.0
        self.swap_block_ns = float(swap_block_ns)

    def observe(self, num_tokens: int, num_rows: int, device_ns: int) -> None:
        """A step computed this many tokens for so many rows in so much time."""
        if num_tokens >= PREFILL_SAMPLE_TOKENS and num_tokens >= 4 * num_rows and device_ns > 0:
            cost = device_ns / num_tokens
            old = self.prefill_token_ns
            self.prefill_token_ns = cost if old == 0.0 else old + SMOOTHING * (cost - old)

    def prefers_swap(self, num_lost_tokens: int, num_blocks: int) -> bool:
        """Whether copying out and back costs less than computing again. Without measurements: compute."""
        if not self.prefill_token_ns or not self.swap_block_ns:
            return False
        return num_blocks * self.swap_block_ns < num_lost_tokens * self.prefill_token_ns


def preempt(scheduler: Scheduler, request: Request, step: Step) -> None:
    """Take a running request out of the batch. A victim is never part of `step`; the caller sees to it."""
    planned = int(scheduler.rows.planned[request.row])
    if planned and _wants_swap(scheduler, request, planned):
        used = request.blocks[:scheduler.blocks.blocks_for(planned)]
        slots = scheduler.host.take(len(used))
        if slots is not None:
            for block, slot in zip(used, slots):
                step.swap_out += (block, slot)
            request.host_slots, request.num_swapped_tokens = slots, planned
            step.swapped_out.append(request)
            scheduler.stats.num_swapped_out_blocks += len(used)
    if not request.host_slots:
        request.num_recomputed_tokens += planned
        scheduler.stats.num_recomputed_tokens += planned
    scheduler.give_back(request)
    step.preempted.append(request)


def _wants_swap(scheduler: Scheduler, request: Request, planned: int) -> bool:
    mode = scheduler.config.preemption_mode
    if mode != "auto":
        return mode == "swap"
    blocks = scheduler.blocks
    shared = 0                                  # leading blocks that others keep alive
    if blocks.enable_prefix_caching:
        for block in request.blocks:
            if blocks.ref_count[block] == 1:
                break
            shared += 1
    lost = planned - min(planned, shared * blocks.block_size)
    return scheduler.costs.prefers_swap(lost, blocks.blocks_for(planned) - shared)


def make_room_for_urgent(scheduler: Scheduler, step: Step) -> None:
    """Priority policy: a waiting request that outranks the last running one takes its place, one per step.

    Decided before running rows are planned, so the victim is in no plan. Ranks never change, so two requests cannot take
    a place from each other in turns.
    """
    rows = scheduler.rows
    request = scheduler.waiting.peek()
    if request is None or request.num_in_flight or rows.n == 0:
        return
    blocks = scheduler.blocks
    needs_blocks = blocks.blocks_for(min(request.num_known_tokens, scheduler.config.max_num_batched_tokens))
    if rows.n < rows.seats and needs_blocks <= blocks.num_free:
        return
    victim = rows.in_order()[-1]
    if scheduler.waiting.key(request) < scheduler.waiting.key(victim) and request.priority < victim.priority:
        preempt(scheduler, victim, step)
