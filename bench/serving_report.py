"""What `bench serve` prints and saves of one load, under the names of vLLM's benchmark: the same scripts read it.

Times are printed and saved in milliseconds. Knows plain records and options, no server.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.stats import RequestRecord, percentile

TITLES = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
    "client_queue_time": ("Client Queue Time", "Client-side Queueing"),
    "e2el_including_client_queue": ("E2EL incl. Client Queue", "Queue-inclusive End-to-end Latency"),
}
GOODPUT_METRICS = ("ttft", "tpot", "e2el")
DETAILED = ("input_lens", "output_lens", "start_times", "queue_times", "ttfts", "itls", "latencies", "generated_texts",
            "errors")


def tpot_s(record: RequestRecord) -> float:
    """Seconds per token after the first; 0 for an answer of one token."""
    return (record.token_times[-1] - record.token_times[0]) / max(1, record.num_output_tokens - 1)


def gaps_s(record: RequestRecord) -> list[float]:
    return [b - a for a, b in zip(record.token_times, record.token_times[1:], strict=False)]


def metric_values(records: Sequence[RequestRecord], is_limited: bool, has_rate: bool) -> dict[str, list[float]]:
    """Metric -> seconds, of requests that succeeded. Queueing in the client is a metric where it can happen."""
    values = {
        "ttft": [r.ttft_s for r in records],
        "tpot": [tpot_s(r) for r in records if r.num_output_tokens > 1],
        "itl": [gap for r in records for gap in gaps_s(r)],
        "e2el": [r.end - r.start for r in records],
    }
    if is_limited:
        values["client_queue_time"] = [r.queue_s for r in records]
    if is_limited and has_rate:
        values["e2el_including_client_queue"] = [r.end - r.start + r.queue_s for r in records]
    return values


def num_good(records: Sequence[RequestRecord], goodput: dict[str, float]) -> int:
    """Requests that met every objective (metric -> milliseconds)."""
    seconds = {"ttft": lambda r: r.ttft_s, "tpot": tpot_s, "e2el": lambda r: r.end - r.start}
    return sum(all(seconds[name](r) * 1000 <= limit for name, limit in goodput.items()) for r in records)


def peak_tokens(records: Sequence[RequestRecord]) -> float:
    """Most tokens that arrived in one second, of the seconds since the first request."""
    begin = min(r.start for r in records)
    buckets: dict[int, float] = {}
    for record in records:
        for index, moment in enumerate(record.token_times):
            second = int(moment - begin)
            buckets[second] = buckets.get(second, 0.0) + (record.tokens_per_gap if index else 1.0)
    return max(buckets.values())


def peak_requests(records: Sequence[RequestRecord]) -> int:
    """Most requests that were in flight at once."""
    level = most = 0
    for _, change in sorted([(r.start, 1) for r in records] + [(r.end, -1) for r in records]):
        level += change
        most = max(most, level)
    return most


def finite(value: float) -> float | str:
    """JSON has no infinity: vLLM's word for it."""
    return "inf" if math.isinf(value) else value


def flat_figures(args: argparse.Namespace, model: str, records: Sequence[RequestRecord], concurrency: int,
                 duration_s: float) -> dict[str, Any]:
    """The keys of a result file of vLLM's benchmark, per-request lists (DETAILED) too. `records`: all, in order."""
    good = [r for r in records if not r.error]
    result: dict[str, Any] = {
        "date": time.strftime("%Y%m%d-%H%M%S"), "endpoint_type": args.backend, "backend": args.backend,
        "label": args.label, "model_id": model, "tokenizer_id": args.tokenizer, "num_prompts": len(records),
        **args.metadata, "request_rate": args.request_rate or "inf", "burstiness": finite(args.burstiness),
        "max_concurrency": concurrency if args.is_limited else None,
    }
    if args.ramp is not None:
        result |= {"ramp_up_strategy": args.ramp.strategy, "ramp_up_start_rps": args.ramp.start,
                   "ramp_up_end_rps": args.ramp.end}
    input_tokens, output_tokens = sum(r.num_prompt_tokens for r in good), sum(r.num_output_tokens for r in good)
    result |= {
        "duration": duration_s, "completed": len(good), "failed": len(records) - len(good),
        "total_input_tokens": input_tokens, "total_output_tokens": output_tokens,
        "request_throughput": len(good) / duration_s,
        "request_goodput": num_good(good, args.goodput) / duration_s if args.goodput else None,
        "output_throughput": output_tokens / duration_s,
        "total_token_throughput": (input_tokens + output_tokens) / duration_s,
        "max_output_tokens_per_s": peak_tokens(good) if good else 0.0,
        "max_concurrent_requests": peak_requests(good),
    }
    has_rate = bool(args.request_rate or args.ramp)
    for name, values in metric_values(good, args.is_limited, has_rate).items() if good else ():
        if name not in args.percentile_metrics or not values:
            continue
        milliseconds = [value * 1000 for value in values]
        result |= {f"mean_{name}_ms": statistics.fmean(milliseconds), f"median_{name}_ms": percentile(milliseconds, 50),
                   f"std_{name}_ms": statistics.pstdev(milliseconds)}
        result |= {f"p{percent:g}_{name}_ms": percentile(milliseconds, percent) for percent in args.metric_percentiles}
    return result | {
        "input_lens": [r.num_prompt_tokens for r in records], "output_lens": [r.num_output_tokens for r in records],
        "start_times": [r.start for r in records], "queue_times": [r.queue_s for r in records],
        "latencies": [r.end - r.start if r.token_times else 0.0 for r in records],
        "ttfts": [r.ttft_s if r.token_times else 0.0 for r in records], "itls": [gaps_s(r) for r in records],
        "generated_texts": [r.text for r in records], "errors": [r.error for r in records],
    }


def print_traffic(args: argparse.Namespace, concurrency: int) -> None:
    """What is about to be sent."""
    if args.ramp is not None:
        print(f"Traffic ramp-up strategy: {args.ramp.strategy}.")
        ends = f"{args.ramp.start:g} to {args.ramp.end:g} RPS"
        print(f"Will increase RPS from {ends} over the duration of the benchmark.")
    else:
        print(f"Traffic request rate: {args.request_rate or math.inf}")
    distribution = "Poisson process" if args.burstiness == 1 else "Gamma distribution"
    print(f"Burstiness factor: {args.burstiness} ({distribution})")
    print(f"Maximum request concurrency: {concurrency if args.is_limited else None}")


def print_serving_report(args: argparse.Namespace, figures: dict[str, Any], flat: dict[str, Any]) -> None:
    """The figures for people; `figures` are those of serving_figures, `flat` those of flat_figures."""

    def show(label: str, value: float | str | None) -> None:
        text = "n/a" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
        print(f"{label + ':':<40} {text:<10}".rstrip())

    print(" Serving Benchmark Result ".center(50, "="))
    show("Successful requests", flat["completed"])
    show("Failed requests", flat["failed"])
    if flat["max_concurrency"] is not None:
        show("Maximum request concurrency", flat["max_concurrency"])
    if args.request_rate:
        show("Request rate configured (RPS)", float(args.request_rate))
    if flat["completed"]:
        show("Benchmark duration (s)", flat["duration"])
        show("Total input tokens", flat["total_input_tokens"])
        show("Total cached input tokens", figures["cached_tokens"])
        show("Total generated tokens", flat["total_output_tokens"])
        show("Request throughput (req/s)", flat["request_throughput"])
        if args.goodput:
            show("Request goodput (req/s)", flat["request_goodput"])
        show("Output token throughput (tok/s)", flat["output_throughput"])
        show("Peak output token throughput (tok/s)", float(flat["max_output_tokens_per_s"]))
        show("Peak concurrent requests", float(flat["max_concurrent_requests"]))
        show("Total token throughput (tok/s)", flat["total_token_throughput"])
        show("Prefill estimate (tok/s)", figures["prefill_tok_s"])
        show("Decode, all requests decoding (tok/s)", figures["decode_tok_s"])
        for name, (short, title) in TITLES.items():
            if f"mean_{name}_ms" not in flat:
                continue
            print(title.center(50, "-"))
            show(f"Mean {short} (ms)", flat[f"mean_{name}_ms"])
            show(f"Median {short} (ms)", flat[f"median_{name}_ms"])
            for percent in args.metric_percentiles:
                show(f"P{percent:g} {short} (ms)", flat[f"p{percent:g}_{name}_ms"])
    print("=" * 50)
    if figures["first_error"]:
        print(f"first error: {figures['first_error']}")


def without_details(result: dict[str, Any]) -> dict[str, Any]:
    """A copy without the lists that have an entry per request."""
    kept = {name: value for name, value in result.items() if name not in DETAILED}
    if "runs" in result:
        kept["runs"] = [without_details(run) for run in result["runs"]]
    return kept


def result_file(args: argparse.Namespace, model: str) -> Path | None:
    """Where --save-result writes; None: nowhere. Without a name it is made of label, load, model and time."""
    if not args.save_result:
        return None
    load = f"{args.request_rate or math.inf}qps"
    if args.ramp is not None:
        load = f"ramp-up-{args.ramp.strategy}-{args.ramp.start:g}qps-{args.ramp.end:g}qps"
    if args.is_limited:
        load += "-concurrency" + "-".join(map(str, args.concurrency))
    name = f"{args.label or args.backend}-{load}-{model.split('/')[-1]}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    return Path(args.result_dir or "") / (args.result_filename or name)


def save_result(args: argparse.Namespace, result: dict[str, Any], file: Path) -> None:
    """One JSON object, the last line of what the file holds. Raises OSError."""
    text = json.dumps(result if args.save_detailed else without_details(result)) + "\n"
    with file.open("a" if args.append_result else "w", encoding="utf-8") as out:
        out.write(text)
