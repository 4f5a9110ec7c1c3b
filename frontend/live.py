"""The engine now, as JSON: what the page at /timeline and `launch.py top` draw. Built only when somebody asks.

Steps are told once: the answer names a count, and the next question asks for what came after it. Knows no HTTP.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from frontend.processes import process_use
from frontend.request_log import RequestRecord, parts
from frontend.step_report import analyse
from frontend.timeline import COLUMN, COLUMNS

if TYPE_CHECKING:
    from frontend.async_llm import AsyncLLM

MAX_STEPS = 1500  # told at once; older ones are left out
LATENCY_S = 60
MAX_GAPS = 20_000  # between tokens that the latency looks at
REPORT_NS = 5_000_000_000
TIMES = COLUMNS[: COLUMNS.index("step")]
# Of each step: plan_begin in microseconds of the monotonic clock, the other moments as microseconds after it, facts.
STEP_FIELDS = (*(name for name in TIMES if name != "device_ns"), "received", "handled", "written", "step", "num_rows",
               "num_tokens", "num_prefill_tokens", "num_running", "num_waiting", "num_free_blocks")
_MOMENTS = STEP_FIELDS[1 : STEP_FIELDS.index("step")]


async def live(llm: AsyncLLM, after: int, pids: list[int]) -> dict[str, Any]:
    """Everything at once. `after`: the count of the last answer; -1: only recent steps."""
    status = llm.status()
    if not status["ready"]:
        return {"status": status}
    found = await llm.overview()
    rows, count = llm.timeline.after(max(after, 0))
    now_ns = time.monotonic_ns()
    running = llm.requests()
    by_id = {number: record for record in running for number in record.engine_ids}
    for entry in found["waiting"]:
        record = by_id.get(entry["request_id"])
        entry["name"] = record.request_id if record else f"of another frontend: {entry['request_id']}"
        entry["waits_s"] = round(record.wall_s, 3) if record else None
    since_ns = llm.timeline.known_since(now_ns - REPORT_NS)
    report = dataclasses.asdict(analyse(llm.timeline.window(since_ns), window_ns=(since_ns, now_ns)))
    return {
        "status": status,
        "model": llm.served_model_name,
        "now_us": now_ns // 1000,
        "count": count,
        "fields": STEP_FIELDS,
        "steps": step_list(rows[-MAX_STEPS:]),
        "pool": {**{k: found[k] for k in ("stride", "num_blocks", "num_free", "block_size")},
                 "blocks": run_lengths(found["blocks"])},
        "queue": {k: found[k] for k in ("waiting", "num_waiting", "num_running", "num_seats",
                                        "max_num_batched_tokens")},
        "requests": [request_json(record) for record in running[:50]],
        "latency": latency(running + llm.request_log.since(now_ns / 1e9 - LATENCY_S), now_ns),
        "report": report,
        "processes": [use._asdict() for use in process_use(pids)],
    }


def step_list(rows: np.ndarray) -> list[list[int]]:
    """Rows as STEP_FIELDS says; a moment that is missing is -1."""
    if not len(rows):
        return []
    base = rows[:, COLUMN["plan_begin"]]
    fields = [base // 1000]
    for name in _MOMENTS:
        moment = rows[:, COLUMN[name]]
        fields.append(np.where(moment > 0, (moment - base) // 1000, -1))
    fields += [rows[:, COLUMN[name]] for name in STEP_FIELDS[STEP_FIELDS.index("step") :]]
    told: list[list[int]] = np.stack(fields, 1).tolist()
    return told


def run_lengths(states: bytes) -> list[int]:
    """state, count, state, count, ...: a pool is mostly runs."""
    values = np.frombuffer(states, np.uint8)
    if not values.size:
        return []
    starts = np.concatenate([[0], np.flatnonzero(np.diff(values)) + 1])
    counts = np.diff(np.concatenate([starts, [values.size]]))
    told: list[int] = np.stack([values[starts], counts], 1).ravel().tolist()
    return told


def request_json(record: RequestRecord) -> dict[str, Any]:
    """One request with its parts in seconds."""
    now = time.monotonic()
    spans = parts(record.metrics, None if record.finish_reason else now)
    return {"id": record.request_id, "wall_s": round(record.wall_s, 3),
            "parts": {name: round(end - begin, 4) for name, (begin, end) in spans.items()},
            "prompt": record.num_prompt_tokens, "cached": record.num_cached_tokens,
            "output": record.num_output_tokens, "preemptions": record.num_preemptions}


def latency(records: list[RequestRecord], now_ns: int) -> dict[str, list[float | None]]:
    """Per second of the last LATENCY_S, oldest first, in milliseconds: medians of TTFT and ITL, ITL's 99th percentile.

    None: nothing happened in that second.
    """
    begin = now_ns - LATENCY_S * 1_000_000_000
    firsts = [(int(r.metrics.first_token_time * 1e9), r.ttft_s * 1000) for r in records
              if r.metrics.first_token_time is not None and r.ttft_s is not None]
    times = [ns for record in records for ns in record.token_ns if len(ns) > 1]
    at = np.concatenate([ns[1:] for ns in times])[-MAX_GAPS:] if times else np.zeros(0, np.int64)
    gaps = np.concatenate([np.diff(ns) for ns in times])[-MAX_GAPS:] / 1e6 if times else np.zeros(0)
    first_at = np.array([at_ns for at_ns, _ in firsts], np.int64)
    first_ms = np.array([ms for _, ms in firsts])
    told: dict[str, list[float | None]] = {"ttft_p50": [], "itl_p50": [], "itl_p99": []}
    for name, moments, values, percent in (("ttft_p50", first_at, first_ms, 50), ("itl_p50", at, gaps, 50),
                                           ("itl_p99", at, gaps, 99)):
        second = (moments - begin) // 1_000_000_000
        order = np.argsort(second, kind="stable")
        edges = np.searchsorted(second[order], np.arange(LATENCY_S + 1))
        for low, high in zip(edges[:-1].tolist(), edges[1:].tolist()):
            part = values[order[low:high]]
            told[name].append(round(float(np.percentile(part, percent)), 3) if part.size else None)
    return told
