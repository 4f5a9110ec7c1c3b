"""Noise bounds and the comparison of two results; a plot."""
from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from bench.compare import (
    SINGLE_RUN_BOUND,
    bootstrap,
    compare,
    compare_results,
    join_repeats,
    noise,
    rate_noise,
    read_result,
    runs_of,
)
from bench.stats import RequestRecord, serving_figures


def records(count: int = 40, ttft: float = 0.1, itl: float = 0.01, spread: float = 0.1,
            seed: int = 1) -> list[RequestRecord]:
    """Requests of 20 tokens, eight at once, with normal times."""
    generator = random.Random(seed)
    found = []
    for number in range(count):
        start = (number // 8) * (ttft + 19 * itl)
        moment = start + ttft * generator.gauss(1, spread)
        times = [moment]
        for _ in range(19):
            moment += itl * max(0.1, generator.gauss(1, spread))
            times.append(moment)
        found.append(RequestRecord(20, start, times[-1], times, 64, 0, 20, True))
    return found


def result(**changes: Any) -> dict[str, Any]:
    rows = records(**changes)
    load = {"concurrency": 8, "prompt_tokens": [64, 64]}
    return {"load": load, **serving_figures(rows, 8, False), "noise": noise(rows)}


def verdicts(old: dict[str, Any], new: dict[str, Any]) -> dict[str, str]:
    return {row["figure"]: row["verdict"] for row in compare(old, new)}


def test_two_runs_of_the_same_thing_are_the_same() -> None:
    """Seeds 1 to 20 against seed 0: the bound is a 95 % one with a floor, so one of twenty medians may differ."""
    old = result(seed=0)
    found = [verdicts(old, result(seed=seed)) for seed in range(1, 21)]
    assert sum(one["ttft_s.p50"] != "same" for one in found) <= 1
    assert sum(one["output_tok_s"] != "same" for one in found) <= 1


def test_a_slower_run_is_worse_and_a_faster_one_better_in_the_right_direction() -> None:
    old, slow = result(), result(ttft=0.15, itl=0.013, seed=2)
    found = verdicts(old, slow)
    assert {found[name] for name in ("ttft_s.p50", "itl_s.mean", "e2e_s.p50", "output_tok_s", "request_s")} == {"worse"}
    assert verdicts(slow, old)["output_tok_s"] == verdicts(slow, old)["ttft_s.p50"] == "better"


def test_single_runs_on_a_machine_that_drifts_are_not_told_apart() -> None:
    """A neighbour took a tenth of the machine during the second run: every figure of it moved, by more than requests
    within a run differ. This was called worse."""
    old, new = result(spread=0.01), result(ttft=0.11, itl=0.011, spread=0.01, seed=2)
    assert set(verdicts(old, new).values()) == {"same"}
    assert {row["bound"] for row in compare(old, new) if row["figure"] == "itl_s.mean"} == {SINGLE_RUN_BOUND}


def test_repeats_show_the_drift_and_what_is_beyond_it() -> None:
    def repeated(*factors: float, seed: int = 0) -> dict[str, Any]:
        return join_repeats([result(ttft=0.1 * f, itl=0.01 * f, spread=0.01, seed=seed + i)
                             for i, f in enumerate(factors)])

    old = repeated(0.95, 1.0, 1.05)
    assert old["num_repeats"] == 3 and old["successful_requests"] == 120
    assert old["noise"]["itl_s.mean"] == pytest.approx(0.05, abs=0.01)
    assert old["itl_s"]["mean"] == pytest.approx(0.01, rel=0.01)
    assert set(verdicts(old, repeated(0.97, 1.02, 1.06, seed=10)).values()) == {"same"}
    assert verdicts(old, repeated(1.25, 1.2, 1.3, seed=20))["itl_s.mean"] == "worse"
    assert verdicts(repeated(1.25, 1.2, 1.3, seed=20), old)["output_tok_s"] == "better"


def test_noisy_measurements_have_wide_bounds() -> None:
    calm, wild = noise(records(spread=0.02)), noise(records(spread=0.8))
    assert wild["ttft_s.p50"] > 5 * calm["ttft_s.p50"] and calm["ttft_s.p50"] < 0.02
    assert noise(records(count=2)) == {}
    assert bootstrap([[], []]) == {} and bootstrap([[1.0]] * 5) == {"mean": 0.0, "p50": 0.0, "p99": 0.0}


def test_equal_requests_have_no_noise_in_their_rate() -> None:
    even = [RequestRecord(20, float(index), index + 2.0, [index + 1.0], 1, 0, 20, True) for index in range(5)]
    assert rate_noise(even) == 0.0


def test_different_loads_and_missing_ones_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    old, new = result(), result(seed=3)
    new["load"] = {"concurrency": 8, "prompt_tokens": [128, 128]}
    rows = compare_results(old, new)
    text = capsys.readouterr().out
    assert "prompt_tokens [64, 64] -> [128, 128]" in text and "TTFT p50 (ms)" in text
    assert {row["concurrency"] for row in rows} == {8}
    several = {"runs": [{**new, "load": {"concurrency": 4}}, {**new, "load": {"concurrency": 16}}]}
    assert compare_results(old, several) == []
    assert "nothing to compare at concurrency 4: the old file has [8]" in capsys.readouterr().out
    assert len(runs_of(several)) == 2 and len(runs_of(old)) == 1


def test_the_last_json_line_of_a_files_output_is_read(tmp_path: Path) -> None:
    path = tmp_path / "old.txt"
    path.write_text('report\n{"a": 1}\nmore\n{"a": 2}\n')
    assert read_result(str(path)) == {"a": 2}
    path.write_text("nothing\n")
    with pytest.raises(ValueError, match="no line of it is a JSON object"):
        read_result(str(path))
    with pytest.raises(ValueError, match="No such file"):
        read_result(str(tmp_path / "absent"))


def test_the_plot_is_a_png_and_needs_two_loads(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from bench.plot import plot_load
    runs = [{**result(ttft=0.1 * load), "load": {"concurrency": load, "prompt_tokens": [64, 64]}}
            for load in (1, 4, 16)]
    plot_load(runs, str(tmp_path / "load.png"))
    assert (tmp_path / "load.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with pytest.raises(ValueError, match="two loads at least"):
        plot_load(runs[:1], str(tmp_path / "x.png"))
    with pytest.raises(ValueError, match="--plot .*nowhere"):
        plot_load(runs, str(tmp_path / "nowhere/x.png"))
    json.dumps(runs)
