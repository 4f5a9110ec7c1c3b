"""Throughput of LLM.generate, without HTTP: `python launch.py bench offline --model MODEL --num-prompts 64`.

All prompts are handed over at once, as a program with a list of them does; the engine batches. Prints vLLM's throughput
line and ends with one JSON object. Every option of an engine may be given. Knows only the public Python API.
"""

import random
import sys
import time
from typing import Any

from bench.compare import MIN_REPEATS, RATES, compare_results, read_result
from bench.stats import output_file, print_json, summary
from frontend import LLM, SamplingParams
from ipc.cli import make_parser, read_options
from ipc.errors import ConfigError, EngineDeadError, RequestError
from ipc.option_help import OptionParser

SHAPE = ("input_len", "output_len", "prefix_len")


def make_bench_parser(name: str, description: str) -> tuple[OptionParser, Any]:
    """(an engine's parser, the group for the benchmark's own options)."""
    parser = make_parser(f"launch.py bench {name}", is_server=False, description=description)
    parser.own_groups.add(name)
    group = parser.add_argument_group(name)
    add = group.add_argument
    add("--dataset-name", choices=["random"], default="random", help="prompts are random tokens")
    add("--input-len", "--random-input-len", type=int, default=256, metavar="N", help="prompt tokens (default: 256)")
    add("--output-len", "--random-output-len", type=int, default=128, metavar="N", help="output tokens (default: 128)")
    add("--prefix-len", "--random-prefix-len", type=int, default=0, metavar="N", help="tokens in front that all share")
    add("--bench-seed", type=int, default=0, metavar="N", help="the same seed draws the same prompts")
    add("--json", "--output-json", type=output_file, metavar="FILE", help="write the JSON object there too")
    add("--compare", metavar="FILE", help="an earlier result: say what changed by more than noise")
    return parser, group


def parse_bench(parser: OptionParser, argv: list[str] | None) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """(model, engine options, own options). Raises ConfigError; exits with 2 for a bad command line."""
    model, options = read_options(parser, sys.argv[1:] if argv is None else argv)
    if model is None:
        parser.error("name one model: --model smollm2-135m")
    for name, least in (("input_len", 1), ("output_len", 1), ("prefix_len", 0)):
        if options[name] < least:
            parser.error(f"--{name.replace('_', '-')} is {options[name]}; it must be at least {least}")
    engine = {name: options.pop(name) for name in list(options) if name in parser.engine_options}
    engine.setdefault("log_level", "warning")
    return model, engine, options


def old_result(own: dict[str, Any]) -> dict[str, Any] | None:
    """Of --compare, read before anything is measured. Raises ConfigError."""
    try:
        return read_result(own["compare"]) if own.get("compare") else None
    except ValueError as error:
        raise ConfigError(str(error)) from None


def random_prompts(own: dict[str, Any], count: int, num_tokens: int) -> list[list[int]]:
    """`count` prompts of ids below num_tokens; the first prefix_len are the same in all."""
    generator = random.Random(own["bench_seed"])

    def draw(length: int) -> list[int]:
        return [generator.randrange(num_tokens) for _ in range(length)]

    prefix = draw(own["prefix_len"])
    return [prefix + draw(own["input_len"]) for _ in range(count)]


def report_failure(name: str, error: Exception, file: str | None) -> int:
    """One line and still a JSON object; the exit status: 3 if an engine died, 1 if none came up, 2 for our caller."""
    print(f"bench {name}: {error}", file=sys.stderr)
    print_json({"error": str(error)}, file)
    return 2 if isinstance(error, RequestError) else 1 if isinstance(error, ConfigError) else 3


def run(model: str, engine: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Start, warm up, generate everything `num_iters` times: the figures of the median run."""
    began = time.monotonic()
    with LLM(model, **engine) as llm:
        start_s = time.monotonic() - began
        num_tokens = llm.tokenizer.num_tokens
        params = SamplingParams(temperature=0, max_tokens=own["output_len"], ignore_eos=True)
        warm_up = random_prompts({**own, "bench_seed": own["bench_seed"] - 1}, min(4, own["num_prompts"]), num_tokens)
        llm.generate(warm_up, params.replace(max_tokens=min(8, own["output_len"])), use_tqdm=False)
        elapsed, outputs = [], []
        for number in range(own["num_iters"]):
            seeded = {**own, "bench_seed": own["bench_seed"] + 1000 * number}      # nothing of a run before is cached
            prompts = random_prompts(seeded, own["num_prompts"], num_tokens)
            began = time.monotonic()
            outputs = llm.generate(prompts, params, use_tqdm=sys.stderr.isatty())
            elapsed.append(time.monotonic() - began)
        stats = llm.stats()
    middle = sorted(elapsed)[len(elapsed) // 2]
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    spread = (max(elapsed) - min(elapsed)) / 2 / middle
    load = {"concurrency": own["num_prompts"], "model": model, **{name: own[name] for name in SHAPE}}
    return {
        "load": load, "num_repeats": len(elapsed), "noise": dict.fromkeys(RATES[:3], round(spread, 4)),
        "model": model, "num_prompts": own["num_prompts"], "input_len": own["prefix_len"] + own["input_len"],
        "output_len": own["output_len"], "start_s": round(start_s, 2), "elapsed_s": round(middle, 4),
        "elapsed_runs_s": [round(seconds, 4) for seconds in elapsed], "prompt_tokens": num_prompt,
        "output_tokens": num_output, "request_s": round(own["num_prompts"] / middle, 4),
        "output_tok_s": round(num_output / middle, 2), "total_tok_s": round((num_prompt + num_output) / middle, 2),
        "cached_tokens": sum(output.num_cached_tokens for output in outputs),
        "spread": summary(elapsed), "num_blocks": stats.get("num_blocks"),
    }


def main(argv: list[str] | None = None) -> int:
    """0, or as report_failure says."""
    parser, group = make_bench_parser("offline", "Throughput of LLM.generate on random prompts.")
    group.add_argument("--num-prompts", type=int, default=32, metavar="N", help="prompts, all at once (default: 32)")
    group.add_argument("--num-iters", type=int, default=1, metavar="N", help="timed runs; the median counts")
    own: dict[str, Any] = {}
    try:
        model, engine, own = parse_bench(parser, argv)
        if own["num_prompts"] < 1 or own["num_iters"] < 1:
            parser.error("--num-prompts and --num-iters must be at least 1")
        old = old_result(own)
        result = run(model, engine, own)
    except (ConfigError, EngineDeadError, RequestError) as error:
        return report_failure("offline", error, own.get("json"))
    print(f"Throughput: {result['request_s']:.2f} requests/s, {result['total_tok_s']:.2f} total tokens/s, "
          f"{result['output_tok_s']:.2f} output tokens/s")
    print(f"Total num prompt tokens:  {result['prompt_tokens']}")
    print(f"Total num output tokens:  {result['output_tokens']}")
    if old is not None:
        rows = compare_results(old, result, f"--num-iters {MIN_REPEATS}")
        result["compare"] = {"file": own["compare"], "rows": rows}
    print_json(result, own.get("json"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
