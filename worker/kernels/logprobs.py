"""Log-probability and rank of each row's chosen token, from raw logits, and what takes any logit of the row to its
log-probability: two passes, no [L, V] in memory, no host.

log-softmax is value - largest - log(sum exp(x - largest)); the rank counts larger logits, from 1. A program per row.
Does not know what was sampled why. NaN in a row gives NaN.
"""

# mypy: allow-untyped-defs
# (kernels: their parameters are Triton's, not Python's)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def chosen_logprobs_kernel(value_ptr, rank_ptr, total_ptr, logits_ptr, targets_ptr, width, stride, BLOCK: tl.constexpr):
    """Grid (L,)."""
    row = tl.program_id(0).to(tl.int64)
    base = logits_ptr + row * stride
    own = tl.load(base + tl.load(targets_ptr + row)).to(tl.float32)
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    above = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, width, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        values = tl.load(base + offsets, mask=offsets < width, other=float("-inf")).to(tl.float32)
        largest = tl.maximum(largest, values)
        above += (values > own).to(tl.int32)
    top = tl.max(largest, 0)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        values = tl.load(base + offsets, mask=offsets < width, other=float("-inf")).to(tl.float32)
        total += tl.exp(values - top)
    log_total = top + tl.log(tl.sum(total, 0))
    tl.store(value_ptr + row, own - log_total)
    tl.store(total_ptr + row, log_total)
    tl.store(rank_ptr + row, 1 + tl.sum(above, 0))


def chosen_logprobs(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probabilities float32 [L], ranks int32 [L]) of targets int64 [L] in logits [L, V] of any float dtype, and
    float32 [L]: the logarithm of each row's sum of exponentials."""
    values = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    totals, ranks = torch.empty_like(values), torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    if len(logits):
        chosen_logprobs_kernel[(len(logits),)](values, ranks, totals, logits, targets, logits.shape[1],
                                               logits.stride(0), BLOCK=min(BLOCK, triton.next_power_of_2(
                                                   logits.shape[1])), num_warps=8)
    return values, ranks, totals


def chosen_logprobs_reference(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same in plain torch."""
    own, totals = logits.float().gather(1, targets[:, None]), torch.logsumexp(logits.double(), 1)
    values = own[:, 0].double() - totals
    return values.float(), (1 + (logits.float() > own).sum(1)).int(), totals.float()
