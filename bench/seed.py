"""`bench seed`: sixteen requests with a shared system prompt, on this engine and on a fixed-slot baseline.

Three engines, the same weights (random, the same seed), the same linear kernels, the same greedy tokens: the baseline
of slot_engine.py in this process, then this engine's three processes with an ample pool and with 24 blocks. Each
repeat runs all three in turn, with an empty prefix cache; figures are medians, and the ratios are what counts. Prints
one JSON line per engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from typing import Any

from bench.seed_workload import SEED_MODEL_CONFIG, Workload, seed_workload
from bench.slot_engine import SlotEngine, load_seed_model
from bench.stats import median, print_json
from frontend import AsyncLLM, SamplingParams
from ipc.option_help import OptionParser

BLOCK_SIZE, BUDGET = 16, 256
POOLS = {"ample pool": 4096, "24-block pool": 24}
TARGETS = {"ample pool": 2.5, "24-block pool": 1.8}


async def run_once(llm: AsyncLLM, workload: Workload) -> tuple[list[list[int]], dict[str, Any]]:
    """All requests at once, cache empty. Returns tokens and figures of this run alone."""
    await llm.reset_prefix_cache()
    before = await llm.stats()

    async def one(prompt: Any, max_tokens: int) -> list[int]:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        tokens: list[int] = []
        async for output in llm.generate(prompt.tobytes(), params, output_kind="final"):
            tokens = output.outputs[0].token_ids
        return tokens

    begin = time.perf_counter()
    tokens = await asyncio.gather(*(one(prompt, max_tokens) for prompt, max_tokens in workload))
    wall = time.perf_counter() - begin
    after = await llm.stats()
    if after["num_free_blocks"] != after["num_blocks"]:
        raise RuntimeError(f"{after['num_blocks'] - after['num_free_blocks']} blocks are still held after the run")
    gain = {name: after[name] - before[name] for name in after if isinstance(after[name], int)}
    count = sum(map(len, tokens))
    return list(tokens), {
        "output_tokens": count,
        "tok_s": count / wall,
        "steps": gain["num_steps"],
        "prefix_hit_rate": gain["num_hit_tokens"] / max(1, gain["num_queried_tokens"]),
        "preemptions": gain["num_preemptions"],
    }


async def measure(args: argparse.Namespace) -> int:
    workload = seed_workload(args.requests, args.seed)
    compiled = args.attention_backend in ("auto", "jit")
    baseline = SlotEngine(load_seed_model(args.seed, compiled, args.threads))
    runs: dict[str, list[dict[str, Any]]] = {"slots": [], **{name: [] for name in POOLS}}
    engines: dict[str, AsyncLLM] = {}
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "config.json"), "w") as file:
            json.dump(SEED_MODEL_CONFIG, file)
        options: dict[str, Any] = dict(
            load_format="dummy",
            seed=args.seed,
            dtype="float32",
            block_size=BLOCK_SIZE,
            max_num_batched_tokens=BUDGET,
            log_level="warning",
            attention_backend=args.attention_backend,
            async_scheduling=args.async_scheduling,
        )
        try:
            for name, blocks in POOLS.items():
                options.update(num_gpu_blocks_override=blocks, num_threads=args.threads)
                engines[name] = await AsyncLLM(folder, **options).start()
            for repeat in range(args.repeat + 1):  # the first is warm-up
                wanted, figures = baseline.generate(workload)
                results = {"slots": figures}
                for name, llm in engines.items():
                    tokens, results[name] = await run_once(llm, workload)
                    if tokens != wanted:
                        raise RuntimeError(f"{name}: tokens differ from the baseline's")
                if repeat:
                    for name, figures in results.items():
                        runs[name].append(figures)
        finally:
            for llm in engines.values():
                await llm.close()
    return report(runs, args)


def report(runs: dict[str, list[dict[str, Any]]], args: argparse.Namespace) -> int:
    slots = runs["slots"]
    print(
        json.dumps(
            {
                "engine": "fixed slots",
                "kv_slots": slots[0]["kv_slots"],
                "output_tokens": slots[0]["output_tokens"],
                "tok_s": round(median(r["tok_s"] for r in slots), 1),
                "steps": slots[0]["steps"],
            }
        )
    )
    for name, blocks in POOLS.items():
        mine = runs[name]
        ratio = median(r["tok_s"] / s["tok_s"] for r, s in zip(mine, slots))
        line = {
            "engine": f"engine core, {name}",
            "kv_slots": blocks * BLOCK_SIZE,
            "num_blocks": blocks,
            "output_tokens": mine[0]["output_tokens"],
            "tok_s": round(median(r["tok_s"] for r in mine), 1),
            "steps": mine[0]["steps"],
            "prefix_hit_rate": round(mine[0]["prefix_hit_rate"], 3),
            "preemptions": mine[0]["preemptions"],
            "ratio": round(ratio, 2),
            "target_ratio": TARGETS[name],
            "repeats": args.repeat,
        }
        if name == list(POOLS)[-1]:
            print_json(line)
        else:
            print(json.dumps(line))
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = OptionParser(prog="launch.py bench seed", description="Sixteen requests against a fixed-slot baseline.")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--threads", type=int, default=1, help="compute threads of every engine; the model is tiny")
    parser.add_argument("--async-scheduling", action=argparse.BooleanOptionalAction, default=True)
    return asyncio.run(measure(parser.parse_args(argv)))


if __name__ == "__main__":
    raise SystemExit(main())
