"""Time of one attention call per layer on this CPU, `reference` against `cpu`.

    python launch.py bench attention-cpu [--threads 2] [--repeats 50]

Prints a line per shape, and one JSON object last: median milliseconds per layer call, and of planning a step once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from ipc.option_help import OptionParser
from worker.attention.base import BatchMeta
from worker.attention.cpu import plan_step
from worker.attention.registry import get_backend

BLOCK_SIZE = 16

# name -> (query lengths, sequence lengths, H, Hkv, D)
_SPREAD = np.linspace(50, 350, 16).astype(int).tolist()
SHAPES: dict[str, tuple[list[int], list[int], int, int, int]] = {
    "decode R=16 L=50..350 H=9/3": ([1] * 16, _SPREAD, 9, 3, 64),
    "decode R=8 L=300 H=4/2": ([1] * 8, [300] * 8, 4, 2, 64),
    "decode R=1 L=300 H=9/3": ([1], [300], 9, 3, 64),
    "decode R=32 L=350 H=9/3": ([1] * 32, [350] * 32, 9, 3, 64),
    "prefill chunk 256 at 0 H=9/3": ([256], [256], 9, 3, 64),
    "prefill chunk 256 at 256 H=9/3": ([256], [512], 9, 3, 64),
    "mixed: 15 decodes, chunk 241 H=9/3": ([1] * 15 + [241], _SPREAD[:15] + [241], 9, 3, 64),
}


def make_meta(query_lens: list[int], seq_lens: list[int], generator: torch.Generator) -> BatchMeta:
    """A batch whose requests hold shuffled blocks."""
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    lengths = np.array(seq_lens, dtype=np.int32)
    counts = -(-lengths // BLOCK_SIZE)
    blocks = torch.randperm(int(counts.sum()), generator=generator).int() + 1
    table = torch.zeros((len(lengths), int(counts.max())), dtype=torch.int32)
    for r, chunk in enumerate(torch.split(blocks, counts.tolist())):
        table[r, : len(chunk)] = chunk
    slots = torch.zeros(int(starts[-1]), dtype=torch.int64)
    return BatchMeta.of(starts, lengths, table, slots, BLOCK_SIZE)


def median_ms(call: Callable[[], object], repeats: int) -> float:
    """Median wall time in milliseconds, after a warm-up."""
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return round(statistics.median(times) * 1e3, 4)


def main(argv: list[str] | None = None) -> int:
    """Run all shapes."""
    parser = OptionParser(prog="launch.py bench attention-cpu", description=__doc__,
                          formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=50)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    reference, cpu = get_backend("reference"), get_backend("cpu")
    generator = torch.Generator().manual_seed(0)
    results = {}
    for name, (query_lens, seq_lens, num_heads, num_kv_heads, dim) in SHAPES.items():
        meta = make_meta(query_lens, seq_lens, generator)
        num_blocks = int(meta.block_table.max()) + 2
        cache = tuple(torch.randn((num_blocks, BLOCK_SIZE, num_kv_heads, dim), generator=generator) for _ in range(2))
        q = torch.randn((int(sum(query_lens)), num_heads, dim), generator=generator)

        with torch.inference_mode():
            error = (cpu.forward(q, cache, meta) - reference.forward(q, cache, meta)).abs().max().item()
            results[name] = {
                "reference_ms": median_ms(partial(reference.forward, q, cache, meta), max(3, args.repeats // 5)),
                "cpu_ms": median_ms(partial(cpu.forward, q, cache, meta), args.repeats),
                "plan_ms": median_ms(partial(plan_step, meta, num_heads, num_kv_heads, dim, 0), args.repeats),
                "max_error": error,
            }
        print(f"{name:40} {results[name]}")
    print(json.dumps({"benchmark": "attention_cpu", "threads": args.threads, "shapes": results}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
