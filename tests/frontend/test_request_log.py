"""The parts of a request: they touch, and what was not reached lends its time to nobody."""
from __future__ import annotations

import numpy as np
import pytest

from frontend.live import LATENCY_S, latency, run_lengths, step_list
from frontend.outputs import RequestMetrics
from frontend.request_log import RequestRecord, parts
from frontend.timeline import COLUMN, COLUMNS


def record(metrics: RequestMetrics, *token_ns: int) -> RequestRecord:
    return RequestRecord("r", [1], metrics, 5, 2, len(token_ns), 0, "stop", [np.array(token_ns, np.int64)])


def test_parts_touch_and_sum_to_the_wall_time() -> None:
    found = parts(RequestMetrics(10.0, 10.5, 11.0, 13.0, 17.0, 17.25))
    assert found == {"tokenize": (10.0, 10.5), "queue": (10.5, 11.0), "prefill": (11.0, 13.0), "decode": (13.0, 17.0),
                     "write": (17.0, 17.25)}


@pytest.mark.parametrize("metrics, now, last", [
    (RequestMetrics(1.0), 4.0, {"tokenize": (1.0, 4.0)}),
    (RequestMetrics(1.0, 2.0), 4.0, {"tokenize": (1.0, 2.0), "queue": (2.0, 4.0)}),
    (RequestMetrics(1.0, 2.0, delivered_time=9.0), None, {"tokenize": (1.0, 2.0), "queue": (2.0, 9.0)}),
    (RequestMetrics(1.0, 2.0, 3.0, 4.0, delivered_time=9.0), None,
     {"tokenize": (1.0, 2.0), "queue": (2.0, 3.0), "prefill": (3.0, 4.0), "decode": (4.0, 9.0)}),
])
def test_the_part_that_was_reached_last_goes_on_to_the_end(metrics: RequestMetrics, now: float | None,
                                                           last: dict[str, tuple[float, float]]) -> None:
    assert parts(metrics, now) == last


def test_a_scheduler_that_was_faster_than_our_own_clock_reading_gives_no_negative_part() -> None:
    found = parts(RequestMetrics(1.0, 2.0, 1.9, 3.0, 4.0, 4.0))
    assert found["queue"] == (2.0, 2.0) and found["prefill"] == (2.0, 3.0)


def test_latency_by_second() -> None:
    now = 1_000 * 10 ** 9
    second = 10 ** 9
    at = now - 3 * second
    one = record(RequestMetrics((at - 200_000_000) / 1e9, first_token_time=at / 1e9), at, at + 10_000_000,
                 at + 30_000_000)
    found = latency([one], now)
    assert all(len(series) == LATENCY_S for series in found.values())
    assert found["ttft_p50"][-3] == pytest.approx(200, abs=0.01) and found["itl_p50"][-3] == pytest.approx(15)
    assert [name for name, series in found.items() for value in series if value is not None] == [
        "ttft_p50", "itl_p50", "itl_p99"]
    assert latency([], now)["itl_p99"] == [None] * LATENCY_S


def test_steps_are_told_relative_to_their_plan() -> None:
    row = np.zeros((1, len(COLUMNS)), np.int64)
    for name, value in (("plan_begin", 5_000_000), ("plan_end", 5_040_000), ("worker_done", 9_000_000), ("step", 7),
                        ("num_tokens", 3)):
        row[0, COLUMN[name]] = value
    from frontend.live import STEP_FIELDS
    (told,) = step_list(row)
    value = dict(zip(STEP_FIELDS, told, strict=True))
    assert (value["plan_begin"], value["plan_end"], value["worker_done"], value["received"]) == (5000, 40, 4000, -1)
    assert (value["step"], value["num_tokens"]) == (7, 3)


def test_a_pool_is_told_in_runs() -> None:
    assert run_lengths(bytes([0, 0, 2, 2, 2, 1])) == [0, 2, 2, 3, 1, 1] and run_lengths(b"") == []
