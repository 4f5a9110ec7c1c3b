"""`python launch.py profile`: where the time goes, scheduler against device, per process.

Attaches to a running server (--url) and watches it for some seconds, or starts an engine and runs a small load on it.
Needs no preparation of the server: the records are always on.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
import time
import urllib.request
from typing import Any

from frontend.cli.common import StartError, make_command_parser, run_command
from frontend.timeline import IDLE_CAUSES, analyse, chrome_trace


def main(argv: list[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    return run_command("profile", lambda: attach(argv) if any(a.startswith("--url") for a in argv) else own_load(argv))


def attach(argv: list[str]) -> int:
    """Watch a server for --seconds."""
    parser = argparse.ArgumentParser(prog="launch.py profile")
    parser.add_argument("--url", required=True, help="of a running server, for example http://127.0.0.1:8000")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--api-key")
    parser.add_argument("--trace", metavar="FILE", help="also write the window as a trace for ui.perfetto.dev")
    args = parser.parse_args(argv)

    def get(query: str) -> Any:
        request = urllib.request.Request(f"{args.url.rstrip('/')}/debug/timeline?seconds={args.seconds}&format={query}")
        if args.api_key:
            request.add_header("Authorization", f"Bearer {args.api_key}")
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return json.load(answer)
        except OSError as error:
            raise StartError(f"{args.url}: {error}") from None

    before = get("report")["processes"]
    time.sleep(args.seconds)
    report = get("report")
    was = {p["pid"]: p["cpu_s"] for p in before}
    shares = {
        f"{p['role']} ({p['pid']})": (p["cpu_s"] - was.get(p["pid"], p["cpu_s"])) / args.seconds
        for p in report.pop("processes")
    }
    if args.trace:
        with open(args.trace, "w") as file:
            json.dump(get("trace"), file)
    show(report, shares)
    return 0


def own_load(argv: list[str]) -> int:
    """Start an engine, run --requests of them --concurrency at a time, and say where the time went."""
    parser, group = make_command_parser("profile", "Where the time goes, scheduler against device, per process.")
    group.add_argument("--concurrency", type=int, default=8)
    group.add_argument("--requests", type=int, default=32)
    group.add_argument("--prompt-tokens", type=int, default=128)
    group.add_argument("--output-tokens", type=int, default=64)
    group.add_argument("--trace", metavar="FILE", help="also write the run as a trace for ui.perfetto.dev")
    options = vars(parser.parse_args(argv))
    own = {name: options.pop(name) for name in ("concurrency", "requests", "prompt_tokens", "output_tokens")}
    trace = options.pop("trace", None)
    model = options.pop("model", None) or options.pop("model_name", None) or "smollm2-135m"
    return asyncio.run(_run(model, options, own, trace))


async def _run(model: str, options: dict[str, Any], own: dict[str, int], trace: str | None) -> int:
    from frontend import AsyncLLM, SamplingParams

    async with AsyncLLM(model, **options) as llm:
        seats = asyncio.Semaphore(own["concurrency"])
        params = SamplingParams(temperature=0.0, max_tokens=own["output_tokens"], ignore_eos=True)

        async def one(number: int) -> None:
            async with seats:
                prompt = [1 + (number * 7919 + i * 31) % (llm.vocab_size - 1) for i in range(own["prompt_tokens"])]
                async for _ in llm.generate(prompt, params, output_kind="delta"):
                    pass

        await one(0)  # warm-up
        begin = time.monotonic_ns()
        await asyncio.gather(*(one(i + 1) for i in range(own["requests"])))
        rows = llm.timeline.window(begin)
    if trace:
        with open(trace, "w") as file:
            json.dump(chrome_trace(rows), file)
    show(dataclasses.asdict(analyse(rows)), {})
    return 0


def show(report: dict[str, Any], cpu: dict[str, float]) -> None:
    """Tables, then the sentence."""
    if not report["num_steps"] or not report["stages"]:
        print(report["verdict"])
        return
    print(
        f"{report['num_steps']} steps in {report['seconds']:.2f} s, {report['tokens_per_s']:.0f} tokens/s, "
        f"{report['tokens_per_step']:.1f} tokens and {report['rows_per_step']:.1f} requests a step\n"
    )
    print(f"scheduler {report['scheduler_us']['p50']:8.0f} us a step (p99 {report['scheduler_us']['p99']:.0f})")
    print(
        f"device    {report['device_ms']['p50']:8.2f} ms a step (p99 {report['device_ms']['p99']:.2f}), "
        f"busy {report['device_busy']:.0%}\n"
    )
    print(f"{'stage':14}{'p50 us':>10}{'p99 us':>10}{'share':>8}")
    for name, stage in report["stages"].items():
        print(f"{name:14}{stage['p50']:>10.0f}{stage['p99']:>10.0f}{stage['share']:>8.1%}")
    print("\nthe device waited for")
    for cause in IDLE_CAUSES:
        print(f"  {cause:22}{report['idle'][cause]:>7.1%}")
    for name, share in cpu.items():
        print(f"{name:30}{share:>7.1%} of a core")
    print(f"\n{report['verdict']}")


if __name__ == "__main__":
    raise SystemExit(main())
