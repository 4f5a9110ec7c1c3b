"""A mixture of experts as grouped matrix products: tokens sorted by expert, one launch for all experts.

    entries (token, place):    0 .. N k - 1, entry e belongs to token e // k
    moe_count                  rank of each entry among those of its expert, and how many each expert has
    moe_order                  entries in the order of their experts:  | expert 0 | expert 1 | (none) | expert 3 | ...
    grouped_matmul             tile m of the launch is found from the counts on the device: expert x has
                               ceil(count / BLOCK_M) tiles; the launch has as many as there can be, the rest end at once
    moe_combine                out[t] = sum_j weight[t, j] * rows[t k + j], in float32

Nothing waits for the device and nothing depends on the host but shapes, so a step with experts can be captured. The
order within an expert is that of the atomic counter: it changes no result, since rows of a product are independent.
Does not know how tokens are routed. Sources: Gale et al. 2022 (MegaBlocks); Kwon et al. 2023 for the flat batch.
"""

# mypy: allow-untyped-defs
# (kernels: their parameters are Triton's, not Python's)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.configs import ELEMENTS_PER_PROGRAM, grouped_config, narrow_grouped_config
from worker.kernels.quant_linear import narrow_product
from worker.kernels.silu_mul import silu_mul
from worker.models.ops import TORCH_OPS
from worker.quant.weights import INT4, QuantWeight

_SORT_BLOCK = 256  # entries one program of the sort handles


@triton.jit(do_not_specialize=["num_entries"], do_not_specialize_on_alignment=["ranks_ptr", "ids_ptr"])
def moe_count_kernel(counts_ptr, ranks_ptr, ids_ptr, num_entries, BLOCK: tl.constexpr):
    """Grid (entries / BLOCK,)."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = entry < num_entries
    expert = tl.load(ids_ptr + entry, mask=mask, other=0)
    rank = tl.atomic_add(counts_ptr + expert, 1, mask=mask)
    tl.store(ranks_ptr + entry, rank, mask=mask)


@triton.jit(do_not_specialize=["num_entries"], do_not_specialize_on_alignment=["order_ptr", "ranks_ptr", "ids_ptr"])
def moe_order_kernel(order_ptr, counts_ptr, ranks_ptr, ids_ptr, num_entries, num_experts, BLOCK: tl.constexpr,
                     BLOCK_X: tl.constexpr):
    """Grid (entries / BLOCK,)."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = entry < num_entries
    expert = tl.load(ids_ptr + entry, mask=mask, other=0).to(tl.int32)
    rank = tl.load(ranks_ptr + entry, mask=mask, other=0)
    begin = entry * 0
    for base in range(0, num_experts, BLOCK_X):
        index = base + tl.arange(0, BLOCK_X)
        counts = tl.load(counts_ptr + index, mask=index < num_experts, other=0)
        begin += tl.sum(tl.where(index[None, :] < expert[:, None], counts[None, :], 0), 1)
    tl.store(order_ptr + begin + rank, entry, mask=mask)


@triton.jit
def find_expert(counts_ptr, num_experts, tile, BLOCK_M: tl.constexpr, BLOCK_X: tl.constexpr):
    """(expert of the tile (num_experts: no such tile), its first row among the expert's entries, where those begin in
    the order, how many there are)."""
    index = tl.arange(0, BLOCK_X)
    counts = tl.load(counts_ptr + index, mask=index < num_experts, other=0)
    tiles = (counts + BLOCK_M - 1) // BLOCK_M
    expert = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    before = index < expert
    first = (tile - tl.sum(tl.where(before, tiles, 0), 0)) * BLOCK_M
    begin = tl.sum(tl.where(before, counts, 0), 0)
    count = tl.sum(tl.where(index == expert, counts, 0), 0)
    return tl.minimum(expert, num_experts), first, begin, count


@triton.jit
def load_entries(order_ptr, first, count, BLOCK_M: tl.constexpr):
    """(entries int64 [BLOCK_M] of an expert's tile, whether each is one)."""
    rows = first + tl.arange(0, BLOCK_M)
    is_row = rows < count
    return tl.load(order_ptr + rows, mask=is_row, other=0).to(tl.int64), is_row


@triton.jit
def store_entries(out_ptr, acc, entry, is_row, columns, is_column, num_out):
    """acc [BLOCK_M, BLOCK_N] to the rows of the tile's entries."""
    at_out = entry[:, None] * num_out + columns[None, :]
    tl.store(out_ptr + at_out, acc.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit(do_not_specialize_on_alignment=["order_ptr"])
def grouped_matmul_kernel(
    out_ptr, x_ptr, w_ptr, order_ptr, counts_ptr, num_out, num_k, num_experts, top_k, stride_x,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_X: tl.constexpr,
):
    """Grid (columns / BLOCK_N, tiles): out[entry] = x[entry // top_k] @ w[expert of entry]^T."""
    expert, first, begin, count = find_expert(counts_ptr, num_experts, tl.program_id(1), BLOCK_M, BLOCK_X)
    if expert >= num_experts:
        return
    entry, is_row = load_entries(order_ptr + begin, first, count, BLOCK_M)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = columns < num_out
    offsets_k = tl.arange(0, BLOCK_K)
    x_rows = x_ptr + (entry // top_k)[:, None] * stride_x
    w_rows = w_ptr + (expert.to(tl.int64) * num_out + columns)[None, :] * num_k
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, num_k, BLOCK_K):
        at = k + offsets_k
        x = tl.load(x_rows + at[None, :], mask=is_row[:, None] & (at < num_k)[None, :], other=0.0)
        w = tl.load(w_rows + at[:, None], mask=is_column[None, :] & (at < num_k)[:, None], other=0.0)
        acc = tl.dot(x, w, acc, input_precision="tf32x3")
    store_entries(out_ptr, acc, entry, is_row, columns, is_column, num_out)


@triton.jit(do_not_specialize_on_alignment=["order_ptr"])
def narrow_grouped_matmul_kernel(
    out_ptr, x_ptr, codes_ptr, scales_ptr, order_ptr, counts_ptr, num_out, num_k, num_experts, top_k, stride_x,
    num_groups, scales_per_expert, GROUP_N: tl.constexpr, GROUP_K: tl.constexpr, IS_INT4: tl.constexpr,
    PER_OUTPUT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_X: tl.constexpr,
):
    """As grouped_matmul_kernel, with weights as worker/kernels/quant_linear.py draws them, expert by expert."""
    expert, first, begin, count = find_expert(counts_ptr, num_experts, tl.program_id(1), BLOCK_M, BLOCK_X)
    if expert >= num_experts:
        return
    entry, is_row = load_entries(order_ptr + begin, first, count, BLOCK_M)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = columns < num_out
    x_rows = x_ptr + (entry // top_k)[:, None] * stride_x
    stride_codes = num_k // 2 if IS_INT4 else num_k
    code_rows = codes_ptr + (expert.to(tl.int64) * num_out + columns)[None, :] * stride_codes
    scale_rows = scales_ptr + expert.to(tl.int64) * scales_per_expert + columns // GROUP_N * num_groups
    acc = narrow_product(x_rows, is_row, code_rows, scale_rows, is_column, num_k, 0, tl.cdiv(num_k, BLOCK_K), GROUP_K,
                         IS_INT4, PER_OUTPUT, BLOCK_M, BLOCK_N, BLOCK_K)
    store_entries(out_ptr, acc, entry, is_row, columns, is_column, num_out)


@triton.jit
def moe_combine_kernel(out_ptr, rows_ptr, weights_ptr, size, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (N, size / BLOCK)."""
    token = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(TOP_K):
        entry = token * TOP_K + j
        weight = tl.load(weights_ptr + entry)
        total += weight * tl.load(rows_ptr + entry * size + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * size + offsets, total.to(out_ptr.dtype.element_ty), mask=mask)


def sort_by_expert(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """ids [N, k] int64 -> (entries in the order of their experts [N k] int32, entries of each expert [X] int32)."""
    num_entries = ids.numel()
    counts = torch.zeros(num_experts, dtype=torch.int32, device=ids.device)
    ranks, order = torch.empty((2, num_entries), dtype=torch.int32, device=ids.device).unbind(0)
    grid = (triton.cdiv(num_entries, _SORT_BLOCK),)
    moe_count_kernel[grid](counts, ranks, ids, num_entries, BLOCK=_SORT_BLOCK, num_warps=4)
    moe_order_kernel[grid](order, counts, ranks, ids, num_entries, num_experts, BLOCK=_SORT_BLOCK, BLOCK_X=16,
                           num_warps=4)
    return order, counts


def grouped_matmul(x: Tensor, weights: Tensor | QuantWeight, order: Tensor, counts: Tensor, top_k: int) -> Tensor:
    """x [entries / top_k, K], weights [X, out, K] -> [entries, out], row e by the expert of entry e."""
    if isinstance(weights, QuantWeight):
        return _narrow_grouped_matmul(x, weights, order, counts, top_k)
    num_experts, num_out, num_k = weights.shape
    num_entries = len(order)
    out = torch.empty((num_entries, num_out), dtype=x.dtype, device=x.device)
    tile = grouped_config(num_entries, num_experts, x.dtype.itemsize)
    num_tiles = _num_tiles(num_entries, num_experts, tile.block_m)
    grouped_matmul_kernel[(triton.cdiv(num_out, tile.block_n), num_tiles)](
        out, x, weights, order, counts, num_out, num_k, num_experts, top_k, x.stride(0), BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, BLOCK_X=triton.next_power_of_2(num_experts),
        num_warps=tile.num_warps, num_stages=tile.num_stages)
    return out


def _num_tiles(num_entries: int, num_experts: int, block_m: int) -> int:
    """As many as there can be. An expert's last tile may be part full: at most one more tile for each expert that has
    an entry."""
    return min(num_entries, num_entries // block_m + num_experts)


def _narrow_grouped_matmul(x: Tensor, weights: QuantWeight, order: Tensor, counts: Tensor, top_k: int) -> Tensor:
    num_experts, num_out = weights.codes.shape[:2]
    num_entries, num_k, is_int4 = len(order), x.shape[1], weights.kind == INT4
    out = torch.empty((num_entries, num_out), dtype=x.dtype, device=x.device)
    tile = narrow_grouped_config(triton.cdiv(num_entries, num_experts), x.dtype.itemsize, is_int4)
    block_k = weights.group_k if is_int4 else min(tile.block_k, weights.group_k)
    groups_n, groups_k = weights.scales.shape[1:]
    narrow_grouped_matmul_kernel[(triton.cdiv(num_out, tile.block_n), _num_tiles(num_entries, num_experts,
                                                                                 tile.block_m))](
        out, x, weights.codes, weights.scales, order, counts, num_out, num_k, num_experts, top_k, x.stride(0),
        groups_k, groups_n * groups_k, GROUP_N=weights.group_n, GROUP_K=weights.group_k, IS_INT4=is_int4,
        PER_OUTPUT=not is_int4 and weights.group_n == 1, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=block_k,
        BLOCK_X=triton.next_power_of_2(num_experts), num_warps=tile.num_warps, num_stages=tile.num_stages)
    return out


def moe_combine(rows: Tensor, weights: Tensor) -> Tensor:
    """rows [N k, E], weights [N, k] float32 -> [N, E]."""
    num_tokens, top_k = weights.shape
    size = rows.shape[1]
    out = torch.empty((num_tokens, size), dtype=rows.dtype, device=rows.device)
    block = min(ELEMENTS_PER_PROGRAM, triton.next_power_of_2(size))
    moe_combine_kernel[(num_tokens, triton.cdiv(size, block))](out, rows, weights.contiguous(), size, TOP_K=top_k,
                                                               BLOCK=block, num_warps=4)
    return out


def experts(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor | QuantWeight,
            down: Tensor | QuantWeight) -> Tensor:
    """As Ops.experts: x [N, E], ids [N, k] int64, weights [N, k] float32, gate_up [X, 2F, E], down [X, E, F]."""
    if len(x) == 0:
        return torch.empty_like(x)
    ids = ids.contiguous()
    order, counts = sort_by_expert(ids, len(gate_up.codes if isinstance(gate_up, QuantWeight) else gate_up))
    hidden = silu_mul(grouped_matmul(x, gate_up, order, counts, ids.shape[1]))
    return moe_combine(grouped_matmul(hidden, down, order, counts, 1), weights)


experts_reference = TORCH_OPS.experts
