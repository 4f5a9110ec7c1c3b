"""Launches once what steps will launch, so that no request waits for a compiler.

A kernel is compiled anew for other dtypes, constants, and whole numbers that are 1 or a multiple of 16 where they were
not; arguments that differ from step to step are exempt (do_not_specialize). So each kernel is launched at every size at
which its tile or such a class changes. Does not know which kernels there are in a model: it runs the model.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from worker.sampling import jit_threads
from worker.sampling.sampler import SamplingColumns

if TYPE_CHECKING:
    from worker.model_runner import ModelRunner

Progress = Callable[[float], None]


def warm_up_sizes(max_tokens: int) -> list[int]:
    """Tokens of the steps that are run: powers of two, where tiles change, and the largest."""
    sizes = [1 << power for power in range(max_tokens.bit_length())]
    return sizes if sizes[-1] == max_tokens else [*sizes, max_tokens]


def warm_up(runner: ModelRunner, max_tokens: int, progress: Progress = lambda fraction: None) -> int:
    """All launches, and what counts tokens on the host; returns the largest step. Nothing in the pool changes but its
    scratch slot."""
    largest = launch_all(runner, max_tokens, progress)
    jit_threads.warm_up_counts(runner.model.config.vocab_size)
    return largest


@torch.inference_mode()
def launch_all(runner: ModelRunner, max_tokens: int, progress: Progress = lambda fraction: None) -> int:
    """Attention, then whole steps, then the sampler; returns the largest step."""
    from worker.attention.triton_paged import TritonBackend
    if isinstance(runner.backend, TritonBackend):
        config = runner.model.config
        runner.backend.warm_up(runner.pool.caches[0], num_heads=config.num_attention_heads,
                               dtype=runner.model.embed_tokens.dtype, block_size=runner.pool.block_size,
                               window=config.sliding_window)
    sizes = warm_up_sizes(max_tokens)
    for done, num_tokens in enumerate(sizes):
        runner.warm_up(num_tokens)
        progress((done + 0.8) / len(sizes))
    warm_up_sampler(runner)
    return sizes[-1]


def warm_up_sampler(runner: ModelRunner) -> None:
    """The kernels of rows that draw, are penalised, masked, or want log-probabilities."""
    from worker.sampling import device_rows
    hidden = runner.model.embed_tokens[:2]
    logits, width = runner.model.compute_logits(hidden), runner.sampler.sampler.num_valid_tokens
    count, num_words = len(logits), -(-logits.shape[1] // 32)
    columns = SamplingColumns.greedy(count)
    words = np.full((count, num_words), -1, np.int32)
    for index in ([], [0, -1][:count], list(range(count))):     # no row has a mask, one, all
        columns.words, columns.word_index = words, np.array(index, np.int32)
        device_rows.sample(logits, width or logits.shape[1], columns)
    device_rows.penalise_rows(logits, np.zeros(1, np.int64), np.ones(1, np.int64), np.zeros(1, np.int64),
                              np.ones(1, np.int64), np.ones((1, 3), np.float32))
    device_rows.logprobs_of(logits, np.zeros(count, np.int64))
