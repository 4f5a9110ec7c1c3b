"""Where the time of each step went: the last steps of all processes on one clock, and what they add up to.

The core sends the stamps of every step it commits (ipc.messages.STAMPS); this frontend adds when it received and
handled them. All are monotonic nanoseconds of one host. Always on: two stamps and one row copy a step. Knows no HTTP.

    plan ─ wire ─ prepare ─ forward ─ sample ─ wire ─ commit ─ wire ─ detokenize
    core          worker                            core            frontend
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from ipc.messages import STAMPS

RING_STEPS = 4096
COLUMNS = (*STAMPS, "received", "handled", "num_running", "num_waiting", "num_free_blocks")
_AT = {name: i for i, name in enumerate(COLUMNS)}

STAGES = (  # stage, process, from, to
    ("plan", "engine_core", "plan_begin", "plan_end"),
    ("plan wire", "wire", "plan_end", "worker_received"),
    ("prepare", "worker", "worker_received", "worker_prepared"),
    ("forward", "worker", "worker_prepared", "worker_launched"),
    ("sample", "worker", "worker_launched", "worker_done"),
    ("result wire", "wire", "worker_done", "commit_begin"),
    ("commit", "engine_core", "commit_begin", "commit_end"),
    ("output wire", "wire", "commit_end", "received"),
    ("detokenize", "frontend", "received", "handled"),
)
IDLE_CAUSES = ("no requests", "scheduler", "waiting for tokens", "wire", "host preparation")


class Timeline:
    """A ring of the last RING_STEPS steps."""

    def __init__(self) -> None:
        self._ring = np.zeros((RING_STEPS, len(COLUMNS)), np.int64)
        self._count = 0

    def add(
        self, stamps: Any, received_ns: int, handled_ns: int, num_running: int, num_waiting: int, num_free_blocks: int
    ) -> None:
        """The steps of one Outputs message."""
        rows = np.frombuffer(stamps, np.int64).reshape(-1, len(STAMPS))
        tail = (received_ns, handled_ns, num_running, num_waiting, num_free_blocks)
        for row in rows:
            target = self._ring[self._count % RING_STEPS]
            target[: len(STAMPS)] = row
            target[len(STAMPS) :] = tail
            self._count += 1

    def window(self, since_ns: int = 0) -> np.ndarray:
        """Rows [steps, COLUMNS] that were committed after `since_ns`, oldest first."""
        kept = min(self._count, RING_STEPS)
        order = [(self._count - kept + i) % RING_STEPS for i in range(kept)]
        rows = self._ring[order]
        found: np.ndarray = rows[rows[:, _AT["commit_begin"]] >= since_ns]
        return found


@dataclasses.dataclass(slots=True)
class Report:
    """What a window of steps says. Times are microseconds unless the name says otherwise."""

    num_steps: int
    seconds: float
    stages: dict[str, dict[str, float]]  # stage -> p50, p99, share of wall time
    scheduler_us: dict[str, float]  # plan + commit per step: p50, p99
    device_ms: dict[str, float]  # forward + sample per step: p50, p99
    device_busy: float  # share of the window
    idle: dict[str, float]  # cause -> share of the window
    tokens_per_step: float
    rows_per_step: float
    tokens_per_s: float
    verdict: str


def analyse(rows: np.ndarray, host_cpu: dict[str, float] | None = None) -> Report:
    """Summarise a window of steps. `host_cpu`: share of a core that each process used, if it was measured."""
    if len(rows) < 2:
        return Report(
            len(rows), 0.0, {}, {}, {}, 0.0, {}, 0.0, 0.0, 0.0, "no steps in this window: the engine was idle"
        )
    column = {name: rows[:, i] for name, i in _AT.items()}
    wall = float(column["worker_done"][-1] - column["worker_received"][0])
    stages = {}
    for name, _, begin, end in STAGES:
        took = np.maximum(column[end] - column[begin], 0)
        stages[name] = {"p50": _p(took, 50), "p99": _p(took, 99), "share": float(took.sum() / max(wall, 1.0))}
    plan, commit = (
        np.maximum(column[b] - column[a], 0) for a, b in (("plan_begin", "plan_end"), ("commit_begin", "commit_end"))
    )
    device = column["worker_done"] - column["worker_prepared"]
    idle = idle_causes(column)
    busy = float(device.sum() / max(wall, 1.0))
    shares = {cause: float(ns / max(wall, 1.0)) for cause, ns in idle.items()}
    seconds = wall / 1e9
    report = Report(
        len(rows),
        seconds,
        stages,
        {"p50": _p(plan + commit, 50), "p99": _p(plan + commit, 99)},
        {"p50": _p(device, 50) / 1000, "p99": _p(device, 99) / 1000},
        min(busy, 1.0),
        shares,
        float(column["num_tokens"].mean()),
        float(column["num_rows"].mean()),
        float(column["num_tokens"].sum() / max(seconds, 1e-9)),
        "",
    )
    report.verdict = verdict(report, host_cpu or {})
    return report


def _p(values: np.ndarray, percent: float) -> float:
    return float(np.percentile(values, percent)) / 1000


def idle_causes(column: dict[str, np.ndarray]) -> dict[str, int]:
    """Nanoseconds in which the device waited between steps, by what it waited for.

    The gap from one step's end to the next one's start is cut where things happened: until the plan was begun it
    waited for the tokens of the last step to be committed (or for a request to arrive), then for the scheduler, then
    for the wire, then for the worker's own preparation.
    """
    found = dict.fromkeys(IDLE_CAUSES, 0)
    for i in range(1, len(column["step"])):
        begin, end = int(column["worker_done"][i - 1]), int(column["worker_prepared"][i])
        plan_begin, plan_end = int(column["plan_begin"][i]), int(column["plan_end"][i])
        received, committed = int(column["worker_received"][i]), int(column["commit_begin"][i - 1])
        at = begin
        for cause, until in (
            ("waiting for tokens", min(plan_begin, max(committed, begin))),
            ("no requests", plan_begin),
            ("scheduler", plan_end),
            ("wire", received),
            ("host preparation", end),
        ):
            if until > at:
                found[cause] += min(until, end) - at
                at = min(until, end)
    # Between a commit and the plan after it the core itself works: only long gaps are a lack of requests.
    return found


def verdict(report: Report, host_cpu: dict[str, float]) -> str:
    """The one sentence that says what bounds throughput in this window."""
    detok = report.stages["detokenize"]["share"]
    largest = max(report.idle, key=lambda cause: report.idle[cause])
    share = report.idle[largest]
    if detok > max(0.5, report.device_busy) or host_cpu.get("frontend", 0.0) > 0.9:
        return f"The frontend bounds it: detokenizing and sending takes {detok:.0%} of the time."
    if report.device_busy >= 0.75 or share < 0.1:
        return (
            f"The device bounds it: it computes {report.device_busy:.0%} of the time, "
            f"{report.device_ms['p50']:.2f} ms a step; the scheduler takes {report.scheduler_us['p50']:.0f} us of it."
        )
    what = {
        "no requests": "Requests bound it: the device waits for them",
        "scheduler": "The scheduler bounds it: the device waits for plans",
        "waiting for tokens": "The core bounds it: the device waits until tokens are committed",
        "wire": "The wire bounds it: the device waits for messages",
        "host preparation": "The worker's host side bounds it: the device waits for batch preparation",
    }[largest]
    return f"{what} {share:.0%} of the time (it computes {report.device_busy:.0%})."


def chrome_trace(rows: np.ndarray) -> dict[str, Any]:
    """The window as Chrome Trace Event JSON (ui.perfetto.dev): a track per process, arrows that follow each step."""
    pids = {"frontend": 1, "engine_core": 2, "worker": 3}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}} for name, pid in pids.items()
    ]
    for row in rows:
        value = {name: int(row[i]) for name, i in _AT.items()}
        arguments = {"step": value["step"], "rows": value["num_rows"], "tokens": value["num_tokens"]}
        for stage, process, begin, end in STAGES:
            if process in pids and value[end] >= value[begin] > 0:
                events.append(
                    {
                        "ph": "X",
                        "name": stage,
                        "pid": pids[process],
                        "tid": 0,
                        "ts": value[begin] / 1000,
                        "dur": (value[end] - value[begin]) / 1000,
                        "args": arguments,
                    }
                )
        for phase, process, at in (
            ("s", "engine_core", "plan_begin"),
            ("t", "worker", "worker_received"),
            ("t", "engine_core", "commit_begin"),
            ("f", "frontend", "received"),
        ):
            events.append(
                {
                    "ph": phase,
                    "name": "step",
                    "cat": "step",
                    "id": value["step"],
                    "pid": pids[process],
                    "tid": 0,
                    "ts": value[at] / 1000,
                    **({"bp": "e"} if phase == "f" else {}),
                }
            )
        events.append(
            {
                "ph": "C",
                "name": "requests",
                "pid": pids["engine_core"],
                "ts": value["commit_begin"] / 1000,
                "args": {"running": value["num_running"], "waiting": value["num_waiting"]},
            }
        )
        events.append(
            {
                "ph": "C",
                "name": "tokens of a step",
                "pid": pids["worker"],
                "ts": value["worker_received"] / 1000,
                "args": {"tokens": value["num_tokens"]},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
