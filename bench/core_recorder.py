"""What the flight recorder costs: its share of a decode step, and one snapshot of a core whose pool is full."""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.stats import median
from engine_core.core import EngineCore
from engine_core.recorder import SEGMENT_EVENTS, NoRecorder, Recorder
from engine_core.snapshot import take
from ipc.config import CacheConfig, SchedulerConfig
from ipc.messages import AddRequest, ModelRunnerOutput, SchedulerOutput, WorkerReady
from ipc.sampling_params import SamplingParams

TURN = 50  # steps with and without, in turns


def recording(loop: Any, steps: int, num_blocks: int = 75_000) -> dict[str, float]:
    """`loop`: a bench.core.Loop of running requests. Shares of a step in percent, snapshot in ms."""
    kinds = (Recorder(loop.core, loop.origin), NoRecorder(loop.core, loop.origin))
    totals: tuple[list[float], list[float]] = ([], [])
    for turn in range(2 * max(4, steps // TURN)):
        loop.recorder = kinds[turn % 2]
        loop.times = {name: [] for name in loop.times}
        loop.measure(TURN)
        totals[turn % 2].append(median(sum(values) for values in zip(*loop.times.values())))
    on, off = median(totals[0]), median(totals[1])
    snapshot = snapshot_us(loop.clock, num_blocks)
    return {
        "step_percent": round(100 * (on - off) / off, 2),
        "snapshot_ms": round(snapshot / 1000, 2),
        "snapshots_percent": round(100 * snapshot / (SEGMENT_EVENTS / 2 * off), 2),  # two events a step
    }


def snapshot_us(clock: Any, num_blocks: int) -> float:
    """CPU time to take a snapshot when every block of the pool is findable and 256 requests run."""
    vocab = 32_000
    ready = WorkerReady(num_blocks, 0, 8192, vocab, [], "float32", "null")
    core = EngineCore(
        SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=8192, async_scheduling=False),
        CacheConfig(),
        ready,
        b"k" * 32,
    )
    rng = np.random.default_rng(3)

    def add(number: int, length: int, max_tokens: int | None) -> None:
        tokens = memoryview(rng.integers(0, vocab, length).astype(np.int32)).cast("B")
        core.handle(0, AddRequest(number, tokens, SamplingParams(max_tokens=max_tokens, seed=1)))

    def step() -> None:
        plan = core.plan()
        assert plan is not None
        core.commit(sampled(core, plan))
        for frontend, _ in core.take_outputs(0):
            core.outbox.sent(frontend)

    number = 0
    while number * 250 < num_blocks:
        add(number, 4000, 1)
        number += 1
        while core.scheduler.has_work:
            step()
    for i in range(256):
        add(number + i, 512 + i % 16, None)
    while core.scheduler.prefilling or len(core.scheduler.waiting):
        step()
    times = []
    for _ in range(15):
        begin = clock()
        take(core)
        times.append(clock() - begin)
    return median(times)


def sampled(core: EngineCore, plan: SchedulerOutput) -> ModelRunnerOutput:
    """A token for every row of the newest plan that samples one."""
    samples = core.scheduler.rows.in_flight[-1].samples
    tokens = np.full(plan.num_rows, 3, np.int32)
    if samples is not None:
        tokens[~samples] = -1
    return ModelRunnerOutput(plan.step, tokens.data.cast("B"))
