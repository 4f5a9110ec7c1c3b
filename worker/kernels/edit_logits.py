"""Penalties and bit masks written into logits, in place: what changes them before the draw.

Penalties touch only the tokens that a row has seen, so their cost does not grow with the vocabulary. Each (row, token)
pair occurs once: no atomics. Does not know how often which token occurred; that is worker/sampling/penalties.py's.
"""

# mypy: allow-untyped-defs
# (kernels: their parameters are Triton's, not Python's)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def penalise_kernel(logits_ptr, rows_ptr, starts_ptr, ids_ptr, used_ptr, factors_ptr, stride, BLOCK: tl.constexpr):
    """Grid (n, longest / BLOCK): entry i has the pairs from starts[i] to starts[i + 1]."""
    entry = tl.program_id(0)
    begin, end = tl.load(starts_ptr + entry), tl.load(starts_ptr + entry + 1)
    place = begin + tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = place < end
    base = logits_ptr + tl.load(rows_ptr + entry).to(tl.int64) * stride
    address = base + tl.load(ids_ptr + place, mask=mask, other=0)
    used = tl.load(used_ptr + place, mask=mask, other=0)
    values = tl.load(address, mask=mask, other=0.0).to(tl.float32)
    repetition = tl.load(factors_ptr + 3 * entry)
    values = tl.where(values > 0.0, values / repetition, values * repetition)
    times = tl.load(factors_ptr + 3 * entry + 1) * used.to(tl.float32)
    values = tl.where(used > 0, values - times - tl.load(factors_ptr + 3 * entry + 2), values)
    tl.store(address, values.to(logits_ptr.dtype.element_ty), mask=mask)


def penalise(logits: Tensor, rows: Tensor, starts: Tensor, ids: Tensor, used: Tensor, factors: Tensor, *,
             longest: int) -> None:
    """Row rows[i] of logits [L, V]: tokens ids[starts[i]:starts[i + 1]], each once, of which `used` says how often the
    row has put them out; factors float32 [n, 3]: repetition, frequency, presence. All others int32; `longest`: most
    pairs of an entry, known on the host."""
    if len(rows) and longest:
        penalise_kernel[(len(rows), triton.cdiv(longest, BLOCK))](logits, rows, starts, ids, used, factors,
                                                                  logits.stride(0), BLOCK=BLOCK, num_warps=4)


def penalise_reference(logits: Tensor, rows: Tensor, starts: Tensor, ids: Tensor, used: Tensor,
                       factors: Tensor) -> None:
    """The same in plain torch."""
    for entry, row in enumerate(rows.tolist()):
        part = slice(int(starts[entry]), int(starts[entry + 1]))
        repetition, frequency, presence = factors[entry]
        values = logits[row, ids[part].long()].float()
        values = torch.where(values > 0, values / repetition, values * repetition)
        values = torch.where(used[part] > 0, values - frequency * used[part] - presence, values)
        logits[row, ids[part].long()] = values.to(logits.dtype)


@triton.jit(do_not_specialize=["word_stride"])
def mask_bits_kernel(logits_ptr, rows_ptr, words_ptr, width, stride, word_stride, BLOCK: tl.constexpr):
    """Grid (n, V / BLOCK). Writes only what the mask excludes."""
    entry = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < width
    bits = tl.load(words_ptr + entry * word_stride + offsets // 32, mask=mask, other=-1)
    address = logits_ptr + tl.load(rows_ptr + entry).to(tl.int64) * stride + offsets
    is_out = ((bits >> (offsets % 32)) & 1) == 0
    tl.store(address, tl.full((BLOCK,), float("-inf"), logits_ptr.dtype.element_ty), mask=mask & is_out)


def mask_bits(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """Token t of row rows[i] int32 becomes -inf where bit t of words[i] int32 is 0, lowest bit first."""
    if len(rows):
        mask_bits_kernel[(len(rows), triton.cdiv(logits.shape[1], BLOCK))](
            logits, rows, words, logits.shape[1], logits.stride(0), words.stride(0), BLOCK=BLOCK, num_warps=4)


def mask_bits_reference(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """The same in plain torch."""
    shifts = torch.arange(32, dtype=torch.int32)
    is_kept = ((words[:, :, None] >> shifts) & 1).bool().reshape(len(words), -1)[:, :logits.shape[1]]
    logits[rows.long()] = logits[rows.long()].masked_fill(~is_kept, float("-inf"))
