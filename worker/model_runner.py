"""Executes one SchedulerOutput: block moves, row ops, batch, forward pass, sampling.

Owns model, pools and rows. Decides nothing: which tokens and which blocks is the plan's. An exception in `execute`
means the step failed; the caller reports it and executes nothing more until a plan with `reset`.
"""
from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor

from ipc.messages import EMPTY, ModelRunnerOutput, SchedulerOutput
from worker.attention.base import AttentionBackend
from worker.batch import Batch, BatchBuilder
from worker.kv_pool import HostPool, KVPool, apply_block_ops
from worker.models.flat_model import FlatModel
from worker.request_state import RequestState
from worker.sampling.sampler import Sampler, SamplingColumns


class ModelRunner:
    """One rank's model over its pool. `seats` rows, steps of at most `max_tokens` tokens."""

    def __init__(self, model: FlatModel, backend: AttentionBackend, pool: KVPool, num_host_blocks: int, *, seats: int,
                 max_tokens: int, max_model_len: int, eos_token_ids: list[int], device: str = "cpu") -> None:
        self.model, self.backend, self.pool, self.device = model, backend, pool, device
        self.host = HostPool(pool, num_host_blocks)
        self.state = RequestState(seats, max_model_len, pool.block_size)
        self.builder = BatchBuilder(self.state, max_tokens, device)
        self.sampler = Sampler()
        self.eos_token_ids = eos_token_ids
        self.needs_reset = False                # a step failed; wait for the plan that says so

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput, received_ns: int = 0) -> ModelRunnerOutput:
        """Run one plan. Afterwards the rows are those of the next plan's beginning."""
        if plan.swap_out or plan.swap_in or plan.copies:
            apply_block_ops(self.pool, self.host, swap_out=_pairs(plan.swap_out), swap_in=_pairs(plan.swap_in),
                            copies=_pairs(plan.copies))
        self.state.apply(plan)
        batch = self.builder.build(plan)
        prepared_ns = launched_ns = done_ns = time.monotonic_ns()
        tokens, bad = np.empty(0, np.int32), np.empty(0, np.int32)
        if batch is not None:
            logits = self._forward(batch)
            launched_ns = time.monotonic_ns()
            if logits is not None:
                tokens, bad = self._sample(batch, logits)
            done_ns = time.monotonic_ns()
        column = self.builder.advance(batch, tokens)
        return ModelRunnerOutput(plan.step, np.ascontiguousarray(column, np.int32).data.cast("B"),
                                 bad.data.cast("B") if bad.size else EMPTY, received_ns, prepared_ns,
                                 launched_ns, done_ns, done_ns - prepared_ns)

    def _forward(self, batch: Batch) -> Tensor | None:
        """Logits [L, V] of the rows to sample, or None when no row of the step is sampled."""
        hidden = self.model(batch.input_ids, batch.positions, self.pool.caches, batch.meta, self.backend)
        if not batch.sample_rows.size:
            return None
        if batch.logits_index is not None:
            hidden = hidden.index_select(0, batch.logits_index)
        return self.model.compute_logits(hidden)

    def _sample(self, batch: Batch, logits: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """(tokens int32 [L], rows of the plan whose logits were not finite)."""
        state, rows = self.state, batch.sample_rows
        masked_rows, masked_ids = state.masked_tokens(rows, self.eos_token_ids)
        result = self.sampler.sample(logits, SamplingColumns(
            temperature=state.temperature[rows], top_k=state.top_k[rows], top_p=state.top_p[rows],
            min_p=state.min_p[rows], seed=state.seed[rows], child=state.choice[rows],
            output_index=state.known[rows] - state.num_prompt[rows], masked_rows=masked_rows, masked_tokens=masked_ids))
        if not result.bad_rows.any():
            return result.tokens, np.empty(0, np.int32)
        return np.where(result.bad_rows, -1, result.tokens).astype(np.int32), rows[result.bad_rows].astype(np.int32)


def _pairs(column: memoryview) -> np.ndarray:
    return np.frombuffer(column, np.int32).reshape(-1, 2)
