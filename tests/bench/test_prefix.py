"""`bench prefix` shows what lpm and partial reuse gain, and that nobody is overtaken more often than allowed."""
from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.prefix import WORKLOADS, add_up, main, make_workload, max_overtakes_of, run


def figures(name: str, num_blocks: int, policy: str, is_partial: bool, *, max_overtakes: int = 16,
            scale: float = 1.0) -> dict[str, Any]:
    return add_up([run(make_workload(name, seed, scale), num_blocks, policy, is_partial, max_overtakes)
                   for seed in range(2)])


@pytest.mark.parametrize(("name", "num_blocks"), [("systems", 96), ("tree", 48), ("chat", 96)])
def test_lpm_finds_more_than_fcfs_when_the_pool_is_too_small_for_all(name: str, num_blocks: int) -> None:
    fcfs, lpm = (figures(name, num_blocks, policy, True) for policy in ("fcfs", "lpm"))
    assert lpm["hit_rate"] > fcfs["hit_rate"] + 0.03
    assert lpm["computed_tokens"] < fcfs["computed_tokens"]


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_partial_reuse_finds_more_and_computes_less(name: str) -> None:
    full, partial = (figures(name, 512, "fcfs", is_partial) for is_partial in (False, True))
    assert full["copied_tokens"] == 0 < partial["copied_tokens"]
    assert partial["hit_rate"] > full["hit_rate"]
    assert partial["hit_tokens"] - full["hit_tokens"] == partial["copied_tokens"]
    assert full["computed_tokens"] - partial["computed_tokens"] == partial["copied_tokens"]


def test_short_turns_save_a_fifth_of_the_computing_by_partial_reuse() -> None:
    full, partial = (figures("chat", 512, "fcfs", is_partial) for is_partial in (False, True))
    assert partial["computed_tokens"] < 0.8 * full["computed_tokens"]


def test_every_figure_repeats_exactly() -> None:
    assert figures("systems", 64, "lpm", True) == figures("systems", 64, "lpm", True)


@pytest.mark.parametrize("limit", [1, 3, 16])
@pytest.mark.parametrize("num_blocks", [48, 128])
def test_nobody_is_overtaken_more_often_than_the_limit(num_blocks: int, limit: int) -> None:
    """Also not in the small pool, where requests are preempted and return."""
    overtakes = [figures(name, num_blocks, "lpm", True, max_overtakes=limit)["max_overtakes"] for name in WORKLOADS]
    assert max(overtakes) == limit


def test_fcfs_overtakes_nobody() -> None:
    assert all(figures(name, 48, "fcfs", True)["max_overtakes"] == 0 for name in WORKLOADS)


def test_overtakes_are_counted_from_the_order_of_admission() -> None:
    assert max_overtakes_of([4, 2, 7], [4, 2, 7]) == 0
    assert max_overtakes_of([4, 2, 7], [7, 2, 4]) == 2
    assert max_overtakes_of([4, 2, 7], [2, 4, 7]) == 1


def test_prints_a_table_and_one_json_object_last(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--plot", "none", "--scale", "0.2", "--repeat", "1", "--blocks", "128", "64"]
    assert main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(WORKLOADS) * 2 * 4 + 1
    result = json.loads(lines[-1])
    assert result["bench"] == "prefix" and result["bound_holds"] and result["max_overtakes"] <= 16
    for series in result["workloads"].values():
        assert series["blocks"] == [64, 128]
        assert set(series["hit_rate"]) == {"fcfs/full", "fcfs/partial", "lpm/full", "lpm/partial"}
        assert all(len(values) == 2 for values in series["hit_rate"].values())


def test_without_matplotlib_the_figures_are_still_printed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                                          capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    argv = ["--workload", "tree", "--scale", "0.2", "--repeat", "1", "--blocks", "64"]
    assert main([*argv, "--plot", str(tmp_path / "plot.png")]) == 1
    captured = capsys.readouterr()
    assert "matplotlib" in captured.err and "setup --extra test" in captured.err
    assert json.loads(captured.out.splitlines()[-1])["bench"] == "prefix"


def test_writes_a_png(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "folder" / "plot.png"
    argv = ["--workload", "tree", "--scale", "0.2", "--repeat", "1", "--blocks", "64", "128", "--plot", str(file)]
    assert main(argv) == 0
    assert file.read_bytes().startswith(b"\x89PNG")
