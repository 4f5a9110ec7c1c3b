"""Kernels on the GPU at hand: right on fresh random data, and how close to what the chip can do.

    python launch.py bench gpu-kernels [--json FILE] [--seconds 240] [--only TEXT]   checks and figures
    python launch.py bench gpu-kernels --tune                    times candidate tiles for worker/kernels/configs.py
    TRITON_INTERPRET=1 python launch.py bench gpu-kernels --dry the same code, tiny shapes, no GPU: times mean nothing

Ceilings are measured first (a copy, a bf16 matrix product), and every figure is a share of one of them. Checks compare
with float32 references. Timing: CUDA graph replays of several launches between two events, over several copies of the
inputs, which together exceed the L2 cache. Prints one table last, and one JSON object after it. Exit status 1 if a
check fails; a missed target is reported, not an error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton

from bench.gpu_bench import (
    BF16,
    BYTES_TO_EXCEED_L2,
    FP8,
    INT8,
    Bench,
    capability_of_device,
    make_batch,
    make_bench,
    make_parser,
    measure_ceilings,
    run_parts,
)
from bench.gpu_products import check_products, check_sampler, measure_products
from worker.attention import triton_paged
from worker.attention.triton_paged import TritonBackend
from worker.kernels.add_rms_norm import add_rms_norm, add_rms_norm_reference
from worker.kernels.argmax import argmax, argmax_reference
from worker.kernels.chip import chip_of
from worker.kernels.configs import TileConfig, shared_estimate, shared_limit
from worker.kernels.embedding import embedding, embedding_reference
from worker.kernels.paged_attention import paged_attention_reference
from worker.kernels.philox import philox_uniform, philox_uniform_reference
from worker.kernels.qkv_rope_kv_write import qkv_rope_kv_write, qkv_rope_kv_write_reference
from worker.kernels.silu_mul import silu_mul, silu_mul_reference
from worker.kv_quant import FP8_CAPABILITY

# Candidates of --tune. Those that spill lose by themselves; those that do not fit are skipped.
DECODE_CANDIDATES = [TileConfig(16, n, w, s) for n in (32, 64, 128) for w in (2, 4, 8) for s in (2, 3, 4, 6)]
CHUNK_CANDIDATES = [
    TileConfig(m, n, w, s) for m, w in ((64, 4), (128, 4), (128, 8)) for n in (32, 64, 128) for s in (2, 3, 4)
]


def check_kernels(bench: Bench) -> None:
    """Every kernel against its float32 reference, on data nobody has seen."""
    backend = TritonBackend()
    long, many = (40, 6) if bench.dry else (3000, 40)
    batches = {
        "decodes": ([1] * many, [7 * i % long + 1 for i in range(many)]),
        "one long decode": ([1], [long]),
        "mixed": ([1, long // 2, 1, 5, 1], [long, long // 2, 0, 60 if not bench.dry else 30, 16]),
        "chunk behind a context": ([long // 3], [long]),
    }
    pools = pools_of(bench)
    for dim, heads, kv_heads, block in [(128, 32, 8, 16), (64, 14, 2, 32), (96, 6, 6, 16), (256, 8, 1, 64)]:
        if bench.dry:
            heads, kv_heads = heads // kv_heads, 1
        for name, (query_lens, seq_lens) in batches.items():
            for pool in pools if dim == 128 else [BF16]:
                if not bench.wants(label := f"attention D={dim} {name} {str(pool)[6:]}"):
                    continue
                meta, cache = make_batch(bench, query_lens, seq_lens, block, kv_heads, dim, pool)
                q = bench.randn(sum(query_lens), heads, dim)
                for window in (0, 33):
                    with bench.attempt(f"{label} window={window}"):
                        actual = backend.forward(q, cache, meta, window=window)
                        expected = paged_attention_reference(q.float(), cache, meta, window=window)
                        bench.check(f"{label} window={window}", actual, expected, 2e-2)


def pools_of(bench: Bench) -> list[torch.dtype]:
    """Those that the device computes with."""
    return [BF16, INT8] + ([FP8] if bench.dry or capability_of_device() >= FP8_CAPABILITY else [])


def check_row_kernels(bench: Bench) -> None:
    """The kernels without attention."""
    if not bench.wants("row kernels"):
        return
    n, width = (3, 96) if bench.dry else (70, 4096)
    x, delta, weight = bench.randn(n, width), bench.randn(n, width), bench.randn(width)
    ours, theirs = x.clone(), x.clone()
    bench.check(
        "add_rms_norm",
        add_rms_norm(ours, delta, weight, 1e-6),
        add_rms_norm_reference(theirs, delta, weight, 1e-6),
        8e-3,
    )
    bench.check("add_rms_norm stream", ours, theirs, 0.0)
    bench.check("silu_mul", silu_mul(x), silu_mul_reference(x), 8e-3)
    ids = torch.arange(-1, n + 1, device=bench.device)
    bench.check("embedding", embedding(ids, x), embedding_reference(ids, x), 0.0)
    logits = bench.randn(n, width * 7 + 3, dtype=torch.float32)
    logits[1, 5] = float("nan")
    bench.check("argmax", argmax(logits), argmax_reference(logits), 0.0)
    seeds = torch.randint(-(1 << 62), 1 << 62, (n,), generator=bench.generator, device=bench.device)
    noise = philox_uniform(seeds, seeds.int(), seeds.abs(), 9)
    bench.check("philox, bit for bit", noise, philox_uniform_reference(seeds, seeds.int(), seeds.abs(), 9), 0.0)
    for pool in pools_of(bench):
        meta, ours_pool = make_batch(bench, [1] * n, [20 + i for i in range(n)], 16, 2, 128, pool)
        theirs_pool = tuple(t.clone() for t in ours_pool)
        qkv, angles, norm = (
            bench.randn(n, 12, 128),
            100 * bench.randn(n, 1, 64, dtype=torch.float32),
            bench.randn(10, 128),
        )
        cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1)
        q = qkv_rope_kv_write(qkv, cos, sin, ours_pool, meta.slot_mapping, num_heads=8, norm_weight=norm)
        expected = qkv_rope_kv_write_reference(
            qkv, cos, sin, theirs_pool, meta.slot_mapping, num_heads=8, norm_weight=norm
        )
        bench.check(f"qkv_rope_kv_write q {str(pool)[6:]}", q, expected, 8e-3)
        for name, a, b in zip(("k", "v"), ours_pool, theirs_pool):
            a, b = (t.float().view(-1, 2, 128)[meta.slot_mapping] for t in (a, b))
            bench.check(
                f"qkv_rope_kv_write {name} {str(pool)[6:]}", a, b, {INT8: 1.01 / 127, FP8: 0.08}.get(pool, 8e-3)
            )


def attention_bytes(
    seq_lens: list[int], num_tokens: int, heads: int, kv_heads: int, dim: int, pool: torch.dtype
) -> float:
    """Bytes a call must move: every key and value once, q and the result once."""
    per_token = 2 * kv_heads * (dim * pool.itemsize + (2 if pool in (INT8, FP8) else 0))
    return float(sum(seq_lens) * per_token + 4 * num_tokens * heads * dim)


def time_decode(
    bench: Bench,
    name: str,
    rows: int,
    context: int,
    block_size: int,
    *,
    heads: int = 32,
    kv_heads: int = 8,
    dim: int = 128,
    pool: torch.dtype = BF16,
    target: float | None = None,
) -> None:
    """One decode attention of a layer."""
    if not bench.wants(name):
        return
    backend = TritonBackend()
    needed = attention_bytes([context] * rows, rows, heads, kv_heads, dim, pool)
    copies = 1 if bench.dry else max(1, min(64, int(BYTES_TO_EXCEED_L2 // needed) + 1))
    inputs = [
        (
            make_batch(bench, [1] * rows, [context] * rows, block_size, kv_heads, dim, pool),
            bench.randn(rows, heads, dim),
        )
        for _ in range(copies)
    ]
    calls = [partial(backend.forward, q, cache, meta) for (meta, cache), q in inputs]
    with bench.attempt(name):
        bench.report(name, bench.seconds(calls), bytes_moved=needed, target=target)


def time_prefill(
    bench: Bench,
    name: str,
    query_lens: list[int],
    seq_lens: list[int],
    *,
    heads: int = 32,
    kv_heads: int = 8,
    dim: int = 128,
    block_size: int = 16,
    pool: torch.dtype = BF16,
    target: float | None = None,
) -> None:
    """One attention call of prompts or chunks. Operations: 4 D a query head and visible key."""
    if not bench.wants(name):
        return
    backend = TritonBackend()
    meta, cache = make_batch(bench, query_lens, seq_lens, block_size, kv_heads, dim, pool)
    q = bench.randn(sum(query_lens), heads, dim)
    pairs = sum(t * n - t * (t - 1) // 2 for t, n in zip(query_lens, seq_lens, strict=True))
    with bench.attempt(name):
        bench.report(name, bench.seconds([lambda: backend.forward(q, cache, meta)]),
                     operations=4.0 * dim * heads * pairs, target=target)


def measure_attention(bench: Bench) -> None:
    """The figures of the decode and prefill attention."""
    rows, long, short, chunk = (2, 48, 20, 24) if bench.dry else (64, 8192, 1024, 8192)
    small: dict[str, Any] = {"heads": 4, "kv_heads": 1, "dim": 64} if bench.dry else {}
    for block_size in (16, 64):
        time_decode(bench, f"decode {rows} x {long}, block {block_size}", rows, long, block_size, target=0.8, **small)
    time_decode(bench, f"decode {rows} x {short}", rows, short, 16, **small)
    time_decode(bench, f"decode 1 x {short}", 1, short, 16, **small)
    time_decode(bench, f"decode 1 x {4 * long}", 1, 4 * long, 16, **small)
    for pool in (INT8, FP8):
        if pool == INT8 or bench.dry or capability_of_device() >= FP8_CAPABILITY:
            time_decode(bench, f"decode {rows} x {long}, {str(pool)[6:]}", rows, long, 16, pool=pool, **small)
    report_narrow_pool(bench, f"decode {rows} x {long}, ")
    time_prefill(bench, f"prefill {chunk}", [chunk], [chunk], target=0.5, **small)
    time_prefill(bench, f"prefill {chunk}, block 64", [chunk], [chunk], block_size=64, **small)
    time_prefill(bench, f"chunk {chunk // 4} at {long}", [chunk // 4], [long + chunk // 4], **small)
    time_prefill(
        bench,
        f"mixed: 63 decodes x {short}, chunk {chunk // 4}",
        [1] * 63 + [chunk // 4],
        [short] * 63 + [chunk // 4],
        **small,
    )
    time_prefill(
        bench, f"mixed: one decode x {4 * long}, chunk {chunk // 4}", [1, chunk // 4], [4 * long, chunk // 4], **small
    )


def report_narrow_pool(bench: Bench, name: str) -> None:
    """The time of fp8 keys and values over that of bfloat16."""
    us = {row["name"]: row["us"] for row in bench.rows if "us" in row}
    wide, narrow = us.get(f"{name}block 16"), us.get(f"{name}float8_e4m3fn")
    if wide and narrow:
        bench.rows.append({"name": "fp8 KV: time of decode attention against bfloat16",
                           "times": round(narrow / wide, 3), "at_most": None if bench.dry else 0.6})


def measure_rows(bench: Bench) -> None:
    """The other kernels, at 1, 64 and 8192 rows of Qwen3-8B's widths."""
    width, inner, vocab = (96, 128, 500) if bench.dry else (4096, 12288, 151936)
    heads, kv_heads = (4, 1) if bench.dry else (32, 8)

    def time_call(name: str, bytes_moved: float, make: Callable[[], Callable[[], object]]) -> None:
        if bench.wants(name):
            bench.report(name, bench.seconds([make()]), bytes_moved=bytes_moved)

    def make_rotate(n: int, pool: torch.dtype) -> Callable[[], object]:
        meta, cache = make_batch(bench, [1] * n, [16] * n, 16, kv_heads, 128, pool)
        qkv, tables = bench.randn(n, heads + 2 * kv_heads, 128), bench.randn(n, 1, 128)
        return partial(
            qkv_rope_kv_write,
            *(qkv, tables, tables, cache, meta.slot_mapping),
            num_heads=heads,
            norm_weight=bench.randn(heads + kv_heads, 128),
        )

    def make_add(n: int) -> Callable[[], object]:
        return partial(add_rms_norm, bench.randn(n, width), bench.randn(n, width), bench.randn(width), 1e-6)

    def make_silu(n: int) -> Callable[[], object]:
        return partial(silu_mul, bench.randn(n, 2 * inner))

    def make_argmax(n: int) -> Callable[[], object]:
        return partial(argmax, bench.randn(n, vocab, dtype=torch.float32))

    for n in (2,) if bench.dry else (1, 64, 8192):
        time_call(f"add_rms_norm {n}", 8.0 * n * width, partial(make_add, n))
        time_call(f"silu_mul {n}", 6.0 * n * inner, partial(make_silu, n))
        for pool in (BF16, INT8):
            bytes_moved = 128.0 * n * (4 * heads + 2 * kv_heads * (2 + pool.itemsize))
            time_call(f"qkv_rope_kv_write {n}, {str(pool)[6:]}", bytes_moved, partial(make_rotate, n, pool))
    for n in (2,) if bench.dry else (1, 64):
        time_call(f"argmax {n}", 4.0 * n * vocab, partial(make_argmax, n))


# By worth: the time may not be enough for all.
PARTS = (check_kernels, check_row_kernels, measure_attention, measure_rows, check_products, check_sampler,
         measure_products)


def _fixed_tile(tile: TileConfig, *shape: int) -> TileConfig:
    return tile


def tune(bench: Bench) -> None:
    """Time every candidate tile for the decode and prefill shapes; the best lines go to worker/kernels/configs.py."""
    original = triton_paged.attention_config
    small: dict[str, Any] = {"heads": 4, "kv_heads": 1} if bench.dry else {}
    shapes: list[tuple[str, list[int], list[int], list[TileConfig]]] = [
        ("decode 64 x 8192", [1] * 64, [8192] * 64, DECODE_CANDIDATES),
        ("decode 1 x 8192", [1], [8192], DECODE_CANDIDATES),
        ("prefill 8192", [8192], [8192], CHUNK_CANDIDATES),
    ]
    if bench.dry:
        shapes = [("decode", [1] * 2, [40] * 2, DECODE_CANDIDATES[:2]), ("prefill", [20], [20], CHUNK_CANDIDATES[:1])]
    try:
        for dim in (64,) if bench.dry else (128, 64, 256):
            for name, query_lens, seq_lens, candidates in shapes:
                for tile in candidates:
                    triton_paged.attention_config = partial(_fixed_tile, tile)
                    label = f"D={dim} {name} {tile.block_m}x{tile.block_n} w{tile.num_warps} s{tile.num_stages}"
                    if shared_estimate(tile, dim, 2, 2) > shared_limit(chip_of(torch.device(bench.device)).capability):
                        bench.rows.append({"name": label, "skipped": "more shared memory than a block may use"})
                    else:
                        time_prefill(bench, label, query_lens, seq_lens, dim=dim, **small)
    finally:
        triton_paged.attention_config = original


def main(argv: list[str] | None = None) -> int:
    """See the module."""
    parser = make_parser(__doc__, 240.0, "launch.py bench gpu-kernels")
    parser.add_argument("--tune", action="store_true")
    args, bench = make_bench(parser, argv)
    parts = (measure_ceilings, *((tune,) if args.tune else PARTS))
    head = {"benchmark": "gpu_kernels", "chip": "interpreter" if args.dry else torch.cuda.get_device_name(),
            "torch": torch.__version__, "triton": triton.__version__}
    with torch.inference_mode():
        result = run_parts(bench, parts, args.json, head)
    print(json.dumps({**result, "rows": len(bench.rows)}))
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
