"""The draw: one uniform number per row turns a row of weights into a token (inverse CDF, in order of token id).

Does not know where the weights come from. The cumulative sum is taken in two levels, over chunks and then inside one
chunk: a float64 running sum over a whole vocabulary costs more than all the rest of sampling.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

CHUNK = 128


def draw(weights: Tensor, noise: NDArray[np.float32]) -> NDArray[np.int64]:
    """int64 [n]: the first token whose cumulative weight exceeds noise * total.

    weights [n, V] float32, >= 0, each row with a positive sum; noise [n] in (0, 1). A token of weight 0 is never drawn.
    Row r depends on row r only, bit for bit.
    """
    width = weights.shape[1]
    sums = chunk_sums(weights)
    cumulative = np.cumsum(sums, axis=1, dtype=np.float64)
    target = noise.astype(np.float64) * cumulative[:, -1]  # < total, because the noise is < 1
    chunk = (cumulative <= target[:, None]).sum(axis=1)
    rows = np.arange(len(chunk))
    rest = target - np.where(chunk > 0, cumulative[rows, chunk - 1], 0.0)

    ids = chunk[:, None] * CHUNK + np.arange(CHUNK)
    inside = np.where(ids < width, _take(weights, np.minimum(ids, width - 1)), np.float32(0.0))
    inner = np.cumsum(inside, axis=1, dtype=np.float64)
    # The chunk's float32 sum and its running sum differ in the last bits; stay below the latter.
    rest = np.minimum(rest, np.nextafter(inner[:, -1], 0.0))
    tokens: NDArray[np.int64] = chunk * CHUNK + (inner <= rest[:, None]).sum(axis=1)
    return tokens


def chunk_sums(weights: Tensor) -> NDArray[np.float32]:
    """[n, ceil(V / CHUNK)] float32 sums of consecutive chunks; the last may be short."""
    width = weights.shape[1]
    whole = width // CHUNK * CHUNK
    parts = []
    if whole:
        parts.append(weights[:, :whole].view(len(weights), -1, CHUNK).sum(dim=2))
    if whole < width:
        parts.append(weights[:, whole:].sum(dim=1, keepdim=True))
    sums: NDArray[np.float32] = torch.cat(parts, dim=1).cpu().numpy()
    return sums


def _take(weights: Tensor, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    if weights.device.type == "cpu":
        taken: NDArray[np.float32] = np.take_along_axis(weights.numpy(), ids, axis=1)
        return taken
    return weights.gather(1, torch.from_numpy(ids).to(weights.device)).cpu().numpy()
