"""Attention of a flat batch over the paged pool: prefill chunks, decodes and drafts in one launch.

A program owns one *tile*: up to BLOCK_M // G consecutive queries of one request, with the G = H / Hkv query heads of
one KV head packed as rows, so that K and V are read once for all of them. Tile t of the launch is found from
query_start_loc on the device: request r begins at tile start[r] // BLOCK_Q + r, which wastes at most one (empty) tile a
request and needs nothing from the host.

    rows of a tile (G = 4, BLOCK_M = 16):   q0h0 q0h1 q0h2 q0h3 | q1h0 .. q1h3 | q2.. | q3..
    keys of a tile:   begin (window, rounded down) ... every row sees all, no mask ... | diagonal, masked | end

Splits (flash-decoding): with few tiles and long contexts the keys of a tile are shared out over the third grid axis and
combine_splits.py merges the parts. How many parts a tile uses follows from its own length on the device, so a captured
launch serves any lengths. Beside prefill chunks only requests of at most max_split_queries queries are split (one long
context must not hold up the step); their workspace is numbered by request instead of by tile. One compiled variant
serves all of these, with and without splits: what changes from step to step is an argument, never a constant.
Keys past a request's end are never loaded: null block, scratch and tails of blocks may hold NaN.
Sources: Dao 2023 (FlashAttention-2); Kwon et al. 2023 (PagedAttention); Dao et al. 2023 (Flash-Decoding).
Does not know how the pool is filled, or which configuration is fast.
"""

# mypy: allow-untyped-defs
# (kernels: their parameters are Triton's, not Python's)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.attention.base import BatchMeta
from worker.attention.reference import gather_context
from worker.kv_quant import dequantize

LOG2E = 1.4426950408889634
_SEARCH = tl.constexpr(128)  # request starts compared at once
WEIGHT_BITS = tl.constexpr(8)
LARGEST_QUERY = tl.constexpr(32768.0)  # of what float16 (up to 65504) multiplies with float8


@triton.jit
def find_tile(starts_ptr, lens_ptr, num_reqs, tile, window, min_tiles, num_splits, BLOCK_Q: tl.constexpr,
              BLOCK_N: tl.constexpr, ONE_TOKEN: tl.constexpr):
    """(request, first row of q, queries (<= 0: no such tile), position of the first, first key, tiles of keys, tiles of
    keys per split, queries of the request). The attention and the combining kernel must agree on it."""
    if ONE_TOKEN:
        request = tile
        first = 0
    else:
        request = 0
        for base in range(0, num_reqs, _SEARCH):
            index = base + tl.arange(0, _SEARCH)
            begins = tl.load(starts_ptr + index, mask=index < num_reqs, other=0) // BLOCK_Q + index
            request += tl.sum(((begins <= tile) & (index < num_reqs)).to(tl.int32), 0)
        request -= 1
        first = (tile - (tl.load(starts_ptr + request) // BLOCK_Q + request)) * BLOCK_Q
    start = tl.load(starts_ptr + request)
    count = tl.load(starts_ptr + request + 1) - start
    length = tl.load(lens_ptr + request)
    num_queries = tl.minimum(BLOCK_Q, count - first)
    position = length - count + first
    end = tl.maximum(position + num_queries, 0)
    key_begin = tl.where(window > 0, tl.maximum(position - window + 1, 0) // BLOCK_N * BLOCK_N, 0)
    key_tiles = tl.maximum(tl.cdiv(end - key_begin, BLOCK_N), 0)
    per_split = tl.maximum(tl.cdiv(key_tiles, num_splits), min_tiles)
    return request, start + first, num_queries, position, key_begin, key_tiles, per_split, count


@triton.jit
def _widen(codes, dtype: tl.constexpr, IN_FLOAT16: tl.constexpr):
    """Codes as numbers. float8 is float16 in one instruction for two; all others take the way over float32."""
    if IN_FLOAT16:
        wide = codes.to(tl.float16)
    else:
        wide = codes.to(tl.float32).to(dtype)
    return wide


@triton.jit
def _load_blocks(table_ptr, begin, end, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """The block of each of the BLOCK_N keys from `begin` on, or one if they lie in one."""
    if BLOCK_SIZE % BLOCK_N == 0:
        block = tl.load(table_ptr + begin // BLOCK_SIZE, mask=begin < end, other=0)
    else:
        keys = begin + tl.arange(0, BLOCK_N)
        block = tl.load(table_ptr + keys // BLOCK_SIZE, mask=keys < end, other=0)
    return block


@triton.jit
def _slots(block, begin, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """int64 [BLOCK_N] of the keys from `begin` on, whose blocks are as _load_blocks gives them."""
    keys = begin + tl.arange(0, BLOCK_N)
    if BLOCK_SIZE % BLOCK_N == 0:
        slots = block.to(tl.int64) * BLOCK_SIZE + begin % BLOCK_SIZE + tl.arange(0, BLOCK_N)
    else:
        slots = block.to(tl.int64) * BLOCK_SIZE + keys % BLOCK_SIZE
    return slots


@triton.jit
def _load_scales(scale_ptr, block, begin, oldest, end, kv_head, num_kv_heads, BLOCK_N: tl.constexpr,
                 BLOCK_SIZE: tl.constexpr):
    """float32 [BLOCK_N] of the keys from `begin` on; 1 before the oldest and past the end."""
    keys = begin + tl.arange(0, BLOCK_N)
    at = _slots(block, begin, BLOCK_N, BLOCK_SIZE) * num_kv_heads + kv_head
    return tl.load(scale_ptr + at, mask=(keys >= oldest) & (keys < end), other=1.0).to(tl.float32)


@triton.jit
def _add_keys(acc, total, highest, q, q_position, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, lo, hi, end,
              kv_head, scale, softcap, window, stride_slot, num_kv_heads, D: tl.constexpr, BLOCK_D: tl.constexpr,
              BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr,
              HAS_SOFTCAP: tl.constexpr, QUANTIZED: tl.constexpr, IN_FLOAT16: tl.constexpr):
    """Online softmax over keys lo .. hi, both multiples of BLOCK_N unless MASKED. In base 2: `scale` includes log2 e,
    except under a softcap, which needs the scores as they are.

    `highest` is what exponents are taken relative to: the highest score so far or, IN_FLOAT16, WEIGHT_BITS below the
    highest sum of a score and log2 of its value's scale. A weight times that scale is then at most 2**WEIGHT_BITS,
    whatever the scales are, and float16 holds those down to 2**-32 of the largest. Without the scale it is at most
    2**108, as the smallest scale is 2**-100: float32 holds the sum of 2**19. What falls below float32's begin is less
    than 2**-15 of the largest, and float16 would have held it only among values over 2**110.

    A tile's blocks are read from the table one tile ahead. Were they read with the tile, Triton would copy them through
    shared memory as a stage of its own, and no tile of keys would be on its way while another is computed.
    """
    first_key = tl.min(q_position, 0) - window + 1  # older ones are seen by no query; their blocks may be gone
    offsets_d = tl.arange(0, BLOCK_D)
    block = _load_blocks(table_ptr, lo, end, BLOCK_N, BLOCK_SIZE)
    if IN_FLOAT16:
        oldest = first_key if HAS_WINDOW else 0
        k_scale = _load_scales(k_scale_ptr, block, lo, oldest, end, kv_head, num_kv_heads, BLOCK_N, BLOCK_SIZE)
        v_scale = _load_scales(v_scale_ptr, block, lo, oldest, end, kv_head, num_kv_heads, BLOCK_N, BLOCK_SIZE)
    for begin in range(lo, hi, BLOCK_N):
        keys = begin + tl.arange(0, BLOCK_N)
        slots = _slots(block, begin, BLOCK_N, BLOCK_SIZE)
        block = _load_blocks(table_ptr, begin + BLOCK_N, end, BLOCK_N, BLOCK_SIZE)
        at = slots[:, None] * stride_slot + (kv_head * D + offsets_d)[None, :]
        if MASKED:
            is_key = keys < end
            if HAS_WINDOW:
                is_key = is_key & (keys >= first_key)
            loaded = is_key[:, None]
            if BLOCK_D != D:
                loaded = loaded & (offsets_d < D)[None, :]
            k = tl.load(k_ptr + at, mask=loaded, other=0.0)
        elif BLOCK_D != D:
            k = tl.load(k_ptr + at, mask=(offsets_d < D)[None, :], other=0.0)
        else:
            k = tl.load(k_ptr + at)
        if k.dtype != q.dtype:
            k = _widen(k, q.dtype, IN_FLOAT16)
        scores = tl.dot(q, tl.trans(k), input_precision="tf32x3")
        if QUANTIZED:
            if not IN_FLOAT16:
                scale_at = slots * num_kv_heads + kv_head
                if MASKED:
                    k_scale = tl.load(k_scale_ptr + scale_at, mask=is_key, other=0.0).to(tl.float32)
                    v_scale = tl.load(v_scale_ptr + scale_at, mask=is_key, other=0.0).to(tl.float32)
                else:
                    k_scale = tl.load(k_scale_ptr + scale_at).to(tl.float32)
                    v_scale = tl.load(v_scale_ptr + scale_at).to(tl.float32)
            scores = scores * (k_scale * scale)[None, :]
        if HAS_SOFTCAP:  # cap * tanh(x / cap), tanh(y) = 1 - 2 / (e^2y + 1)
            if not QUANTIZED:
                scores = scores * scale
            scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * (2.8853900817779268 / softcap)) + 1.0))
            scores = scores * 1.4426950408889634
        if MASKED:
            visible = (keys[None, :] <= q_position[:, None]) & (keys < end)[None, :]
            if HAS_WINDOW:
                visible = visible & (keys[None, :] > q_position[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))
        if IN_FLOAT16:
            new_highest = tl.maximum(highest, tl.max(scores + (tl.log2(v_scale) - WEIGHT_BITS)[None, :], 1))
        elif QUANTIZED or HAS_SOFTCAP:
            new_highest = tl.maximum(highest, tl.max(scores, 1))
        else:  # the largest is the same one before it is scaled
            new_highest = tl.maximum(highest, tl.max(scores, 1) * scale)
        if MASKED:  # a row may have seen no key yet
            base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        else:
            base = new_highest
        if QUANTIZED or HAS_SOFTCAP:
            weights = tl.exp2(scores - base[:, None])
        else:
            weights = tl.exp2(scores * scale - base[:, None])
        if IN_FLOAT16:  # a total of 2**108 outlasts a step of more than float32's range
            half = tl.exp2((highest - base) * 0.5)
            total = total * half * half + tl.sum(weights, 1)
            shrink = half * half
        else:
            shrink = tl.exp2(highest - base)
            total = total * shrink + tl.sum(weights, 1)
        if QUANTIZED:
            weights = weights * v_scale[None, :]
        if MASKED:
            v = tl.load(v_ptr + at, mask=loaded, other=0.0)
        elif BLOCK_D != D:
            v = tl.load(v_ptr + at, mask=(offsets_d < D)[None, :], other=0.0)
        else:
            v = tl.load(v_ptr + at)
        if v.dtype != q.dtype:
            v = _widen(v, q.dtype, IN_FLOAT16)
        acc = tl.dot(weights.to(q.dtype), v, acc * shrink[:, None], input_precision="tf32x3")
        if IN_FLOAT16:  # of the next tile
            k_scale = _load_scales(k_scale_ptr, block, begin + BLOCK_N, oldest, end, kv_head, num_kv_heads, BLOCK_N,
                                   BLOCK_SIZE)
            v_scale = _load_scales(v_scale_ptr, block, begin + BLOCK_N, oldest, end, kv_head, num_kv_heads, BLOCK_N,
                                   BLOCK_SIZE)
        highest = new_highest
    return acc, total, highest


# What changes from step to step must not select another compiled variant.
PER_STEP = ["num_reqs", "num_splits", "min_tiles", "max_split_queries", "part_rows", "parts_by_request", "stride_table"]
PER_STEP_POINTERS = ["part_ptr", "part_lse_ptr", "starts_ptr", "lens_ptr", "table_ptr"]


@triton.jit(do_not_specialize=PER_STEP, do_not_specialize_on_alignment=PER_STEP_POINTERS)
def paged_attention_kernel(
    out_ptr, q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, sinks_ptr, part_ptr, part_lse_ptr, starts_ptr, lens_ptr,
    table_ptr, num_reqs, scale, softcap, window, num_splits, min_tiles, max_split_queries, part_rows, parts_by_request,
    stride_q, stride_out, stride_slot, stride_table, num_kv_heads,
    D: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ONE_TOKEN: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, QUANTIZED: tl.constexpr,
):
    """Grid (Hkv, tiles, splits) if ONE_TOKEN, so that neighbours read neighbouring heads of the same slots, else
    (tiles, Hkv, splits), so that the tiles of a head share its keys in the cache, the longest first."""
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    if ONE_TOKEN:
        kv_head = tl.program_id(0)
        tile = tl.program_id(1)
    else:
        kv_head = tl.program_id(1)
        tile = tl.num_programs(0) - 1 - tl.program_id(0)
    split = tl.program_id(2)
    request, first, num_queries, position, key_begin, key_tiles, per_split, count = find_tile(
        starts_ptr, lens_ptr, num_reqs, tile, window, min_tiles, num_splits, BLOCK_Q, BLOCK_N, ONE_TOKEN)
    if num_queries <= 0:
        return
    per_split = tl.where(count <= max_split_queries, per_split, key_tiles)
    if (split > 0) & (split * per_split >= key_tiles):
        return

    rows = tl.arange(0, BLOCK_M)
    offsets_d = tl.arange(0, BLOCK_D)
    heads = kv_head * GROUP + rows % GROUP
    is_row = rows < num_queries * GROUP
    q_rows = (first + rows // GROUP).to(tl.int64)
    at_row = is_row[:, None] & (offsets_d < D)[None, :]
    q = tl.load(q_ptr + (q_rows * stride_q + heads * D)[:, None] + offsets_d[None, :], mask=at_row, other=0.0)
    # Of many rows a tile costs products rather than conversions.
    IN_FLOAT16: tl.constexpr = (k_ptr.dtype.element_ty == tl.float8e4nv and q_ptr.dtype.element_ty != tl.float32
                                and BLOCK_M <= 32)
    if IN_FLOAT16 and q_ptr.dtype.element_ty == tl.bfloat16:
        wide = q.to(tl.float32)
        finite = tl.where(tl.abs(wide) < float("inf"), tl.abs(wide), 0.0)  # an infinite row spoils no other
        factor = LARGEST_QUERY / tl.maximum(tl.max(tl.max(finite, 1), 0), 1e-30)
        q = (wide * factor).to(tl.float16)
        scale = scale / factor
    q_position = position + rows // GROUP
    end = position + num_queries
    lo = key_begin + split * per_split * BLOCK_N
    hi = tl.minimum(end, lo + per_split * BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    highest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    if not HAS_WINDOW:
        whole = tl.maximum(tl.minimum(hi, (position + 1) // BLOCK_N * BLOCK_N), lo)
        acc, total, highest = _add_keys(
            acc, total, highest, q, q_position, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr,
            table_ptr + request.to(tl.int64) * stride_table, lo, whole, end, kv_head, scale, softcap, window,
            stride_slot, num_kv_heads, D, BLOCK_D, BLOCK_N, BLOCK_SIZE, False, False, HAS_SOFTCAP, QUANTIZED,
            IN_FLOAT16)
        lo = whole
    acc, total, highest = _add_keys(
        acc, total, highest, q, q_position, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr,
        table_ptr + request.to(tl.int64) * stride_table, lo, hi, end, kv_head, scale, softcap, window, stride_slot,
        num_kv_heads, D, BLOCK_D, BLOCK_N, BLOCK_SIZE, True, HAS_WINDOW, HAS_SOFTCAP, QUANTIZED, IN_FLOAT16)
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # no key at all (padding): zeros
    lse = highest + tl.log2(total)
    if HAS_SINKS:  # one more logit in the softmax that has no value, hence no scale; it belongs to the first split
        sink = tl.load(sinks_ptr + heads, mask=is_row, other=0.0).to(tl.float32) * 1.4426950408889634
        sink = tl.where(split == 0, sink, float("-inf"))
        larger = tl.maximum(lse, sink)
        larger = tl.where(larger == float("-inf"), 0.0, larger)
        of_keys = tl.exp2(lse - larger)
        of_all = of_keys + tl.exp2(sink - larger)
        out = out * (of_keys / tl.where(of_all == 0.0, 1.0, of_all))[:, None]
        lse = larger + tl.log2(of_all)
    if per_split < key_tiles:
        part = tl.where(parts_by_request != 0, request, tile)
        part_row = ((part.to(tl.int64) * num_kv_heads + kv_head) * num_splits + split) * part_rows + rows
        tl.store(part_ptr + part_row[:, None] * D + offsets_d[None, :], out, mask=at_row)
        tl.store(part_lse_ptr + part_row, lse, mask=is_row)
    else:
        tl.store(out_ptr + (q_rows * stride_out + heads * D)[:, None] + offsets_d[None, :],
                 out.to(out_ptr.dtype.element_ty), mask=at_row)


def paged_attention_reference(
    q: Tensor, cache: tuple[Tensor, ...], meta: BatchMeta, *, scale: float | None = None, window: int = 0,
    softcap: float = 0.0, sinks: Tensor | None = None,
) -> Tensor:
    """The same in plain torch and float32, request by request. q [N, H, D]; cache k, v [B, S, Hkv, D] and, for narrow
    pools, their scales [B, S, Hkv]; sinks [H]: a logit beside those of the keys."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    pools = [dequantize(p, s) for p, s in zip(cache[:2], cache[2:], strict=True)] if len(cache) == 4 else cache[:2]
    group, out = q.shape[1] // cache[0].shape[2], torch.zeros_like(q)
    for r in range(meta.num_reqs):
        begin, end = int(meta.query_start_loc_cpu[r]), int(meta.query_start_loc_cpu[r + 1])
        length = int(meta.seq_lens_cpu[r])
        if length == 0 or begin == end:
            continue
        k, v = (gather_context(p, meta.block_table[r], length).float().repeat_interleave(group, 1) for p in pools)
        scores = torch.einsum("thd,lhd->htl", q[begin:end].float(), k) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        q_position = torch.arange(length - (end - begin), length, device=q.device)[:, None]
        k_position = torch.arange(length, device=q.device)
        visible = k_position <= q_position
        if window:
            visible &= k_position > q_position - window
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, end - begin, 1)], -1)
        weights = torch.softmax(scores, -1)[..., :length]
        out[begin:end] = torch.einsum("htl,lhd->thd", weights, v).to(q.dtype)
    return out
