"""Kernels on the GPU at hand: right on fresh random data, and how close to what the chip can do.

    python -m bench.gpu_kernels [--json FILE] [--seconds 240] [--only TEXT]   checks and figures
    python -m bench.gpu_kernels --tune                    times candidate tiles for worker/kernels/configs.py
    TRITON_INTERPRET=1 python -m bench.gpu_kernels --dry  the same code, tiny shapes, no GPU: times mean nothing

Ceilings are measured first (a copy, a bf16 matrix product), and every figure is a share of one of them. Checks compare
with float32 references. Timing: CUDA graph replays of several launches between two events, over several copies of the
inputs, which together exceed the L2 cache. Prints one table last, and one JSON object after it. Exit status 1 if a
check fails; a missed target is reported, not an error.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

from worker.attention import triton_paged
from worker.attention.base import BatchMeta
from worker.attention.triton_paged import TritonBackend
from worker.kernels.add_rms_norm import add_rms_norm, add_rms_norm_reference
from worker.kernels.argmax import argmax, argmax_reference
from worker.kernels.configs import FP8_CAPABILITY, TileConfig
from worker.kernels.embedding import embedding, embedding_reference
from worker.kernels.interpreter import install_if_interpreted, is_interpreted
from worker.kernels.paged_attention import paged_attention_reference
from worker.kernels.philox import philox_uniform, philox_uniform_reference
from worker.kernels.qkv_rope_kv_write import qkv_rope_kv_write, qkv_rope_kv_write_reference
from worker.kernels.silu_mul import silu_mul, silu_mul_reference

BF16, FP8, INT8 = torch.bfloat16, torch.float8_e4m3fn, torch.int8
BYTES_TO_EXCEED_L2 = 256 << 20
# Candidates of --tune: tiles that compile without spills for sm_90 at D = 128.
DECODE_CANDIDATES = [TileConfig(16, n, w, s) for n in (32, 64, 128) for w in (2, 4, 8) for s in (2, 3, 4, 6)]
CHUNK_CANDIDATES = [
    TileConfig(m, n, w, s) for m, w in ((64, 4), (128, 4), (128, 8)) for n in (32, 64, 128) for s in (2, 3, 4)
]


@dataclass
class Bench:
    """What all measurements share, and their results."""

    device: str
    dry: bool
    deadline: float  # time.monotonic() after which nothing new is begun
    only: str = ""
    rows: list[dict[str, Any]] = field(default_factory=list)
    copy_rate: float = 1.0  # bytes per second, read and written
    matmul_rate: float = 1.0  # bf16 operations per second
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator(self.device).manual_seed(time.time_ns() % (1 << 31))

    def wants(self, name: str) -> bool:
        """Whether to begin this measurement; says so when time is up."""
        if self.only not in name:
            return False
        if time.monotonic() < self.deadline:
            return True
        self.rows.append({"name": name, "skipped": "time is up"})
        return False

    def randn(self, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device).to(dtype)

    def report(
        self,
        name: str,
        seconds: float,
        *,
        bytes_moved: float = 0.0,
        operations: float = 0.0,
        target: float | None = None,
        error: float | None = None,
    ) -> None:
        """A figure as a share of its ceiling: of copy bandwidth if bytes_moved, else of the matrix product's rate."""
        row: dict[str, Any] = {"name": name, "us": round(seconds * 1e6, 2), "target": target, "error": error}
        if bytes_moved:
            row |= {"GB/s": round(bytes_moved / seconds / 1e9, 1), "share": bytes_moved / seconds / self.copy_rate}
        elif operations:
            row |= {"TFLOP/s": round(operations / seconds / 1e12, 1), "share": operations / seconds / self.matmul_rate}
        self.rows.append(row)

    def check(self, name: str, actual: Tensor, expected: Tensor, limit: float) -> None:
        """Largest error relative to the largest expected value must be below `limit`; NaN never is."""
        error = ((actual.float() - expected.float()).abs().max() / expected.float().abs().max().clamp_min(1e-9)).item()
        self.rows.append({"name": f"check: {name}", "error": error, "limit": limit, "ok": bool(error <= limit)})

    def seconds(self, calls: Sequence[Callable[[], object]], repeats: int = 5) -> float:
        """Median time of one call. `calls` do the same to different memory."""
        if self.device == "cpu":
            begin = time.perf_counter()
            calls[0]()
            return time.perf_counter() - begin
        for call in calls:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        rounds = max(1, 16 // len(calls))
        with torch.cuda.graph(graph):
            for _ in range(rounds):
                for call in calls:
                    call()
        graph.replay()
        times = []
        for _ in range(repeats):
            started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            started.record()
            graph.replay()
            ended.record()
            ended.synchronize()
            times.append(started.elapsed_time(ended) / 1e3 / (rounds * len(calls)))
        return statistics.median(times)


def make_batch(
    bench: Bench,
    query_lens: list[int],
    seq_lens: list[int],
    block_size: int,
    kv_heads: int,
    dim: int,
    pool: torch.dtype = BF16,
) -> tuple[BatchMeta, tuple[Tensor, ...]]:
    """Shuffled blocks full of random keys and values; the null block and scratch are NaN."""
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    lengths = np.array(seq_lens, np.int32)
    counts = -(-lengths // block_size)
    num_blocks = int(counts.sum()) + 2
    order = (np.random.default_rng(0).permutation(num_blocks - 2) + 1).astype(np.int32)
    table = np.zeros((len(seq_lens), max(1, int(counts.max()))), np.int32)
    for r, begin in enumerate(np.cumsum(counts) - counts):
        table[r, : counts[r]] = order[begin : begin + counts[r]]
    slots = np.concatenate(
        [
            np.empty(0, np.int64),
            *(
                table[r, p // block_size].astype(np.int64) * block_size + p % block_size
                for r, (t, n) in enumerate(zip(query_lens, seq_lens, strict=True))
                for p in (np.arange(max(0, n - t), n),)
            ),
        ]
    )
    cache = TritonBackend().allocate((num_blocks, block_size, kv_heads, dim), pool, bench.device)
    for tensor in cache:
        if tensor.dtype == INT8:
            tensor.random_(-127, 128)
        else:
            values = torch.randn(tensor.shape[1:], generator=bench.generator, device=bench.device)
            is_scale = tensor.dim() == 3
            tensor.copy_((values.abs() * 0.02 + 0.01 if is_scale else values).to(tensor.dtype).expand_as(tensor))
            raw = tensor.view(torch.uint8)
            raw[1:-1, 0].copy_(raw[1:-1, -1].roll(1, 0))
            for unread in (raw[0], raw[-1]):
                unread.fill_(0xFF)  # NaN in every float dtype

    def on_device(array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(bench.device)

    meta = BatchMeta(
        on_device(starts),
        on_device(lengths),
        on_device(table),
        on_device(slots),
        block_size,
        starts,
        lengths,
        max(query_lens),
        int(lengths.max()),
    )
    return meta, cache


def measure_ceilings(bench: Bench) -> None:
    """Copy bandwidth and bf16 matrix rate of this chip, on random data."""
    size, side = (1 << 12, 64) if bench.dry else (1 << 30, 8192)
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    seconds = bench.seconds([lambda: target.copy_(source)])
    bench.copy_rate = 2 * size / seconds
    bench.report("ceiling: copy", seconds, bytes_moved=2 * size)
    a, b = bench.randn(side, side), bench.randn(side, side)
    seconds = bench.seconds([lambda: a @ b])
    bench.matmul_rate = 2 * side**3 / seconds
    bench.report(f"ceiling: bf16 product {side}", seconds, operations=2 * side**3)


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
    pools = [BF16, INT8] + ([FP8] if bench.dry or triton_paged_capability() >= FP8_CAPABILITY else [])
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
                    actual = backend.forward(q, cache, meta, window=window)
                    expected = paged_attention_reference(q.float(), cache, meta, window=window)
                    bench.check(f"{label} window={window}", actual, expected, 2e-2)
    check_row_kernels(bench, pools)


def triton_paged_capability() -> int:
    """Compute capability of the current device, 90 for 9.0."""
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def check_row_kernels(bench: Bench, pools: list[torch.dtype]) -> None:
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
    for pool in pools:
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
            a, b = (t.view(-1, 2, 128)[meta.slot_mapping].float() for t in (a, b))
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
    bench.report(
        name,
        bench.seconds([lambda: backend.forward(q, cache, meta)]),
        operations=4.0 * dim * heads * pairs,
        target=target,
    )


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
        if pool == INT8 or bench.dry or triton_paged_capability() >= FP8_CAPABILITY:
            time_decode(bench, f"decode {rows} x {long}, {str(pool)[6:]}", rows, long, 16, pool=pool, **small)
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
                    try:
                        time_prefill(
                            bench,
                            label,
                            query_lens,
                            seq_lens,
                            dim=dim,
                            **small,
                        )
                    except triton.runtime.errors.OutOfResources as error:
                        bench.rows.append({"name": label, "skipped": str(error)[:60]})
    finally:
        triton_paged.attention_config = original


def print_table(rows: list[dict[str, Any]]) -> None:
    """One line a result."""
    print(f"{'what':52} {'us':>10} {'rate':>14} {'share':>6} {'target':>6}")
    for row in rows:
        if "skipped" in row:
            print(f"{row['name']:52} skipped: {row['skipped']}")
        elif "ok" in row:
            print(
                f"{row['name']:66} {'ok' if row['ok'] else 'WRONG'}: error {row['error']:.2e}, limit {row['limit']:.1e}"
            )
        else:
            rate = f"{row['GB/s']} GB/s" if "GB/s" in row else f"{row.get('TFLOP/s', 0)} TFLOP/s"
            target = (
                "" if row["target"] is None else f"{row['target']:.0%}{' !' if row['share'] < row['target'] else ''}"
            )
            print(f"{row['name']:52} {row['us']:>10} {rate:>14} {row['share']:>6.1%} {target:>6}")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=240.0, help="begin nothing new after this time")
    parser.add_argument("--only", default="", help="results whose name contains this; ceilings always run")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--dry", action="store_true", help="tiny shapes in Triton's interpreter")
    args = parser.parse_args()
    if args.dry != is_interpreted():
        parser.error("--dry needs TRITON_INTERPRET=1, and a GPU run must not have it")
    install_if_interpreted()
    bench = Bench("cpu" if args.dry else "cuda", args.dry, time.monotonic() + args.seconds, args.only)
    with torch.inference_mode():
        measure_ceilings(bench)
        for part in (tune,) if args.tune else (check_kernels, measure_attention, measure_rows):
            part(bench)
    print_table(bench.rows)
    wrong = sum(row.get("ok") is False for row in bench.rows)
    missed = [row["name"] for row in bench.rows if row.get("target") and row["share"] < row["target"] and not args.dry]
    chip = "interpreter" if args.dry else torch.cuda.get_device_name()
    result = {
        "benchmark": "gpu_kernels",
        "chip": chip,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "dry": args.dry,
        "wrong": wrong,
        "missed": missed,
        "rows": bench.rows,
    }
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    print(json.dumps({**result, "rows": len(bench.rows)}))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
