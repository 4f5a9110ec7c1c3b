"""`bench preemption`: recompute, swap and auto, when the pool is too small for what runs.

Three workloads through this engine's three processes, with weights that are random at true shape:

    little    the pool lacks a few blocks now and then
    thrash    many requests with long prompts share a pool that holds a fifth of them
    long      short prompts, long outputs: all fit at first, then grow out of the pool

With the prefix cache on, then off. One engine per mode stays up and runs take turns, so that what else the machine does
falls on all alike. Figures are medians. `auto_over_best` is the time of auto over that of the better one of the others,
the median over the repeats; `least` compares the shortest runs instead, and `cpu` the least CPU time of the engine's
processes: others on the machine only ever add, so on a busy one these two say more. `modelled` varies what copying
costs, see preemption_model.py. Prints a table, then one JSON object.
"""
from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.preemption_model import COPY_COSTS, OVERHEADS_NS, Workload, modelled_ratios
from bench.seed_workload import SEED_MODEL_CONFIG
from bench.stats import median, percentile, print_json
from frontend import AsyncLLM, SamplingParams
from ipc.option_help import OptionParser

MODES = ("recompute", "swap", "auto")
CACHES = {"cached": True, "uncached": False}
NUM_BLOCKS, BLOCK_SIZE, BUDGET, SEATS = 112, 16, 256, 32
TARGET = 1.05                                   # auto against the better of the others
COUNTERS = {"recomputed_tokens": "num_recomputed_tokens", "swapped_out": "num_swapped_out_blocks",
            "swapped_in": "num_swapped_in_blocks", "preemptions": "num_preemptions",
            "computed_tokens": "num_computed_tokens", "steps": "num_steps"}
# Waves (one after the other), requests of a wave, shared prompt tokens, own prompt tokens, output tokens.
SHAPES = {"little": (4, 16, 32, (48, 96), (32, 64)), "thrash": (1, 40, 64, (96, 256), (24, 72)),
          "long": (1, 20, 0, (16, 48), (160, 256))}


def make_workload(name: str, seed: int, vocab_size: int, scale: float = 1.0) -> list[Workload]:
    """Waves of requests; the same for the same arguments."""
    waves, count, shared, own, output = SHAPES[name]
    rng = np.random.default_rng([seed, list(SHAPES).index(name)])

    def words(low: int, high: int) -> np.ndarray:
        return rng.integers(0, vocab_size, rng.integers(low, high, endpoint=True), dtype=np.int32)

    system = words(shared, shared)
    return [[(np.concatenate([system, words(*own)]), int(rng.integers(*output, endpoint=True)))
             for _ in range(max(2, round(count * scale)))] for _ in range(waves)]


# ------------------------------------------------------------ one run

def cpu_seconds(pids: list[int]) -> float | None:
    """CPU time of these processes so far; None where the system does not tell."""
    total = 0
    try:
        for pid in pids:
            for task in Path(f"/proc/{pid}/task").iterdir():
                total += int((task / "schedstat").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return total / 1e9


async def run_once(llm: AsyncLLM, waves: list[Workload]) -> tuple[list[list[int]], dict[str, float]]:
    """All waves, cache empty at first. Returns tokens and figures of this run alone."""
    await llm.reset_prefix_cache()
    before, cpu = await llm.stats(), cpu_seconds(llm.pids)
    tpot: list[float] = []

    async def one(prompt: np.ndarray, max_tokens: int) -> list[int]:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        tokens: list[int] = []
        async for output in llm.generate(prompt.tobytes(), params, output_kind="final"):
            tokens, times = output.outputs[0].token_ids, output.metrics
            if len(tokens) > 1 and times is not None and times.finish_time and times.first_token_time:
                tpot.append((times.finish_time - times.first_token_time) / (len(tokens) - 1))
        return tokens

    tokens: list[list[int]] = []
    begin = time.perf_counter()
    for wave in waves:
        tokens += await asyncio.gather(*(one(prompt, max_tokens) for prompt, max_tokens in wave))
    figures: dict[str, float] = {"total_s": time.perf_counter() - begin, "p99_tpot_ms": 1000 * percentile(tpot, 99)}
    after, cpu_after = await llm.stats(), cpu_seconds(llm.pids)
    if cpu is not None and cpu_after is not None:
        figures["cpu_s"] = cpu_after - cpu
    if after["num_free_blocks"] != after["num_blocks"]:
        raise RuntimeError(f"{after['num_blocks'] - after['num_free_blocks']} blocks are still held after the run")
    return tokens, figures | {name: after[counter] - before[counter] for name, counter in COUNTERS.items()}


@contextlib.asynccontextmanager
async def engines(args: argparse.Namespace, is_cached: bool) -> AsyncIterator[dict[str, AsyncLLM]]:
    """One engine per mode, all up; all down at the end."""
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "config.json"), "w") as file:
            json.dump(SEED_MODEL_CONFIG, file)
        model = {"tiny": folder, "demo": "smollm2-135m"}.get(args.model, args.model)
        options: dict[str, Any] = dict(
            load_format="dummy", seed=args.seed, block_size=BLOCK_SIZE, num_gpu_blocks_override=args.blocks,
            max_num_batched_tokens=BUDGET, max_num_seqs=SEATS, enable_prefix_caching=is_cached,
            swap_space=args.swap_space, device=args.device, attention_backend=args.attention_backend,
            num_threads=args.num_threads, log_level="warning")
        up: dict[str, AsyncLLM] = {}
        try:
            starts = [AsyncLLM(model, preemption_mode=mode, **options).start() for mode in MODES]
            started = await asyncio.gather(*starts, return_exceptions=True)
            up |= {mode: llm for mode, llm in zip(MODES, started) if isinstance(llm, AsyncLLM)}
            for failure in started:
                if isinstance(failure, BaseException):
                    raise failure
            yield up
        finally:
            for llm in up.values():
                await llm.close()


# ------------------------------------------------------------ all runs

Runs = dict[tuple[str, str, str], list[dict[str, float]]]    # (workload, cache, mode) -> its repeats


async def measure(args: argparse.Namespace) -> tuple[Runs, int]:
    """The runs, and how many requests got other tokens than in the first run (rounding differs between batches)."""
    runs: Runs = {}
    num_different = 0
    for cache, is_cached in CACHES.items():
        async with engines(args, is_cached) as up:
            for name in args.workload or SHAPES:
                waves = make_workload(name, args.seed, up["auto"].vocab_size, args.scale)
                wanted: list[list[int]] = []
                for repeat in range(args.repeat + 1):       # the first is warm-up
                    first = repeat % len(MODES)
                    for mode in (*MODES[first:], *MODES[:first]):
                        tokens, figures = await run_once(up[mode], waves)
                        wanted = wanted or tokens
                        num_different += sum(a != b for a, b in zip(tokens, wanted, strict=True))
                        if repeat:
                            runs.setdefault((name, cache, mode), []).append(figures)
    return runs, num_different


def auto_over_best(runs: Runs, name: str, cache: str) -> dict[str, float | None]:
    """Three ratios. "median": the others' better one is chosen by its median, then compared repeat by repeat."""
    total = {mode: [run["total_s"] for run in runs[name, cache, mode]] for mode in MODES}
    cpu = {mode: [run["cpu_s"] for run in runs[name, cache, mode] if "cpu_s" in run] for mode in MODES}
    best = min(("recompute", "swap"), key=lambda mode: median(total[mode]))
    return {"median": round(median(a / b for a, b in zip(total["auto"], total[best])), 4),
            "least": _least_ratio(total), "cpu": _least_ratio(cpu) if all(cpu.values()) else None}


def _least_ratio(values: dict[str, list[float]]) -> float:
    return round(min(values["auto"]) / min(values["recompute"] + values["swap"]), 4)


def modelled(args: argparse.Namespace) -> dict[str, Any]:
    """auto against the better one, by kind of cost, workload, cache and copy cost."""
    result: dict[str, Any] = {"copy_costs": list(COPY_COSTS)}
    for kind, overhead_ns in OVERHEADS_NS.items():
        for name in args.workload or SHAPES:
            wave = make_workload(name, args.seed, SEED_MODEL_CONFIG["vocab_size"], args.scale)[0]
            for cache, is_cached in CACHES.items():
                result[f"{kind} {name} {cache}"] = modelled_ratios(
                    wave, is_cached=is_cached, overhead_ns=overhead_ns, num_blocks=args.blocks, block_size=BLOCK_SIZE,
                    budget=BUDGET, seats=SEATS)
    return result


def report(runs: Runs, num_different: int, model: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Print the table; return the result."""
    columns = {"total_s": 9, "cpu_s": 8, "p99_tpot_ms": 13, "recomputed_tokens": 19, "swapped_out": 13,
               "swapped_in": 12, "preemptions": 13, "computed_tokens": 17, "steps": 7}
    print(f"{'workload':<9}{'cache':<10}{'mode':<10}" + "".join(f"{name:>{width}}" for name, width in columns.items()))
    rows = []
    for (name, cache, mode), repeats in runs.items():
        row = {figure: round(median(run[figure] for run in repeats), 4) for figure in columns if figure in repeats[0]}
        rows.append({"workload": name, "cache": cache, "mode": mode, **row})
        print(f"{name:<9}{cache:<10}{mode:<10}" + "".join(f"{row.get(figure, 'n/a'):>{width}}"
                                                          for figure, width in columns.items()))
    cells = list(dict.fromkeys((name, cache) for name, cache, _ in runs))
    ratios = {f"{name} {cache}": auto_over_best(runs, name, cache) for name, cache in cells}
    print(f"\n{'auto over the better one':<26}{'median':>9}{'least':>9}{'cpu':>9}")
    for cell, ratio in ratios.items():
        print(f"{cell:<26}" + "".join(f"{'n/a' if x is None else x:>9}" for x in ratio.values()))
    modelled_cells = {key: cell for key, cell in model.items() if key != "copy_costs"}
    if modelled_cells:
        print(f"{'modelled; a copy costs':<26}" + "".join(f"{cost:>9}" for cost in COPY_COSTS))
    for cell, series in modelled_cells.items():
        print(f"{cell:<26}" + "".join(f"{x:>9}" for x in series["auto_over_best"]))
    worst = max((max(series["auto_over_best"]) for series in modelled_cells.values()), default=None)
    return {"bench": "preemption", "model": args.model, "repeats": args.repeat, "num_blocks": args.blocks,
            "block_size": BLOCK_SIZE, "auto_over_best": {cell: ratio["median"] for cell, ratio in ratios.items()},
            "auto_over_best_least": {cell: ratio["least"] for cell, ratio in ratios.items()},
            "auto_over_best_cpu": {cell: ratio["cpu"] for cell, ratio in ratios.items()},
            "auto_over_best_modelled": worst, "target": TARGET, "num_different_outputs": num_different,
            "load_average": round(os.getloadavg()[0], 2), "rows": rows, "modelled": model}


def main(argv: list[str] | None = None) -> int:
    parser = OptionParser(prog="launch.py bench preemption", description="Ways for a preempted request to return.")
    parser.add_argument("--model", default="tiny", help="tiny, demo (smollm2-135m), or an alias; weights are random")
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workload", action="append", choices=list(SHAPES), help="repeatable; default: all")
    parser.add_argument("--scale", type=float, default=1.0, help="number of requests, as a multiple of the default")
    parser.add_argument("--blocks", type=int, default=NUM_BLOCKS, help="size of the pool")
    parser.add_argument("--swap-space", default="512MiB")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--num-threads", type=int, default=1, help="of a CPU worker; one is least disturbed by others")
    parser.add_argument("--modelled", action=argparse.BooleanOptionalAction, default=True, help="the modelled part too")
    parser.add_argument("--json", metavar="FILE", help="also write the JSON object there")
    args = parser.parse_args(argv)
    model = modelled(args) if args.modelled else {}
    runs, num_different = asyncio.run(measure(args))
    print_json(report(runs, num_different, model, args), args.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
