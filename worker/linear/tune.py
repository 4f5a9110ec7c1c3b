"""Measure the variants of every linear kernel on this machine and keep the best in the table.

    python launch.py tune [--width K] [--outputs N] [--threads T] [--quick]

Takes half a minute, once per machine and version; without it the defaults run. Prints, for each format and number of
rows, the time of each variant and of torch's own float32 matmul on the same shape; for each format its accuracy, which
is the same for all its variants; and a JSON object last.
"""
from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from ipc.option_help import OptionParser
from worker.jit import features
from worker.linear import table
from worker.linear.formats import BFLOAT16, FLOAT32, INT4, INT4_MIN, INT8_WIDE, KIND_NAMES, WIDE_BLOCK, PackedWeight
from worker.linear.pack import (pack_bfloat16, pack_float32, pack_gguf, quantize_int4, quantize_int8,
                                unpack)

CLASS_ROWS = (8, 32, 128, 256)                  # rows measured for each class of the table
MARGIN = 0.03                                   # by which a variant must be faster than the default


def make_weight(kind: int, num_out: int, num_k: int) -> PackedWeight:
    """A random weight of the format."""
    rng = np.random.default_rng(0)
    weight: NDArray[np.float32] = (rng.standard_normal((num_out, num_k)) * 0.02).astype(np.float32)
    if kind == FLOAT32:
        return pack_float32(weight)
    if kind == BFLOAT16:
        return pack_bfloat16((weight.view(np.uint32) >> 16).astype(np.uint16))
    if kind == INT4:
        raw = rng.integers(0, 256, (num_out, num_k // 32, 18), dtype=np.uint8)
        raw[..., :2] = np.full(1, 0.01, np.float16).view(np.uint8)
        return pack_gguf(raw.reshape(num_out, -1), "Q4_0", num_k)
    return quantize_int4(weight) if kind == INT4_MIN else quantize_int8(weight, wide=kind == INT8_WIDE)


def best_ms(runs: Mapping[int, Callable[[], object]], repeats: int) -> dict[int, float]:
    """Shortest time of each, taken in turns: another process on the machine only ever adds time."""
    times = {key: float("inf") for key in runs}
    for run in runs.values():
        run()
    for _ in range(repeats):
        for key, run in runs.items():
            begin = time.perf_counter()
            run()
            times[key] = min(times[key], 1e3 * (time.perf_counter() - begin))
    return times


def choose(times: dict[int, float], default: int) -> int:
    """The fastest variant, where it beats the default by more than two measurements differ."""
    fastest = min(times, key=lambda variant: times[variant])
    return fastest if times[fastest] < (1 - MARGIN) * times[default] else default


def relative_error(weight: PackedWeight, y: torch.Tensor, x: torch.Tensor) -> float:
    """Of products y [M, num_out] against x times the weight in float64, root mean square over root mean square: what
    the format's rounding of activations, and the order of its sums, cost."""
    exact = x.double() @ torch.from_numpy(unpack(weight)).double().T
    return float((y.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt())


def measure(num_out: int, num_k: int, threads: int, repeats: int) -> tuple[dict[int, tuple[int, ...]], dict[str, Any]]:
    """(rows per tile by format and class, all times in ms); of the formats whose blocks fit num_k."""
    from worker.jit import matmul as mm
    from worker.jit import program as pg
    from worker.jit.team import get_team
    from worker.linear.kernel import KernelLinear
    from worker.linear.route import PackedLinear

    best: dict[int, tuple[int, ...]] = {}
    figures: dict[str, Any] = {}
    torch.set_num_threads(threads)
    dense = torch.randn(num_out, num_k)
    for rows in (1, *CLASS_ROWS):
        x = torch.randn(rows, num_k)
        figures.setdefault("torch float32", {})[rows] = best_ms({0: functools.partial(F.linear, x, dense)}, repeats)[0]
    for kind in range(len(KIND_NAMES)):
        if kind == INT8_WIDE and num_k % WIDE_BLOCK:
            continue                            # made with blocks of 32, it would be another format
        layer = PackedLinear([make_weight(kind, num_out, num_k)])
        kernel = KernelLinear(layer, get_team(threads))

        def run(variant: int, x: torch.Tensor, out: torch.Tensor, kernel: KernelLinear = kernel) -> None:
            kernel.prepare(len(x))
            for row in kernel.table:
                if row[pg.CODE] == pg.MATMUL:
                    row[mm.TILE_ROWS] = sum(variant << (8 * index) for index in range(table.NUM_CLASSES))
            kernel(x, out)

        chosen = []
        for rows in (1, *CLASS_ROWS):
            x, out = torch.randn(rows, num_k), torch.empty(rows, layer.padded_out)
            runs = {variant: functools.partial(run, variant, x, out) for variant in table.variants(kind)}
            times = best_ms(runs, repeats)
            figures.setdefault(KIND_NAMES[kind], {})[rows] = times
            if rows > 1:
                chosen.append(choose(times, table.variants(kind)[-1]))
        best[kind] = tuple(chosen)
        x = torch.randn(8, num_k)
        figures[KIND_NAMES[kind]]["relative error"] = relative_error(layer.weights[0], kernel(x), x)
    return best, figures


def main(argv: list[str]) -> int:
    parser = OptionParser(prog="launch.py tune", description="measure this machine's linear kernels, once")
    parser.add_argument("--width", type=int, default=1024, help="inputs of the measured layer, a multiple of 32")
    parser.add_argument("--outputs", type=int, default=4096, help="outputs of the measured layer")
    parser.add_argument("--threads", type=int, default=0, help="compute threads; 0: one per core")
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    args = parser.parse_args(argv)
    missing = features.missing()
    if missing is not None:
        print(f"tune: nothing to measure: {missing}", file=sys.stderr)
        return 1
    from worker.jit.team import usable_cores
    print(f"tune: {features.describe()}", flush=True)
    best, figures = measure(args.outputs, args.width, args.threads or usable_cores(), 10 if args.quick else 60)
    for name, by_rows in figures.items():
        for rows, value in by_rows.items():
            if rows == "relative error":
                print(f"  {name:14} products within {value:.1e} of exact ones with the same weights (rms)")
                continue
            shown = f"{value:.3f} ms" if isinstance(value, float) else ", ".join(
                f"{ms:.3f} ms at {variant} rows a tile" for variant, ms in value.items())
            print(f"  {name:14} {rows:4} rows: {shown}")
    path = table.save(best, figures)
    print(f"tune: kept in {path}")
    print(json.dumps({"rows_per_tile": {KIND_NAMES[kind]: row for kind, row in best.items()}, "ms": figures}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
