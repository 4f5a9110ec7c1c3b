"""What a request adds to its logits and which tokens it excludes: logit_bias, allowed_token_ids, bad_words, bit masks.

Every function changes only the rows it is given, in place. An excluded token has logit -inf, so it takes part in
nothing after it. Does not know penalties or sampling.
"""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from worker.sampling.placement import upload


def add_bias(logits: Tensor, entries: Sequence[int], ids: Sequence[np.ndarray], values: Sequence[np.ndarray]) -> None:
    """logits[entries[i], ids[i]] += values[i]; the ids of one row differ from each other."""
    lengths = [len(row) for row in ids]
    place = (np.repeat(np.array(entries, np.int64), lengths), np.concatenate(ids))
    rows, columns, added = upload([*place, np.concatenate(values)], logits.device)
    logits.index_put_((rows, columns), added, accumulate=True)


def keep_only(logits: Tensor, entry: int, ids: np.ndarray) -> None:
    """Exclude every token of the row but `ids` int64."""
    [index] = upload([ids], logits.device)
    row = logits[entry]
    kept = row[index]
    row.fill_(float("-inf"))
    row[index] = kept


def exclude(logits: Tensor, entries: np.ndarray, ids: np.ndarray) -> None:
    """logits[entries[i], ids[i]] = -inf."""
    rows, columns = upload([entries.astype(np.int64), ids.astype(np.int64)], logits.device)
    logits.index_put_((rows, columns), torch.full((), float("-inf"), dtype=logits.dtype, device=logits.device))


def bad_tokens(words: Sequence[np.ndarray], output: np.ndarray) -> list[int]:
    """Tokens that would complete one of the words behind this output. A word must lie in the output as a whole."""
    found = []
    for word in words:
        before = len(word) - 1
        if before <= len(output) and np.array_equal(output[len(output) - before:], word[:before]):
            found.append(int(word[before]))
    return found


def apply_bitmask(logits: Tensor, entries: np.ndarray, bits: np.ndarray) -> None:
    """Exclude token t of row entries[i] where bit t of bits[i] is 0. The compiled sampler reads through the bits.

    bits int32 [n, >= ceil(V / 32)], lowest bit first: the layout of grammar libraries.
    """
    width = logits.shape[1]
    words = torch.from_numpy(np.ascontiguousarray(bits)).to(logits.device)
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    is_kept = ((words[:, :, None] >> shifts) & 1).bool().reshape(len(bits), -1)[:, :width]
    index = torch.from_numpy(entries.astype(np.int64)).to(logits.device)
    logits[index] = logits[index].masked_fill(~is_kept, float("-inf"))
