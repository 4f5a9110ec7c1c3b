"""Hostile grammars: how soon each is answered, and what the streams of others notice.

    python launch.py bench grammars [--streams 8] [--step-ms 20] [--seconds 30] [--rounds 8]

A real engine with a tiny model, whose worker sleeps a step's time in place of computing it, so that the figure shows
interference and not two busy cores. Streams run first alone, then while every hostile grammar is sent, one after the
other, each a millisecond after the answer to the last, then every one that only looks hostile; in rounds, so that the
machine's other work meets all three and each has about as many steps: the p99 of a few hundred is a matter of luck. A
list that is through before its share of a round is over begins anew. Each time the grammars are written a little
differently, so that none is remembered. Those that only look hostile may be accepted; of each one token is asked.
Prints the slowest answers and one JSON object last; status 1 if a hostile one is accepted, one of either took more than
2.5 s or failed, or the p99 gap of the streams rises by more than 10 %.
"""
from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.hostile_grammars import Form, Named, harmless, hostile, sized
from bench.sleeping_engine import sleeping_engine
from bench.tiny_model import write_tiny_model
from frontend import AsyncLLM, SamplingParams
from ipc.errors import OverloadedError, RequestError
from ipc.option_help import OptionParser

LIMIT_S = 2.5
MAX_RISE = 0.10
TURN_S = 0.001                                  # from an answer to the next request, which comes by a socket in life
Answers = dict[str, tuple[float, str]]


class Streams:
    """Endless ones, and the gaps between their tokens while `is_measured`."""

    def __init__(self, llm: AsyncLLM) -> None:
        self.llm = llm
        self.gaps: list[float] = []
        self.is_measured = False

    async def run(self, seed: int) -> None:
        params = SamplingParams(max_tokens=3000, ignore_eos=True, seed=seed)
        while True:
            before = None
            async for _ in self.llm.generate([1, seed % 200 + 1], params, output_kind="delta"):
                now = time.monotonic()
                if before is not None and self.is_measured:
                    self.gaps.append(now - before)
                before = now

    def take(self) -> list[float]:
        """The gaps since the last call."""
        gaps, self.gaps = self.gaps, []
        return gaps


async def answer(llm: AsyncLLM, form: Form) -> tuple[float, str]:
    """(seconds, what came): refused, accepted or the failure."""
    began = time.monotonic()
    try:
        spec = sized(form)
        if isinstance(spec, str):
            return time.monotonic() - began, "refused"
        async for _ in llm.generate("x", SamplingParams(max_tokens=1, structured_outputs=spec)):
            pass
        what = "accepted"
    except (RequestError, OverloadedError):
        what = "refused"
    except Exception as error:
        what = f"failed: {type(error).__name__}: {error}"
    return time.monotonic() - began, what


def variant(form: Form, number: int) -> Form:
    """The same grammar in other letters: blanks behind texts, groups around a regex."""
    (kind, text), = form.items()
    if not isinstance(text, str) or not number:
        return form
    return {kind: "(?:" * number + text + ")" * number if kind == "regex" else text + " " * number}


async def answer_all(llm: AsyncLLM, forms: list[Named], numbers: Iterator[int], seconds: float,
                     answers: Answers) -> None:
    """One after the other, once or for `seconds` at least. The slowest answer to each stays."""
    end = time.monotonic() + seconds
    while True:
        number = next(numbers)
        for name, form in forms:
            await asyncio.sleep(TURN_S)
            found = await answer(llm, variant(form, number))
            answers[name] = max(answers.get(name, found), found, key=lambda one: one[0])
        if time.monotonic() >= end:
            return


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The whole run."""
    lists = {"hostile": hostile()[:args.count], "harmless": harmless()[:args.count]}
    answers: dict[str, Answers] = {name: {} for name in lists}
    gaps: dict[str, list[float]] = {"calm": [], **{name: [] for name in lists}}
    with tempfile.TemporaryDirectory() as folder, sleeping_engine(args.step_ms):
        async with AsyncLLM(model=write_tiny_model(Path(folder)), max_num_seqs=args.streams + 4,
                            batch_invariant=True) as llm:   # waits for the kernels: none is compiled beside the streams
            await answer(llm, {"regex": "warm"})
            streams = Streams(llm)
            tasks = [asyncio.create_task(streams.run(seed)) for seed in range(args.streams)]
            await asyncio.sleep(2.0)
            streams.is_measured = True
            numbers = {name: itertools.count() for name in lists}
            for _ in range(args.rounds):
                streams.take()
                await asyncio.sleep(args.seconds / args.rounds)
                gaps["calm"] += streams.take()
                for name, forms in lists.items():
                    await answer_all(llm, forms, numbers[name], args.seconds / args.rounds, answers[name])
                    gaps[name] += streams.take()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return report(answers, {name: [1000 * gap for gap in found] for name, found in gaps.items()})


def report(answers: dict[str, Answers], gaps_ms: dict[str, list[float]]) -> dict[str, Any]:
    """Print the slowest, and hostile ones that were accepted; the figures."""
    p50, p99, longest = ({name: round(float(np.percentile(found, q)), 2) for name, found in gaps_ms.items()}
                         for q in (50, 99, 100))
    result: dict[str, Any] = {"benchmark": "grammars", "limit_s": LIMIT_S, "max_rise": MAX_RISE, "itl_p50_ms": p50,
                              "itl_p99_ms": p99, "itl_max_ms": longest,
                              "num_gaps": {name: len(found) for name, found in gaps_ms.items()}}
    for kind, found in answers.items():
        for name, (seconds, what) in sorted(found.items(), key=lambda item: -item[1][0])[:8]:
            print(f"{kind:8} {name[:50]:50} {seconds:6.2f} s  {what}")
        outcomes = [what for _, what in found.values()]
        accepted = [name for name, (_, what) in found.items() if what == "accepted"]
        result[kind] = {"num": len(found), "num_refused": outcomes.count("refused"), "num_accepted": len(accepted),
                        "num_failed": len(outcomes) - outcomes.count("refused") - len(accepted),
                        "slowest_s": round(max(seconds for seconds, _ in found.values()), 2),
                        "itl_p99_rise": round(p99[kind] / p99["calm"] - 1, 3)}
        if kind == "hostile":
            for name in accepted:
                print(f"ACCEPTED {name}")
    return result


def main(argv: list[str] | None = None) -> int:
    """Run and judge."""
    parser = OptionParser(prog="launch.py bench grammars", description=__doc__,
                          formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--step-ms", type=int, default=20, help="what a step of the worker takes")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each kind, in all")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--count", type=int, default=1000, help="only so many grammars of each list")
    found = asyncio.run(measure(parser.parse_args(argv)))
    print(json.dumps(found))
    both = [found["hostile"], found["harmless"]]
    return int(both[0]["num_accepted"] > 0 or any(
        kind["slowest_s"] > LIMIT_S or kind["num_failed"] or kind["itl_p99_rise"] > MAX_RISE for kind in both))


if __name__ == "__main__":
    raise SystemExit(main())
