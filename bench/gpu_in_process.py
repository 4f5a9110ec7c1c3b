"""Core and worker in one process on one device, without sockets: what GPU checks and figures run requests through.

Two loops: plan, execute, commit (synchronous), and the worker's own, in which a plan is launched before the one in
front of it is finished. Prompts and weights are random.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import numpy as np
import torch

from engine_core.core import EngineCore
from ipc.config import CacheConfig, SchedulerConfig
from ipc.messages import AddRequest, ModelRunnerOutput, NewRow, SchedulerOutput, WorkerReady
from ipc.model_config import ModelConfig
from ipc.model_source import ModelFiles
from ipc.sampling_params import SamplingParams
from worker.attention.registry import get_backend
from worker.kv_pool import KVPool
from worker.model_runner import ModelRunner, Step
from worker.models.flat_model import FlatModel
from worker.models.loader import load_model

DTYPE_NAMES = {torch.bfloat16: "bfloat16", torch.float32: "float32", torch.float16: "float16"}


def random_model(config: ModelConfig, dtype: torch.dtype, device: str) -> FlatModel:
    """Weights of a real start of training."""
    return load_model(ModelFiles("dummy", "", config, "random"), dtype=DTYPE_NAMES[dtype], device=device, seed=1)


@dataclasses.dataclass
class Setup:
    """One engine. `num_host_blocks` with preemption_mode "swap"."""

    num_blocks: int
    block_size: int = 16
    num_host_blocks: int = 0
    seats: int = 256
    budget: int = 8192
    max_model_len: int = 4096
    graphs: str = "off"
    kv_dtype: torch.dtype | None = None
    backend: str = "triton"
    is_overlapped: bool = True
    scheduler: dict[str, Any] = dataclasses.field(default_factory=dict)


def make_runner(model: FlatModel, setup: Setup, device: str) -> ModelRunner:
    """A worker's runner over a pool of its own, with its graphs captured if it has some."""
    backend = get_backend(setup.backend, device)
    dtype = setup.kv_dtype or model.embed_tokens.dtype
    pool = KVPool(backend, setup.num_blocks, setup.block_size, model.kv_spec(), dtype, device)
    runner = ModelRunner(model, backend, pool, setup.num_host_blocks, seats=setup.seats, max_tokens=setup.budget,
                         max_model_len=setup.max_model_len, eos_token_ids=[], device=device, graphs=setup.graphs,
                         is_resident=setup.backend == "triton")
    while runner.has_capture:
        runner.capture_next()
    return runner


class InProcessEngine:
    """Requests that ignore EOS, greedy unless asked otherwise."""

    def __init__(self, model: FlatModel, setup: Setup, device: str) -> None:
        self.setup = setup
        self.runner = make_runner(model, setup, device)
        ready = WorkerReady(setup.num_blocks, setup.num_host_blocks, setup.max_model_len, model.config.vocab_size, [],
                            "", "", swap_block_ns=1000)
        scheduler = SchedulerConfig(**{"max_num_seqs": setup.seats, "max_num_batched_tokens": setup.budget,
                                       "async_scheduling": setup.is_overlapped, **setup.scheduler})
        self.core = EngineCore(scheduler, CacheConfig(block_size=setup.block_size, swap_space=1), ready, b"bench")
        self.tokens: dict[int, list[int]] = collections.defaultdict(list)
        self.plans: list[tuple[int, int]] = []  # rows and tokens of each step
        self._launched: collections.deque[Step] = collections.deque()

    def run(self, prompts: list[list[int]], max_tokens: int, **options: Any) -> list[list[int]]:
        """The outputs of all, when all are done. options: of SamplingParams."""
        for index, prompt in enumerate(prompts):
            params = SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, "seed": 1,
                                       **options})
            self.core.handle(0, AddRequest(index, np.array(prompt, np.int32).data.cast("B"), params))
        while self.core.can_plan() or self._launched:
            while self.core.can_plan() and (plan := self.core.plan()) is not None:
                self.core.plan_sent(0)
                self._launch(plan)
            self._finish(0)
        return [self.tokens[index] for index in range(len(prompts))]

    def _launch(self, plan: SchedulerOutput) -> None:
        counts = np.frombuffer(plan.counts, np.int32)
        self.plans.append((plan.num_rows, plan.num_rows + int((counts[1::2] - 1).sum())))
        self._launched.append(self.runner.launch(plan, 0, lambda: self._finish(0)))
        self._finish(1 if self.setup.is_overlapped else 0)

    def _finish(self, left: int) -> None:
        while len(self._launched) > left:
            self._commit(self.runner.finish(self._launched.popleft()))

    def _commit(self, result: ModelRunnerOutput) -> None:
        self.core.commit(result)
        for number, outputs in self.core.take_outputs(0):
            self.core.outbox.sent(number)
            ids, tokens = np.frombuffer(outputs.request_ids, np.int64), np.frombuffer(outputs.tokens, np.int32)
            for request_id, token in zip(ids.tolist(), tokens.tolist()):
                self.tokens[request_id].append(token)


def decoding_rows(runner: ModelRunner, rows: int, context: int, num_steps: int) -> SchedulerOutput:
    """The plan after which each of `rows` rows has computed `context` tokens, in shuffled blocks that also hold the
    tokens of `num_steps` further steps. Keys and values are whatever the pool holds."""
    size = runner.pool.block_size
    per_row = -(-(context + num_steps + 1) // size)
    blocks = (np.random.default_rng(0).permutation(rows * per_row) + 1).astype(np.int32)
    params = SamplingParams(temperature=0.0, seed=1, ignore_eos=True)
    new = [NewRow(row, context, context, context - 1, per_row, params) for row in range(rows)]
    tokens = np.arange(rows * context, dtype=np.int32) % runner.model.config.vocab_size
    return SchedulerOutput(1, rows, new=new, new_tokens=tokens.data.cast("B"), new_blocks=blocks.data.cast("B"),
                           reset=True)


def blocks_for(rows: int, context: int, num_steps: int, block_size: int) -> int:
    """Blocks that decoding_rows uses."""
    return rows * -(-(context + num_steps + 1) // block_size)
