"""One request at a time, without HTTP: `python launch.py bench latency --model MODEL`.

What a single user feels: end-to-end time, time to the first token, gap between tokens, each as a distribution over
`--num-iters` requests with prompts of their own. `--batch-size` hands over several at once. Prints vLLM's latency lines
and ends with one JSON object. Knows only the public Python API.
"""

import asyncio
import sys
import time
from typing import Any, NamedTuple

from bench.compare import bootstrap, compare_results
from bench.offline import SHAPE, make_bench_parser, old_result, parse_bench, random_prompts, report_failure
from bench.stats import percentile, print_json, summary
from frontend import AsyncLLM, SamplingParams
from ipc.errors import ConfigError, EngineDeadError, RequestError

PERCENTILES = (10, 25, 50, 75, 90, 99)


class Answer(NamedTuple):
    """What came of one request. A piece may hold several tokens: news that are not read yet are joined."""

    start: float
    times: list[float]  # arrival of each piece
    counts: list[int]  # tokens in it

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]


async def one_request(llm: AsyncLLM, prompt: list[int], params: SamplingParams) -> Answer:
    """Follow one answer to its end."""
    answer = Answer(time.monotonic(), [], [])
    async for output in llm.generate(prompt, params, output_kind="delta"):
        if num_tokens := sum(len(choice.token_ids) for choice in output.outputs):
            answer.times.append(time.monotonic())
            answer.counts.append(num_tokens)
    return answer


async def run(model: str, engine: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Start, warm up, one batch after another: the figures."""
    size, count = own["batch_size"], own["num_iters"]
    began = time.monotonic()
    async with AsyncLLM(model=model, **engine) as llm:
        start_s = time.monotonic() - began
        params = SamplingParams(temperature=0, max_tokens=own["output_len"], ignore_eos=True)
        prompts = random_prompts(own, size * (count + own["num_iters_warmup"]), llm.tokenizer.num_tokens)
        answers: list[Answer] = []
        e2e = []
        for number in range(count + own["num_iters_warmup"]):
            batch = prompts[number * size : (number + 1) * size]
            began = time.monotonic()
            found = await asyncio.gather(*(one_request(llm, prompt, params) for prompt in batch))
            if number >= own["num_iters_warmup"]:
                e2e.append(time.monotonic() - began)
                answers += found
    late = sum(sum(answer.counts[1:]) for answer in answers)  # tokens behind the first piece
    decode_s = sum(answer.times[-1] - answer.times[0] for answer in answers) / size
    seconds = {"ttft_s": [[answer.times[0] - answer.start] for answer in answers],
               "itl_s": [answer.gaps for answer in answers], "e2e_s": [[one] for one in e2e]}
    widths = {name: bootstrap(groups) for name, groups in seconds.items()}
    load = {"concurrency": size, "model": model, **{name: own[name] for name in SHAPE}}
    return {
        "load": load,
        "noise": {f"{name}.{figure}": round(width, 4) for name in widths for figure, width in widths[name].items()},
        "model": model, "input_len": own["prefix_len"] + own["input_len"], "output_len": own["output_len"],
        "batch_size": size, "num_iters": count, "start_s": round(start_s, 2), "avg_latency": round(sum(e2e) / count, 6),
        "percentiles": {str(percent): round(percentile(e2e, percent), 6) for percent in PERCENTILES},
        "latencies": [round(seconds, 6) for seconds in e2e], "e2e_s": summary(e2e),
        "ttft_s": summary([answer.times[0] - answer.start for answer in answers]),
        "itl_s": summary([gap for answer in answers for gap in answer.gaps]),
        "tokens_per_piece": round(sum(sum(a.counts) for a in answers) / sum(len(a.counts) for a in answers), 3),
        "decode_tok_s": round(late / decode_s, 2) if late and decode_s > 0 else None,
    }


def main(argv: list[str] | None = None) -> int:
    """0, or as report_failure says."""
    parser, group = make_bench_parser("latency", "Latency of single requests on random prompts.")
    group.add_argument("--batch-size", type=int, default=1, metavar="N", help="requests at once (default: 1)")
    group.add_argument("--num-iters", type=int, default=10, metavar="N", help="timed batches (default: 10)")
    group.add_argument("--num-iters-warmup", type=int, default=2, metavar="N", help="untimed ones before (default: 2)")
    own: dict[str, Any] = {}
    try:
        model, engine, own = parse_bench(parser, argv)
        if own["batch_size"] < 1 or own["num_iters"] < 1 or own["num_iters_warmup"] < 0:
            parser.error("--batch-size and --num-iters must be at least 1, --num-iters-warmup at least 0")
        old = old_result(own)
        result = asyncio.run(run(model, engine, own))
    except (ConfigError, EngineDeadError, RequestError) as error:
        return report_failure("latency", error, own.get("json"))
    print(f"Avg latency: {result['avg_latency']:.6f} seconds")
    for percent in PERCENTILES:
        print(f"{percent}% percentile latency: {result['percentiles'][str(percent)]:.6f} seconds")
    for key, title in (("ttft_s", "TTFT"), ("itl_s", "ITL")):
        if result[key]["p50"] is not None:
            print(f"Median {title} (ms): {result[key]['p50'] * 1000:.2f}")
            print(f"P99 {title} (ms): {result[key]['p99'] * 1000:.2f}")
    if result["decode_tok_s"] is not None:
        print(f"Decode (tok/s): {result['decode_tok_s']:.2f}")
    if old is not None:
        result["compare"] = {"file": own["compare"], "rows": compare_results(old, result, "")}
    print_json(result, own.get("json"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
