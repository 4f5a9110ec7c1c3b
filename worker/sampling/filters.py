"""min_p, top-k and top-p as one number per row: the smallest logit that may still be drawn.

All three keep a set of the largest logits, so the set is {x >= threshold}. That makes the result independent of how a
sort orders equal logits (equal logits are kept or dropped together) and of whatever else is in the batch: every number
of a row is computed from that row alone, in an order that depends on the row alone.

Thresholds are found among the CANDIDATES largest logits, which nearly always suffice; a row for which that cannot be
proved is done again over the full vocabulary. Does not know about temperature 0, masks or noise.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

CANDIDATES = 1024
SMALLEST_T = 1e-30  # a float32 that may divide; below it only the maximum has any weight anyway
Floats = NDArray[np.float64]


def thresholds(
    logits: Tensor,
    largest: Floats,
    temperature: Floats,
    top_k: NDArray[np.int64],
    top_p: Floats,
    min_p: Floats,
    row_total: Floats,
    candidates: int = CANDIDATES,
) -> NDArray[np.float32]:
    """float32 [n]: row r may draw the tokens with logits[r] >= threshold[r]; -inf where nothing is filtered.

    logits [n, V] float32, finite or -inf; largest [n] each row's maximum; row_total [n] each row's sum of
    exp((x - largest) / T) over all tokens; temperature > 0. top_k <= 0, top_p >= 1 and min_p <= 0 mean off.
    Order: temperature, min_p, top-k, top-p, each over what the one before left.
    """
    limits = min_p_limits(largest, temperature, min_p)
    width = logits.shape[1]
    needs = np.flatnonzero(((top_k > 0) & (top_k < width)) | (top_p < 1.0))
    if len(needs) == 0:
        return limits
    columns = (largest[needs], temperature[needs], top_k[needs], top_p[needs], row_total[needs], limits[needs])
    found, exact = _among_largest(select_rows(logits, needs), min(candidates, width), *columns)
    limits[needs] = found
    again = needs[~exact]
    if len(again):
        columns = tuple(column[~exact] for column in columns)  # type: ignore[assignment]
        limits[again] = _among_largest(select_rows(logits, again), width, *columns)[0]
    return limits


def min_p_limits(largest: Floats, temperature: Floats, min_p: Floats) -> NDArray[np.float32]:
    """p >= min_p * p_max is x >= x_max + T * log(min_p); -inf where min_p is off."""
    with np.errstate(divide="ignore"):
        log_min_p = np.log(np.maximum(min_p, 0.0))
    limits = np.where(min_p > 0.0, largest + temperature * np.where(min_p > 0.0, log_min_p, 0.0), -np.inf)
    return limits.astype(np.float32)


def _among_largest(
    logits: Tensor,
    count: int,
    largest: Floats,
    temperature: Floats,
    top_k: NDArray[np.int64],
    top_p: Floats,
    row_total: Floats,
    limits: NDArray[np.float32],
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """(thresholds, proved exact) from the `count` largest logits of each row.

    Exact means that nothing below them could have moved the threshold. Equal logits beyond the candidates do not
    matter: they are kept or dropped by value.
    """
    width = logits.shape[1]
    values = largest_values(logits, count)  # [n, count], descending
    smallest = values[:, -1]
    active_k = (top_k > 0) & (top_k < width)
    kth = np.take_along_axis(values, (np.clip(top_k, 1, count) - 1)[:, None], axis=1)[:, 0]
    limits = np.where(active_k, np.maximum(limits, kth), limits)
    exact = ~active_k | (top_k <= count)

    active_p = top_p < 1.0
    if active_p.any():
        weights = scaled_weights(values, largest, temperature)
        weights[values < limits[:, None]] = 0.0
        cumulative = np.cumsum(weights, axis=1)
        total = cumulative[:, -1]
        if count < width:
            # The set to normalise over may reach beyond the candidates. An unfiltered row's total is known; a row whose
            # min_p reaches that far is left to the full pass.
            beyond = active_p & (limits <= smallest)
            total = np.where(beyond, row_total, total)
            exact &= ~beyond | np.isneginf(limits)
        # The smallest set whose share reaches top_p: up to and including the first logit that crosses.
        crossing = (cumulative < (top_p * total)[:, None]).sum(axis=1)
        exact &= ~active_p | (crossing < count)
        last = np.take_along_axis(values, np.minimum(crossing, count - 1)[:, None], axis=1)[:, 0]
        limits = np.where(active_p, np.maximum(limits, last), limits)
    return limits.astype(np.float32), exact


def largest_values(logits: Tensor, count: int) -> NDArray[np.float32]:
    """The `count` largest of each row, descending, [n, count]. On a CPU numpy's vectorised partition and sort take a
    tenth of torch.topk's time."""
    if logits.device.type != "cpu":
        return torch.topk(logits, count, dim=1).values.cpu().numpy()
    rows = logits.numpy()
    width = rows.shape[1]
    part = np.partition(rows, width - count, axis=1)[:, width - count :] if count < width else rows
    return np.sort(part, axis=1)[:, ::-1]


def scaled_weights(values: NDArray[np.float32], largest: Floats, temperature: Floats) -> Floats:
    """exp((x - x_max) / T) in float64: the largest weighs 1, whatever the temperature."""
    with np.errstate(under="ignore", over="ignore"):
        weights: Floats = np.exp((values - largest[:, None]) / temperature[:, None])
    return weights


def softmax_rows(logits: Tensor, largest: Floats, temperature: Floats) -> Tensor:
    """softmax(x / T) float32 [n, V], a new tensor. The maximum is subtracted before dividing, so that no temperature
    overflows; torch computes a row of a softmax in one thread, so the batch does not show."""
    device = logits.device
    shifted = logits - torch.from_numpy(largest.astype(np.float32)).to(device)[:, None]
    shifted /= torch.from_numpy(np.maximum(temperature, SMALLEST_T).astype(np.float32)).to(device)[:, None]
    return torch.softmax(shifted, dim=1)


def select_rows(logits: Tensor, rows: NDArray[np.int64]) -> Tensor:
    """logits[rows], without a copy when that is all of them."""
    if len(rows) == logits.shape[0]:
        return logits
    return logits.index_select(0, torch.from_numpy(rows).to(logits.device))
