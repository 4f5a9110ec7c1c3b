"""Undoing plans: after a failed step, and after the pool is lost.

plan() promises and commit() keeps; everything between can be taken back exactly, because each plan in flight keeps what
it published, swapped and moved. Knows no messages.
"""
from __future__ import annotations

from engine_core.request import Request
from engine_core.rows import PlanRecord
from engine_core.scheduler import Scheduler


def undo_in_flight(scheduler: Scheduler) -> None:
    """A step failed: nothing in flight has happened or will. Rows return to what is committed.

    Published hashes are taken back; a request that adopted such a block falls back to the tokens before it; swaps are
    lost, so their requests recompute. The worker must be sent all rows anew.
    """
    rows, blocks, size = scheduler.rows, scheduler.blocks, scheduler.blocks.block_size
    scheduler.settle()
    bad: set[int] = set()
    kept: dict[Request, int] = {}               # swapped in by a lost plan -> tokens it has without the swap
    for record in reversed(rows.in_flight):
        for block, h in record.published:
            bad.add(block)
            if blocks.block_hash[block] == h:
                blocks.unpublish(block)
        kept.update(record.swapped_in)
        for request in record.swapped_out:
            scheduler.drop_swap(request)
        for request in record.detached.values():
            request.num_in_flight = 0
    rows.in_flight.clear()
    rows.moves.clear()
    scheduler.prefilling.clear()
    for row in range(rows.n):
        running = rows.request[row]
        if running is None:
            raise RuntimeError(f"row {row} of {rows.n} has no request")
        request = running
        computed = min(int(rows.computed[row]), kept.get(request, 1 << 60))
        for i, block in enumerate(request.blocks):
            if (i + 1) * size > computed:
                break
            if block in bad:
                computed = i * size
                break
        rows.computed[row] = computed
        blocks.trim(request.blocks, blocks.blocks_for(computed))
        request.num_published = min(request.num_published, computed // size)
        rows.capacity[row] = len(request.blocks) * size
        if int(rows.known[row]) - computed > 1:
            scheduler.prefilling.add(request)
    rows.reset_to_committed()


def requests_of(scheduler: Scheduler, record: PlanRecord) -> list[Request]:
    """Requests that still run and computed something in this plan."""
    found = []
    for then in range(record.num_rows):
        now = int(record.current[then]) if record.is_moved else then
        request = scheduler.rows.request[now] if now >= 0 else record.detached.get(then)
        if request is not None and not request.is_finished and (record.counts is None or record.counts[then]):
            found.append(request)
    return found


def forget_pool(scheduler: Scheduler) -> None:
    """The pool is lost. Everyone computes everything again, and nothing the cache says is true: a crash is a preemption
    of everyone."""
    undo_in_flight(scheduler)
    rows, blocks = scheduler.rows, scheduler.blocks
    blocks.forget()
    for request in reversed(rows.in_order()):
        request.num_recomputed_tokens += int(rows.computed[request.row])
        rows.computed[request.row] = 0
        scheduler.give_back(request)
    for request in scheduler.waiting:
        scheduler.drop_swap(request)
    rows.moves.clear()

