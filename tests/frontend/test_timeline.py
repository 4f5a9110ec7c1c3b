"""What a window of steps says, from stamps whose meaning is known."""
from __future__ import annotations

import json

import numpy as np
import pytest

from frontend.step_report import IDLE_CAUSES, StepTotals, analyse, device_ns, idle_causes
from frontend.timeline import COLUMN, COLUMNS, RING_STEPS, Timeline, columns
from frontend.trace import chrome_trace, operator_events
from ipc.messages import STAMPS, Outputs

US = 1000


def steps(count: int, *, plan: int = 50, encode: int = 10, wire: int = 40, prepare: int = 30, forward: int = 5000,
          sample: int = 100, back: int = 40, commit: int = 60, out: int = 30, detokenize: int = 50, write: int = 20,
          pause: int = 0) -> np.ndarray:
    """Synchronous steps, one after the other; times in microseconds. `pause`: before each plan nothing is asked for."""
    rows, now = [], 1_000_000 * US
    for step in range(count):
        now += pause * US
        row = {"step": step, "num_rows": 4, "num_tokens": 4, "num_prefill_tokens": 1, "plan_begin": now}
        for name, took in (("plan_end", plan), ("plan_sent", encode), ("worker_received", wire),
                           ("worker_prepared", prepare), ("worker_launched", forward), ("worker_done", sample),
                           ("commit_begin", back), ("commit_end", commit)):
            now += took * US
            row[name] = now
        row["outputs_sent"] = now
        row["received"] = now + out * US
        row["handled"] = row["received"] + detokenize * US
        row["written"] = row["handled"] + write * US
        row["device_ns"] = (forward + sample) * US
        rows.append([row.get(name, 0) for name in COLUMNS])
    return np.array(rows, np.int64)


def hear(timeline: Timeline, rows: np.ndarray, received_ns: int = 1, written: bool = True) -> None:
    """One message that tells of these steps."""
    stamps = np.ascontiguousarray(rows[:, :len(STAMPS)]).data.cast("B")
    outputs = Outputs(int(rows[-1, COLUMN["step"]]), num_running=1, num_waiting=2, num_free_blocks=3, stamps=stamps)
    if timeline.hear(outputs, received_ns) and written:
        timeline.written()


def test_stages_have_the_times_that_were_put_in() -> None:
    report = analyse(steps(50))
    assert report.num_steps == 50 and report.tokens_per_step == 4
    assert {name: round(stage["p50"]) for name, stage in report.stages.items()} == {
        "plan": 50, "encode": 10, "plan wire": 40, "prepare": 30, "forward": 5000, "sample": 100, "result wire": 40,
        "commit": 60, "output wire": 30, "detokenize": 50, "write": 20}
    assert report.scheduler_us["p50"] == pytest.approx(120) and report.device_ms["p50"] == pytest.approx(5.1)


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
    for i in range(len(rows)):
        hear(timeline, rows[i:i + 1])
    kept = timeline.window()
    assert len(kept) == RING_STEPS and kept[0][STAMPS.index("step")] == 100 and kept[-1][-3:].tolist() == [1, 2, 3]


def test_a_window_begins_where_it_is_asked_to() -> None:
    timeline = Timeline()
    rows = steps(20)
    hear(timeline, rows)
    since = int(rows[12][COLUMNS.index("commit_begin")])
    assert timeline.window(since)[0][STAMPS.index("step")] == 12


def test_shares_are_of_the_window_also_where_it_has_few_steps() -> None:
    """They were of the time from the first step to the last: a server that had done nothing for long read busy."""
    rows = steps(50, forward=1000)
    first, last = int(rows[0, COLUMN["plan_begin"]]), int(rows[-1, COLUMN["worker_done"]])
    alone, span = analyse(rows), last - first
    half = analyse(rows, window_ns=(first - span // 2, last + span // 2))
    assert half.busy["worker"] == pytest.approx(alone.busy["worker"] / 2, rel=0.01)
    assert half.device_busy == pytest.approx(alone.device_busy / 2, rel=0.01)
    assert half.idle["no requests"] == pytest.approx(0.5, abs=0.01) and half.verdict.startswith("Requests bound it")
    rows[-1, COLUMN["num_running"]] = 1                     # a step is under way
    assert analyse(rows, window_ns=(first, last + span)).busy == alone.busy


def test_a_frontend_had_no_news_of_steps_before_it_came() -> None:
    rows = steps(5)[1:]
    since_ns = int(rows[2, COLUMN["commit_end"]])
    timeline = Timeline(since_ns)
    assert timeline.known_since(5) == 5
    hear(timeline, rows, 7)
    found = timeline.window()[:, -6:]
    assert not found[:2].any() and found[2:, 0].tolist() == [7, 7] and found[2:, 3:].tolist() == [[1, 2, 3]] * 2
    assert not [e for e in chrome_trace(timeline.window()[:2])["traceEvents"] if e["ph"] in "Cf"]
    rows = steps(RING_STEPS + 9)
    for i in range(5, len(rows)):
        hear(timeline, rows[i:i + 1])
    assert timeline.known_since(5) == rows[9, COLUMN["commit_begin"]]


def test_each_step_has_the_times_of_the_message_that_brought_its_news() -> None:
    """The stamps of many steps come together; what this frontend did was noted when the news of each came."""
    timeline, rows = Timeline(), steps(8)[1:]
    for step in (1, 2, 4, 5):                               # the news of 3 came with those of 4
        assert timeline.hear(Outputs(step, num_running=step), 100 * step)
        timeline.written()
    assert len(timeline.window()) == 0                      # nothing is known of the steps themselves
    hear(timeline, rows[:5], 500, written=False)            # a beat: 5 was heard of
    found = timeline.window()
    assert found[:, COLUMN["step"]].tolist() == [1, 2, 3, 4, 5]
    assert found[:, COLUMN["received"]].tolist() == [100, 200, 400, 400, 500]
    assert found[:, COLUMN["num_running"]].tolist() == [1, 2, 4, 4, 5]
    assert (found[:, COLUMN["written"]] > found[:, COLUMN["handled"]]).all()
    hear(timeline, rows[5:], 700)
    assert timeline.window()[:, COLUMN["received"]].tolist() == [100, 200, 400, 400, 500, 700, 700]


def test_the_steps_of_a_new_core_are_not_taken_for_those_of_the_old_one() -> None:
    timeline = Timeline()
    hear(timeline, steps(8)[1:], 100)
    timeline.hear(Outputs(9), 200)                          # of which the old core could not tell any more
    timeline.begin()
    timeline.written()
    hear(timeline, steps(3)[1:], 300)
    found = timeline.window()
    assert found[:, COLUMN["step"]].tolist() == [1, 2, 3, 4, 5, 6, 7, 1, 2]
    assert found[:, COLUMN["received"]].tolist() == [100] * 7 + [300] * 2


def test_no_steps_is_said_and_not_divided_by() -> None:
    assert "idle" in analyse(np.zeros((0, len(COLUMNS)), np.int64)).verdict


def test_the_trace_has_a_track_per_process_and_follows_each_step() -> None:
    trace = json.loads(json.dumps(chrome_trace(steps(3))))["traceEvents"]
    assert {e["args"]["name"] for e in trace if e["ph"] == "M"} == {"frontend", "engine_core", "worker", "requests"}
    assert [e["ph"] for e in trace if e.get("cat") == "step" and e["id"] == 1] == ["s", "t", "t", "f"]
    assert all(e["dur"] >= 0 for e in trace if e["ph"] == "X")


def test_totals_are_those_of_all_steps_whatever_the_ring_kept() -> None:
    rows = steps(RING_STEPS * 2, forward=1000, pause=500)
    timeline = Timeline()
    totals = StepTotals(timeline)
    for i in range(len(rows)):
        hear(timeline, rows[i:i + 1])
        if totals.is_due:
            totals.update()
    totals.update()
    assert totals.num_tokens == 4 * len(rows) and totals.num_prefill_tokens == len(rows)
    assert totals.device_s == pytest.approx(len(rows) * 1100e-6)
    assert totals.scheduler_s == pytest.approx(len(rows) * 120e-6)
    assert totals.idle_s["no requests"] == pytest.approx((len(rows) - 1) * 500e-6)
    assert totals.token_counts.tolist()[2] == len(rows) == totals.token_counts.sum()
    assert totals.busy_s["worker"] == pytest.approx(len(rows) * 1130e-6)


def test_a_plan_made_before_the_gap_leaves_only_its_later_parts() -> None:
    rows = steps(2)
    begin = int(rows[0, COLUMN["worker_done"]])
    for name, at in (("plan_begin", -900), ("plan_end", -800), ("plan_sent", -700), ("worker_received", 5),
                     ("worker_prepared", 25)):
        rows[1, COLUMN[name]] = begin + at * US
    idle = idle_causes(columns(rows))
    assert {cause: ns // US for cause, ns in idle.items() if ns} == {"wire": 5, "host preparation": 20}


def test_steps_told_in_one_message_count_their_frontend_time_once() -> None:
    rows = steps(10, forward=100, detokenize=500)
    for name in ("received", "handled", "written"):
        rows[:, COLUMN[name]] = rows[-1, COLUMN[name]]
    assert analyse(rows).busy["frontend"] * analyse(rows).seconds == pytest.approx(520e-6)


def test_after_gives_each_step_once() -> None:
    timeline = Timeline()
    hear(timeline, steps(10)[:4])
    rows, count = timeline.after(0)
    hear(timeline, steps(10)[4:])
    more, end = timeline.after(count)
    assert (len(rows), count, len(more), end) == (4, 4, 6, 10) and len(timeline.after(end)[0]) == 0
    assert len(timeline.after(1 << 40)[0]) == 10            # of a server that was restarted


def test_operators_come_on_the_clock_of_the_steps() -> None:
    other = 5_000_000.0                                     # microseconds that the profiler's clock is ahead
    mark = {"ph": "X", "name": f"threefold clock {2_000 * US}", "pid": 7, "tid": 7, "ts": 2_000 + other, "dur": 3}
    operator = {"ph": "X", "name": "aten::mm", "cat": "cpu_op", "pid": 7, "tid": 7, "ts": 2_500 + other, "dur": 40.0}
    found = operator_events({"traceEvents": [mark, operator, {"ph": "i", "name": "Record Window End"}]})
    assert [(e["name"], e["ts"], e["dur"]) for e in found if e["ph"] == "X"] == [("aten::mm", 2_500.0, 40.0)]
    with pytest.raises(ValueError, match="clock mark"):
        operator_events({"traceEvents": [operator]})


def test_a_step_launched_before_the_last_one_ended_counts_from_that_end() -> None:
    rows = steps(3, forward=1000)
    rows[1, COLUMN["worker_prepared"]] = rows[0, COLUMN["worker_done"]] - 400 * US
    rows[1, COLUMN["worker_done"]] = rows[0, COLUMN["worker_done"]] + 700 * US
    assert device_ns(columns(rows)).tolist() == [1100 * US, 700 * US, 1100 * US]
