"""What GPU measurements share: ceilings, timing, checks, random batches, one table.

Times are medians of CUDA graph replays between two events, over copies of the inputs that together exceed the L2 cache.
Does not know which kernels there are.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from worker.attention.base import BatchMeta
from worker.attention.triton_paged import TritonBackend
from worker.kernels.interpreter import install_if_interpreted, is_interpreted

BF16, FP8, INT8 = torch.bfloat16, torch.float8_e4m3fn, torch.int8
BYTES_TO_EXCEED_L2 = 256 << 20


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

    @contextlib.contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """What raises inside, a kernel or the device, is a failed check; what comes after it still runs."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.rows.append({"name": f"check: {name} ran to its end", "error": 1.0, "limit": 0.0, "ok": False,
                              "raised": f"{type(error).__name__}: {error}"[:400]})

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

    return BatchMeta.of(starts, lengths, on_device(table), on_device(slots), block_size), cache


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


def run_parts(bench: Bench, parts: Sequence[Callable[[Bench], object]], path: Path | None, head: dict[str, Any]
              ) -> dict[str, Any]:
    """Run the parts in order; the result for JSON. After each its lines are printed and everything so far is in the
    file, so that an end by a time limit costs only the part it strikes."""
    result: dict[str, Any] = {}
    for part in parts:
        begin = len(bench.rows)
        with bench.attempt(part.__name__):
            part(bench)
        print_table(bench.rows[begin:], has_head=begin == 0)
        result = {**head, "dry": bench.dry, "wrong": sum(row.get("ok") is False for row in bench.rows),
                  "missed": missed(bench), "rows": bench.rows}
        if path:
            path.write_text(json.dumps(result, indent=1))
    return result


def capability_of_device() -> int:
    """Compute capability of the current device, 90 for 9.0."""
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def make_parser(doc: str | None, seconds: float, prog: str | None = None) -> argparse.ArgumentParser:
    """The options that all of these programs have."""
    parser = argparse.ArgumentParser(prog=prog, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=seconds, help="begin nothing new after this time")
    parser.add_argument("--only", default="", help="results whose name contains this; ceilings, where there are any, "
                        "always run")
    parser.add_argument("--dry", action="store_true", help="tiny shapes in Triton's interpreter")
    return parser


def make_bench(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, Bench]:
    """Read the command line, install the interpreter where it is asked for."""
    args = parser.parse_args(argv)
    if args.dry != is_interpreted():
        parser.error("--dry needs TRITON_INTERPRET=1, and a GPU run must not have it")
    install_if_interpreted()
    return args, Bench("cpu" if args.dry else "cuda", args.dry, time.monotonic() + args.seconds, args.only)


def missed(bench: Bench) -> list[str]:
    """Names of figures below their targets; a dry run has no figures."""
    return [row["name"] for row in bench.rows if is_missed(row)] if not bench.dry else []


def is_missed(row: dict[str, Any]) -> bool:
    """A figure that has a target and does not reach it."""
    value, low, high = row.get("times", row.get("us", 0.0)), row.get("at_least"), row.get("at_most")
    return bool((row.get("target") and row["share"] < row["target"]) or (low is not None and value < low)
                or (high is not None and value > high))


def print_table(rows: list[dict[str, Any]], *, has_head: bool = True) -> None:
    """One line a result."""
    if has_head:
        print(f"{'what':52} {'us':>10} {'rate':>14} {'share':>6} {'target':>6}")
    for row in rows:
        if "skipped" in row:
            print(f"{row['name']:52} skipped: {row['skipped']}")
        elif "ok" in row:
            print(
                f"{row['name']:66} {'ok' if row['ok'] else 'WRONG'}: error {row['error']:.2e}, limit {row['limit']:.1e}"
            )
        elif "at_most" in row or "at_least" in row:
            value = row.get("times", row.get("us"))
            low, high = row.get("at_least"), row.get("at_most")
            bound = "" if low is high is None else f"at least {low}" if low is not None else f"at most {high}"
            print(f"{row['name']:52} {value:>10} {bound:>14}{' !' if is_missed(row) else ''}")
        elif "rate" in row:
            mark = "!" if row["share"] < row["target"] else ""
            print(f"{row['name']:52} {row['us']:>10} {row['rate']:>14} {row['share']:>6.1%} {row['target']:.0%} {mark}")
        else:
            rate = f"{row['GB/s']} GB/s" if "GB/s" in row else f"{row.get('TFLOP/s', 0)} TFLOP/s"
            target = (
                "" if row["target"] is None else f"{row['target']:.0%}{' !' if row['share'] < row['target'] else ''}"
            )
            print(f"{row['name']:52} {row['us']:>10} {rate:>14} {row['share']:>6.1%} {target:>6}")
    sys.stdout.flush()
