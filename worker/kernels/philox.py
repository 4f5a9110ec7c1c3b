"""Noise on the device, equal bit for bit to ipc/counter_rng.py: Philox4x32-10 of (seed, child, output index, lane).

The layout of key and counter is drawn there. Nothing has to be stored, seeded or advanced, so a captured graph draws
the right noise for whatever rows it is replayed with. Does not know what the noise is for.
Source: Salmon et al. 2011.
"""

# mypy: allow-untyped-defs
# (kernels: their parameters are Triton's, not Python's)
from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ipc.counter_rng import uniform


@triton.jit
def _mix(c0, c1, c2, c3, k0, k1):
    """Ten rounds; all uint32. Two 32 x 32 -> 64 bit products a round, and the keys follow a Weyl sequence."""
    m0 = tl.full((1,), 0xD2511F53, tl.uint32)
    m1 = tl.full((1,), 0xCD9E8D57, tl.uint32)
    w0 = tl.full((1,), 0x9E3779B9, tl.uint32)
    w1 = tl.full((1,), 0xBB67AE85, tl.uint32)
    for _ in tl.static_range(10):
        high0 = tl.umulhi(c0, m0)
        high1 = tl.umulhi(c2, m1)
        low0 = tl.mul(c0, m0, sanitize_overflow=False)
        low1 = tl.mul(c2, m1, sanitize_overflow=False)
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 = tl.add(k0, w0, sanitize_overflow=False)
        k1 = tl.add(k1, w1, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def uniform_lanes(seed, child, output_index, lanes):
    """float32 in (0, 1) for one row's lanes (int32 [n]); seed and output_index int64 scalars, child int32. Usable
    inside other kernels, so that a sampler needs no noise in memory."""
    zero = lanes * 0
    c0 = (output_index & 0xFFFFFFFF).to(tl.uint32) + zero.to(tl.uint32)
    c1 = ((output_index >> 32) & 0xFFFFFFFF).to(tl.uint32) + zero.to(tl.uint32)
    c2 = child.to(tl.uint32, bitcast=True) + zero.to(tl.uint32)
    c3 = (lanes // 4).to(tl.uint32)
    k0 = (seed & 0xFFFFFFFF).to(tl.uint32) + zero.to(tl.uint32)
    k1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32) + zero.to(tl.uint32)
    c0, c1, c2, c3 = _mix(c0, c1, c2, c3, k0, k1)
    word = lanes % 4
    bits = tl.where(word == 0, c0, tl.where(word == 1, c1, tl.where(word == 2, c2, c3)))
    odd = ((bits >> 9) * 2 + 1).to(tl.int32)  # at most 24 bits: exact in float32
    return odd.to(tl.float32) * 5.9604644775390625e-08


@triton.jit(do_not_specialize_on_alignment=["seeds_ptr", "children_ptr", "indices_ptr"])
def philox_uniform_kernel(out_ptr, seeds_ptr, children_ptr, indices_ptr, num_lanes, BLOCK: tl.constexpr):
    """Grid (R, lanes / BLOCK)."""
    row = tl.program_id(0)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    noise = uniform_lanes(tl.load(seeds_ptr + row), tl.load(children_ptr + row), tl.load(indices_ptr + row), lanes)
    tl.store(out_ptr + row.to(tl.int64) * num_lanes + lanes, noise, mask=lanes < num_lanes)


def philox_uniform(seeds: Tensor, children: Tensor, output_index: Tensor, lanes: int = 1) -> Tensor:
    """float32 [R, lanes] in (0, 1). seeds int64 [R] (the bits of the uint64), children int32 [R], output_index int64
    [R]."""
    num_rows = len(seeds)
    out = torch.empty((num_rows, lanes), dtype=torch.float32, device=seeds.device)
    if num_rows and lanes:
        block = min(256, triton.next_power_of_2(lanes))
        philox_uniform_kernel[(num_rows, triton.cdiv(lanes, block))](out, seeds, children, output_index, lanes,
                                                                     BLOCK=block, num_warps=max(1, block // 64))
    return out


def philox_uniform_reference(seeds: Tensor, children: Tensor, output_index: Tensor, lanes: int = 1) -> Tensor:
    """The CPU's noise."""
    columns = (x.cpu().numpy() for x in (seeds, children, output_index))
    seed, child, index = columns
    return torch.from_numpy(uniform(seed.view(np.uint64), child, index, lanes)).to(seeds.device)
