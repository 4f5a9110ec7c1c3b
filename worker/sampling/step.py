"""From the hidden states of a step to everything its rows get: tokens, log-probabilities, vectors, failures.

Rows without options take the short way: logits, sample. The head runs over prompt positions only for rows that ask for
their log-probabilities, PROMPT_SLICE at a time, so that a long prompt needs no more memory than a short one. Knows rows
and their tokens, nothing of blocks.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ipc.errors import FAULT, INVALID
from ipc.messages import RowFailure, RowLogprobs, RowPooled
from worker.batch import Batch
from worker.request_state import RequestState
from worker.sampling.jit_threads import NO_WORDS
from worker.sampling.logprobs import Logprobs, compute_logprobs
from worker.sampling.row_options import RowOptions
from worker.sampling.sampler import Sampler, SampleResult, SamplingColumns
from worker.sampling.stages import Entries, apply_stages

PROMPT_SLICE = 256
NO_ROWS = np.empty(0, np.int32)


@dataclasses.dataclass(slots=True)
class StepResult:
    """`tokens` int32 [L] for the batch's sample_rows; -1 where the row is in `bad_rows` or `failed`."""
    tokens: np.ndarray = dataclasses.field(default_factory=lambda: NO_ROWS)
    bad_rows: np.ndarray = dataclasses.field(default_factory=lambda: NO_ROWS)
    logprobs: list[RowLogprobs] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[RowLogprobs] = dataclasses.field(default_factory=list)
    pooled: list[RowPooled] = dataclasses.field(default_factory=list)
    failed: list[RowFailure] = dataclasses.field(default_factory=list)


# (rows int [L], V) -> (words, word_index) of SamplingColumns: the grammars' masks.
Mask = Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray]]
# (logits, width) -> (arg-max int64 [L], the largest float32 [L], NaN if any is) over the first `width` ids, where the
# model noted them while it made these very logits; else None.
BestOf = Callable[[Tensor, int], tuple[np.ndarray, np.ndarray] | None]


class StepSampler:
    """One per worker. `compute_logits`: hidden [n, E] -> [n, V] float32; it may reuse its memory in the next call."""

    def __init__(self, state: RequestState, compute_logits: Callable[[Tensor], Tensor], eos_token_ids: list[int],
                 num_valid_tokens: int | None = None, *, use_kernels: bool = True,
                 best_of: BestOf | None = None) -> None:
        self.state, self.compute_logits, self.eos_token_ids = state, compute_logits, eos_token_ids
        self.best_of = best_of
        self.sampler = Sampler(num_valid_tokens, use_kernels=use_kernels)
        self.mask: Mask | None = None           # of the step

    def use(self, compute_logits: Callable[[Tensor], Tensor], best_of: BestOf | None) -> None:
        """Another model's head from now on, and the compiled row kernels, which draw the same tokens."""
        self.compute_logits, self.best_of = compute_logits, best_of
        self.sampler = Sampler(self.sampler.num_valid_tokens)

    def reads_prompts(self, batch: Batch) -> bool:
        """Whether a row of the step asks for more than its last hidden state."""
        return any(_reads_prompt(self.state.options[row]) for row in self._active(batch))

    def run(self, batch: Batch, hidden: Tensor) -> StepResult:
        """hidden of the step, as the model gave it for this batch."""
        result = StepResult()
        state, rows = self.state, batch.sample_rows
        if state.num_with_options:
            self._prompt_positions(batch, hidden, result)
        if not rows.size:
            return result
        hidden = batch.with_logits(hidden)
        entries: Entries = state.options_of(rows) if state.num_with_options else []
        if not any(options.pooling for _, options in entries):
            self._sample(rows, hidden, entries, result, batch.offsets)
            return result
        is_pooled = np.zeros(rows.size, bool)
        tokens = np.zeros(rows.size, np.int32)
        bad: list[int] = []
        for i, options in entries:
            if options.pooling:
                is_pooled[i] = True
                tokens[i] = self._pool(int(rows[i]), hidden[i], options, result, bad)
        rest = (~is_pooled).nonzero()[0]
        if rest.size:
            new_index = {int(i): j for j, i in enumerate(rest)}
            index = torch.from_numpy(rest).to(hidden.device)
            self._sample(rows[rest], hidden.index_select(0, index),
                         [(new_index[i], o) for i, o in entries if not o.pooling], result,
                         None if batch.offsets is None else batch.offsets[rest])
            tokens[rest] = result.tokens
        result.tokens = tokens
        result.bad_rows = np.concatenate([result.bad_rows, np.array(bad, np.int32)])
        return result

    def _sample(self, rows: np.ndarray, hidden: Tensor, entries: Entries, result: StepResult,
                offsets: np.ndarray | None = None) -> None:
        """`offsets` [L]: drafts before each token; rows with options have none."""
        state, ahead = self.state, 0 if offsets is None else offsets
        logits = self.compute_logits(hidden)
        masked_rows, masked_ids = state.masked_tokens(rows, ahead, self.eos_token_ids)
        raw: dict[int, Tensor] = {}
        if entries:
            changed = set(masked_rows.tolist())
            raw = {i: logits[i].clone() for i, o in entries
                   if o.num_logprobs >= 0 and (o.changes_logits or i in changed)}
            more_rows, more_ids = apply_stages(logits, state, rows, entries, self.sampler.kernels)
            masked_rows = np.concatenate([masked_rows, more_rows])
            masked_ids = np.concatenate([masked_ids, more_ids])
        words, word_index = (NO_WORDS, NO_ROWS) if self.mask is None else self.mask(rows, logits.shape[1])
        is_plain = not entries and not masked_rows.size and not words.size
        sampled = (self._noted(logits, rows) if is_plain else None) or self.sampler.sample(logits, SamplingColumns(
            temperature=state.temperature[rows], top_k=state.top_k[rows], top_p=state.top_p[rows],
            min_p=state.min_p[rows], seed=state.seed[rows], child=state.choice[rows],
            output_index=state.known[rows] + ahead - state.num_prompt[rows], masked_rows=masked_rows,
            masked_tokens=masked_ids, words=words, word_index=word_index))
        result.tokens = sampled.tokens
        is_lost = sampled.bad_rows
        if entries or is_lost.any():
            # Logits after a draft count only if the draft was right, which the next step will show.
            is_first = np.ones(rows.size, bool) if offsets is None else offsets == 0
            self._fail(rows, entries, sampled.bad_rows, sampled.empty_rows & is_first, masked_rows, is_first, result)
        asking = [(i, o.num_logprobs) for i, o in entries if o.num_logprobs >= 0 and result.tokens[i] >= 0]
        if asking:
            self._logprobs(rows, logits, raw, asking, result)

    def _noted(self, logits: Tensor, rows: np.ndarray) -> SampleResult | None:
        """Greedy rows whose logits nothing changes, without reading the logits again, if the model knows."""
        if self.best_of is None or self.state.temperature[rows].any():
            return None
        found = self.best_of(logits, self.sampler.num_valid_tokens or logits.shape[1])
        return None if found is None else SampleResult.of_best(*found)

    def _fail(self, rows: np.ndarray, entries: Entries, bad: np.ndarray, empty: np.ndarray, masked_rows: np.ndarray,
              is_first: np.ndarray, result: StepResult) -> None:
        """Tell rows whose model is at fault from those whose own request excludes every token."""
        failures = {i: o.failure for i, o in entries if o.failure is not None}
        may_be_empty = {i for i, o in entries if o.changes_logits} | set(masked_rows.tolist())
        for i in empty.nonzero()[0].tolist():
            if i in may_be_empty and i not in failures:
                failures[i] = INVALID, ("no token is left to sample: allowed_token_ids, bad_words, logit_bias, "
                                        "min_tokens and structured_outputs together exclude all; loosen one of them")
        is_failed = np.zeros(rows.size, bool)
        is_failed[list(failures)] = True
        result.failed += [RowFailure(int(rows[i]), *failure) for i, failure in failures.items()]
        result.bad_rows = rows[bad & is_first & ~is_failed].astype(np.int32)
        result.tokens = np.where(bad | is_failed, -1, result.tokens).astype(np.int32)

    def _logprobs(self, rows: np.ndarray, logits: Tensor, raw: dict[int, Tensor], asking: list[tuple[int, int]],
                  result: StepResult) -> None:
        index = np.array([i for i, _ in asking], np.int64)
        if raw or index.size < rows.size:
            logits = torch.stack([raw.get(i, logits[i]) for i in index.tolist()])
        found = compute_logprobs(logits, result.tokens[index], np.array([n for _, n in asking], np.int64),
                                 self.sampler.kernels)
        state = self.state
        for j, (i, num_top) in enumerate(asking):
            row = int(rows[i])
            result.logprobs.append(_row_logprobs(found, j, row, int(state.known[row] - state.num_prompt[row]), num_top))

    # ------------------------------------------------------------ prompts

    def _prompt_positions(self, batch: Batch, hidden: Tensor, result: StepResult) -> None:
        """What is asked of prompt positions computed in this step."""
        state, starts = self.state, batch.meta.query_start_loc_cpu
        for at, row in enumerate(self._active(batch)):
            options = state.options[row]
            if options is None or not _reads_prompt(options):
                continue
            begin, end = int(starts[at]), int(starts[at + 1])
            first = int(state.computed[row])                # position of the step's first token of this row
            num_prompt = int(state.num_prompt[row])
            if options.pooling == "mean":
                total = hidden[begin:end].double().sum(dim=0).cpu().numpy()
                if first == 0:
                    options.pooled_sum = total
                elif options.pooled_sum is not None:
                    options.pooled_sum += total
                else:
                    options.failure = FAULT, "the engine lost part of this prompt's vector; send the request again"
            if options.num_prompt_logprobs < 0:
                continue
            end = min(end, begin + num_prompt - 1 - first)  # each position is told by the one before it
            for low in range(begin, end, PROMPT_SLICE):
                high = min(low + PROMPT_SLICE, end)
                position = first + low - begin + 1
                targets = state.tokens[row, position:position + high - low]
                found = compute_logprobs(self.compute_logits(hidden[low:high]), targets,
                                         np.full(high - low, options.num_prompt_logprobs, np.int64),
                                         self.sampler.kernels)
                result.prompt_logprobs += [_row_logprobs(found, j, int(row), position + j, options.num_prompt_logprobs)
                                           for j in range(high - low)]

    def _active(self, batch: Batch) -> list[int]:
        """Rows that compute something."""
        return list(range(self.state.n)) if batch.counts is None else batch.counts.nonzero()[0].tolist()

    def _pool(self, row: int, hidden: Tensor, options: RowOptions, result: StepResult, bad: list[int]) -> int:
        """The row's vector; its token, which nobody reads, is 0, or -1 when the vector is not finite."""
        if options.failure is not None:
            result.failed.append(RowFailure(row, *options.failure))
            return -1
        if options.pooling == "mean" and options.pooled_sum is not None:
            vector = options.pooled_sum / float(self.state.num_prompt[row])
        else:
            vector = hidden.double().cpu().numpy()
        if options.normalize:
            length = float(np.sqrt(np.square(vector).sum()))
            vector = vector / length if length > 0.0 else vector
        if not np.isfinite(vector).all():
            bad.append(row)
            return -1
        result.pooled.append(RowPooled(row, np.ascontiguousarray(vector, np.float32).data.cast("B")))
        return 0


def _reads_prompt(options: RowOptions | None) -> bool:
    """It asks for hidden states of its prompt's tokens."""
    return options is not None and (options.num_prompt_logprobs >= 0 or options.pooling == "mean")


def _row_logprobs(found: Logprobs, index: int, row: int, position: int, num_top: int) -> RowLogprobs:
    end = 1 + num_top
    return RowLogprobs(row, position, int(found.ranks[index]), found.ids[index, :end].data.cast("B"),
                       found.values[index, :end].data.cast("B"))
