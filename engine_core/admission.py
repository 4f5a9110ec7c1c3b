"""Admitting waiting requests: how much of each the cache gives, which blocks it takes, and its row.

A request starts after its longest cached run of full blocks; of the next block, tokens that some cached block has in
common are copied; a swapped-out request brings the rest from host memory. At least one token is left to compute: the
logits of the last known token choose the next one. A long prompt starts only when all of it fits, though its first
chunk needs less: else several start, run out of blocks in mid-prompt, and what they computed is lost. Knows no running
rows.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

from engine_core.request import Request

if TYPE_CHECKING:
    from engine_core.scheduler import Scheduler, Step


def admit(scheduler: Scheduler, step: Step, budget: int) -> None:
    """Admit requests in policy order until one does not fit or the budget is spent."""
    rows = scheduler.rows
    while budget > 0 and rows.n < rows.seats:
        request = scheduler.waiting.peek()
        if request is None or request.num_in_flight:        # its newest token is still being computed
            break
        if request in step.preempted:                       # this plan copies its blocks out; it cannot copy them back
            break
        if free_blocks_needed(scheduler, request) > scheduler.blocks.num_free:
            break
        count = admit_one(scheduler, step, request, budget)
        if count == 0:
            break
        budget -= count


def free_blocks_needed(scheduler: Scheduler, request: Request) -> int:
    """Blocks of the free queue that all known tokens of a waiting request take: fresh ones, and cached ones that nobody
    holds. At most the whole pool."""
    blocks = scheduler.blocks
    needed = blocks.blocks_for(request.num_known_tokens)
    if needed <= blocks.num_free:                           # the cache can only make it less
        return needed
    limit = min((request.num_known_tokens - 1) // blocks.block_size, len(request.hashes))
    hits = blocks.find_cached_prefix(request.hashes, 0, limit)
    return needed - sum(1 for block in hits if blocks.ref_count[block] > 0)


def admit_one(scheduler: Scheduler, step: Step, request: Request, budget: int) -> int:
    """Tokens planned for the request; 0, changing nothing, when it does not fit now."""
    rows, blocks, size = scheduler.rows, scheduler.blocks, scheduler.blocks.block_size
    known = request.num_known_tokens
    hits = blocks.find_cached_prefix(request.hashes, 0, min((known - 1) // size, len(request.hashes)))
    cached = len(hits) * size
    source, part = (0, 0)
    if request.num_swapped_tokens <= cached:
        source, part = _partial_match(scheduler, step, request, len(hits))
    computed = max(cached + part, request.num_swapped_tokens)
    remaining = known - computed
    if not scheduler.config.enable_chunked_prefill and budget < remaining <= scheduler.config.max_num_batched_tokens:
        return 0
    count = scheduler.chunk(remaining, budget)
    fresh = blocks.allocate(max(blocks.blocks_for(computed + count) - len(hits), 0), hits)
    if fresh is None:
        return 0
    scheduler.waiting.pop(request)
    request.blocks = hits + fresh
    request.num_published = len(hits)
    if part:
        step.copies += (source, fresh[0])
        step.swapped_in.append((request, cached))
        scheduler.stats.num_copied_tokens += part
    elif request.num_swapped_tokens > cached:
        stop = blocks.blocks_for(request.num_swapped_tokens)
        for i in range(len(hits), stop):
            step.swap_in += (request.host_slots[i], request.blocks[i])
        step.swapped_in.append((request, cached))
        scheduler.stats.num_swapped_in_blocks += stop - len(hits)
    scheduler.drop_swap(request)
    _count(scheduler, request, cached + part)
    rows.append(request, scheduler.waiting.key(request), computed, len(request.blocks) * size)
    if remaining > 1:
        scheduler.prefilling.add(request)
        step.chunks.append((request, count))
    step.new.append(request)
    scheduler.publish_planned(request, computed + count, step)
    return count


def _partial_match(scheduler: Scheduler, step: Step, request: Request, num_hits: int) -> tuple[int, int]:
    """(block to copy, number of its tokens to reuse) for the block after the cached ones; (0, 0): none worth a copy.

    Only blocks that an earlier plan computes: copies are made before this plan's forward pass.
    """
    partial = scheduler.blocks.partial
    if partial is None:
        return 0, 0
    size = scheduler.blocks.block_size
    start = num_hits * size
    stop = min(start + size, request.num_known_tokens - 1)
    parent = request.hashes[num_hits - 1] if num_hits else request.root
    source, part = partial.find(parent, bytes(request.tokens[start * 4:stop * 4]), {b for b, _ in step.published})
    return (source, part) if part >= max(1, size // 4) else (0, 0)


def _count(scheduler: Scheduler, request: Request, num_cached: int) -> None:
    """Hit statistics count once, at admission; returns of preempted and of re-added requests apart."""
    stats = scheduler.stats
    if request.is_replay and not request.is_admitted:
        request.is_admitted = True                          # what it finds is its own work, not a hit of the cache
        stats.num_replayed_tokens += request.num_known_tokens
        stats.num_replayed_hit_tokens += num_cached
    elif not request.is_admitted:
        request.is_admitted = True
        request.num_cached_tokens = num_cached
        stats.num_queried_tokens += request.num_known_tokens
        stats.num_hit_tokens += num_cached
    else:
        request.num_reused_tokens += num_cached
        scheduler.costs.observe_return(request.num_known_tokens, num_cached)
        stats.num_resumed_hit_tokens += num_cached
