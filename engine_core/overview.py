"""The pool and the queue at a glance, for who watches: the state of blocks, and why each of the first waiting waits.

Read only when somebody asks, and bounded in what it costs then. Changes nothing.
"""
from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

from engine_core.status import waiting_reason

if TYPE_CHECKING:
    from engine_core.scheduler import Scheduler

MAX_CELLS = 4096                                # blocks that are told of; of a larger pool every n-th
MAX_WAITING = 50
BLOCK_STATES = ("free", "cached", "in use", "shared")   # cached: free, and findable until it is handed out


def overview(scheduler: Scheduler) -> dict[str, Any]:
    """`blocks`: one byte per told block, an index into BLOCK_STATES; block 1 + i * stride is byte i."""
    pool, running = scheduler.blocks, scheduler.rows
    stride = -(-pool.num_blocks // MAX_CELLS)
    told = range(1, pool.num_blocks + 1, stride)
    counts, hashes = pool.ref_count, pool.block_hash
    blocks = bytes(min(counts[b], 2) + 1 if counts[b] else hashes[b] is not None for b in told)
    waiting: list[dict[str, Any]] = []
    ahead = 0
    for request in islice(scheduler.waiting, MAX_WAITING):
        waiting.append({"request_id": request.request_id, "reason": waiting_reason(scheduler, request, ahead),
                        "num_tokens": request.num_known_tokens, "num_preemptions": request.num_preemptions})
        ahead += not request.is_held
    return {"blocks": blocks, "stride": stride, "num_blocks": pool.num_blocks, "num_free": pool.num_free,
            "block_size": pool.block_size, "waiting": waiting, "num_waiting": len(scheduler.waiting),
            "num_running": running.n, "num_seats": running.seats,
            "max_num_batched_tokens": scheduler.config.max_num_batched_tokens}
