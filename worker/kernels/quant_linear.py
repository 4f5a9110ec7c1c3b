"""y = x W^T + b with a narrow W: int8, 4-bit or float8 (e4m3) codes and their scales, widened in registers.

A decode step is bound by reading weights, so half or a quarter of the bytes is half or a quarter of the time; x and the
product stay in the model's dtype. A scale covers GROUP_N outputs by GROUP_K inputs; W is codes * scale.

    int8, fp8            GROUP_N 1, GROUP_K all     one scale an output: applied to the sum, once
    int4                 GROUP_N 1, GROUP_K 32-128  a tile of inputs is one group
    fp8_per_block        GROUP_N 128, GROUP_K 128   as published fp8 checkpoints have it

4-bit codes lie two in a byte, group by group: byte i of a group holds inputs i (low) and GROUP_K / 2 + i (high), so a
tile is two plain products and nothing is interleaved. With few rows the inputs are shared out over splits, whose
float32 parts are summed in order by a second launch. Does not know models. Sources: Frantar et al. 2023 (grouped
4-bit), Micikevicius et al. 2022 (e4m3), DeepSeek-AI 2024 (blocks of 128).
"""

# mypy: allow-untyped-defs
# (kernels: their parameters are Triton's, not Python's)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.chip import chip_of
from worker.kernels.configs import ELEMENTS_PER_PROGRAM, linear_config, linear_splits
from worker.quant.weights import INT4, QuantWeight



@triton.jit
def narrow_product(x_rows, is_row, code_rows, scale_rows, is_column, num_k, first, last, GROUP_K: tl.constexpr,
                   IS_INT4: tl.constexpr, PER_OUTPUT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                   BLOCK_K: tl.constexpr):
    """float32 [BLOCK_M, BLOCK_N], scaled: the tiles first .. last - 1 of the inputs. x_rows [BLOCK_M, 1], code_rows
    [1, BLOCK_N], scale_rows [BLOCK_N]: where rows of the inputs, of the codes and of their scales begin."""
    WIDTH: tl.constexpr = BLOCK_K // 2 if IS_INT4 else BLOCK_K  # codes of an output in a tile
    offsets = tl.arange(0, WIDTH)
    dtype = x_rows.dtype.element_ty
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for tile in range(first, last):
        k = tile * BLOCK_K
        if IS_INT4:  # a tile is a group, and groups are whole
            codes = tl.load(code_rows + (k // 2 + offsets)[:, None], mask=is_column[None, :], other=0).to(tl.int32)
            low = tl.load(x_rows + (k + offsets)[None, :], mask=is_row[:, None], other=0.0)
            high = tl.load(x_rows + (k + WIDTH + offsets)[None, :], mask=is_row[:, None], other=0.0)
            part = tl.dot(low, ((codes & 15) - 8).to(dtype), input_precision="tf32x3")
            part = tl.dot(high, ((codes >> 4) - 8).to(dtype), part, input_precision="tf32x3")
        else:
            at = k + offsets
            codes = tl.load(code_rows + at[:, None], mask=is_column[None, :] & (at < num_k)[:, None], other=0.0)
            x = tl.load(x_rows + at[None, :], mask=is_row[:, None] & (at < num_k)[None, :], other=0.0)
            if PER_OUTPUT:
                acc = tl.dot(x, codes.to(dtype), acc, input_precision="tf32x3")
            else:
                part = tl.dot(x, codes.to(dtype), input_precision="tf32x3")
        if not PER_OUTPUT:
            scale = tl.load(scale_rows + k // GROUP_K, mask=is_column, other=0.0).to(tl.float32)
            acc += part * scale[None, :]
    if PER_OUTPUT:
        acc *= tl.load(scale_rows, mask=is_column, other=0.0).to(tl.float32)[None, :]
    return acc


@triton.jit(do_not_specialize=["num_rows", "tiles_per_split", "split_stride"])
def quant_linear_kernel(
    out_ptr, x_ptr, codes_ptr, scales_ptr, bias_ptr, num_rows, num_out, num_k, stride_x, num_groups, tiles_per_split,
    split_stride, GROUP_N: tl.constexpr, GROUP_K: tl.constexpr, IS_INT4: tl.constexpr, PER_OUTPUT: tl.constexpr,
    HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """Grid (outputs / BLOCK_N, rows / BLOCK_M, splits). Split s writes out_ptr + s * split_stride."""
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(2)
    is_row = rows < num_rows
    is_column = columns < num_out
    x_rows = x_ptr + rows.to(tl.int64)[:, None] * stride_x
    stride_codes = num_k // 2 if IS_INT4 else num_k
    code_rows = codes_ptr + columns.to(tl.int64)[None, :] * stride_codes
    scale_rows = scales_ptr + (columns // GROUP_N).to(tl.int64) * num_groups
    first = split * tiles_per_split
    last = tl.minimum(first + tiles_per_split, tl.cdiv(num_k, BLOCK_K))
    acc = narrow_product(x_rows, is_row, code_rows, scale_rows, is_column, num_k, first, last, GROUP_K, IS_INT4,
                         PER_OUTPUT, BLOCK_M, BLOCK_N, BLOCK_K)
    if HAS_BIAS:
        if split == 0:
            acc += tl.load(bias_ptr + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    at_out = split.to(tl.int64) * split_stride + rows.to(tl.int64)[:, None] * num_out + columns[None, :]
    tl.store(out_ptr + at_out, acc.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit(do_not_specialize=["size"])
def sum_splits_kernel(out_ptr, parts_ptr, size, num_splits, BLOCK: tl.constexpr):
    """Grid (size / BLOCK,): parts [splits, size] float32 -> [size]."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    total = tl.zeros((BLOCK,), tl.float32)
    for split in range(num_splits):
        total += tl.load(parts_ptr + split * size + offsets, mask=mask, other=0.0)
    tl.store(out_ptr + offsets, total.to(out_ptr.dtype.element_ty), mask=mask)


def quant_linear(x: Tensor, weight: QuantWeight, bias: Tensor | None = None) -> Tensor:
    """x [N, K], rows may be strided -> [N, out] in x's dtype."""
    num_rows, num_k = x.shape
    out = torch.empty((num_rows, weight.num_out), dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    is_int4 = weight.kind == INT4
    tile = linear_config(num_rows, x.dtype.itemsize, is_int4)
    block_k = min(tile.block_k, weight.group_k) if not is_int4 else weight.group_k
    grid = (triton.cdiv(weight.num_out, tile.block_n), triton.cdiv(num_rows, tile.block_m))
    num_tiles = triton.cdiv(num_k, block_k)
    num_splits = linear_splits(grid[0] * grid[1], num_tiles, chip_of(x.device).num_processors)
    per_split = triton.cdiv(num_tiles, num_splits)
    num_splits = triton.cdiv(num_tiles, per_split)
    target = out if num_splits == 1 else torch.empty((num_splits, *out.shape), dtype=torch.float32, device=x.device)
    quant_linear_kernel[(*grid, num_splits)](
        target, x, weight.codes, weight.scales, out if bias is None else bias, num_rows, weight.num_out, num_k,
        x.stride(0), weight.scales.shape[1], per_split, num_rows * weight.num_out, GROUP_N=weight.group_n,
        GROUP_K=weight.group_k, IS_INT4=is_int4, PER_OUTPUT=not is_int4 and weight.group_n == 1,
        HAS_BIAS=bias is not None, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=block_k,
        num_warps=tile.num_warps, num_stages=tile.num_stages)
    if num_splits > 1:
        size = out.numel()
        sum_splits_kernel[(triton.cdiv(size, ELEMENTS_PER_PROGRAM),)](out, target, size, num_splits,
                                                                      BLOCK=ELEMENTS_PER_PROGRAM, num_warps=4)
    return out
