"""The tables of `launch.py profile`: a report of frontend/step_report.py on a screen, or in a file as plain text."""
from __future__ import annotations

from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from frontend.step_report import IDLE_CAUSES
from frontend.timeline import STAGES

BARS = " ▁▂▃▄▅▆▇█"
OWNER = {name: process for name, process, *_ in STAGES}
CAUSES = {"no requests": "has no requests", "tokens": "waits until its tokens are back",
          "scheduler": "waits for the scheduler", "wire": "waits for the wire",
          "host preparation": "waits for the worker's host side"}
STYLES = {"frontend": "cyan", "engine_core": "green", "worker": "magenta", "wire": "bright_black"}


def show(report: dict[str, Any], processes: list[dict[str, Any]], console: Console) -> None:
    """Tables, then the sentence. `processes`: role, pid, cpu (share of a core) and rss_bytes of each."""
    if not report["stages"]:
        console.print(report["verdict"])
        return
    prefill = report["prefill_share"]
    console.print(
        f"{report['num_steps']} steps in {report['seconds']:.2f} s, {report['tokens_per_s']:.0f} tokens/s, "
        f"{prefill:.0%} of them prefill\n{report['rows_per_step']:.1f} requests and "
        f"{report['tokens_per_step']:.1f} tokens a step, at most {report['max_tokens_per_step']}", highlight=False)
    console.print(summary_table(report))
    console.print(process_table(report, processes))
    console.print(stage_table(report))
    console.print(idle_table(report))
    console.print(Text(report["verdict"], style="bold"))


def table(*columns: str) -> Table:
    """A table whose first column is text and whose others are numbers."""
    made = Table(box=SIMPLE, pad_edge=False, show_edge=False)
    for index, column in enumerate(columns):
        made.add_column(column, justify="right" if index else "left", no_wrap=True)
    return made


def summary_table(report: dict[str, Any]) -> Table:
    made = table("per step", "p50", "p99")
    scheduler, device = report["scheduler_us"], report["device_ms"]
    made.add_row("scheduler", f"{scheduler['p50']:.0f} us", f"{scheduler['p99']:.0f} us")
    made.add_row("device", f"{device['p50']:.2f} ms", f"{device['p99']:.2f} ms")
    return made


def process_table(report: dict[str, Any], processes: list[dict[str, Any]]) -> Table:
    made = table("process", "pid", "busy with steps", "idle", "CPU", "memory")
    known = {use["role"]: use for use in processes}
    for role in ("frontend", "engine_core", "worker"):
        busy, use = report["busy"][role], known.get(role)
        made.add_row(Text(role, STYLES[role]), str(use["pid"]) if use else "", f"{busy:.1%}", f"{1 - busy:.1%}",
                     f"{use['cpu']:.0%} of a core" if use else "", f"{use['rss_bytes'] / 2**20:.0f} MiB" if use else "")
    return made


def stage_table(report: dict[str, Any]) -> Table:
    made = table("stage", "in", "p50 us", "p99 us", "of wall", "10 us ... 100 ms")
    for name, stage in report["stages"].items():
        made.add_row(name, Text(OWNER[name], STYLES[OWNER[name]]), f"{stage['p50']:.0f}", f"{stage['p99']:.0f}",
                     f"{stage['share']:.1%}", bars(stage["histogram"]))
    return made


def bars(counts: list[int]) -> str:
    """A histogram in one line; what occurs at all is seen."""
    top = max(max(counts), 1)
    return "".join(BARS[-(-count * (len(BARS) - 1) // top)] for count in counts)


def idle_table(report: dict[str, Any]) -> Table:
    made = table("the device", "of wall")
    made.add_row("computes", f"{report['device_busy']:.1%}")
    for cause in IDLE_CAUSES:
        made.add_row(CAUSES[cause], f"{report['idle'][cause]:.1%}")
    return made


def shares(before: list[dict[str, Any]], after: list[dict[str, Any]], seconds: float) -> list[dict[str, Any]]:
    """Processes with the share of a core that each used in between."""
    was = {use["pid"]: use["cpu_s"] for use in before}
    return [{**use, "cpu": (use["cpu_s"] - was.get(use["pid"], use["cpu_s"])) / seconds} for use in after]
