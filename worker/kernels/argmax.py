"""Greedy choice of each row: the first index of its largest logit, or -1 when that logit is not finite.

Two passes, because a decode step has few rows and a wide vocabulary: chunks of each row in parallel, then the chunks'
winners. NaN counts as largest, as in the sampler, so a broken row is reported and never sampled.
Does not know temperature or masks.
"""

# mypy: allow-untyped-defs
# (kernels: their parameters are Triton's, not Python's)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.configs import ARGMAX_CHUNK

_NO_INDEX = tl.constexpr(2147483647)


@triton.jit
def _first_largest(values, indices):
    """(largest, first index of it). The caller has made NaN +inf: either way the row is not finite."""
    largest = tl.max(values, 0)
    return largest, tl.min(tl.where(values == largest, indices, _NO_INDEX), 0)


@triton.jit
def argmax_chunks_kernel(logits_ptr, value_ptr, index_ptr, size, stride, num_chunks, BLOCK: tl.constexpr):
    """Grid (L, chunks)."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    offsets = chunk * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits_ptr + row * stride + offsets, mask=offsets < size, other=float("-inf")).to(tl.float32)
    values = tl.where(values == values, values, float("inf"))
    largest, index = _first_largest(values, offsets)
    tl.store(value_ptr + row * num_chunks + chunk, largest)
    tl.store(index_ptr + row * num_chunks + chunk, index)


@triton.jit
def argmax_rows_kernel(out_ptr, value_ptr, index_ptr, num_chunks, BLOCK: tl.constexpr):
    """Grid (L,): the winner of each row's chunks."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < num_chunks
    values = tl.load(value_ptr + row * num_chunks + offsets, mask=mask, other=float("-inf"))
    indices = tl.load(index_ptr + row * num_chunks + offsets, mask=mask, other=_NO_INDEX)
    largest, index = _first_largest(values, indices)
    is_finite = (largest < float("inf")) & (largest > float("-inf"))
    tl.store(out_ptr + row, tl.where(is_finite, index, -1))


def argmax(logits: Tensor) -> Tensor:
    """logits [L, V] any float dtype, rows may be strided -> int32 [L]; -1 where the row's largest is not finite."""
    num_rows, size = logits.shape
    out = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    if num_rows == 0:
        return out
    block = min(ARGMAX_CHUNK, triton.next_power_of_2(size))
    num_chunks = triton.cdiv(size, block)
    values = torch.empty((num_rows, num_chunks), dtype=torch.float32, device=logits.device)
    indices = torch.empty((num_rows, num_chunks), dtype=torch.int32, device=logits.device)
    argmax_chunks_kernel[(num_rows, num_chunks)](logits, values, indices, size, logits.stride(0), num_chunks,
                                                 BLOCK=block, num_warps=4)
    argmax_rows_kernel[(num_rows,)](out, values, indices, num_chunks, BLOCK=triton.next_power_of_2(num_chunks),
                                    num_warps=1)
    return out


def argmax_reference(logits: Tensor) -> Tensor:
    """The same in plain torch."""
    values = logits.float()
    largest = values.amax(-1, keepdim=True)
    index = torch.arange(values.shape[1], device=values.device)
    first = torch.where(values == largest, index, values.shape[1]).amin(-1)
    return torch.where(torch.isfinite(largest[:, 0]), first, -1).int()
