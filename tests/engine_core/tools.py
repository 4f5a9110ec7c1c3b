"""An engine core with a simulated worker and no sockets, driven step by step: small numbers, exact values."""
from __future__ import annotations

import collections
from typing import Any

import numpy as np

from bench.sim_worker import SimWorker
from engine_core.core import EngineCore
from engine_core.request import Request
from ipc.config import CacheConfig, SchedulerConfig
from ipc.messages import AddRequest, Command, Finished, ModelRunnerOutput, SchedulerOutput, StepFailed, WorkerReady
from ipc.sampling_params import SamplingParams
from bench.simulation import VOCAB, over_the_wire, pack, unpack

KEY = b"secret of a test"


def pairs(column: Any) -> list[tuple[int, int]]:
    flat = unpack(column)
    return list(zip(flat[::2], flat[1::2]))


def add_message(request_id: int, prompt: list[int], *, priority: int = 0, salt: str = "", choice: int = 0,
                outputs: tuple[int, ...] = (), **params: Any) -> AddRequest:
    """Greedy, 4 tokens, EOS ignored, unless told otherwise."""
    params = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True, "seed": 1, **params}
    return AddRequest(request_id, pack(prompt), SamplingParams(**params), output_token_ids=pack(outputs), choice=choice,
                      priority=priority, cache_salt=salt)


class Engine:
    """Core and worker in one process. Synchronous, no partial blocks, unless told otherwise; what it sent to frontend 0
    is in `tokens` and `ends`."""

    def __init__(self, num_blocks: int = 16, block_size: int = 4, *, num_host_blocks: int = 0,
                 max_model_len: int = 1000,
                 eos: tuple[int, ...] = (), caching: bool = True, partial: bool = False, **scheduler: Any) -> None:
        scheduler = {"async_scheduling": False, **scheduler}
        cache = CacheConfig(block_size=block_size, enable_prefix_caching=caching, swap_space=1,
                            enable_partial_reuse=partial)
        ready = WorkerReady(num_blocks, num_host_blocks, max_model_len, VOCAB, list(eos), "float32", "simulated")
        self.cache = cache
        self.core = EngineCore(SchedulerConfig(**scheduler), cache, ready, KEY)
        self.scheduler = self.core.scheduler
        self.blocks, self.rows, self.stats = self.scheduler.blocks, self.scheduler.rows, self.scheduler.stats
        self.worker = SimWorker(num_blocks, block_size, num_host_blocks, VOCAB,
                                self.core.config.num_speculative_tokens)
        self.in_flight: collections.deque[SchedulerOutput] = collections.deque()
        self.tokens: dict[int, list[int]] = collections.defaultdict(list)
        self.ends: dict[int, Finished] = {}
        self.admitted: dict[int, tuple[int, int]] = {}          # cached tokens, max_tokens

    def add(self, request_id: int, prompt: list[int], **options: Any) -> None:
        self.core.handle(request_id >> 40, over_the_wire(add_message(request_id, prompt, **options)))

    def request(self, request_id: int) -> Request:
        return self.core.requests[request_id]

    def plan(self) -> SchedulerOutput:
        """The next plan; it is in flight now."""
        assert self.core.can_plan()
        plan = self.core.plan()
        assert plan is not None
        self.core.plan_sent(0)
        plan = over_the_wire(plan)
        self.in_flight.append(plan)
        return plan

    def result(self) -> ModelRunnerOutput:
        """The worker's answer to the oldest plan in flight, not committed."""
        return over_the_wire(self.worker.execute(self.in_flight.popleft()))

    def finish_step(self) -> None:
        """Execute and commit the oldest plan in flight."""
        self.commit(self.result())

    def commit(self, result: ModelRunnerOutput) -> None:
        self.core.commit(result)
        self.take()
        self.check()

    def step(self) -> SchedulerOutput:
        plan = self.plan()
        self.finish_step()
        return plan

    def run(self, limit: int = 1000) -> int:
        """Until idle, with as many plans in flight as the core allows. The number of steps."""
        for count in range(limit):
            while self.core.can_plan() and (plan := self.core.plan()) is not None:
                self.core.plan_sent(0)
                self.in_flight.append(over_the_wire(plan))
            if not self.in_flight:
                self.take()
                assert not self.scheduler.has_work
                return count
            self.finish_step()
        raise AssertionError(f"not idle after {limit} steps")

    def fail(self, plan: SchedulerOutput | None = None, named: tuple[int, ...] = ()) -> None:
        """The oldest plan in flight (or this one) raised on the worker, which drops the others."""
        step = (plan or self.in_flight[0]).step
        self.in_flight.clear()
        self.worker.needs_reset = True
        self.core.abort_step(over_the_wire(StepFailed(step, "boom", request_ids=list(named))))
        self.take()
        self.check()

    def take(self) -> None:
        for number, outputs in self.core.take_outputs(0):
            self.core.outbox.sent(number)
            for request_id, index, token in zip(unpack(outputs.request_ids, np.int64), unpack(outputs.output_index),
                                                unpack(outputs.tokens)):
                assert len(self.tokens[request_id]) == index and request_id not in self.ends
                self.tokens[request_id].append(token)
            for news in outputs.admitted:
                self.admitted[news.request_id] = (news.num_cached_tokens, news.max_tokens)
            for end in outputs.finished:
                assert end.request_id not in self.ends
                self.ends[end.request_id] = end

    def check(self) -> None:
        self.core.handle(0, Command(1, "check"))

    def assert_idle(self) -> None:
        """Idle means every block is free."""
        assert not self.core.requests and not self.scheduler.has_work and not self.rows.in_flight
        assert self.blocks.num_free == self.blocks.num_blocks
        self.scheduler.host.next_plan()
        assert self.scheduler.host.num_free == self.scheduler.host.num_slots
