"""A window as Chrome Trace Event JSON, for ui.perfetto.dev: a track per process and per request, arrows that follow
each step from core to worker to core to frontend, counters. Times are microseconds of the host's monotonic clock.

An operator trace of torch's profiler can be laid beside it: it has a clock of its own, and marks in it that tell both.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from frontend.request_log import RequestRecord, parts
from frontend.timeline import COLUMN, STAGES

PIDS = {"frontend": 1, "engine_core": 2, "worker": 3, "requests": 4, "worker operators": 5}
CLOCK_MARK = re.compile(r"threefold clock (\d+)")   # a range of this name begins at that monotonic ns

Event = dict[str, Any]


def chrome_trace(
    rows: np.ndarray, requests: Iterable[RequestRecord] = (), operators: dict[str, Any] | None = None,
    num_blocks: int = 0,
) -> dict[str, Any]:
    """The whole file. `operators`: a trace that torch's profiler wrote. `num_blocks`: of the pool, for KV use."""
    events: list[Event] = [_name(pid, name) for name, pid in PIDS.items() if name != "worker operators" or operators]
    for row in rows:
        events += _step({name: int(row[i]) for name, i in COLUMN.items()}, num_blocks)
    if len(rows):
        since_s = int(rows[0][COLUMN["plan_begin"]]) / 1e9
        requests = [r for r in requests if (r.metrics.delivered_time or 1e18) >= since_s]
    for number, record in enumerate(requests):
        events += _request(record, number + 1)
    if operators:
        events += operator_events(operators)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _name(pid: int, name: str, tid: int | None = None) -> Event:
    kind = "process_name" if tid is None else "thread_name"
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid or 0, "args": {"name": name}}


def _step(value: dict[str, int], num_blocks: int) -> list[Event]:
    arguments = {
        "step": value["step"], "requests": value["num_rows"], "tokens": value["num_tokens"],
        "prefill tokens": value["num_prefill_tokens"],
    }
    events: list[Event] = []
    for stage, process, begin, end in STAGES:
        if process in PIDS and value[end] >= value[begin] > 0:
            events.append({"ph": "X", "name": stage, "pid": PIDS[process], "tid": 0, "ts": value[begin] / 1000,
                           "dur": (value[end] - value[begin]) / 1000, "args": arguments})
    for phase, process, at in (("s", "engine_core", "plan_begin"), ("t", "worker", "worker_received"),
                               ("t", "engine_core", "commit_begin"), ("f", "frontend", "received")):
        arrow: Event = {"ph": phase, "name": "step", "cat": "step", "id": value["step"], "pid": PIDS[process],
                        "tid": 0, "ts": value[at] / 1000}
        if phase == "f":
            arrow["bp"] = "e"
        if value[at]:
            events.append(arrow)
    if not value["received"]:                   # a step of which no frontend of ours was told what else there was
        return events
    committed = value["commit_begin"] / 1000
    counters: list[tuple[str, str, float, dict[str, int]]] = [
        ("engine_core", "requests", committed, {"running": value["num_running"], "waiting": value["num_waiting"]}),
        ("worker", "tokens of a step", value["worker_received"] / 1000,
         {"prefill": value["num_prefill_tokens"], "decode": value["num_tokens"] - value["num_prefill_tokens"]}),
    ]
    if num_blocks:
        used = num_blocks - value["num_free_blocks"]
        counters.append(("engine_core", "KV blocks in use", committed, {"blocks": used}))
    events += [{"ph": "C", "name": name, "pid": PIDS[process], "ts": ts, "args": args}
               for process, name, ts, args in counters]
    return events


def _request(record: RequestRecord, tid: int) -> list[Event]:
    arguments = {"prompt tokens": record.num_prompt_tokens, "cached tokens": record.num_cached_tokens,
                 "output tokens": record.num_output_tokens, "preemptions": record.num_preemptions,
                 "finish reason": record.finish_reason or "running"}
    pid = PIDS["requests"]
    events = [_name(pid, record.request_id, tid)]
    for name, (begin, end) in parts(record.metrics, record.metrics.arrival_time + record.wall_s).items():
        events.append({"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": begin * 1e6, "dur": (end - begin) * 1e6,
                       "args": arguments})
    for choice, times in enumerate(record.token_ns):
        events += [{"ph": "i", "s": "t", "name": "token", "pid": pid, "tid": tid, "ts": ns / 1000,
                    "args": {"number": number, "choice": choice}} for number, ns in enumerate(times.tolist())]
    return events


def operator_events(operators: dict[str, Any]) -> list[Event]:
    """The events of torch's profiler, on our clock and under one process.

    Raises ValueError when the trace has no mark that says how its clock relates to ours.
    """
    found = operators.get("traceEvents", [])
    marks = [(int(match[1]) / 1000 - float(event["ts"])) for event in found if event.get("ph") == "X"
             and (match := CLOCK_MARK.fullmatch(str(event.get("name", ""))))]
    if not marks:
        raise ValueError("the operator trace has no clock mark; it was not written by this worker")
    offset = float(np.median(marks))
    threads: dict[Any, int] = {}
    events: list[Event] = []
    for event in found:
        if event.get("ph") != "X" or CLOCK_MARK.fullmatch(str(event.get("name", ""))):
            continue
        if not isinstance(event.get("tid"), (int, str)) or "Iteration" in str(event.get("name")):
            continue
        tid = threads.setdefault((event.get("pid"), event["tid"]), len(threads) + 1)
        events.append({"ph": "X", "name": event["name"], "cat": event.get("cat", "cpu_op"),
                       "pid": PIDS["worker operators"], "tid": tid, "ts": float(event["ts"]) + offset,
                       "dur": float(event.get("dur", 0.0)), "args": event.get("args", {})})
    events += [_name(PIDS["worker operators"], f"thread {thread}", tid) for (_, thread), tid in threads.items()]
    return events
