"""`launch.py profile --steps FILE`: what core and worker did before one of them failed, from a file that the supervisor
saved. The last steps one by one, those under way with how far they came."""
from __future__ import annotations

import argparse
import dataclasses

import numpy as np
from rich.console import Console

from frontend.cli.profile_view import show, table
from frontend.step_report import analyse
from frontend.timeline import COLUMN, COLUMNS, STAGES
from ipc.messages import STAMPS
from ipc.option_help import OptionParser
from ipc.step_ring import load_steps

SHOWN = 12
REACHED = (("commit_end", ""), ("commit_begin", "being committed"), ("worker_done", "computed, its result not entered"),
           ("worker_launched", "being sampled"), ("worker_prepared", "in its forward pass"),
           ("worker_received", "being prepared"), ("plan_sent", "sent, not begun"))
SPANS = tuple((name, begin, end) for name, process, begin, end in STAGES if process in ("engine_core", "worker"))


def make_parser() -> argparse.ArgumentParser:
    parser = OptionParser(prog="launch.py profile")
    parser.add_argument("--steps", required=True, metavar="FILE", help="that the message of a failure named")
    parser.add_argument("--trace", metavar="FILE", help="also write them as a trace for ui.perfetto.dev")
    return parser


def read(path: str) -> tuple[str, np.ndarray]:
    """(why a process failed, rows as in frontend/timeline.py; no frontend's part is known). Raises ConfigError."""
    reason, known = load_steps(path)
    rows = np.zeros((len(known), len(COLUMNS)), np.int64)
    rows[:, :len(STAMPS)] = known
    return reason, rows


def reached(row: np.ndarray) -> str:
    """How far a step came; "": to its end."""
    return next((text for name, text in REACHED if row[COLUMN[name]]), "planned")


def show_steps(reason: str, rows: np.ndarray, console: Console) -> None:
    """A report of the steps that ended, then the last ones."""
    is_over = rows[:, COLUMN["commit_begin"]] > 0
    show(dataclasses.asdict(analyse(rows[is_over])), [], console)
    end = rows[:, [COLUMN[name] for name, _ in REACHED]].max(initial=0)
    made = table("last steps", "ms ago", "requests", "tokens", *(name for name, *_ in SPANS), "us; came to")
    made.columns[-1].justify = "left"
    for row in rows[-SHOWN:]:
        times = [f"{(row[COLUMN[b]] and max(0, row[COLUMN[e]] - row[COLUMN[b]])) / 1000:.0f}" if row[COLUMN[e]] else ""
                 for _, b, e in SPANS]
        made.add_row(str(row[COLUMN["step"]]), f"{(end - row[COLUMN['plan_begin']]) / 1e6:.1f}",
                     str(row[COLUMN["num_rows"]]), str(row[COLUMN["num_tokens"]]), *times, reached(row))
    console.print(made)
    console.print(f"Then: {reason}", highlight=False)

