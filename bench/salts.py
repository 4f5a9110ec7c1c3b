"""`python launch.py bench salts`: can a client tell by timing what another client has sent?

A victim sends prompts under one salt, as each API key has. A guesser with another salt times the first token of those
same prompts and of fresh ones, on an idle engine, in random order. The area under the ROC curve of the guess "fast
means seen before" must be that of a coin; with the victim's own salt it shows that a hit can be seen at all.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.stats import print_json
from bench.tiny_model import write_tiny_model
from frontend import AsyncLLM, SamplingParams
from ipc.option_help import OptionParser

PROMPT_TOKENS = 240
GOAL = (0.45, 0.55)
OPTIONS: dict[str, Any] = dict(num_gpu_blocks_override=2048, attention_backend="cpu", num_threads=1, log_level="error")


def auc(fast: list[float], slow: list[float]) -> float:
    """Probability that one of `fast` is below one of `slow` (ties count half): the Mann-Whitney statistic."""
    ranked = sorted([(value, 0) for value in fast] + [(value, 1) for value in slow])
    below = 0.0
    num_fast = 0
    for _, is_slow in ranked:
        if is_slow:
            below += num_fast
        else:
            num_fast += 1
    return below / (len(fast) * len(slow))


async def first_token_s(llm: AsyncLLM, prompt: list[int], salt: str) -> float:
    begin = time.perf_counter()
    async for _ in llm.generate(prompt, SamplingParams(max_tokens=1, temperature=0), cache_salt=salt):
        return time.perf_counter() - begin
    raise RuntimeError("no output")


async def measure(llm: AsyncLLM, num_pairs: int, guesser: str, rng: random.Random) -> float:
    seen: list[float] = []
    fresh: list[float] = []
    for _ in range(num_pairs):
        victims, other = ([rng.randrange(1, 250) for _ in range(PROMPT_TOKENS)] for _ in range(2))
        await first_token_s(llm, victims, "victim")
        for is_seen in rng.sample((True, False), 2):
            seconds = await first_token_s(llm, victims if is_seen else other, guesser)
            (seen if is_seen else fresh).append(seconds)
    return auc(seen, fresh)


async def run(args: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="tf") as folder:
        async with AsyncLLM(write_tiny_model(Path(folder)), **OPTIONS) as llm:
            rng = random.Random(args.seed)
            await measure(llm, 10, "guesser", rng)
            across = await measure(llm, args.pairs, "guesser", rng)
            within = await measure(llm, max(20, args.pairs // 10), "victim", rng)
    print_json({"pairs": args.pairs, "auc_across_salts": round(across, 3), "auc_within_a_salt": round(within, 3),
                "goal": GOAL})
    return 0 if GOAL[0] <= across <= GOAL[1] else 1


def main(argv: list[str] | None = None) -> int:
    parser = OptionParser(prog="launch.py bench salts", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.pairs < 10:
        parser.error("--pairs must be at least 10")
    return asyncio.run(run(args))


if __name__ == "__main__":
    raise SystemExit(main())
