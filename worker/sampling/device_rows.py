"""The sampler's stages as Triton kernels: what they need goes to the device in one copy, and nothing is waited for.

Imported only where there is a CUDA device (or Triton's interpreter). Does not know requests.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from worker.kernels.edit_logits import mask_bits, penalise
from worker.kernels.logprobs import chosen_logprobs
from worker.kernels.sample_rows import sample_rows
from worker.sampling.placement import upload

if TYPE_CHECKING:
    from worker.sampling.sampler import SamplingColumns


def sample(logits: Tensor, width: int, params: SamplingColumns) -> Tensor:
    """int32 [L] on the logits' device: a token, -1 for a row whose largest is not finite, -2 if all are -inf. Logits
    are read through the words if every row has some; else the rows that have are masked in place."""
    seeds = params.seed.astype(np.uint64).view(np.int64)
    masked = np.flatnonzero(params.word_index >= 0) if len(params.word_index) else np.empty(0, np.int64)
    *columns, index, rows, words = upload([
        params.temperature.astype(np.float32), params.top_k.astype(np.int32), params.top_p.astype(np.float32),
        params.min_p.astype(np.float32), seeds, params.child.astype(np.int32), params.output_index.astype(np.int64),
        np.arange(len(masked), dtype=np.int32), masked.astype(np.int32),
        params.words[params.word_index[masked]] if len(masked) else np.empty((0, 1), np.int32)], logits.device)
    if len(masked) == len(logits) > 0:
        return sample_rows(logits, *columns, width=width, words=words, word_index=index)
    mask_bits(logits, rows, words)
    return sample_rows(logits, *columns, width=width)


def penalise_rows(logits: Tensor, entries: np.ndarray, lengths: np.ndarray, ids: np.ndarray, used: np.ndarray,
                  factors: np.ndarray) -> None:
    """Row entries[i] by its lengths[i] tokens of ids, each once; used: times put out. In place."""
    starts = np.concatenate([[0], np.cumsum(lengths)])
    rows, places, tokens, times, by = upload([
        entries.astype(np.int32), starts.astype(np.int32), ids.astype(np.int32), used.astype(np.int32),
        factors.astype(np.float32)], logits.device)
    penalise(logits, rows, places, tokens, times, by, longest=int(lengths.max(initial=0)))


def keep_only(logits: Tensor, entries: np.ndarray, ids: Sequence[np.ndarray]) -> None:
    """Row entries[i] keeps its tokens ids[i]; the others become -inf. In place."""
    row, token = np.repeat(np.arange(len(ids)), [len(kept) for kept in ids]), np.concatenate(ids)
    words = np.zeros((len(ids), -(-logits.shape[1] // 32)), np.uint32)
    np.bitwise_or.at(words, (row, token // 32), np.uint32(1) << (token % 32).astype(np.uint32))
    mask_bits(logits, *upload([entries.astype(np.int32), words.view(np.int32)], logits.device))


def logprobs_of(logits: Tensor, targets: np.ndarray) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(targets int64, log-probabilities float32, ranks int32, log of the sum of exponentials) [L], on the device."""
    [index] = upload([targets.astype(np.int64)], logits.device)
    return index, *chosen_logprobs(logits, index)
