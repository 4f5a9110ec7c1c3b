"""The last stages of the pipeline, from finished logits to a token: temperature -> min_p -> top-k -> top-p -> draw.

The whole order, and why (the first five stages are stages.py's):

    log-probabilities       of the raw logits, so that they say what the model thinks
    logits processors       see what the model said
    logit_bias              before penalties, as vLLM does: a repeated token's bias is damped with it
    penalties
    masks                   allowed_token_ids, bad_words, min_tokens, grammar, ids beyond the tokenizer: last of what
                            changes logits, so that nothing lifts a forbidden token, and it takes part in nothing below
    temperature             before the filters, because their probabilities are those of the tempered distribution
    min_p, top-k, top-p     in this order the sets only shrink (vLLM's)
    draw                    inverse CDF at the noise of (seed, choice, output index)

A row of temperature 0 is one arg-max over its masked logits; when no row asks for more, nothing else runs. Every number
of a row is computed from that row alone, so a row gives the same token in any batch. On a CPU with numba the stages
here are one compiled pass per row (jit_rows.py), on CUDA one Triton program per row (device_rows.py); otherwise they
are torch and numpy. Does not know requests or text.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ipc.counter_rng import uniform
from worker.sampling import placement
from worker.sampling.filters import select_rows, softmax_rows, thresholds
from worker.sampling.jit_threads import NO_WORDS, RowKernels, load
from worker.sampling.masks import apply_bitmask, exclude
from worker.sampling.noise import draw

SLICE_ELEMENTS = 1 << 22  # logits handled at once by the rows that draw: bounds temporary memory, changes no result


def _no_ids() -> NDArray[np.int32]:
    return np.empty(0, dtype=np.int32)


@dataclass
class SamplingColumns:
    """What each of the L rows asks for; numpy, one entry a row."""

    temperature: NDArray[np.float32]  # 0: greedy
    top_k: NDArray[np.int32]  # <= 0: off
    top_p: NDArray[np.float32]  # 1: off
    min_p: NDArray[np.float32]  # 0: off
    seed: NDArray[np.uint64]
    child: NDArray[np.int32]  # which of a request's n choices
    output_index: NDArray[np.int64]  # how many tokens the row has put out before this one
    # Pairs that must not be drawn: stop and EOS tokens while output_index < min_tokens.
    masked_rows: NDArray[np.int32] = field(default_factory=_no_ids)
    masked_tokens: NDArray[np.int32] = field(default_factory=_no_ids)
    # Row r may take the tokens whose bits (lowest first) in words[word_index[r]] are 1; -1: all. No index: no masks.
    words: NDArray[np.int32] = field(default_factory=lambda: NO_WORDS)     # [n, >= ceil(V / 32)]
    word_index: NDArray[np.int32] = field(default_factory=_no_ids)

    @staticmethod
    def greedy(num_rows: int) -> SamplingColumns:
        """Columns in which every row takes its arg-max."""
        zeros = np.zeros(num_rows, dtype=np.int64)
        return SamplingColumns(
            temperature=zeros.astype(np.float32),
            top_k=zeros.astype(np.int32),
            top_p=np.ones(num_rows, dtype=np.float32),
            min_p=zeros.astype(np.float32),
            seed=zeros.astype(np.uint64),
            child=zeros.astype(np.int32),
            output_index=zeros,
        )


@dataclass
class SampleResult:
    """tokens [L] int32, 0 where bad_rows; bad_rows [L] bool: the row's largest logit is not finite (NaN, infinite, or
    every token masked); empty_rows [L] bool: of those, every logit is -inf."""

    tokens: NDArray[np.int32]
    bad_rows: NDArray[np.bool_]
    empty_rows: NDArray[np.bool_]

    @staticmethod
    def of_best(best: NDArray[np.int64], largest: NDArray[np.float32]) -> SampleResult:
        """From each row's token and its largest logit, NaN if any is."""
        bad = ~np.isfinite(largest)
        return SampleResult(np.where(bad, 0, best).astype(np.int32), bad, np.isneginf(largest))


class Sampler:
    """num_valid_tokens: ids from there on exist in the logits but not in the tokenizer, and are never drawn."""

    def __init__(self, num_valid_tokens: int | None = None, *, use_kernels: bool = True) -> None:
        self.num_valid_tokens = num_valid_tokens
        self.kernels: RowKernels | None = load() if use_kernels else None

    def sample(self, logits: Tensor, params: SamplingColumns) -> SampleResult:
        """One token a row. logits [L, V] float32; masked pairs are set to -inf in it. The kernels write nothing else,
        and read rows with words through their bits; without kernels these are written into the logits too."""
        if len(params.masked_rows):
            exclude(logits, params.masked_rows, params.masked_tokens)
        width = logits.shape[1] if self.num_valid_tokens is None else min(self.num_valid_tokens, logits.shape[1])
        if self.kernels is not None and logits.is_cpu:
            if np.count_nonzero(params.temperature):
                return SampleResult(*self.kernels.sample(
                    logits.numpy(), width, params.temperature, params.top_k, params.top_p, params.min_p, params.seed,
                    params.child, params.output_index, params.words, params.word_index))
            return SampleResult(*self.kernels.greedy(logits.numpy(), width, params.words, params.word_index))
        if placement.on_device(logits):
            from worker.sampling import device_rows
            codes = device_rows.sample(logits, width, params).cpu().numpy()     # the one wait of the step
            return SampleResult(np.maximum(codes, 0), codes < 0, codes == -2)
        entries = np.flatnonzero(params.word_index >= 0)
        if len(entries):
            apply_bitmask(logits, entries, params.words[params.word_index[entries]])
        return self._sample_with_torch(logits, width, params)

    @torch.inference_mode()
    def _sample_with_torch(self, logits: Tensor, width: int, params: SamplingColumns) -> SampleResult:
        valid = logits[:, :width]
        best, largest = arg_max(valid)
        sampled = np.flatnonzero((params.temperature > 0.0) & np.isfinite(largest))
        rows_at_once = max(1, SLICE_ELEMENTS // max(1, width))
        for begin in range(0, len(sampled), rows_at_once):
            part = sampled[begin : begin + rows_at_once]
            best[part] = _draw_rows(select_rows(valid, part), largest[part], params, part)
        return SampleResult.of_best(best, largest)


def _draw_rows(
    logits: Tensor, largest: NDArray[np.float32], params: SamplingColumns, rows: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Tokens [n] for logits [n, V], which are rows `rows` of the columns."""
    top = largest.astype(np.float64)
    temperature = params.temperature[rows].astype(np.float64)
    weights = softmax_rows(logits, top, temperature)
    limits = thresholds(
        logits,
        top,
        temperature,
        params.top_k[rows].astype(np.int64),
        params.top_p[rows].astype(np.float64),
        params.min_p[rows].astype(np.float64),
        row_total=1.0 / weights.amax(dim=1).cpu().numpy().astype(np.float64),  # the largest logit's weight is 1 / total
    )
    if not np.isneginf(limits).all():
        keep_from(weights, logits, limits)
    noise = uniform(params.seed[rows], params.child[rows], params.output_index[rows])[:, 0]
    return draw(weights, noise)


def arg_max(logits: Tensor) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """(first index of the largest, the largest) of each row; NaN counts as largest. numpy's arg-max is vectorised
    where torch's is not: a tenth of the time on a CPU."""
    if logits.device.type != "cpu":
        values, indices = torch.max(logits, dim=1)
        return indices.cpu().numpy(), values.cpu().numpy()
    rows = logits.numpy()
    best = rows.argmax(axis=1)
    return best, np.take_along_axis(rows, best[:, None], axis=1)[:, 0]


def keep_from(weights: Tensor, logits: Tensor, limits: NDArray[np.float32]) -> None:
    """Zero the weights of logits below their row's limit, in place."""
    if weights.device.type == "cpu":
        view = weights.numpy()
        np.multiply(view, logits.numpy() >= limits[:, None], out=view)
    else:
        weights.mul_(logits >= torch.from_numpy(limits).to(logits.device)[:, None])
