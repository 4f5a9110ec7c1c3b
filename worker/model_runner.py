"""Executes one SchedulerOutput: block moves, row ops, batch, forward pass, sampling.

Owns model, pools and rows. Decides nothing: which tokens and which blocks is the plan's. An exception in `execute`
means the step failed; the caller reports it and executes nothing more until a plan with `reset`.
"""
from __future__ import annotations

import functools
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from ipc.messages import EMPTY, ModelRunnerOutput, SchedulerOutput
from ipc.model_source import ModelFiles
from worker.attention.base import AttentionBackend
from worker.batch import BatchBuilder
from worker.kv_pool import HostPool, KVPool, apply_block_ops
from worker.models.flat_model import FlatModel
from worker.profiler import no_range
from worker.request_state import RequestState
from worker.sampling.grammar import Grammars
from worker.sampling.grammar_vocabulary import load_vocabulary
from worker.sampling.step import NO_ROWS, StepResult, StepSampler
from worker.spec_decode.ngram import NO_DRAFTS, NgramDrafter


class ModelRunner:
    """One rank's model over its pool. `seats` rows, steps of at most `max_tokens` tokens."""

    def __init__(self, model: FlatModel, backend: AttentionBackend, pool: KVPool, num_host_blocks: int, *, seats: int,
                 max_tokens: int, max_model_len: int, eos_token_ids: list[int], device: str = "cpu",
                 num_valid_tokens: int | None = None, files: ModelFiles | None = None,
                 drafter: NgramDrafter | None = None) -> None:
        self.model, self.backend, self.pool, self.device = model, backend, pool, device
        self.host = HostPool(pool, num_host_blocks)
        self.state = RequestState(seats, max_model_len, pool.block_size)
        self.builder = BatchBuilder(self.state, max_tokens, device)
        self.sampler = StepSampler(self.state, model.compute_logits, eos_token_ids, num_valid_tokens)
        self.grammars = Grammars(functools.partial(load_vocabulary, files, model.config.vocab_size, eos_token_ids))
        self.drafter = drafter
        self.needs_reset = False                # a step failed; wait for the plan that says so
        self.range: Callable[[str], AbstractContextManager[Any]] = no_range     # around parts of a step, in a recording

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput, received_ns: int = 0) -> ModelRunnerOutput:
        """Run one plan. Afterwards the rows are those of the next plan's beginning."""
        if plan.swap_out or plan.swap_in or plan.copies:
            apply_block_ops(self.pool, self.host, swap_out=_pairs(plan.swap_out), swap_in=_pairs(plan.swap_in),
                            copies=_pairs(plan.copies))
        self.state.apply(plan)
        batch = self.builder.build(plan)
        prepared_ns = launched_ns = done_ns = time.monotonic_ns()
        result, ended_rows = StepResult(), NO_ROWS
        if batch is not None:
            state = self.state
            grammars = self.grammars.begin(state, batch.sample_rows) if state.num_with_options else None
            with self.range("forward"):
                hidden = self.model(batch.input_ids, batch.positions, self.pool.caches, batch.meta, self.backend)
            launched_ns = time.monotonic_ns()
            self.sampler.mask = grammars.mask if grammars is not None else None
            with self.range("sample"):
                result = self.sampler.run(batch, hidden)
            if grammars is not None:
                ended_rows = grammars.accept(batch.sample_rows, result.tokens)
            state.is_reusable[result.bad_rows] = False
            done_ns = time.monotonic_ns()
        column, accepted = self.builder.advance(batch, result.tokens)
        proposals = NO_DRAFTS
        if self.drafter is not None:
            proposals = self.drafter.step(self.state, (column >= 0).nonzero()[0])
        return ModelRunnerOutput(plan.step, np.ascontiguousarray(column, np.int32).data.cast("B"),
                                 _packed(result.bad_rows), received_ns,
                                 prepared_ns, launched_ns, done_ns, done_ns - prepared_ns, result.logprobs,
                                 result.prompt_logprobs, result.pooled,
                                 _packed(ended_rows), result.failed, _packed(accepted), _packed(proposals))


def _packed(column: np.ndarray) -> memoryview:
    return column.data.cast("B") if column.size else EMPTY


def _pairs(column: memoryview) -> np.ndarray:
    return np.frombuffer(column, np.int32).reshape(-1, 2)
