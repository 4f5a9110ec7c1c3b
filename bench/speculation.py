"""`bench speculation`: drafts on and off, on texts that repeat their prompt and on texts that do not.

Each engine answers the same prompts greedily, in turns over `--repeat` rounds; the answers must be the same tokens.
Printed per kind of text and number of requests at once: tokens a second, steps, how many drafts were right. One JSON
object last. Knows only the public Python API.
"""

from __future__ import annotations

import time
from typing import Any

from bench.stats import median, print_json
from frontend import LLM, SamplingParams
from ipc.option_help import OptionParser

CODE = "def {0}(a, b):\n    if a is None:\n        return b\n    return a {1} b\n\n"
FUNCTIONS = "".join(CODE.format(name, sign) for name, sign in (("add", "+"), ("sub", "-"), ("mul", "*"), ("div", "/")))


def prompts(kind: str, count: int) -> list[str]:
    if kind == "copy":
        return [f"# file {i}\n{FUNCTIONS}# the same functions again, file {i}\n" for i in range(count)]
    subjects = ("rivers", "the moon", "bread", "music", "winter", "trains", "glass", "bees")
    return [f"A short essay about {subjects[i % len(subjects)]}, part {i}.\n\n" for i in range(count)]


def once(llm: LLM, texts: list[str], output_len: int) -> tuple[float, list[list[int]], dict[str, int]]:
    """(seconds, tokens of each answer, what the counters rose by)."""
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    names = ("num_steps", "num_draft_tokens", "num_accepted_tokens")
    before = llm.stats()
    began = time.perf_counter()
    answers = llm.generate(texts, params, use_tqdm=False)
    took = time.perf_counter() - began
    after = llm.stats()
    tokens = [list(answer.outputs[0].token_ids) for answer in answers]
    return took, tokens, {name: after[name] - before[name] for name in names}


def main(argv: list[str] | None = None) -> int:
    parser = OptionParser(prog="launch.py bench speculation", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--output-len", type=int, default=96)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args(argv)
    drafts = args.num_speculative_tokens
    loads = [(kind, count) for kind in ("copy", "essay") for count in args.concurrency]
    times: dict[tuple[str, int, int], list[float]] = {}
    answers: dict[tuple[str, int, int], list[list[int]]] = {}
    counts: dict[tuple[str, int, int], dict[str, int]] = {}
    with (
        LLM(args.model, log_level="warning") as plain,
        LLM(args.model, num_speculative_tokens=drafts, log_level="warning") as drafting,
    ):
        for round_ in range(args.repeat + 1):  # the first warms up
            for kind, count in loads:
                for num, llm in ((0, plain), (drafts, drafting)):
                    key = kind, count, num
                    took, answers[key], counts[key] = once(llm, prompts(kind, count), args.output_len)
                    if round_:
                        times.setdefault(key, []).append(took)
    result: dict[str, Any] = {"num_speculative_tokens": drafts, "loads": []}
    for kind, count in loads:
        without, with_ = (kind, count, 0), (kind, count, drafts)
        seen = counts[with_]
        row = {
            "text": kind,
            "concurrency": count,
            "tok_s": round(count * args.output_len / median(times[without]), 1),
            "tok_s_drafts": round(count * args.output_len / median(times[with_]), 1),
            "ratio": round(median(times[without]) / median(times[with_]), 2),
            "steps": counts[without]["num_steps"],
            "steps_drafts": seen["num_steps"],
            "accepted": round(seen["num_accepted_tokens"] / max(1, seen["num_draft_tokens"]), 2),
            "same_tokens": answers[without] == answers[with_],
        }
        result["loads"].append(row)
        print(
            f"{kind:>6} x {count:<3} {row['tok_s']:8} tok/s, with drafts {row['tok_s_drafts']:8} ({row['ratio']}x), "
            f"steps {row['steps']} -> {row['steps_drafts']}, {row['accepted']:.0%} of the drafts right, "
            f"{'the same tokens' if row['same_tokens'] else 'OTHER TOKENS'}"
        )
    print_json(result)
    return 0 if all(row["same_tokens"] for row in result["loads"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
