"""Rows of the embedding table by token id. An id outside the table gives zeros instead of a fault: the newest token of
a row whose logits were bad is -1 until the core has heard of it."""

# mypy: allow-untyped-defs
# (kernels: their parameters are Triton's, not Python's)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.configs import ELEMENTS_PER_PROGRAM


@triton.jit(do_not_specialize_on_alignment=["ids_ptr"])
def embedding_kernel(out_ptr, table_ptr, ids_ptr, vocab_size, size, BLOCK: tl.constexpr):
    """Grid (N, size / BLOCK)."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(ids_ptr + row).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_known = (token >= 0) & (token < vocab_size)
    values = tl.load(table_ptr + token * size + offsets, mask=(offsets < size) & is_known, other=0.0)
    tl.store(out_ptr + row * size + offsets, values, mask=offsets < size)


def embedding(ids: Tensor, table: Tensor) -> Tensor:
    """ids [N] int32 or int64, table [V, E] contiguous -> [N, E]."""
    size = table.shape[1]
    out = torch.empty((len(ids), size), dtype=table.dtype, device=table.device)
    if len(ids):
        block = min(ELEMENTS_PER_PROGRAM, triton.next_power_of_2(size))
        embedding_kernel[(len(ids), triton.cdiv(size, block))](out, table, ids, table.shape[0], size, BLOCK=block,
                                                               num_warps=4)
    return out


def embedding_reference(ids: Tensor, table: Tensor) -> Tensor:
    """The same in plain torch."""
    is_known = (ids >= 0) & (ids < table.shape[0])
    rows = table[torch.where(is_known, ids, 0).long()]
    return torch.where(is_known[:, None], rows, torch.zeros_like(rows))
