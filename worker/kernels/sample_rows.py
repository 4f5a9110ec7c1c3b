"""One token a row from logits: temperature, min_p, top-k, top-p and the draw, without a sort and without the host.

A program per row. The filters keep the largest logits, so together they are one limit; it is searched by PIVOTS limits
at a time: how much weight lies above each narrows the range of floats sixteen-fold, until nothing lies between. The
draw is the inverse CDF in order of token id at the noise of (seed, child, output index), so a captured graph draws what
its rows are due. A row with a bit mask is read through it. Does not know requests.
Source of the search: pivots as in FlashInfer's top-p kernels; of the noise: philox.py.
"""

# mypy: allow-untyped-defs
# (kernels: their parameters are Triton's, not Python's)
from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.philox import philox_uniform_reference, uniform_lanes

BLOCK = 1024
PIVOTS = 16
BAD, EMPTY = -1, -2                             # in place of a token: the row's largest is not finite; all are -inf
_LOG2E = tl.constexpr(1.4426950408889634)
_SMALLEST_T = tl.constexpr(1e-30)
_NONE = tl.constexpr(2147483647)
_LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def _load(base, words, offsets, width, HAS_WORDS: tl.constexpr):
    """Logits float32; -inf beyond the width and where the bit is 0."""
    mask = offsets < width
    values = tl.load(base + offsets, mask=mask, other=float("-inf")).to(tl.float32)
    if HAS_WORDS:
        bits = tl.load(words + offsets // 32, mask=mask, other=0)
        values = tl.where(((bits >> (offsets % 32)) & 1) != 0, values, float("-inf"))
    return values


@triton.jit
def _key(value):
    """int64 that orders as float32 does."""
    bits = value.to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(bits >= 0, bits, -2147483648 - bits)


@triton.jit
def _value(key):
    bits = tl.where(key >= 0, key, -2147483648 - key)
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _search(base, words, width, low, high, largest, scale, target, COUNTS: tl.constexpr, HAS_WORDS: tl.constexpr,
            BLOCK: tl.constexpr, PIVOTS: tl.constexpr):
    """The largest limit above which the weights (or, COUNTS, the number) of logits reach the target. low, high: int64
    keys; the limit is >= low and < high."""
    lanes = tl.arange(0, PIVOTS).to(tl.int64)
    while high - low > 1:
        step = (high - low + PIVOTS) // (PIVOTS + 1)
        pivots = tl.minimum(low + step * (lanes + 1), high)
        limits = _value(pivots)
        sums = tl.zeros((BLOCK, PIVOTS), tl.float32)
        for start in range(0, width, BLOCK):
            values = _load(base, words, start + tl.arange(0, BLOCK), width, HAS_WORDS)
            if COUNTS:
                weights = tl.where(values > float("-inf"), 1.0, 0.0)
            else:
                weights = tl.exp2((values - largest) * scale)
            sums += tl.where(values[:, None] >= limits[None, :], weights[:, None], 0.0)
        reaches = (tl.sum(sums, 0) >= target) & (pivots < high)
        low = tl.maximum(low, tl.max(tl.where(reaches, pivots, low), 0))
        high = tl.minimum(high, tl.min(tl.where(reaches, high, pivots), 0))
    return low


@triton.jit
def _weights(values, largest, scale, limit):
    return tl.where((values >= limit) & (values > float("-inf")), tl.exp2((values - largest) * scale), 0.0)


@triton.jit
def _weight_from(base, words, width, largest, scale, limit, HAS_WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """float64, block by block: the draw sums in the same order."""
    total = tl.zeros((1,), tl.float64)
    for start in range(0, width, BLOCK):
        values = _load(base, words, start + tl.arange(0, BLOCK), width, HAS_WORDS)
        total += tl.sum(_weights(values, largest, scale, limit), 0).to(tl.float64)
    return tl.sum(total, 0)


@triton.jit
def _draw(base, words, width, largest, scale, limit, noise, HAS_WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """The first token whose cumulative weight exceeds noise * total; the last of any weight if rounding lets none."""
    target = noise.to(tl.float64) * _weight_from(base, words, width, largest, scale, limit, HAS_WORDS, BLOCK)
    before, token, last = tl.sum(tl.zeros((1,), tl.float64), 0), _NONE, 0
    start = 0
    while (start < width) & (token == _NONE):
        offsets = start + tl.arange(0, BLOCK)
        weights = _weights(_load(base, words, offsets, width, HAS_WORDS), largest, scale, limit)
        part = tl.sum(weights, 0).to(tl.float64)
        last = tl.maximum(last, tl.max(tl.where(weights > 0.0, offsets, 0), 0))
        if before + part > target:
            running = before + tl.cumsum(weights.to(tl.float64), 0)
            token = tl.min(tl.where((running > target) & (weights > 0.0), offsets, last), 0)
        before += part
        start += BLOCK
    return tl.minimum(token, last)


@triton.jit(do_not_specialize=["word_stride"])
def sample_rows_kernel(out_ptr, logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seeds_ptr, children_ptr,
                       indices_ptr, words_ptr, word_index_ptr, width, stride, word_stride, HAS_WORDS: tl.constexpr,
                       BLOCK: tl.constexpr, PIVOTS: tl.constexpr):
    """Grid (L,). With HAS_WORDS every row has a mask."""
    row = tl.program_id(0).to(tl.int64)
    base, words = logits_ptr + row * stride, words_ptr
    if HAS_WORDS:
        words += tl.load(word_index_ptr + row).to(tl.int64) * word_stride
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    first = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, width, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        values = _load(base, words, offsets, width, HAS_WORDS)
        values = tl.where(values == values, values, float("inf"))
        first = tl.where(values > best, offsets, first)
        best = tl.maximum(best, values)
    largest = tl.max(best, 0)
    token = tl.min(tl.where(best == largest, first, _NONE), 0)
    temperature = tl.load(temperature_ptr + row)
    is_finite = (largest < float("inf")) & (largest > float("-inf"))
    if is_finite & (temperature > 0.0):
        scale = _LOG2E / tl.maximum(temperature, _SMALLEST_T)
        end = _key(largest) + 1
        min_p = tl.load(min_p_ptr + row)
        limit = tl.where(min_p > 0.0, largest + temperature * tl.log(tl.where(min_p > 0.0, min_p, 1.0)), _LOWEST)
        limit = tl.minimum(limit, largest)
        top_k = tl.load(top_k_ptr + row)
        if (top_k > 0) & (top_k < width):
            limit = _value(_search(base, words, width, _key(limit), end, largest, scale, top_k.to(tl.float32), True,
                                   HAS_WORDS, BLOCK, PIVOTS))
        top_p = tl.load(top_p_ptr + row)
        if top_p < 1.0:
            target = top_p * _weight_from(base, words, width, largest, scale, limit, HAS_WORDS, BLOCK).to(tl.float32)
            limit = _value(_search(base, words, width, _key(limit), end, largest, scale, target, False, HAS_WORDS,
                                   BLOCK, PIVOTS))
        noise = tl.sum(uniform_lanes(tl.load(seeds_ptr + row), tl.load(children_ptr + row), tl.load(indices_ptr + row),
                                     tl.zeros((1,), tl.int32)), 0)
        token = _draw(base, words, width, largest, scale, limit, noise, HAS_WORDS, BLOCK)
    token = tl.where(is_finite, token, tl.where(largest == float("-inf"), -2, -1))
    tl.store(out_ptr + row, token)


def sample_rows(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seeds: Tensor,
                children: Tensor, output_index: Tensor, *, width: int = 0, words: Tensor | None = None,
                word_index: Tensor | None = None) -> Tensor:
    """int32 [L]: a token, BAD or EMPTY. Nothing waits for the host.

    logits [L, V] any float dtype, of which the first `width` (0: all) may be drawn; temperature, top_p, min_p float32
    [L]; top_k, children int32 [L]; seeds int64 [L] (the bits of the uint64), output_index int64 [L]. Temperature 0
    takes the first largest; top_k <= 0, top_p >= 1 and min_p <= 0 are off. words int32 [n, >= ceil(width / 32)],
    word_index int32 [L]: the row may take tokens whose bit is 1.
    """
    out = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    has_words = words is not None and word_index is not None
    if len(logits):
        sample_rows_kernel[(len(logits),)](
            out, logits, temperature, top_k, top_p, min_p, seeds, children, output_index, words if has_words else out,
            word_index if has_words else out, width or logits.shape[1], logits.stride(0),
            words.stride(0) if words is not None else 0, HAS_WORDS=has_words, BLOCK=BLOCK, PIVOTS=PIVOTS, num_warps=8)
    return out


def kept_reference(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Probabilities float64 [V] of one finite row after all filters, equal logits kept or dropped together."""
    x = logits.double()
    p = torch.softmax((x - x.max()) / max(temperature, 1e-30), 0)
    if min_p > 0:
        p = torch.where(x >= x.max() + temperature * np.log(min_p), p, 0.0)
    if 0 < top_k < len(x):
        p = torch.where(x >= torch.where(p > 0, x, -torch.inf).topk(top_k).values[-1], p, 0.0)
    p = p / p.sum()
    if top_p < 1:
        order = torch.sort(p, descending=True)
        crossing = min(int((order.values.cumsum(0) < top_p).sum()), len(x) - 1)
        p = torch.where(p >= order.values[crossing], p, 0.0)
    return p / p.sum()


def sample_rows_reference(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor,
                          seeds: Tensor, children: Tensor, output_index: Tensor) -> tuple[Tensor, Tensor]:
    """(tokens int32 [L], distance [L] of the noise from the nearest end of the token's share): with a distance within
    rounding, a neighbour is as right."""
    noise = philox_uniform_reference(seeds, children, output_index)[:, 0].double()
    tokens, margins = [], []
    for row, x in enumerate(logits.float()):
        largest = x.max()
        if not torch.isfinite(largest):
            tokens.append(EMPTY if largest == -torch.inf else BAD)
            margins.append(1.0)
        elif temperature[row] <= 0:
            tokens.append(int((x == largest).nonzero()[0]))
            margins.append(1.0)
        else:
            upper = kept_reference(x, float(temperature[row]), int(top_k[row]), float(top_p[row]),
                                   float(min_p[row])).cumsum(0)
            token = min(int((upper <= noise[row]).sum()), len(x) - 1)
            tokens.append(token)
            ends = torch.cat([upper.new_zeros(1), upper])
            margins.append(float((ends - noise[row]).abs().min()))
    return torch.tensor(tokens, dtype=torch.int32), torch.tensor(margins)
