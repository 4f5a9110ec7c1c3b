"""The CUDA backend: Triton kernels over the paged pool, for any mix of prefill chunks and decodes in one launch.

What a launch looks like (tiles, splits, workspace) is decided once per step from shapes and the *_cpu copies, kept in
meta.cache and reused by every layer. Nothing here waits for the device: a launch depends on device tensors only through
pointers, so it can be captured; capture with the largest max_seq_len the graph shall serve.
The same code runs in Triton's interpreter on CPU tensors, which is how it is proven without a GPU.
Does not know models, and tunes nothing: worker/kernels/configs.py has the shapes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from worker.attention.base import BatchMeta
from worker.kernels import configs
from worker.kernels.chip import chip_of
from worker.kernels.combine_splits import combine_splits_kernel
from worker.kernels.configs import TileConfig, attention_config, padded_dim
from worker.kernels.interpreter import install_if_interpreted
from worker.kernels.kv_write import kv_write
from worker.kernels.ops import TRITON_OPS
from worker.kernels.paged_attention import LOG2E, paged_attention_kernel
from worker.kv_pool import allocate_kv
from worker.kv_quant import is_quantized

NO_SPLIT, SPLIT_TILES, SPLIT_SHORT_REQUESTS = 0, 1, 2  # kinds of plan


@dataclass
class LaunchPlan:
    """One step's launch for layers of one shape."""

    tile: TileConfig
    num_tiles: int
    kind: int
    num_splits: int
    num_parts: int  # tiles or requests that have workspace
    part_rows: int
    max_split_queries: int
    min_tiles: int = configs.MIN_TILES_PER_SPLIT  # tiles of keys that a split has at least
    parts: Tensor = field(default_factory=lambda: torch.empty(0))  # [parts, Hkv, splits, rows, D] float32
    lse: Tensor = field(default_factory=lambda: torch.empty(0))  # [parts, Hkv, splits, rows] float32, base 2


class TritonBackend:
    """See AttentionBackend. float32, float16 and bfloat16 pools; int8 and float8_e4m3fn ones carry two more tensors,
    the scales of each token and head, [B, S, Hkv] bfloat16."""

    name = "triton"
    ops = TRITON_OPS

    def __init__(self) -> None:
        install_if_interpreted()

    def allocate(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
        return allocate_kv(shape, dtype, device)

    def write(self, cache: tuple[Tensor, ...], k: Tensor, v: Tensor, meta: BatchMeta) -> None:
        kv_write(cache, k, v, meta.slot_mapping)

    def forward(
        self, q: Tensor, cache: tuple[Tensor, ...], meta: BatchMeta, *, scale: float | None = None, window: int = 0,
        softcap: float = 0.0, sinks: Tensor | None = None,
    ) -> Tensor:
        """As AttentionBackend.forward. softcap c > 0 bounds scores to c * tanh(score / c); sinks [H] are logits that
        take part in the softmax and have no value."""
        if q.stride()[1:] != (q.shape[2], 1):
            q = q.contiguous()
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if len(q):
            _launch(self._plan(meta, q, cache[0]), out, q, cache, meta, scale, window, softcap, sinks)
        return out

    def warm_up(self, cache: tuple[Tensor, ...], *, num_heads: int, dtype: torch.dtype, block_size: int,
                scale: float | None = None, window: int = 0, softcap: float = 0.0, sinks: Tensor | None = None) -> int:
        """Compile (or load from disk) every variant that layers of this kind can launch, so that no request waits for
        the compiler; returns how many launches it took. Nothing in the pool changes: the batch is one padding row."""
        num_kv_heads, dim, device = cache[0].shape[2], cache[0].shape[3], cache[0].device
        tables = torch.zeros((4, 1), dtype=torch.int32, device=device)
        q = torch.zeros((1, num_heads, dim), dtype=dtype, device=device)
        work = torch.zeros((2, num_kv_heads * 64 * dim), dtype=torch.float32, device=device)
        tiles = {self._tile(max_query_len, q, cache[0]) for max_query_len in range(1, 64)}
        launches = [(tile, 2) for tile in tiles] + [(self._tile(1, q, cache[0]), 1)]
        for tile, max_query_len in launches:
            starts = torch.arange(2, dtype=torch.int32, device=device)
            meta = BatchMeta(starts, tables[0], tables[1:2], tables[2].long(), block_size,
                             np.arange(2, dtype=np.int32), np.zeros(1, np.int32), max_query_len, 1)
            plan = LaunchPlan(tile, 1, SPLIT_TILES, 1, 1, 1, 1, parts=work[0], lse=work[1])
            _launch(plan, torch.empty_like(q), q, cache, meta, scale, window, softcap, sinks)
        return len(launches)

    def _tile(self, max_query_len: int, q: Tensor, pool: Tensor) -> TileConfig:
        return attention_config(max_query_len, q.shape[1] // pool.shape[2], q.shape[2], q.dtype.itemsize,
                                pool.dtype.itemsize, chip_of(q.device).capability,
                                pool.dtype == torch.float8_e4m3fn)

    def _plan(self, meta: BatchMeta, q: Tensor, pool: Tensor) -> LaunchPlan:
        """The step's launch for layers of this shape; made once, with its workspace."""
        num_kv_heads, dim = pool.shape[2:]
        group = q.shape[1] // num_kv_heads
        key = (self.name, group, num_kv_heads, dim, q.dtype, pool.dtype)
        plan: LaunchPlan | None = meta.cache.get(key)
        if plan is None:
            tile = self._tile(meta.max_query_len, q, pool)
            plan = plan_launch(meta, len(q), group, num_kv_heads, dim, tile, chip_of(q.device).num_processors)
            # Without splits it is a tensor of the same type that is not touched: one compiled variant for both.
            shape = (1,) if plan.kind == NO_SPLIT else (plan.num_parts, num_kv_heads, plan.num_splits, plan.part_rows)
            plan.parts = torch.empty((*shape, dim), dtype=torch.float32, device=q.device)
            plan.lse = torch.empty(shape, dtype=torch.float32, device=q.device)
            meta.cache[key] = plan
        return plan


def plan_launch(meta: BatchMeta, num_tokens: int, group: int, num_kv_heads: int, dim: int, tile: TileConfig,
                num_processors: int) -> LaunchPlan:
    """Number of tiles, and over how many programs a tile's keys are shared out.

    Few programs in all, or decodes only: every tile is split. Many, some of them prefill chunks: only requests with few
    queries and much context are, so that one program's walk over 100k keys does not outlast the rest of the step.
    Raises ValueError if one KV head serves more query heads than a tile has rows.
    """
    if group > tile.block_m:
        raise ValueError(f"one KV head serves {group} query heads; the triton backend packs at most {tile.block_m}; "
                         "use --attention-backend reference")
    num_tiles = meta.num_reqs if meta.decode_only else num_tokens // (tile.block_m // group) + meta.num_reqs
    plan = LaunchPlan(tile, num_tiles, NO_SPLIT, 1, num_tiles, tile.block_m, num_tokens)
    num_programs = num_tiles * num_kv_heads
    useful = -(-meta.max_seq_len // (tile.block_n * configs.MIN_TILES_PER_SPLIT))
    wanted = min(num_processors * configs.FEW_PROGRAMS // num_programs, useful)
    if meta.decode_only:
        many = num_processors * configs.MANY_PROGRAMS // num_programs
        if wanted < 2:  # the chip is full: a captured launch for long contexts must not cut short ones to pieces
            plan.min_tiles = max(configs.MIN_TILES_PER_SPLIT, configs.PART_KEYS // tile.block_n)
        wanted = max(wanted, min(many, meta.max_seq_len // configs.PART_KEYS))
    if wanted >= 2:
        plan.kind = SPLIT_TILES
        plan.part_rows = min(tile.block_m, max(1, meta.max_query_len) * group)
    elif not meta.decode_only:
        plan.kind = SPLIT_SHORT_REQUESTS
        plan.num_parts, plan.part_rows = meta.num_reqs, min(tile.block_m, max(group, configs.SPLIT_ROWS))
        plan.max_split_queries = plan.part_rows // group
        is_short = np.diff(meta.query_start_loc_cpu) <= plan.max_split_queries
        longest = int(meta.seq_lens_cpu.max(where=is_short, initial=0))
        wanted = min(-(-longest // configs.SPLIT_KEYS), useful)
    bytes_per_split = plan.num_parts * num_kv_heads * plan.part_rows * dim * 4
    plan.num_splits = min(wanted, configs.MAX_SPLITS, configs.MAX_SPLIT_BYTES // bytes_per_split)
    if plan.num_splits < 2:
        plan.kind, plan.num_splits = NO_SPLIT, 1
    return plan


def _launch(plan: LaunchPlan, out: Tensor, q: Tensor, cache: tuple[Tensor, ...], meta: BatchMeta, scale: float | None,
            window: int, softcap: float, sinks: Tensor | None) -> None:
    """The attention kernel and, if keys are split, the combining one."""
    num_heads, dim = q.shape[1:]
    num_kv_heads, tile, one_token = cache[0].shape[2], plan.tile, meta.decode_only
    group, block_d = num_heads // num_kv_heads, padded_dim(dim)
    scale = dim**-0.5 if scale is None else scale
    scales = cache[2:] or cache[:2]
    by_request = int(plan.kind == SPLIT_SHORT_REQUESTS)
    grid = (num_kv_heads, plan.num_tiles) if one_token else (plan.num_tiles, num_kv_heads)
    paged_attention_kernel[(*grid, plan.num_splits)](
        out, q, cache[0], cache[1], scales[0], scales[1], out if sinks is None else sinks, plan.parts, plan.lse,
        meta.query_start_loc, meta.seq_lens, meta.block_table, meta.num_reqs, scale if softcap else scale * LOG2E,
        float(softcap), window, plan.num_splits, plan.min_tiles, plan.max_split_queries, plan.part_rows,
        by_request, q.stride(0), out.stride(0), num_kv_heads * dim, meta.block_table.stride(0), num_kv_heads, D=dim,
        BLOCK_D=block_d, GROUP=group, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_SIZE=meta.block_size,
        ONE_TOKEN=one_token, HAS_WINDOW=window > 0, HAS_SOFTCAP=softcap > 0, HAS_SINKS=sinks is not None,
        QUANTIZED=is_quantized(cache[0].dtype), num_warps=tile.num_warps, num_stages=tile.num_stages)
    if plan.kind != NO_SPLIT:
        rows = min(plan.part_rows, meta.max_query_len * group)
        combine_splits_kernel[(rows, num_kv_heads, plan.num_parts)](
            out, plan.parts, plan.lse, meta.query_start_loc, meta.seq_lens, meta.num_reqs, window, plan.num_splits,
            plan.min_tiles, plan.max_split_queries, plan.part_rows, by_request, out.stride(0),
            num_kv_heads, D=dim, BLOCK_D=block_d, GROUP=group, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
            BLOCK_SPLITS=configs.MAX_SPLITS, ONE_TOKEN=one_token, num_warps=4)
