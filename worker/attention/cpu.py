"""Attention for CPUs in plain torch: a mixed batch in a handful of calls per layer, no Python per request and layer.

Design: what the step looks like is turned into index tensors once (`plan_step`, kept in meta.cache), and every layer
only replays them: gather q, K and V rows, one masked softmax(q k^T) v per bucket, one gather back into batch order.
A decode, a draft check and a prefill chunk are the same thing, a *piece*: t consecutive queries of one request that see
`length` keys. Long chunks are cut into pieces, so that the masked upper half of their scores is mostly never computed.
Pieces of similar shape share a bucket and are padded to its largest; how similar is decided by the cost of the padding
against the cost of another bucket. Padding gathers a key of the same request, so nothing foreign is ever read.
Rejected: padding whole blocks (a stale NaN behind the mask would survive 0 * NaN) and expanding K/V to the query heads
(the H / Hkv query heads of a head are rows of one matrix instead).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from worker.attention.base import BatchMeta
from worker.kv_pool import allocate_kv, scatter_kv
from worker.models.ops import TORCH_OPS

MAX_PIECE = 128  # queries of a piece; smaller skips more of the causal triangle, larger feeds the matmul better
FUSED_SCORES = 1 << 19  # scores of a bucket from which the fused op, which does not store them, is faster
MAX_BUCKET_BYTES = 8 << 20  # K and V gathered at once: stay in cache, and bound the workspace
# A piece costs about (t + GATHER_COST) * length; a bucket costs as much as BUCKET_COST of that in dispatch.
GATHER_COST = 2.5
BUCKET_COST = 1600.0


@dataclass
class Bucket:
    """P pieces padded to t queries and `length` keys. Indices address rows of D floats."""

    num_pieces: int
    t: int
    length: int
    q_index: Tensor | None  # [P * H * t] rows of q as [N * H, D]; None: tokens first_token .. + P as they are
    first_token: int
    kv_index: Tensor  # [P * Hkv * length] rows of a pool as [B * S * Hkv, D]
    mask: Tensor  # 0 or -inf: [P, 1, t, length] if fused, else [P * Hkv, 1 or G * t, length]
    fused: bool


@dataclass
class StepPlan:
    """What every layer of a step repeats. result_index [N * H] picks each output row from the buckets' results, whose
    row 0 is zero (for padding); None: the only bucket's result is the output."""

    buckets: list[Bucket]
    num_rows: int
    result_index: Tensor | None


@dataclass
class Buffers:
    """Views of the workspace in one bucket's shapes, made once per step: making a view costs as much as a small op."""

    q: Tensor | None  # [P * H * t, D]
    k: Tensor  # [P * Hkv * length, D] pool dtype
    v: Tensor
    k32: Tensor  # the same in float32; the same tensor if the pool is float32
    v32: Tensor
    keys: Tensor  # k32 in the shape its product wants: [P, Hkv, length, D] if fused, else [P * Hkv, D, length]
    values: Tensor  # [P, Hkv, length, D] or [P * Hkv, length, D]
    scores: Tensor  # [P * Hkv, G * t, length]
    weights: Tensor
    result: Tensor  # the bucket's rows of all results: [P, H, t, D] or [P * Hkv, G * t, D]


class CpuBackend:
    """See AttentionBackend. Pools of any float dtype, int8 and float8; the arithmetic is float32. The workspace grows
    to the largest step seen and is reused by all layers, so one instance serves one thread."""

    name = "cpu"
    ops = TORCH_OPS

    def __init__(self) -> None:
        self._workspace: dict[str, Tensor] = {}

    def allocate(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
        return allocate_kv(shape, dtype, device)

    def write(self, cache: tuple[Tensor, ...], k: Tensor, v: Tensor, meta: BatchMeta) -> None:
        scatter_kv(cache, k, v, meta.resolved_slots(cache[0].shape[0] * cache[0].shape[1]))

    def forward(
        self, q: Tensor, cache: tuple[Tensor, ...], meta: BatchMeta, *, scale: float | None = None, window: int = 0
    ) -> Tensor:
        k_pool = cache[0]
        num_heads, dim, num_kv_heads = q.shape[1], q.shape[2], k_pool.shape[2]
        key = (self, num_heads, num_kv_heads, dim, window, k_pool.dtype)
        prepared: tuple[StepPlan, list[Buffers], Tensor] | None = meta.cache.get(key)
        if prepared is None:
            plan = plan_step(meta, num_heads, num_kv_heads, dim, window)
            prepared = meta.cache[key] = (plan, *self._make_buffers(plan, num_heads, num_kv_heads, dim, k_pool.dtype))
        plan, buffers, results = prepared
        scale = dim**-0.5 if scale is None else scale
        rows = q.reshape(-1, dim).float()
        pools = [tensor.view(-1, dim) for tensor in cache[:2]] + [tensor.view(-1) for tensor in cache[2:]]
        if plan.result_index is None:
            out = _attend(plan.buckets[0], buffers[0], rows, pools, scale, torch.empty_like(rows))
        else:
            results[0] = 0.0
            for bucket, views in zip(plan.buckets, buffers, strict=True):
                _attend(bucket, views, rows, pools, scale, None)
            out = results.index_select(0, plan.result_index)
        return out.view(q.shape).to(q.dtype)

    def _make_buffers(
        self, plan: StepPlan, num_heads: int, num_kv_heads: int, dim: int, pool_dtype: torch.dtype
    ) -> tuple[list[Buffers], Tensor]:
        """Views of the workspace for each bucket (buckets run one after another and share it), and all results."""
        results = self._buffer("results", plan.num_rows * dim).view(-1, dim)
        buffers, row = [], 1
        for b in plan.buckets:
            batch, group = b.num_pieces * num_kv_heads, num_heads // num_kv_heads * b.t
            num_keys = batch * b.length
            k, v = (self._buffer(name, num_keys * dim, pool_dtype).view(-1, dim) for name in ("k", "v"))
            k32, v32 = k, v
            if pool_dtype != torch.float32:
                k32, v32 = (self._buffer(name, num_keys * dim).view(-1, dim) for name in ("k32", "v32"))
            result = results[row : row + batch * group]
            row += batch * group
            if b.fused:
                kv_shape: tuple[int, ...] = (b.num_pieces, num_kv_heads, b.length, dim)
                keys, values = k32.view(kv_shape), v32.view(kv_shape)
                scores = weights = torch.empty(0)
                result = result.view(b.num_pieces, num_heads, b.t, dim)
            else:
                keys, values = k32.view(batch, b.length, dim).transpose(1, 2), v32.view(batch, b.length, dim)
                scores, weights = (
                    self._buffer(name, num_keys * group).view(batch, group, b.length) for name in ("scores", "weights")
                )
                result = result.view(batch, group, dim)
            q = None if b.q_index is None else self._buffer("q", len(b.q_index) * dim).view(-1, dim)
            buffers.append(Buffers(q, k, v, k32, v32, keys, values, scores, weights, result))
        return buffers, results

    def _buffer(self, name: str, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """`size` elements that are kept between calls; grows by at least half, so growing ends soon."""
        flat = self._workspace.get(f"{name} {dtype}")
        if flat is None or flat.numel() < size:
            grown = size if flat is None else max(size, flat.numel() * 3 // 2)
            flat = self._workspace[f"{name} {dtype}"] = torch.empty(grown, dtype=dtype)
        return flat[:size]


def _attend(
    b: Bucket, views: Buffers, q: Tensor, pools: list[Tensor], scale: float, target: Tensor | None
) -> Tensor:
    """One bucket of one layer. q [N * H, D], pools: keys and values as [B * S * Hkv, D], and for codes their scales
    [B * S * Hkv]. The result goes to the bucket's rows of all results, or to `target` [P * H * t, D]."""
    if b.q_index is None or views.q is None:
        num_heads = views.result.numel() // (b.num_pieces * q.shape[1])
        q = q[b.first_token * num_heads : (b.first_token + b.num_pieces) * num_heads]
    else:
        q = torch.index_select(q, 0, b.q_index, out=views.q)
    torch.index_select(pools[0], 0, b.kv_index, out=views.k)
    torch.index_select(pools[1], 0, b.kv_index, out=views.v)
    if views.k32 is not views.k:
        views.k32.copy_(views.k)
        views.v32.copy_(views.v)
    for wide, scales in zip((views.k32, views.v32), pools[2:]):
        wide.mul_(scales.index_select(0, b.kv_index)[:, None])
    out = views.result if target is None else target.view(views.result.shape)
    if b.fused:
        fused = F.scaled_dot_product_attention(
            q.view(out.shape), views.keys, views.values, attn_mask=b.mask, scale=scale, enable_gqa=True
        )
        return out.copy_(fused)
    torch.baddbmm(b.mask, q.view(out.shape), views.keys, alpha=scale, out=views.scores)
    torch.softmax(views.scores, -1, out=views.weights)
    return torch.bmm(views.weights, views.values, out=out)


# ------------------------------------------------------------------ once per step


@dataclass
class Pieces:
    """Columns, one entry a piece: `t` queries from row `token` of the batch, the first at `position`, seeing keys
    `key_begin` .. `key_begin + length`, the last of which is the last query's own."""

    request: np.ndarray
    token: np.ndarray
    t: np.ndarray
    position: np.ndarray
    key_begin: np.ndarray
    length: np.ndarray


def plan_step(meta: BatchMeta, num_heads: int, num_kv_heads: int, dim: int, window: int) -> StepPlan:
    """The index tensors of one step, for layers of this shape and window."""
    pieces = cut_pieces(meta, window)
    num_tokens = int(meta.query_start_loc_cpu[-1])
    table = meta.block_table.numpy()
    max_tokens = MAX_BUCKET_BYTES // (2 * 4 * num_kv_heads * dim)
    result_index = np.zeros((num_tokens, num_heads), dtype=np.int64)
    buckets: list[Bucket] = []
    out_row = 1  # row 0 stays zero
    heads = np.arange(num_heads)
    for members in group_pieces(pieces.t, pieces.length, max_tokens):
        bucket = _build_bucket(pieces, members, table, meta.block_size, num_heads, num_kv_heads, window)
        # Real queries only: result row ((p * H + head) * t + i) belongs to token + i.
        p, i = np.nonzero(np.arange(bucket.t) < pieces.t[members][:, None])
        result_index[pieces.token[members][p] + i] = out_row + (p[:, None] * num_heads + heads) * bucket.t + i[:, None]
        out_row += len(members) * num_heads * bucket.t
        buckets.append(bucket)
    if len(buckets) == 1 and buckets[0].q_index is None and buckets[0].num_pieces == num_tokens:
        return StepPlan(buckets, out_row, None)
    return StepPlan(buckets, out_row, torch.from_numpy(result_index.reshape(-1)))


def cut_pieces(meta: BatchMeta, window: int) -> Pieces:
    """Every real request's queries in pieces of at most MAX_PIECE; padding rows have none."""
    starts = meta.query_start_loc_cpu.astype(np.int64)
    lengths = meta.seq_lens_cpu.astype(np.int64)
    counts = np.where(lengths > 0, np.diff(starts), 0)
    num_pieces = -(-counts // MAX_PIECE)
    request = np.repeat(np.arange(len(lengths)), num_pieces)
    first = np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    offset = (np.arange(len(request)) - first) * MAX_PIECE
    t = np.minimum(counts[request] - offset, MAX_PIECE)
    position = lengths[request] - counts[request] + offset
    key_begin = np.maximum(position - window + 1, 0) if window > 0 else np.zeros_like(position)
    return Pieces(request, starts[request] + offset, t, position, key_begin, position + t - key_begin)


def group_pieces(t: np.ndarray, length: np.ndarray, max_tokens: int) -> list[np.ndarray]:
    """Indices of the pieces of each bucket, ascending. Greedy over pieces sorted by shape: a piece joins the current
    bucket unless all its padding then costs more than one more bucket, or its keys exceed max_tokens."""
    groups: list[list[int]] = []
    work = ((t + GATHER_COST) * length).tolist()
    t_list, length_list = t.tolist(), length.tolist()
    t_max, length_max, work_sum = 0, 0, 0.0
    for i in np.lexsort((length, t))[::-1].tolist():
        longest = max(length_max, length_list[i])
        if groups and (len(groups[-1]) + 1) * longest <= max_tokens:
            padded = (len(groups[-1]) + 1) * (t_max + GATHER_COST) * longest
            if padded - work_sum - work[i] <= BUCKET_COST:
                groups[-1].append(i)
                length_max, work_sum = longest, work_sum + work[i]
                continue
        groups.append([i])
        t_max, length_max, work_sum = t_list[i], length_list[i], work[i]
    return [np.sort(np.array(group)) for group in groups]


def _build_bucket(
    pieces: Pieces,
    members: np.ndarray,
    table: np.ndarray,
    block_size: int,
    num_heads: int,
    num_kv_heads: int,
    window: int,
) -> Bucket:
    """Padded queries repeat the piece's last query, padded keys its last key behind the mask."""
    count, t, length = len(members), int(pieces.t[members].max()), int(pieces.length[members].max())
    token, position = pieces.token[members], pieces.position[members]
    query = np.minimum(np.arange(t), pieces.t[members][:, None] - 1)  # [P, t]
    in_order = t == 1 and np.array_equal(token, np.arange(token[0], token[0] + count))
    q_index = None
    if not in_order:
        rows = (token[:, None] + query)[:, None, :] * num_heads + np.arange(num_heads)[:, None]  # [P, H, t]
        q_index = torch.from_numpy(rows.reshape(-1))

    begin = pieces.key_begin[members][:, None]
    key = np.minimum(np.arange(length), pieces.length[members][:, None] - 1) + begin  # [P, length] positions
    slot = table[pieces.request[members][:, None], key // block_size].astype(np.int64) * block_size + key % block_size
    kv_rows = slot[:, None, :] * num_kv_heads + np.arange(num_kv_heads)[:, None]  # [P, Hkv, length]

    q_position = (position[:, None] + query)[:, :, None]
    k_position = (np.arange(length) + begin)[:, None, :]
    hidden = k_position > q_position  # causal; padded keys lie behind the last query
    if window > 0:
        hidden |= k_position <= q_position - window
    mask = torch.from_numpy(np.where(hidden, np.float32("-inf"), np.float32(0.0)))  # [P, t, length]
    group = num_heads // num_kv_heads
    fused = t > 1 and count * num_heads * t * length > FUSED_SCORES
    if fused:
        mask = mask[:, None]
    elif t == 1:
        mask = mask.repeat_interleave(num_kv_heads, dim=0)
    else:
        mask = mask.repeat_interleave(num_kv_heads, dim=0).repeat(1, group, 1)
    return Bucket(count, t, length, q_index, int(token[0]), torch.from_numpy(kv_rows.reshape(-1)), mask, fused)
