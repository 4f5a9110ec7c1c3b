"""Preemption under a modelled clock: what each mode would take if copying a block cost this or that.

One machine has one ratio of copying to computing, usually far on one side, where choosing is easy. Here the real engine
core plans for the simulated worker, and a step takes overhead + tokens * per-token cost + blocks moved * copy cost. The
core is told these times as a worker would tell them, so `auto` decides as it does in service. Exact; reads no clock.
"""
from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.sim_worker import SimWorker
from engine_core.core import EngineCore
from ipc.config import CacheConfig, SchedulerConfig
from ipc.messages import AddRequest, SchedulerOutput, WorkerReady
from ipc.sampling_params import SamplingParams

VOCAB_SIZE = 4096
TOKEN_NS = 25_000
OVERHEADS_NS = {"overhead": 2_500_000, "compute": 0}    # of a step: about a small model on a CPU; nothing but tokens
COPY_COSTS = (0.1, 0.5, 0.75, 1.0, 1.5, 2.0, 5.0)       # of a block out and back, in costs of computing its tokens

Workload = list[tuple[np.ndarray, int]]                 # (prompt int32 [n], max_tokens)


def modelled_time(workload: Workload, mode: str, *, is_cached: bool, overhead_ns: int, copy_ns: int, num_blocks: int,
                  block_size: int, budget: int, seats: int) -> int:
    """Nanoseconds until all requests, sent at once, are done."""
    scheduler = SchedulerConfig(max_num_seqs=seats, max_num_batched_tokens=budget, preemption_mode=mode)
    cache = CacheConfig(block_size=block_size, enable_prefix_caching=is_cached, swap_space=1)
    host_blocks = 16 * num_blocks
    ready = WorkerReady(num_blocks, host_blocks, 1 << 16, VOCAB_SIZE, [], "float32", "simulated", swap_block_ns=copy_ns)
    core = EngineCore(scheduler, cache, ready, b"bench preemption, a fixed key")
    worker = SimWorker(num_blocks, block_size, host_blocks, VOCAB_SIZE)
    for index, (prompt, max_tokens) in enumerate(workload):
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, seed=0)
        core.handle(0, AddRequest(index, prompt.data.cast("B"), params))
    in_flight: collections.deque[tuple[SchedulerOutput, int]] = collections.deque()
    total = 0
    while True:
        while core.can_plan() and (plan := core.plan()) is not None:
            core.plan_sent(0)
            in_flight.append((plan, core.scheduler.rows.in_flight[-1].num_tokens))
        if not in_flight:
            break
        plan, num_tokens = in_flight.popleft()
        device_ns = overhead_ns + TOKEN_NS * num_tokens if num_tokens else 0
        total += device_ns + copy_ns * (len(plan.swap_out) + len(plan.swap_in)) // 16   # a pair is 8 bytes, half a trip
        result = worker.execute(plan)
        result.device_ns = device_ns
        core.commit(result)
        for number, _ in core.take_outputs(0):
            core.outbox.sent(number)
    if core.requests:
        raise RuntimeError(f"{mode}: {len(core.requests)} requests never ended")
    return total


def modelled_ratios(workload: Workload, *, is_cached: bool, overhead_ns: int, costs: Sequence[float] = COPY_COSTS,
                    **sizes: int) -> dict[str, Any]:
    """auto against the better of recompute and swap, for each copy cost; and swap against recompute, to see where the
    choice turns."""
    def took(mode: str, cost: float) -> int:
        copy_ns = int(cost * TOKEN_NS * sizes["block_size"])
        return modelled_time(workload, mode, is_cached=is_cached, overhead_ns=overhead_ns, copy_ns=copy_ns, **sizes)

    recompute = took("recompute", 0.0)          # copies nothing
    swap = [took("swap", cost) for cost in costs]
    auto = [took("auto", cost) for cost in costs]
    return {"auto_over_best": [round(a / min(recompute, s), 4) for a, s in zip(auto, swap)],
            "swap_over_recompute": [round(s / recompute, 4) for s in swap]}
