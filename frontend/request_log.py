"""Where the time of each request went: its parts, and the last requests that ended.

    arrival ─ tokenize ─ sent ─ queue ─ first scheduled ─ prefill ─ first token ─ decode ─ finished ─ write ─ delivered

The parts touch, so they add up to the request's wall time. A part that was not reached is missing; the last one that
was, lasts until the end. Knows no steps and no HTTP.
"""
from __future__ import annotations

import dataclasses
import time
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from frontend.outputs import RequestMetrics

if TYPE_CHECKING:
    from frontend.request_stream import RequestStream

KEPT_REQUESTS = 512
PARTS = ("tokenize", "queue", "prefill", "decode", "write")


def parts(metrics: RequestMetrics, now: float | None = None) -> dict[str, tuple[float, float]]:
    """Part -> (begin, end) in seconds of time.monotonic(). `now`: the end of a request that still runs."""
    marks = (metrics.arrival_time, metrics.sent_time, metrics.first_scheduled_time, metrics.first_token_time,
             metrics.finish_time, metrics.delivered_time)
    found: dict[str, tuple[float, float]] = {}
    begin, part = metrics.arrival_time, 0
    for index, mark in enumerate(marks[1:]):
        if mark is not None:
            end = max(begin, mark)
            found[PARTS[part]] = (begin, end)
            begin, part = end, index + 1
    if now is not None and part < len(PARTS):
        found[PARTS[part]] = (begin, max(begin, now))
    return found


@dataclasses.dataclass(slots=True)
class RequestRecord:
    """One request, running or ended."""
    request_id: str
    engine_ids: list[int]                       # what the engine calls its choices
    metrics: RequestMetrics
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_preemptions: int
    finish_reason: str                          # of its first choice; "": it runs
    token_ns: list[np.ndarray]                  # per choice, when each token arrived, monotonic

    @classmethod
    def of(cls, stream: RequestStream) -> RequestRecord:
        choices = stream.choices
        return cls(stream.request_id, [choice.request_id for choice in choices], stream.metrics,
                   len(stream.prompt_token_ids) // 4, stream.num_cached_tokens,
                   sum(len(choice.token_ids) for choice in choices), stream.num_preemptions,
                   (choices[0].finish_reason or "") if choices else "",
                   [np.array(choice.token_ns, np.int64) for choice in choices])

    @property
    def wall_s(self) -> float:
        """From arrival to its end, or to now."""
        end = self.metrics.delivered_time
        return (time.monotonic() if end is None else end) - self.metrics.arrival_time

    @property
    def ttft_s(self) -> float | None:
        first = self.metrics.first_token_time
        return None if first is None else first - self.metrics.arrival_time


class RequestLog:
    """The last requests that ended, oldest first. Add `observe` to AsyncLLM.observers."""

    def __init__(self) -> None:
        self.ended: deque[RequestRecord] = deque(maxlen=KEPT_REQUESTS)

    def observe(self, stream: RequestStream) -> None:
        record = RequestRecord.of(stream)
        if not record.finish_reason:
            record.finish_reason = "abort"
        self.ended.append(record)

    def since(self, since_s: float) -> list[RequestRecord]:
        """Those that ended after this time of time.monotonic()."""
        return [record for record in self.ended if (record.metrics.delivered_time or 0.0) >= since_s]
