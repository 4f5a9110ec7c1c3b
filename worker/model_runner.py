"""Executes one SchedulerOutput: block moves, row ops, batch, forward pass, sampling.

In two halves: `launch` queues the step, `finish` waits for its tokens and makes the result. Where batches are made on
the device, the next plan may be launched between the two: its input tokens never visit the host. Rows that draw, or
have options, are sampled with the host's help; then the step before is finished first.

Owns model, pools and rows. Decides nothing: which tokens and which blocks is the plan's. An exception in `execute`
means the step failed; the caller reports it and executes nothing more until a plan with `reset`.
"""
from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ipc.messages import EMPTY, STAMPS, ModelRunnerOutput, SchedulerOutput
from ipc.model_source import ModelFiles
from ipc.step_ring import StepRing
from worker.attention.base import AttentionBackend, BatchMeta
from worker.batch import NO_PAIRS, Batch, BatchBuilder, result_column
from worker.decode_graphs import DecodeGraphs
from worker.device_rows import ResidentBuilder
from worker.kv_pool import HostPool, KVPool
from worker.models.flat_model import FlatModel
from worker.profiler import no_range
from worker.pinned import Result, ResultReader
from worker.request_state import RequestState, Unread
from worker.sampling.grammar import Grammars
from worker.sampling.grammar_vocabulary import load_vocabulary
from worker.sampling.sampler import SamplingColumns
from worker.sampling.step import NO_ROWS, StepResult, StepSampler
from worker.spec_decode.ngram import NO_DRAFTS, NgramDrafter
from worker.swap_stream import mover_of

if TYPE_CHECKING:
    from worker.jit.upgrade import Upgrade

PREPARED, LAUNCHED, DONE = (STAMPS.index(name) for name in (
    "worker_prepared", "worker_launched", "worker_done"))           # device_ns follows


@dataclasses.dataclass(slots=True)
class Step:
    """A plan that is launched. `pending`: its tokens on their way from the device; None: they are in `result`."""
    number: int
    num_rows: int
    batch: Batch | None
    unread: Unread | None
    pending: Result | None
    result: StepResult
    ended_rows: np.ndarray
    received_ns: int
    prepared_ns: int
    launched_ns: int
    done_ns: int
    column: np.ndarray                          # one token per row of the plan, -1: none
    accepted: np.ndarray                        # pairs (row, token): verified drafts
    proposals: np.ndarray                       # pairs (row, token): drafts for the next step

    def is_ready(self) -> bool:
        """`finish` will not wait."""
        return self.pending is None or self.pending.is_ready()


class ModelRunner:
    """One rank's model over its pool. `seats` rows, steps of at most `max_tokens` tokens. `graphs`: mode of decode
    batches (worker/decode_graphs.py). `is_resident`: batches are made on the device."""

    def __init__(self, model: FlatModel, backend: AttentionBackend, pool: KVPool, num_host_blocks: int, *, seats: int,
                 max_tokens: int, max_model_len: int, eos_token_ids: list[int], device: str = "cpu",
                 num_valid_tokens: int | None = None, files: ModelFiles | None = None,
                 drafter: NgramDrafter | None = None, graphs: str = "off", is_resident: bool = False,
                 upgrade: Upgrade | None = None) -> None:
        """upgrade: on its way to another model for the same pool; this one then uses no compiled kernels either."""
        self.model, self.backend, self.pool, self.device = model, backend, pool, device
        self.host = HostPool(pool, num_host_blocks)
        self.move_blocks = mover_of(pool)(pool, self.host)
        self.state = RequestState(seats, max_model_len, pool.block_size)
        self.builder: BatchBuilder | ResidentBuilder
        self.graphs: DecodeGraphs | None = None
        if is_resident or graphs != "off":
            self.builder = builder = ResidentBuilder(self.state, max_tokens, device, backend.ops.rows)
            self.graphs = DecodeGraphs(graphs, seats, self._forward, builder.blank)
            builder.pad = self.graphs.padded
            self.results = ResultReader(device, seats)
        else:
            self.builder = BatchBuilder(self.state, max_tokens, device)
        self.sampler = StepSampler(self.state, model.compute_logits, eos_token_ids, num_valid_tokens,
                                   use_kernels=upgrade is None, best_of=getattr(model, "best_of", None))
        self.upgrade = upgrade
        self.grammars = Grammars(functools.partial(load_vocabulary, files, model.config.vocab_size, eos_token_ids))
        self.drafter = drafter
        self.needs_reset = False                # a step failed; wait for the plan that says so
        self.ring = StepRing()                  # of the last steps; the worker's loop gives one that outlives it
        self.range: Callable[[str], AbstractContextManager[Any]] = no_range     # around parts of a step, in a recording

    def use(self, model: Any, backend: AttentionBackend) -> None:
        """Between two steps: go on with this model, whose backend reads the pool as it is."""
        self.model, self.backend, self.upgrade = model, backend, None
        self.sampler.use(model.compute_logits, getattr(model, "best_of", None))

    def execute(self, plan: SchedulerOutput, received_ns: int = 0) -> ModelRunnerOutput:
        """Run one plan. Afterwards the rows are those of the next plan's beginning."""
        return self.finish(self.launch(plan, received_ns))

    @torch.inference_mode()
    def launch(self, plan: SchedulerOutput, received_ns: int = 0,
               before_wait: Callable[[], None] = lambda: None) -> Step:
        """Queue one plan. At most one earlier step may be unfinished; `before_wait` finishes it, and is called when
        this plan needs its tokens, or before the host waits for this plan's own."""
        self.ring.put(plan.step, (0, 0, 0, received_ns, 0, 0, 0, 0, 0, 0, 0, plan.step, plan.num_rows, 0, 0))
        if plan.swap_out or plan.swap_in or plan.copies:
            self.move_blocks(swap_out=_pairs(plan.swap_out), swap_in=_pairs(plan.swap_in), copies=_pairs(plan.copies))
        if plan.spec_token_ids:                 # they follow tokens that the step before must have
            before_wait()
        self.builder.apply(plan)
        batch = self.builder.build(plan)
        now = time.monotonic_ns()
        step = Step(plan.step, self.state.n, batch, None, None, StepResult(), NO_ROWS, received_ns, now, now, now,
                    np.full(self.state.n, -1, np.int32), NO_PAIRS, NO_DRAFTS)
        self.ring.mark(plan.step, PREPARED, now)
        if batch is None:
            return step
        if self._is_sampled_on_device(batch):
            begin = self._event()
            hidden = self._run(batch)
            step.launched_ns = time.monotonic_ns()
            self.ring.mark(step.number, LAUNCHED, step.launched_ns)
            with self.range("sample"):
                tokens = self._sample(batch, hidden)
            step.pending = self.results.read(tokens, begin)
            step.unread = self.state.count(batch.counts, batch.sample_rows)
            return step
        self._launch_with_host(batch, step, before_wait)
        return step

    def _launch_with_host(self, batch: Batch, step: Step, before_wait: Callable[[], None]) -> None:
        """The step's sampling reads or writes host memory: it is done when this returns."""
        state, grammars = self.state, None
        is_waiting = state.unread is not None   # for an earlier step: launch first, the device computes meanwhile
        if state.num_with_options and not is_waiting:
            grammars = self.grammars.begin(state, batch.sample_rows)
        hidden = self._run(batch)
        step.launched_ns = time.monotonic_ns()
        self.ring.mark(step.number, LAUNCHED, step.launched_ns)
        before_wait()
        if state.num_with_options and is_waiting:
            grammars = self.grammars.begin(state, batch.sample_rows)
        self.sampler.mask = grammars.mask if grammars is not None else None
        with self.range("sample"):
            result = step.result = self.sampler.run(batch, hidden)
        if grammars is not None:
            step.ended_rows = grammars.accept(batch.sample_rows, result.tokens)
        state.is_reusable[result.bad_rows] = False
        step.done_ns = time.monotonic_ns()
        step.column, step.accepted = self.builder.advance(batch, result.tokens)
        if self.drafter is not None:
            step.proposals = self.drafter.step(state, (step.column >= 0).nonzero()[0])

    def finish(self, step: Step) -> ModelRunnerOutput:
        """The result of a launched step; waits for it."""
        result, device_ns = step.result, step.done_ns - step.prepared_ns
        if step.pending is not None and step.unread is not None and step.batch is not None:
            tokens = result.tokens = np.maximum(step.pending.wait(), -1)
            step.done_ns = time.monotonic_ns()
            device_ns = step.pending.device_ns() or step.done_ns - step.prepared_ns
            self.state.fill(step.unread, tokens)
            is_bad = tokens < 0
            if is_bad.any():
                result.bad_rows = step.batch.sample_rows[is_bad].astype(np.int32)
                rows = step.unread.rows[is_bad]
                self.state.is_reusable[rows[rows >= 0]] = False
            step.column = result_column(step.batch, tokens, step.num_rows)
        self.ring.mark_two(step.number, DONE, step.done_ns, device_ns)
        return ModelRunnerOutput(step.number, np.ascontiguousarray(step.column, np.int32).data.cast("B"),
                                 _packed(result.bad_rows), step.received_ns, step.prepared_ns, step.launched_ns,
                                 step.done_ns, device_ns, result.logprobs, result.prompt_logprobs, result.pooled,
                                 _packed(step.ended_rows), result.failed, _packed(step.accepted),
                                 _packed(step.proposals))

    def is_device_lost(self) -> bool:
        """Whether an error is one that every later call will meet too, as CUDA's after an illegal address is: only a
        new process has a working device."""
        if torch.device(self.device).type != "cuda":
            return False
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError:
            return True
        return False

    @property
    def has_capture(self) -> bool:
        """A graph of decode steps is still to be captured."""
        return self.graphs is not None and self.graphs.num_left > 0

    @torch.inference_mode()
    def capture_next(self) -> None:
        """Capture one. Call while no step is under way."""
        if self.graphs is not None:
            self.graphs.capture_next()

    @torch.inference_mode()
    def warm_up(self, num_tokens: int) -> None:
        """Run a padding request of so many tokens: compiles or loads what such a step launches. Nothing in the pool
        changes but its scratch slot."""
        starts, nothing = np.array([0, num_tokens], np.int32), np.zeros(1, np.int32)
        device = self.pool.device
        meta = BatchMeta.of(starts, nothing, torch.zeros((1, 1), dtype=torch.int32, device=device),
                            torch.full((num_tokens,), -1, device=device), self.pool.block_size)
        ids = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        hidden = self._forward(Batch(ids, ids, meta, None, NO_ROWS, None, num_tokens))
        self.backend.ops.arg_max(self.model.compute_logits(hidden[:self.state.seats]))
        if isinstance(self.builder, ResidentBuilder):
            self.builder.warm_up()

    def _run(self, batch: Batch) -> Tensor:
        """hidden of the step's tokens, or of `batch.last`, without those of padding rows."""
        with self.range("forward"):
            if self.graphs is None or batch.counts is not None:
                return self._forward(batch)
            return self.graphs.run(batch)[:batch.num_tokens]

    def _forward(self, batch: Batch) -> Tensor:
        """hidden [N, E]; [L, E], of the rows with logits, where `batch.last` is set."""
        if self.state.num_with_options and batch.last is not None and self.sampler.reads_prompts(batch):
            batch.last = None
        hidden: Tensor = self.model(batch.input_ids, batch.positions, self.pool.caches, batch.meta, self.backend,
                                    batch.last)
        return hidden

    def _is_sampled_on_device(self, batch: Batch) -> bool:
        """Arg-maxes and draws that nothing which the host knows changes."""
        state, rows = self.state, batch.sample_rows
        can_sample = self.backend.ops.draw is not None or not state.temperature[rows].any()
        return (isinstance(self.builder, ResidentBuilder) and self.drafter is None and state.num_with_options == 0
                and state.num_with_floor == 0 and can_sample)

    def _sample(self, batch: Batch, hidden: Tensor) -> Tensor:
        """Newest tokens int32 [L], on the device and kept there; below 0: the row's logits are bad."""
        hidden = batch.with_logits(hidden)
        state, rows = self.state, batch.sample_rows
        logits = self.model.compute_logits(hidden)
        width = min(logits.shape[1], self.sampler.sampler.num_valid_tokens or logits.shape[1])
        if state.temperature[rows].any():
            draw = self.backend.ops.draw
            if draw is None:
                raise RuntimeError("rows that draw were launched where drawing takes the host")
            tokens = draw(logits, width, SamplingColumns(
                temperature=state.temperature[rows], top_k=state.top_k[rows], top_p=state.top_p[rows],
                min_p=state.min_p[rows], seed=state.seed[rows], child=state.choice[rows],
                output_index=state.known[rows] - state.num_prompt[rows]))
        else:
            tokens = self.backend.ops.arg_max(logits[:, :width])
        if isinstance(self.builder, ResidentBuilder):
            self.builder.sampled(batch, tokens)
        return tokens

    def _event(self) -> torch.cuda.Event | None:
        """A mark on the device's timeline."""
        if torch.device(self.device).type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _packed(column: np.ndarray) -> memoryview:
    return column.data.cast("B") if column.size else EMPTY


def _pairs(column: memoryview) -> np.ndarray:
    return np.frombuffer(column, np.int32).reshape(-1, 2)
