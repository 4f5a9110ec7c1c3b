"""What a window of steps says, from stamps whose meaning is known."""
from __future__ import annotations

import json

import numpy as np
import pytest

from frontend.timeline import COLUMNS, IDLE_CAUSES, RING_STEPS, Timeline, analyse, chrome_trace
from ipc.messages import STAMPS

US = 1000


def steps(count: int, *, plan: int = 50, wire: int = 40, prepare: int = 30, forward: int = 5000, sample: int = 100,
          back: int = 40, commit: int = 60, out: int = 30, detokenize: int = 50, pause: int = 0) -> np.ndarray:
    """Synchronous steps, one after the other; times in microseconds. `pause`: before each plan nothing is asked for."""
    rows, now = [], 1_000_000 * US
    for step in range(count):
        now += pause * US
        row = {"step": step, "num_rows": 4, "num_tokens": 4, "plan_begin": now}
        for name, took in (("plan_end", plan), ("worker_received", wire), ("worker_prepared", prepare),
                           ("worker_launched", forward), ("worker_done", sample), ("commit_begin", back),
                           ("commit_end", commit)):
            now += took * US
            row[name] = now
        row["received"] = now + out * US
        row["handled"] = row["received"] + detokenize * US
        row["device_ns"] = (forward + sample) * US
        rows.append([row.get(name, 0) for name in COLUMNS])
    return np.array(rows, np.int64)


def test_stages_have_the_times_that_were_put_in() -> None:
    report = analyse(steps(50))
    assert report.num_steps == 50 and report.tokens_per_step == 4
    assert {name: round(stage["p50"]) for name, stage in report.stages.items()} == {
        "plan": 50, "plan wire": 40, "prepare": 30, "forward": 5000, "sample": 100, "result wire": 40, "commit": 60,
        "output wire": 30, "detokenize": 50}
    assert report.scheduler_us["p50"] == pytest.approx(110) and report.device_ms["p50"] == pytest.approx(5.1)


def test_busy_and_idle_shares_sum_to_the_window() -> None:
    report = analyse(steps(80, forward=1000, plan=700, pause=900))
    first_prepare = 30 * US / (report.seconds * 1e9)        # before the first step nothing is known to wait
    assert report.device_busy + sum(report.idle.values()) + first_prepare == pytest.approx(1.0, abs=0.01)
    assert set(report.idle) == set(IDLE_CAUSES)


@pytest.mark.parametrize("planted, says", [
    ({"plan": 3000, "forward": 1000}, "The scheduler bounds it"),
    ({"prepare": 3000, "forward": 1000}, "The worker's host side bounds it"),
    ({"detokenize": 6000, "forward": 1000}, "The frontend bounds it"),
    ({"pause": 20_000, "forward": 1000}, "Requests bound it"),
    ({"wire": 3000, "forward": 1000}, "The wire bounds it"),
    ({"forward": 20_000}, "The device bounds it"),
])
def test_a_planted_fault_is_named(planted: dict[str, int], says: str) -> None:
    assert analyse(steps(60, **planted)).verdict.startswith(says)


def test_the_ring_keeps_the_newest_steps() -> None:
    timeline = Timeline()
    rows = steps(RING_STEPS + 100)
    for row in rows:
        timeline.add(row[:len(STAMPS)].tobytes(), int(row[-5]), int(row[-4]), 1, 2, 3)
    kept = timeline.window()
    assert len(kept) == RING_STEPS and kept[0][STAMPS.index("step")] == 100 and kept[-1][-3:].tolist() == [1, 2, 3]


def test_a_window_begins_where_it_is_asked_to() -> None:
    timeline = Timeline()
    rows = steps(20)
    timeline.add(rows[:, :len(STAMPS)].tobytes(), 1, 2, 0, 0, 0)
    since = int(rows[12][COLUMNS.index("commit_begin")])
    assert timeline.window(since)[0][STAMPS.index("step")] == 12


def test_no_steps_is_said_and_not_divided_by() -> None:
    assert "idle" in analyse(np.zeros((0, len(COLUMNS)), np.int64)).verdict


def test_the_trace_has_a_track_per_process_and_follows_each_step() -> None:
    trace = json.loads(json.dumps(chrome_trace(steps(3))))["traceEvents"]
    assert {e["args"]["name"] for e in trace if e["ph"] == "M"} == {"frontend", "engine_core", "worker"}
    assert [e["ph"] for e in trace if e.get("cat") == "step" and e["id"] == 1] == ["s", "t", "t", "f"]
    assert all(e["dur"] >= 0 for e in trace if e["ph"] == "X")
