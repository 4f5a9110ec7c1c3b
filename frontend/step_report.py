"""What a window of steps adds up to: stages, scheduler against device, what the device waited for, and the sentence.

Works on rows of frontend/timeline.py and knows nothing else. The totals behind /metrics are sums of the same parts.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from frontend.timeline import COLUMNS, STAGES, Timeline, columns, stage_ns

IDLE_CAUSES = ("no requests", "tokens", "scheduler", "wire", "host preparation")
PROCESS_STAGES = {
    process: tuple(name for name, owner, *_ in STAGES if owner == process)
    for process in ("frontend", "engine_core", "worker")
}
HISTOGRAM_US = (10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


@dataclasses.dataclass(slots=True)
class Report:
    """What a window of steps says. Times are microseconds unless the name says otherwise."""

    num_steps: int
    seconds: float
    stages: dict[str, dict[str, Any]]  # stage -> p50, p99, share of wall time, histogram (counts per HISTOGRAM_US)
    busy: dict[str, float]  # process -> share of the window in which it worked on steps
    scheduler_us: dict[str, float]  # plan + encode + commit per step: p50, p99
    device_ms: dict[str, float]  # forward + sample per step: p50, p99
    device_busy: float  # share of the window
    idle: dict[str, float]  # cause -> share of the window
    tokens_per_step: float
    prefill_share: float  # of the computed tokens, those of rows in mid-prompt
    max_tokens_per_step: int
    rows_per_step: float
    tokens_per_s: float
    verdict: str


def analyse(rows: np.ndarray, host_cpu: dict[str, float] | None = None,
            window_ns: tuple[int, int] | None = None) -> Report:
    """Summarise a window of steps: those that were committed in `window_ns` (begin, end), whose time before and after
    them counts as idle; None: from the first step to the last. `host_cpu`: share of a core that each process used, if
    it was measured."""
    if len(rows) < 2:
        text = "no steps in this window: the engine was idle"
        return Report(len(rows), 0.0, {}, {}, {}, {}, 0.0, {}, 0.0, 0.0, 0, 0.0, 0.0, text)
    column = columns(rows)
    first, last = int(column["worker_received"][0]), int(column["worker_done"][-1])
    before = after = 0
    if window_ns is not None:
        before = max(0, int(column["plan_begin"][0]) - window_ns[0])
        is_over = not column["num_running"][-1] + column["num_waiting"][-1]     # else a step is under way
        after = max(0, window_ns[1] - last) if is_over else 0
    wall = max(float(last - first + before + after), 1.0)
    idle = idle_causes(column)
    idle["no requests"] += before + after
    took = {name: stage_ns(column, name) for name, *_ in STAGES}
    scheduler, device = scheduler_ns(column), device_ns(column)
    num_tokens = column["num_tokens"]
    report = Report(
        num_steps=len(rows),
        seconds=wall / 1e9,
        stages={name: _stage(ns, wall) for name, ns in took.items()},
        busy={process: min(1.0, _union_ns(column, process) / wall) for process in PROCESS_STAGES},
        scheduler_us={"p50": _p(scheduler, 50), "p99": _p(scheduler, 99)},
        device_ms={"p50": _p(device, 50) / 1000, "p99": _p(device, 99) / 1000},
        device_busy=min(float(device.sum()) / wall, 1.0),
        idle={cause: ns / wall for cause, ns in idle.items()},
        tokens_per_step=float(num_tokens.mean()),
        prefill_share=float(column["num_prefill_tokens"].sum() / max(1, num_tokens.sum())),
        max_tokens_per_step=int(num_tokens.max()),
        rows_per_step=float(column["num_rows"].mean()),
        tokens_per_s=float(num_tokens.sum() / (wall / 1e9)),
        verdict="",
    )
    report.verdict = verdict(report, host_cpu or {})
    return report


def scheduler_ns(column: dict[str, np.ndarray]) -> np.ndarray:
    """Per step: plan, encode and commit."""
    found: np.ndarray = sum(stage_ns(column, name) for name in PROCESS_STAGES["engine_core"])  # type: ignore[assignment]
    return found


def device_ns(column: dict[str, np.ndarray]) -> np.ndarray:
    """Per step: forward pass and sampling. A step launched before the last one ended begins where that ended."""
    begin = column["worker_prepared"].copy()
    begin[1:] = np.maximum(begin[1:], column["worker_done"][:-1])
    found: np.ndarray = np.maximum(column["worker_done"] - begin, 0)
    return found


def _stage(ns: np.ndarray, wall: float) -> dict[str, Any]:
    places = np.searchsorted(np.array(HISTOGRAM_US) * 1000, ns)
    counts = np.bincount(places, minlength=len(HISTOGRAM_US) + 1)
    return {"p50": _p(ns, 50), "p99": _p(ns, 99), "share": float(ns.sum() / wall), "histogram": counts.tolist()}


def _p(values: np.ndarray, percent: float) -> float:
    return float(np.percentile(values, percent)) / 1000


def _union_ns(column: dict[str, np.ndarray], process: str) -> float:
    """Time in which the process was in any of its stages: steps whose news came in one message share theirs."""
    spans = np.concatenate(
        [np.stack([column[begin], column[end]], 1) for _, owner, begin, end in STAGES if owner == process]
    )
    spans = spans[(spans[:, 1] > spans[:, 0]) & (spans[:, 0] > 0)]
    if not len(spans):
        return 0.0
    spans = spans[np.argsort(spans[:, 0])]
    reached = np.maximum.accumulate(spans[:, 1])
    begins = np.maximum(spans[1:, 0], reached[:-1])
    first = spans[0, 1] - spans[0, 0]
    return float(first + np.maximum(spans[1:, 1] - begins, 0).sum())


def idle_causes(column: dict[str, np.ndarray]) -> dict[str, int]:
    """Nanoseconds in which the device waited between steps, by what it waited for.

    The gap from one step's end to the next one's start is cut where things happened, in this order: the last step's
    tokens reach the core, the core commits them, a request makes it plan, the plan is made and sent, it arrives, the
    worker prepares the batch. A plan that was made before the gap began leaves only the later parts.
    """
    begin, end = column["worker_done"][:-1], column["worker_prepared"][1:]
    plan_begin = column["plan_begin"][1:]
    found = dict.fromkeys(IDLE_CAUSES, 0)
    at = begin
    for cause, until in (
        ("tokens", np.minimum(column["commit_begin"][:-1], plan_begin)),
        ("scheduler", np.minimum(column["commit_end"][:-1], plan_begin)),
        ("no requests", plan_begin),
        ("scheduler", column["plan_sent"][1:]),
        ("wire", column["worker_received"][1:]),
        ("host preparation", end),
    ):
        until = np.maximum(at, np.minimum(until, end))
        found[cause] += int((until - at).sum())
        at = until
    return found


def verdict(report: Report, host_cpu: dict[str, float]) -> str:
    """The one sentence that says what bounds throughput in this window."""
    frontend = report.busy["frontend"]
    largest = max(report.idle, key=lambda cause: report.idle[cause])
    share = report.idle[largest]
    if (frontend > 0.5 and frontend > report.device_busy) or host_cpu.get("frontend", 0.0) > 0.9:
        detokenize, write = (report.stages[name]["share"] for name in ("detokenize", "write"))
        part = "detokenizing" if detokenize >= write else "writing to clients"
        return f"The frontend bounds it: it is busy {frontend:.0%} of the time, most of it {part}."
    if report.device_busy >= 0.75 or share < 0.1:
        return (
            f"The device bounds it: it computes {report.device_busy:.0%} of the time, "
            f"{report.device_ms['p50']:.2f} ms a step; the scheduler takes {report.scheduler_us['p50']:.0f} us of it."
        )
    what = {
        "no requests": "Requests bound it: the device waits for them",
        "scheduler": "The scheduler bounds it: the device waits for plans",
        "tokens": "The way back bounds it: the device waits until the core has its tokens",
        "wire": "The wire bounds it: the device waits for messages",
        "host preparation": "The worker's host side bounds it: the device waits for batch preparation",
    }[largest]
    return f"{what} {share:.0%} of the time (it computes {report.device_busy:.0%})."


class StepTotals:
    """Sums over every step since the start, for counters. `update` takes in what the ring has gathered since."""

    TOKEN_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._seen = 0
        self._last = np.zeros((0, len(COLUMNS)), np.int64)
        self.scheduler_s = self.device_s = self.wire_s = 0.0
        self.idle_s = dict.fromkeys(IDLE_CAUSES, 0.0)
        self.busy_s = dict.fromkeys(PROCESS_STAGES, 0.0)
        self.token_counts = np.zeros(len(self.TOKEN_BUCKETS) + 1, np.int64)
        self.num_tokens = self.num_prefill_tokens = 0

    @property
    def is_due(self) -> bool:
        """Whether the ring would forget steps that are not summed, if nobody asked soon."""
        return self._timeline.num_steps - self._seen > len(self._timeline) // 2

    def update(self) -> None:
        rows, self._seen = self._timeline.after(self._seen)
        if not len(rows):
            return
        column = columns(rows)
        self.scheduler_s += float(scheduler_ns(column).sum()) / 1e9
        self.device_s += float(device_ns(column).sum()) / 1e9
        self.wire_s += sum(float(stage_ns(column, name).sum()) for name, owner, *_ in STAGES if owner == "wire") / 1e9
        for process in PROCESS_STAGES:
            self.busy_s[process] += _union_ns(column, process) / 1e9
        for cause, ns in idle_causes(columns(np.concatenate([self._last, rows]))).items():
            self.idle_s[cause] += ns / 1e9
        self._last = rows[-1:]
        tokens = column["num_tokens"]
        places = np.searchsorted(self.TOKEN_BUCKETS, tokens)
        self.token_counts += np.bincount(places, minlength=len(self.token_counts))
        self.num_tokens += int(tokens.sum())
        self.num_prefill_tokens += int(column["num_prefill_tokens"].sum())
