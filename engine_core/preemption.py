"""Taking a running request's blocks back: which way it returns, and what either costs.

    recompute   forget its KV; when it returns, its tokens are prefilled again, less what the cache still has
    swap        copy its blocks to host memory first; on return copy back what the cache does not have
    auto        per victim the cheaper one: tokens nobody else holds x measured prefill time, against blocks x measured
                copy time; both less what the prefix cache has lately kept until a preempted request came back

Times come from the worker's messages, so decisions replay exactly. Knows no clock.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

from engine_core.admission import free_blocks_needed
from engine_core.request import Request

if TYPE_CHECKING:
    from engine_core.scheduler import Scheduler, Step

PREFILL_SAMPLE_TOKENS = 32                      # steps at least this large say what a prefill token costs
SMOOTHING = 0.2
MAX_RISE = 4                                    # of one sample over the average
MIN_MARGINAL_SHARE = 0.1                        # of a step's average cost per token


class CostModel:
    """What it costs to compute a token and to move a block, and how much of what is given up the cache still has when
    it is wanted again; as measured so far. 0: not measured."""

    def __init__(self, swap_block_ns: int = 0) -> None:
        self.swap_block_ns = float(swap_block_ns)   # out and back
        self.prefill_token_ns = 0.0                 # one more token in a step that runs anyway
        self.decode_step_ns = 0.0                   # a step in which every row computes one token
        self.survival = 0.0                         # share of given-up tokens that their request finds in the cache

    def observe(self, num_tokens: int, num_rows: int, device_ns: int) -> None:
        """A step computed this many tokens for so many rows in so much time."""
        if device_ns <= 0 or num_tokens <= 0:
            return
        if num_tokens <= num_rows:
            if device_ns < self.decode_step_ns / 2:         # what it was followed up to was an outlier, a step that
                self.decode_step_ns = 0.0                   # compiled, say
            self.decode_step_ns = _smooth(self.decode_step_ns, device_ns)
        elif num_tokens >= PREFILL_SAMPLE_TOKENS and num_tokens >= 4 * num_rows:
            cost = device_ns / num_tokens
            if self.decode_step_ns:                 # what the step costs anyway is no part of what recomputing adds
                extra = (device_ns - self.decode_step_ns) / (num_tokens - num_rows)
                cost = max(min(cost, extra), MIN_MARGINAL_SHARE * cost)
            self.prefill_token_ns = _smooth(self.prefill_token_ns, cost)

    def observe_return(self, num_known_tokens: int, num_found_tokens: int) -> None:
        """A preempted request is back and found so many of its tokens in the cache."""
        self.survival += SMOOTHING * (num_found_tokens / max(1, num_known_tokens - 1) - self.survival)

    def prefers_swap(self, num_lost_tokens: int, num_blocks: int, num_lost_blocks: int) -> bool:
        """Whether copying out and back costs less than computing again. Without measurements: compute.

        All blocks are copied out. Of those that are lost unless the cache keeps them, what it still has at return is
        neither copied back nor computed.
        """
        if not self.prefill_token_ns or not self.swap_block_ns:
            return False
        lost = 1.0 - self.survival
        copy_ns = (num_blocks + num_lost_blocks * lost) * self.swap_block_ns / 2
        return copy_ns < num_lost_tokens * lost * self.prefill_token_ns

    def state(self) -> list[float]:
        """For a snapshot."""
        return [self.swap_block_ns, self.prefill_token_ns, self.decode_step_ns, self.survival]

    def restore(self, state: list[float]) -> None:
        self.swap_block_ns, self.prefill_token_ns, self.decode_step_ns, self.survival = state


def _smooth(old: float, new: float) -> float:
    """Follows slowly; a single outlier counts for little."""
    return old + SMOOTHING * (min(new, MAX_RISE * old) - old) if old else new


def preempt(scheduler: Scheduler, request: Request, step: Step) -> None:
    """Take a running request out of the batch. A victim is never part of `step`; the caller sees to it."""
    rows = scheduler.rows
    planned = int(rows.planned[request.row] - rows.drafted[request.row])    # a draft in flight may turn out wrong
    if planned and _wants_swap(scheduler, request, planned):
        used = request.blocks[:scheduler.blocks.blocks_for(planned)]
        slots = scheduler.host.take(len(used))
        if slots is not None:
            for block, slot in zip(used, slots):
                step.swap_out += (block, slot)
            request.host_slots, request.num_swapped_tokens = slots, planned
            step.swapped_out.append(request)
            scheduler.stats.num_swapped_out_blocks += len(used)
            scheduler.stats.num_swap_preemptions += 1
    if not request.host_slots:
        request.num_recomputed_tokens += planned
        scheduler.stats.num_recomputed_tokens += planned
    scheduler.give_back(request)
    step.preempted.append(request)


def _wants_swap(scheduler: Scheduler, request: Request, planned: int) -> bool:
    mode = scheduler.config.preemption_mode
    if request.params.pooling == "mean":        # what the worker has summed up so far leaves with the row
        return False
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
    num_blocks = blocks.blocks_for(planned)
    return scheduler.costs.prefers_swap(lost, num_blocks, max(num_blocks - shared, 0))


def make_room_for_urgent(scheduler: Scheduler, step: Step) -> None:
    """Priority policy: a waiting request that outranks the last running one takes its place, one per step.

    Decided before running rows are planned, so the victim is in no plan. Ranks never change, so two requests cannot
    take a place from each other in turns.
    """
    rows = scheduler.rows
    request = scheduler.waiting.peek()
    if request is None or request.num_in_flight or rows.n == 0:
        return
    blocks = scheduler.blocks
    if rows.n < rows.seats and free_blocks_needed(scheduler, request) <= blocks.num_free:
        return
    victim = rows.in_order()[-1]
    if scheduler.waiting.key(request) < scheduler.waiting.key(victim) and request.priority < victim.priority:
        preempt(scheduler, victim, step)
