"""`python launch.py chaos`: real processes, random kills and stops, and a check of every stream.

A tiny model on the reference backend serves a steady load while core and worker are killed (SIGKILL) or stopped
(SIGSTOP) at random moments. Every stream must be exactly the sequence that the same request gives undisturbed: no
gap, no repeat, no other token. Prints what happened and one JSON object last; exit status 1 when anything was
corrupt or too little succeeded.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import tempfile
import time
from typing import Any

from bench.seed_workload import SEED_MODEL_CONFIG
from bench.stats import percentile, print_json
from frontend import AsyncLLM, SamplingParams
from ipc.option_help import OptionParser

GOAL = 0.999  # share of requests that must succeed
RESTART_SPACING_S = 13.0  # five restarts a minute are the supervisor's limit


def request(number: int, seed: int) -> tuple[list[int], SamplingParams]:
    """The number-th of a small set of requests: greedy and seeded ones, short and long."""
    rng = random.Random(seed * 1000 + number)
    prompt = [rng.randrange(4000) for _ in range(rng.randint(4, 60))]
    return prompt, SamplingParams(
        temperature=rng.choice([0.0, 0.8]), seed=number, max_tokens=rng.randint(8, 80), ignore_eos=True
    )


async def run_request(llm: AsyncLLM, number: int, seed: int) -> list[int]:
    prompt, params = request(number, seed)
    tokens: list[int] = []
    async for output in llm.generate(prompt, params, output_kind="delta"):
        tokens += output.outputs[0].token_ids
    return tokens


class Chaos:
    """One run: a load, a tormentor, and a checker."""

    def __init__(self, llm: AsyncLLM, args: argparse.Namespace) -> None:
        self.llm, self.args, self.rng = llm, args, random.Random(args.seed)
        self.wanted: dict[int, list[int]] = {}
        self.num_ok = self.num_failed = self.num_corrupt = 0
        self.latencies: list[float] = []
        self.events: list[str] = []

    async def learn(self) -> None:
        """What each request gives undisturbed."""
        for number in range(self.args.kinds):
            self.wanted[number] = await run_request(self.llm, number, self.args.seed)

    async def load(self, until: float) -> None:
        tasks: set[asyncio.Task[None]] = set()
        while time.monotonic() < until:
            task = asyncio.create_task(self.one(self.rng.randrange(self.args.kinds)))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            await asyncio.sleep(self.rng.expovariate(self.args.rate))
        await asyncio.wait_for(asyncio.gather(*tasks), 120)

    async def one(self, number: int) -> None:
        begin = time.monotonic()
        try:
            tokens = await run_request(self.llm, number, self.args.seed)
        except Exception as error:
            self.num_failed += 1
            self.events.append(f"request failed: {type(error).__name__}: {error}")
            return
        self.latencies.append(time.monotonic() - begin)
        if tokens == self.wanted[number]:
            self.num_ok += 1
        else:
            self.num_corrupt += 1
            self.events.append(f"request {number}: {tokens} instead of {self.wanted[number]}")

    async def torment(self, until: float) -> None:
        """Kill or stop the core or the worker, at random moments."""
        while True:
            pause = max(RESTART_SPACING_S, self.rng.expovariate(1 / self.args.every))
            if time.monotonic() + pause + 15 > until:
                return
            await asyncio.sleep(pause)
            _, worker, core = self.llm.pids[:3]
            name, pid = self.rng.choice([("worker", worker), ("core", core)])
            what = signal.SIGSTOP if self.rng.random() < 0.2 else signal.SIGKILL
            try:
                os.kill(pid, what)
            except ProcessLookupError:
                continue
            self.events.append(f"{what.name} {name} ({pid})")
            print(
                f"{self.events[-1]}; so far {self.num_ok} ok, {self.num_failed} failed, {self.num_corrupt} corrupt",
                flush=True,
            )


async def run(args: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "config.json"), "w") as file:
            json.dump(SEED_MODEL_CONFIG, file)
        options: dict[str, Any] = dict(
            load_format="dummy",
            num_gpu_blocks_override=400,
            attention_backend="reference",
            log_level="error",
            num_threads=1,
            block_size=16,
        )
        async with AsyncLLM(folder, **options) as llm:
            chaos = Chaos(llm, args)
            await chaos.learn()
            until = time.monotonic() + args.minutes * 60
            torment = asyncio.create_task(chaos.torment(until))
            await chaos.load(until)
            await torment
            stats = await llm.stats()
            await llm.check_invariants()
    total = chaos.num_ok + chaos.num_failed + chaos.num_corrupt
    share = chaos.num_ok / max(1, total)
    for event in chaos.events:
        if "request" in event:
            print(event)
    print_json(
        {
            "minutes": args.minutes,
            "requests": total,
            "succeeded": round(share, 5),
            "corrupt": chaos.num_corrupt,
            "failed": chaos.num_failed,
            "faults": sum("SIG" in e for e in chaos.events),
            "latency_p50_s": round(percentile(chaos.latencies, 50), 3),
            "latency_max_s": round(max(chaos.latencies, default=0.0), 3),
            "blocks_held": stats["num_blocks"] - stats["num_free_blocks"],
            "goal": GOAL,
        }
    )
    return 0 if share >= GOAL and not chaos.num_corrupt and stats["num_blocks"] == stats["num_free_blocks"] else 1


def main(argv: list[str] | None = None) -> int:
    parser = OptionParser(prog="launch.py chaos", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=float, default=20.0, help="mean seconds between faults")
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second")
    parser.add_argument("--kinds", type=int, default=24, help="different requests")
    return asyncio.run(run(parser.parse_args(argv)))


if __name__ == "__main__":
    raise SystemExit(main())
