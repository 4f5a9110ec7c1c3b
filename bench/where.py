"""`bench where`: the profile of one model at several loads: a table of where a step's time goes, and a picture.

One engine, started once; each load is requests of equal size, so many at a time, as `launch.py profile` runs them. The
parts of a step are means over the load's steps. Prints a Markdown table; one JSON object last. --plot FILE draws it.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

import numpy as np

from bench.stats import print_json
from frontend import AsyncLLM
from frontend.cli.profile import Load, Measured, run_load
from frontend.step_report import Report, analyse, device_ns, idle_causes, scheduler_ns
from frontend.timeline import columns, stage_ns
from ipc.option_help import OptionParser

COLOURS = {"device": "#6a4fc4", "wait: tokens": "#e3b341", "wait: scheduler": "#2f8f5b", "wait: wire": "#b8b2a7",
           "wait: host preparation": "#c9bcef", "no requests": "#e9e5dd"}


async def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per load."""
    # batch_invariant: the start waits until the compiled kernels are there
    options: dict[str, Any] = dict(log_level="warning", max_num_seqs=max(args.concurrency), batch_invariant=True)
    if args.threads:
        options["num_threads"] = args.threads
    async with AsyncLLM(args.model, **options) as llm:
        found = []
        for concurrency in args.concurrency:
            load = Load(concurrency, max(args.rounds * concurrency, 4), args.prompt_tokens, args.output_tokens)
            found.append(row(concurrency, await run_load(llm, load)))
    return found


def row(concurrency: int, measured: Measured) -> dict[str, Any]:
    """The figures of one load; times are milliseconds of a mean step unless the name says otherwise."""
    report: Report = analyse(measured.rows)
    column = columns(measured.rows)
    count = len(measured.rows)
    waits = {("no requests" if cause == "no requests" else f"wait: {cause}"): ns / 1e6 / count
             for cause, ns in idle_causes(column).items()}
    cpu = {use["role"]: use["cpu"] for use in measured.processes}
    frontend = stage_ns(column, "detokenize") + stage_ns(column, "write")
    return {
        "concurrency": concurrency,
        "tokens_per_s": round(report.tokens_per_s, 1),
        "tokens_per_step": round(report.tokens_per_step, 1),
        "prefill_share": round(report.prefill_share, 3),
        "scheduler_us_p50": round(report.scheduler_us["p50"], 1),
        "device_ms_p50": round(report.device_ms["p50"], 3),
        "frontend_us_p50": round(float(np.median(frontend)) / 1000, 1),
        "device_busy": round(report.device_busy, 3),
        "scheduler_ms": round(float(scheduler_ns(column).mean()) / 1e6, 4),
        "step_ms": {"device": round(float(device_ns(column).mean()) / 1e6, 4),
                    **{name: round(value, 4) for name, value in waits.items()}},
        "cpu": {role: round(share, 3) for role, share in cpu.items()},
        "verdict": report.verdict,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """For the README."""
    heads = ("requests at once", "tokens/s", "tokens a step", "scheduler a step", "device a step", "device busy",
             "frontend a step")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for one in rows:
        lines.append(f"| {one['concurrency']} | {one['tokens_per_s']:,.0f} | {one['tokens_per_step']:.1f} | "
                     f"{one['scheduler_us_p50']:.0f} us | {one['device_ms_p50']:.2f} ms | {one['device_busy']:.0%} | "
                     f"{one['frontend_us_p50']:.0f} us |")
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]], model: str, path: str) -> None:
    """A bar per load: what the device did in a mean step, the scheduler's work beside it. Raises ValueError."""
    try:
        import matplotlib
        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install matplotlib") from None
    figure, panels = pyplot.subplots(1, len(rows), figsize=(3.4 * len(rows), 3.9), layout="constrained", squeeze=False)
    for panel, one in zip(panels[0], rows, strict=True):
        bottom = 0.0
        for name, value in one["step_ms"].items():
            panel.bar(0, value, 0.55, bottom, color=COLOURS[name], label=name)
            bottom += value
        panel.bar(1, one["scheduler_ms"], 0.55, color="#14593a", label="scheduler, beside it")
        panel.set_xticks([0, 1], ["device", "scheduler"])
        panel.set_title(f"{one['concurrency']} at once\n{one['tokens_per_s']:,.0f} tokens/s", fontsize=10)
        panel.grid(axis="y", alpha=0.3)
        panel.set_axisbelow(True)
        panel.text(1, one["scheduler_ms"], f"{1000 * one['scheduler_ms']:.0f} us", ha="center", va="bottom", fontsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("milliseconds of a mean step")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.suptitle(f"{model}: where a step's time goes", fontsize=11)
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise ValueError(f"--plot {path}: {error}") from None
    finally:
        pyplot.close(figure)


def main(argv: list[str] | None = None) -> int:
    parser = OptionParser(prog="launch.py bench where", description="The profile of a model at several loads.")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--concurrency", type=lambda text: [int(part) for part in text.split(",")], default=[1, 16, 64])
    parser.add_argument("--rounds", type=int, default=2, help="requests of each place")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=0, help="0: one per core")
    parser.add_argument("--plot", metavar="FILE")
    args = parser.parse_args(argv)
    rows = asyncio.run(measure(args))
    print(table(rows))
    if args.plot:
        plot(rows, args.model, args.plot)
    print_json({"model": args.model, "loads": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
