"""Hostile grammars: how soon each is answered, and what the streams of others notice.

    python launch.py bench grammars [--streams 8] [--step-ms 20] [--seconds 30]

A real engine with a tiny model, whose worker sleeps a step's time in place of computing it, so that the figure shows
interference and not two busy cores. Streams run first alone, then while every hostile grammar is sent, one after the
other; in turns, so that the machine's other work meets both. A grammar that the library can follow is accepted,
whatever it looks like. Prints the slowest answers and one JSON object last; status 1 if one took more than 2.5 s or
failed.
"""
from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.hostile_grammars import hostile, sized
from bench.tiny_model import write_tiny_model
from frontend import AsyncLLM, SamplingParams
from ipc.errors import RequestError

LIMIT_S = 2.5
MAX_RISE = 0.10
TURNS = 4


def sleep_a_step(prompt: np.ndarray, output: np.ndarray, logits: Any) -> None:
    """A logits processor, named by one stream only, so once a step. The prompt's first token says for how many ms."""
    time.sleep(int(prompt[0]) / 1000)


class Streams:
    """Endless ones, and the gaps between their tokens while `is_measured`."""

    def __init__(self, llm: AsyncLLM, step_ms: int) -> None:
        self.llm, self.step_ms = llm, step_ms
        self.gaps: list[float] = []
        self.is_measured = False

    async def run(self, seed: int) -> None:
        params = SamplingParams(max_tokens=3000, ignore_eos=True, seed=seed,
                                logits_processors=[] if seed else ["sleep"])
        while True:
            before = None
            async for _ in self.llm.generate([self.step_ms, seed % 200 + 1], params, output_kind="delta"):
                now = time.monotonic()
                if before is not None and self.is_measured:
                    self.gaps.append(now - before)
                before = now

    def take(self) -> list[float]:
        """The gaps since the last call."""
        gaps, self.gaps = self.gaps, []
        return gaps


async def answer(llm: AsyncLLM, form: dict[str, str]) -> tuple[float, str]:
    """(seconds, what came): refused, accepted or the failure."""
    began = time.monotonic()
    try:
        spec = sized(form)
        if isinstance(spec, str):
            return time.monotonic() - began, "refused"
        async for _ in llm.generate("x", SamplingParams(max_tokens=1, structured_outputs=spec)):
            pass
        what = "accepted"
    except RequestError:
        what = "refused"
    except Exception as error:
        what = f"failed: {type(error).__name__}: {error}"
    return time.monotonic() - began, what


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The whole run."""
    forms = hostile()[:args.count]
    answers: dict[str, tuple[float, str]] = {}
    calm: list[float] = []
    under_fire: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        async with AsyncLLM(model=write_tiny_model(Path(folder)), max_num_seqs=args.streams + 4,
                            logits_processor=["sleep=bench.grammars:sleep_a_step"]) as llm:
            await answer(llm, {"regex": "warm"})
            streams = Streams(llm, args.step_ms)
            tasks = [asyncio.create_task(streams.run(seed)) for seed in range(args.streams)]
            await asyncio.sleep(2.0)
            for turn in range(TURNS):
                streams.is_measured = True
                await asyncio.sleep(args.seconds / TURNS)
                calm += streams.take()
                for name, form in forms[turn::TURNS]:
                    answers[name] = await answer(llm, form)
                under_fire += streams.take()
                streams.is_measured = False
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return report(answers, calm, under_fire)


def report(answers: dict[str, tuple[float, str]], calm: list[float], under_fire: list[float]) -> dict[str, Any]:
    """Print the slowest; the figures."""
    for name, (seconds, what) in sorted(answers.items(), key=lambda item: -item[1][0])[:10]:
        print(f"{name:40} {seconds:6.2f} s  {what}")
    outcomes = [what for _, what in answers.values()]
    slowest = max(seconds for seconds, _ in answers.values())
    before, during = (1000 * float(np.percentile(gaps, 99)) for gaps in (calm, under_fire))
    return {"benchmark": "grammars", "num_grammars": len(answers), "num_refused": outcomes.count("refused"),
            "num_harmless": outcomes.count("accepted"), "slowest_s": round(slowest, 2), "limit_s": LIMIT_S,
            "num_failed": len(outcomes) - outcomes.count("refused") - outcomes.count("accepted"),
            "itl_p99_ms_calm": round(before, 2), "itl_p99_ms_under_fire": round(during, 2),
            "itl_p50_ms": [round(1000 * float(np.median(gaps)), 2) for gaps in (calm, under_fire)],
            "itl_p99_rise": round(during / before - 1, 3), "max_rise": MAX_RISE}


def main(argv: list[str] | None = None) -> int:
    """Run and judge."""
    parser = argparse.ArgumentParser(prog="launch.py bench grammars", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--step-ms", type=int, default=20, help="what a step of the worker takes")
    parser.add_argument("--seconds", type=float, default=30.0, help="of calm, in all")
    parser.add_argument("--count", type=int, default=1000, help="only so many grammars")
    found = asyncio.run(measure(parser.parse_args(argv)))
    print(json.dumps(found))
    return int(found["slowest_s"] > LIMIT_S or found["num_failed"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
