"""What a request adds to its logits and which tokens it excludes: logit_bias, allowed_token_ids, bad_words, bit masks.

Every function changes only the rows it is given, in place. An excluded token has logit -inf, so it takes part in
nothing after it. Does not know penalties or sampling.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from worker.sampling import placement
from worker.sampling.placement import upload

ANY, NOTHING = -1, -2                           # in place of a token: of a word, of an output


def add_bias(logits: Tensor, entries: Sequence[int], ids: Sequence[np.ndarray], values: Sequence[np.ndarray]) -> None:
    """logits[entries[i], ids[i]] += values[i]; the ids of one row differ from each other."""
    lengths = [len(row) for row in ids]
    place = (np.repeat(np.array(entries, np.int64), lengths), np.concatenate(ids))
    rows, columns, added = upload([*place, np.concatenate(values)], logits.device)
    logits.index_put_((rows, columns), added, accumulate=True)


def keep_only(logits: Tensor, entries: Sequence[int], ids: Sequence[np.ndarray]) -> None:
    """Exclude every token of row entries[i] but ids[i] int64."""
    if placement.on_device(logits):
        from worker.sampling import device_rows
        device_rows.keep_only(logits, np.array(entries), ids)
        return
    for entry, kept in zip(entries, ids):
        row, index = logits[entry], torch.from_numpy(kept)
        values = row[index]
        row.fill_(float("-inf"))
        row[index] = values


def exclude(logits: Tensor, entries: np.ndarray, ids: np.ndarray) -> None:
    """logits[entries[i], ids[i]] = -inf."""
    rows, columns = upload([entries.astype(np.int64), ids.astype(np.int64)], logits.device)
    logits.index_put_((rows, columns), torch.full((), float("-inf"), dtype=logits.dtype, device=logits.device))


@dataclasses.dataclass(frozen=True, slots=True)
class BadWords:
    """Those of one row. beginnings int32 [n, longest - 1]: each word without its last token, at the right, ANY before
    it; lasts int32 [n]."""
    beginnings: np.ndarray
    lasts: np.ndarray

    @staticmethod
    def of(words: Sequence[Sequence[int]]) -> BadWords | None:
        """None: there are none."""
        if not words:
            return None
        beginnings = np.full((len(words), max(map(len, words)) - 1), ANY, np.int32)
        for row, word in zip(beginnings, words):
            row[len(row) - len(word) + 1:] = word[:-1]
        return BadWords(beginnings, np.array([word[-1] for word in words], np.int32))


def bad_tokens(entries: Sequence[int], words: Sequence[BadWords], tokens: np.ndarray, rows: np.ndarray,
               begins: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pairs (entry, token) that would complete a word of entries[i]: its output is tokens[rows[i], begins[i]:ends[i]],
    and a word must lie in it as a whole. All but tokens [rows, length] have n entries."""
    width = max(word.beginnings.shape[1] for word in words)
    beginnings = np.concatenate([
        word.beginnings if word.beginnings.shape[1] == width else
        np.pad(word.beginnings, ((0, 0), (width - word.beginnings.shape[1], 0)), constant_values=ANY)
        for word in words])
    index = np.repeat(np.arange(len(words)), [len(word.lasts) for word in words])
    places = ends[index][:, None] - width + np.arange(width)
    behind = np.where(places >= begins[index][:, None], tokens[rows[index][:, None], np.maximum(places, 0)], NOTHING)
    is_bad = ((beginnings == ANY) | (beginnings == behind)).all(axis=1)
    return np.asarray(entries)[index[is_bad]], np.concatenate([word.lasts for word in words])[is_bad]


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
