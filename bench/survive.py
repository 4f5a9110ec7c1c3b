"""`python launch.py bench survive`: kill or stop processes under 32 streams and check every token.

A tiny model with `--batch-invariant` serves 32 streams, greedy and seeded; at random moments the core or the worker is
killed (SIGKILL) or stopped (SIGSTOP). Measured per fault: when `/ready` turned to no, when the next token arrived, and
how many tokens were computed again. Every stream must equal the same request undisturbed. An engine takes four faults,
then a new one is started, for the supervisor allows five restarts a minute. `--host N` kills the process that embeds
the engine, or its supervisor, in every phase of its life, and looks for what is left after two seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.stats import percentile, print_json
from bench.survive_host import kill_hosts
from bench.tiny_model import write_tiny_model
from frontend import AsyncLLM, SamplingParams
from ipc.option_help import OptionParser

NUM_STREAMS, NUM_TOKENS, FAULTS_PER_ENGINE = 32, 250, 4
OPTIONS: dict[str, Any] = dict(num_gpu_blocks_override=1024, batch_invariant=True, num_threads=1,
                               log_level="error", max_num_seqs=NUM_STREAMS)
GOALS_S = {"kill": (1.0, 5.0), "stop": (5.0, 15.0)}  # noticed, serving again


def request(number: int) -> tuple[list[int], SamplingParams]:
    prompt = [1 + (number * 7 + i * 3) % 250 for i in range(4 + number)]
    return prompt, SamplingParams(temperature=0.0 if number % 2 else 0.9, seed=number, max_tokens=NUM_TOKENS,
                                  ignore_eos=True)


class Streams:
    """The load: all requests at once, again and again; what is received is compared with what was received before."""

    def __init__(self, llm: AsyncLLM) -> None:
        self.llm = llm
        self.whole: dict[int, list[int]] = {}
        self.num_tokens = self.num_ended = 0
        self.wrong: list[str] = []
        self.last_token_s = 0.0
        self._tasks: list[asyncio.Task[None]] = []

    async def learn(self) -> None:
        for number, tokens in enumerate(await asyncio.gather(*(self._one(n) for n in range(NUM_STREAMS)))):
            self.whole[number] = tokens

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._repeat(n)) for n in range(NUM_STREAMS)]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _one(self, number: int) -> list[int]:
        tokens: list[int] = []
        prompt, params = request(number)
        async for output in self.llm.generate(prompt, params, output_kind="delta"):
            tokens += output.outputs[0].token_ids
            self.num_tokens += 1
            self.last_token_s = time.monotonic()
        return tokens

    async def _repeat(self, number: int) -> None:
        while True:
            try:
                tokens = await self._one(number)
            except Exception as error:
                self.wrong.append(f"stream {number}: {type(error).__name__}: {error}")
                await asyncio.sleep(0.1)
                continue
            self.num_ended += 1
            if tokens != self.whole[number]:
                self.wrong.append(f"stream {number} differs: {len(tokens)} tokens of {len(self.whole[number])}")


async def one_fault(llm: AsyncLLM, streams: Streams, index: int, number: signal.Signals) -> dict[str, float]:
    """Kill or stop process `index` of the engine now. Seconds until it was noticed and until tokens came again."""
    pid, begin = llm.pids[index], time.monotonic()
    os.kill(pid, number)
    noticed = 0.0
    while True:
        await asyncio.sleep(0.005)
        now = time.monotonic()
        if now - begin > 60:
            raise TimeoutError(f"no token within 60 s after {number.name} of process {index}")
        is_replaced = llm.pids[index] != pid
        if not noticed and (is_replaced or not llm.status()["ready"]):
            noticed = now - begin
        if noticed and is_replaced and llm.status()["ready"] and streams.last_token_s > begin + noticed:
            return {"noticed_s": noticed, "serving_s": streams.last_token_s - begin}


async def faults(model: str, index: int, number: signal.Signals, count: int, rng: random.Random) -> dict[str, Any]:
    results: list[dict[str, float]] = []
    wrong: list[str] = []
    num_ended = num_replayed = num_kept = 0
    while len(results) < count:
        async with AsyncLLM(model, **OPTIONS) as llm:
            streams = Streams(llm)
            await streams.learn()
            streams.start()
            for _ in range(min(FAULTS_PER_ENGINE, count - len(results))):
                await asyncio.sleep(rng.uniform(0.2, 2.0))
                results.append(await one_fault(llm, streams, index, number))
                stats = await llm.stats()
                num_replayed += stats["num_replayed_tokens"]
                num_kept += stats["num_replayed_hit_tokens"]
            goal = streams.num_ended + 2 * NUM_STREAMS  # all that were running have ended
            while streams.num_ended < goal:
                await asyncio.sleep(0.01)
            await streams.stop()
            await llm.check_invariants()
            wrong += streams.wrong
            num_ended += streams.num_ended
    noticed, serving = [r["noticed_s"] for r in results], [r["serving_s"] for r in results]
    return {"faults": count, "noticed_max_s": round(max(noticed), 2),
            "serving_p50_s": round(percentile(serving, 50), 2), "serving_max_s": round(max(serving), 2),
            "streams_ended": num_ended, "wrong": wrong, "replayed_tokens": num_replayed,
            "computed_again": num_replayed - num_kept}


async def run(args: argparse.Namespace, folder: str) -> int:
    (Path(folder) / "tiny").mkdir()
    model = write_tiny_model(Path(folder) / "tiny")
    rng = random.Random(args.seed)
    result: dict[str, Any] = {}
    for name, index, number, count in (("kill core", 2, signal.SIGKILL, args.core),
                                       ("kill worker", 1, signal.SIGKILL, args.worker),
                                       ("stop core", 2, signal.SIGSTOP, args.stop),
                                       ("stop worker", 1, signal.SIGSTOP, args.stop)):
        if count:
            result[name] = await faults(model, index, number, count, rng)
            print(f"{name}: {result[name]}", flush=True)
    if args.host:
        result["kill host"] = await kill_hosts(model, folder, args.host, rng)
        print(f"kill host: {result['kill host']}", flush=True)
    print_json(result)
    missed = [name for name, one in result.items() if one.get("wrong") or one.get("left")]
    for name, one in result.items():
        if name != "kill host":
            noticed, serving = GOALS_S[name.split()[0]]
            missed += [name] if one["noticed_max_s"] > noticed or one["serving_max_s"] > serving else []
    return 1 if missed else 0


def main(argv: list[str] | None = None) -> int:
    parser = OptionParser(prog="launch.py bench survive", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--core", type=int, default=50, help="kills of the core")
    parser.add_argument("--worker", type=int, default=50, help="kills of the worker")
    parser.add_argument("--stop", type=int, default=20, help="SIGSTOPs of each")
    parser.add_argument("--host", type=int, default=100, help="kills of the host or the supervisor")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if min(args.core, args.worker, args.stop, args.host) < 0:
        parser.error("--core, --worker, --stop and --host must not be below 0")
    with tempfile.TemporaryDirectory(prefix="tf") as folder, contextlib.suppress(KeyboardInterrupt):
        return asyncio.run(run(args, folder))
    return 130


if __name__ == "__main__":
    raise SystemExit(main())
