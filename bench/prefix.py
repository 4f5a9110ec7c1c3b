"""`bench prefix`: how much of the prompts the prefix cache gives, against the size of the pool.

Three seeded workloads run through the real engine core with the simulated worker of sim_worker.py, which has no model
but fails on any wrong read. So every figure is exact and repeats on any machine: nothing here reads a clock.

    chat      conversations over a few system prompts; a turn's prompt is all that was said before and a short message
    tree      paths from the root of a random tree to its leaves, in random order: what search and agents send
    systems   long system prompts, several questions to each, arriving interleaved

Each runs under fcfs and lpm, reusing full blocks only and parts of blocks too; figures are sums over several seeds,
because one schedule of a pool that is too small says little. Prints a table, writes a PNG, and ends with one JSON
object. Exits with 1 when a request was overtaken more often than lpm_max_overtakes allows.
"""
from __future__ import annotations

import datetime
import random
import sys
from bisect import bisect_right, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.sim_worker import SimWorker, expected_outputs
from bench.stats import print_json
from engine_core.core import EngineCore
from ipc.config import CacheConfig, SchedulerConfig
from ipc.messages import AddRequest, WorkerReady
from ipc.option_help import OptionParser
from ipc.sampling_params import SamplingParams

VOCAB_SIZE, BLOCK_SIZE, BUDGET, SEATS = 5000, 16, 256, 8
POOLS = (48, 64, 96, 128, 192, 256, 384, 512)
POLICIES = ("fcfs", "lpm")
MAX_STEPS = 100_000
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Turn:
    """One request: sent `delay` steps after the one before it in its conversation ended, or after the start."""
    prompt: list[int]
    max_tokens: int
    delay: int
    after: int = -1                             # index of the turn before it; -1: none


# ------------------------------------------------------------ workloads

def _words(rng: random.Random, low: int, high: int) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(low, high))]


def chat(rng: random.Random, scale: float = 1.0) -> list[Turn]:
    """A turn adds about two blocks, so the last, unfilled one matters. Users read between turns."""
    systems = [_words(rng, 70, 110) for _ in range(4)]
    turns: list[Turn] = []
    for number in range(max(2, round(32 * scale))):
        history = list(systems[rng.randrange(len(systems))])
        after, delay = -1, 3 * number
        for _ in range(6):
            history += _words(rng, 5, 20)
            max_tokens = rng.randint(6, 18)
            turns.append(Turn(list(history), max_tokens, delay, after))
            history += expected_outputs(history, max_tokens, VOCAB_SIZE)    # the model is known: so are the next turns
            after, delay = len(turns) - 1, rng.randint(5, 40)
    return turns


def tree(rng: random.Random, scale: float = 1.0) -> list[Turn]:
    """Three trees of depth 4; every leaf is one request, and all are there from the start."""
    def leaves(path: list[int], depth: int) -> Iterator[list[int]]:
        path = path + _words(rng, 25, 55)
        if depth == 0:
            yield path
            return
        for _ in range(rng.randint(2, 4)):
            yield from leaves(path, depth - 1)
    paths = [path for _ in range(max(1, round(3 * scale))) for path in leaves(_words(rng, 60, 90), 3)]
    rng.shuffle(paths)
    return [Turn(path, rng.randint(4, 12), 0) for path in paths]


def systems(rng: random.Random, scale: float = 1.0) -> list[Turn]:
    """Ten applications, each with its own long system prompt, take turns in sending questions: two new ones a step."""
    prompts = [_words(rng, 180, 260) for _ in range(10)]
    asked = [Turn(prompt + _words(rng, 6, 30), rng.randint(6, 20), 0) for _ in range(max(2, round(14 * scale)))
             for prompt in prompts]
    return [Turn(turn.prompt, turn.max_tokens, index // 2) for index, turn in enumerate(asked)]


WORKLOADS: dict[str, Callable[[random.Random, float], list[Turn]]] = {"chat": chat, "tree": tree, "systems": systems}


def make_workload(name: str, seed: int, scale: float = 1.0) -> list[Turn]:
    return WORKLOADS[name](random.Random(f"{name} {seed}"), scale)


# ------------------------------------------------------------ one run

def run(turns: list[Turn], num_blocks: int, policy: str, is_partial: bool, max_overtakes: int) -> dict[str, Any]:
    """All turns through one engine with an empty cache. Raises RuntimeError when it does not come to an end."""
    scheduler = SchedulerConfig(policy=policy, max_num_seqs=SEATS, max_num_batched_tokens=BUDGET,
                                async_scheduling=False, lpm_max_overtakes=max_overtakes)
    cache = CacheConfig(block_size=BLOCK_SIZE, enable_partial_reuse=is_partial)
    ready = WorkerReady(num_blocks, 0, 1 << 16, VOCAB_SIZE, [], "float32", "simulated")
    core = EngineCore(scheduler, cache, ready, b"bench prefix, a fixed key")
    worker = SimWorker(num_blocks, BLOCK_SIZE, 0, VOCAB_SIZE)
    follower = {turn.after: index for index, turn in enumerate(turns) if turn.after >= 0}
    due: dict[int, list[int]] = {}              # step -> turns sent then
    for index, turn in enumerate(turns):
        if turn.after < 0:
            due.setdefault(turn.delay, []).append(index)
    arrivals: list[int] = []                    # turns in the order in which they were sent
    admitted: list[int] = []                    # and in which they were admitted first
    for now in range(MAX_STEPS):
        for index in due.pop(now, ()):
            prompt = np.array(turns[index].prompt, np.int32).data.cast("B")
            params = SamplingParams(temperature=0.0, max_tokens=turns[index].max_tokens, ignore_eos=True, seed=0)
            core.handle(0, AddRequest(index, prompt, params))
            arrivals.append(index)
        if core.can_plan() and (plan := core.plan()) is not None:
            core.plan_sent(0)
            core.commit(worker.execute(plan))
        for number, outputs in core.take_outputs(0):
            core.outbox.sent(number)
            admitted += [news.request_id for news in outputs.admitted]
            for end in outputs.finished:
                if (index := follower.get(end.request_id, -1)) >= 0:
                    due.setdefault(now + turns[index].delay, []).append(index)
        if not due and not core.requests:
            break
    else:
        raise RuntimeError(f"{policy}, {num_blocks} blocks: {len(core.requests)} requests live after {MAX_STEPS} steps")
    stats = core.scheduler.stats
    return {"hit_tokens": stats.num_hit_tokens, "prompt_tokens": stats.num_queried_tokens,
            "computed_tokens": stats.num_computed_tokens, "copied_tokens": stats.num_copied_tokens,
            "evicted_blocks": core.scheduler.blocks.num_evicted, "preemptions": stats.num_preemptions,
            "steps": stats.num_steps, "max_overtakes": max_overtakes_of(arrivals, admitted)}


def max_overtakes_of(arrivals: list[int], admitted: list[int]) -> int:
    """The most later arrivals that were first admitted before any one request: from outside, not the core's counter."""
    place = {index: number for number, index in enumerate(arrivals)}
    before: list[int] = []                      # places of those admitted so far, sorted
    worst = 0
    for index in admitted:
        worst = max(worst, len(before) - bisect_right(before, place[index]))
        insort(before, place[index])
    return worst


# ------------------------------------------------------------ all runs

def add_up(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums over seeds; of the overtakes the maximum."""
    total = {name: sum(run[name] for run in runs) for name in runs[0]}
    total["max_overtakes"] = max(run["max_overtakes"] for run in runs)
    return {"hit_rate": round(total["hit_tokens"] / total["prompt_tokens"], 4), **total}


def sweep(names: list[str], pools: list[int], seeds: range, max_overtakes: int,
          scale: float = 1.0) -> list[dict[str, Any]]:
    """One row per workload, pool, policy and kind of reuse; printed as they come."""
    columns = {"hit_rate": 9, "computed_tokens": 16, "copied_tokens": 14, "evicted_blocks": 15, "preemptions": 12,
               "steps": 7, "max_overtakes": 14}
    print(f"{'workload':<9}{'blocks':>7} {'policy':<7}{'reuse':<8}" + "".join(f"{c:>{w}}" for c, w in columns.items()))
    rows = []
    for name in names:
        workloads = [make_workload(name, seed, scale) for seed in seeds]
        for num_blocks in pools:
            for policy in POLICIES:
                for reuse in ("full", "partial"):
                    figures = add_up([run(turns, num_blocks, policy, reuse == "partial", max_overtakes)
                                      for turns in workloads])
                    rows.append({"workload": name, "blocks": num_blocks, "policy": policy, "reuse": reuse, **figures})
                    print(f"{name:<9}{num_blocks:>7} {policy:<7}{reuse:<8}"
                          + "".join(f"{figures[c]:>{w}}" for c, w in columns.items()), flush=True)
    return rows


def summarize(rows: list[dict[str, Any]], max_overtakes: int) -> dict[str, Any]:
    """Series by workload, and the gains: hit rate of lpm over fcfs (points), and share of all computed tokens that
    partial reuse saves, each where it is largest and where it is smallest."""
    result: dict[str, Any] = {"bench": "prefix", "block_size": BLOCK_SIZE, "workloads": {}}
    for name in dict.fromkeys(row["workload"] for row in rows):
        mine = [row for row in rows if row["workload"] == name]
        by_kind = {f"{policy}/{reuse}": [row for row in mine if (row["policy"], row["reuse"]) == (policy, reuse)]
                   for policy in POLICIES for reuse in ("full", "partial")}
        fcfs, lpm, whole = by_kind["fcfs/partial"], by_kind["lpm/partial"], by_kind["fcfs/full"]
        result["workloads"][name] = {
            "blocks": [row["blocks"] for row in fcfs],
            "prompt_tokens": fcfs[0]["prompt_tokens"],
            "hit_rate": {kind: [row["hit_rate"] for row in some] for kind, some in by_kind.items()},
            "computed_tokens": {kind: [row["computed_tokens"] for row in some] for kind, some in by_kind.items()},
            "max_overtakes": max(row["max_overtakes"] for row in mine),
            "lpm_gain": _range(b["hit_rate"] - a["hit_rate"] for a, b in zip(fcfs, lpm)),
            "partial_gain": _range(1 - b["computed_tokens"] / a["computed_tokens"] for a, b in zip(whole, fcfs))}
    worst = max(row["max_overtakes"] for row in rows)
    return result | {"max_overtakes": worst, "lpm_max_overtakes": max_overtakes, "bound_holds": worst <= max_overtakes}


def _range(gains: Iterator[float]) -> dict[str, float]:
    values = [round(gain, 4) for gain in gains]
    return {"max": max(values), "min": min(values)}


def plot(result: dict[str, Any], file: Path) -> None:
    """One panel per workload: hit rate against pool size. Raises ModuleNotFoundError without matplotlib."""
    from matplotlib.figure import Figure
    names = list(result["workloads"])
    figure = Figure(figsize=(4.6 * len(names), 4.2), layout="constrained")
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    for panel, name in zip(panels, names):
        series = result["workloads"][name]
        for kind, rates in series["hit_rate"].items():
            policy, reuse = kind.split("/")
            panel.plot(series["blocks"], [100 * rate for rate in rates], label=f"{policy}, {reuse} blocks", marker=".",
                       color="tab:blue" if policy == "fcfs" else "tab:orange",
                       linestyle="-" if reuse == "partial" else "--")
        panel.set_xscale("log", base=2)
        panel.set_xticks(series["blocks"], [str(b) for b in series["blocks"]], rotation=45)
        panel.minorticks_off()
        panel.set_title(name)
        panel.set_xlabel(f"pool, blocks of {result['block_size']} tokens")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("prompt tokens from the cache, %")
    panels[0].set_ylim(0, 100)
    panels[-1].legend(loc="lower right")
    figure.savefig(file, dpi=110)


def main(argv: list[str] | None = None) -> int:
    parser = OptionParser(prog="launch.py bench prefix", description="Prefix cache hit rate against pool size.")
    parser.add_argument("--workload", action="append", choices=list(WORKLOADS), help="repeatable; default: all")
    parser.add_argument("--blocks", type=int, nargs="+", default=list(POOLS), help="pool sizes in blocks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeat", type=int, default=4, help="workloads of so many seeds from --seed on; default 4")
    parser.add_argument("--scale", type=float, default=1.0, help="number of requests, as a multiple of the default")
    parser.add_argument("--lpm-max-overtakes", type=int, default=SchedulerConfig().lpm_max_overtakes)
    parser.add_argument("--plot", metavar="FILE",
                        help="PNG to write; none: no plot. Default: bench/results/prefix_DATE.png")
    parser.add_argument("--json", metavar="FILE", help="also write the JSON object there")
    args = parser.parse_args(argv)
    rows = sweep(args.workload or list(WORKLOADS), sorted(args.blocks), range(args.seed, args.seed + args.repeat),
                 args.lpm_max_overtakes, args.scale)
    result = summarize(rows, args.lpm_max_overtakes)
    code = 0 if result["bound_holds"] else 1
    if args.plot != "none":
        file = Path(args.plot) if args.plot else RESULTS / f"prefix_{datetime.date.today().isoformat()}.png"
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            plot(result, file)
            print(f"plot: {file}", file=sys.stderr)
        except ModuleNotFoundError as error:
            package = str(error.name).split(".")[0]
            print(f"bench prefix: no plot, the package {package} is missing; run: python launch.py setup --extra test, "
                  "or pass --plot none", file=sys.stderr)
            code = code or int(args.plot is not None)
    print_json(result, args.json)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
