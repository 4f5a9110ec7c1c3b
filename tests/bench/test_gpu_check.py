"""The GPU run without a GPU: its script keeps to its time and tells every failure, its loader figures hang together."""
from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

pytest.importorskip("triton")

from bench import gpu_load  # noqa: E402
from bench.gpu_bench import Bench, is_missed, run_parts  # noqa: E402
from bench.gpu_engine import is_near_tie, shape  # noqa: E402
from bench.gpu_in_process import random_model  # noqa: E402

ROOT = Path(__file__).parents[2]


def run_script(tmp_path: Path, python: str, **env: str) -> subprocess.CompletedProcess[str]:
    """With a stand-in for Python, whose arguments are `$*`."""
    stub = tmp_path / "python"
    stub.write_text(f"#!/bin/sh\n{python}\n")
    stub.chmod(0o755)
    return subprocess.run(["bash", "bench/gpu_check.sh"], cwd=ROOT, capture_output=True, text=True, timeout=60,
                          env={**os.environ, "PYTHON": str(stub), "OUT": str(tmp_path / "out"), **env})


def test_each_step_runs_and_a_failure_is_named_without_ending_the_others(tmp_path: Path) -> None:
    stub = 'case "$*" in "- "*) exit;; *gpu_engine*) echo "a table"; echo "{}"; exit 3;; esac; echo "{}"'
    done = run_script(tmp_path, stub)
    assert done.returncode == 1 and "failed: engine(3); logs in" in done.stdout
    for name in ("warm", "compile", "kernels", "load", "transformers", "preemption"):
        assert f"{name}: exit 0" in done.stdout
        assert f"{name}        "[:13] in done.stdout.split("nothing goes on after 570 s")[0]
    assert "== engine\na table\n" in done.stdout


def test_nothing_goes_on_when_the_time_is_up(tmp_path: Path) -> None:
    """A step that hangs is ended, also if it hears no signal; the next ones are not begun, the result says so and
    shows what the step had found."""
    begin = time.monotonic()
    hang = 'case "$*" in *gpu_kernels*) echo "a figure"; trap "" TERM; sleep 50 & wait; wait;; esac'
    done = run_script(tmp_path, hang, LIMIT_S="6")
    assert time.monotonic() - begin < 40
    assert "kernels: exit 137" in done.stdout and "load: skipped, time is up" in done.stdout
    assert "== kernels\na figure\n" in done.stdout
    assert done.returncode == 1 and "kernels(137) engine(skipped) load(skipped)" in done.stdout


def test_a_part_that_raises_is_a_failed_check_and_what_was_found_is_kept(tmp_path: Path) -> None:
    bench, seen = Bench("cpu", True, time.monotonic() + 100), []

    def first(bench: Bench) -> None:
        bench.rows.append({"name": "check: first", "error": 0.0, "limit": 0.0, "ok": True})

    def broken(bench: Bench) -> None:
        seen.append(json.loads((tmp_path / "rows.json").read_text())["rows"])
        raise RuntimeError("an illegal memory access was encountered")

    result = run_parts(bench, (first, broken, first), tmp_path / "rows.json", {"benchmark": "b"})
    assert [row["name"] for row in seen[0]] == ["check: first"]
    assert [row["ok"] for row in bench.rows] == [True, False, True] and result["wrong"] == 1
    assert bench.rows[1]["raised"] == "RuntimeError: an illegal memory access was encountered"
    assert json.loads((tmp_path / "rows.json").read_text()) == json.loads(json.dumps(result))


def test_packages_that_are_missing_are_named(tmp_path: Path) -> None:
    done = run_script(tmp_path, 'case "$1" in -) echo "triton zmq";; esac')
    assert done.returncode == 2 and "lacks: triton zmq; see bench/gpu_check.sh --needs" in done.stdout


@pytest.mark.parametrize("row, missed", [
    ({"share": 0.7, "target": 0.8}, True), ({"share": 0.8, "target": 0.8}, False),
    ({"share": 0.1, "target": None}, False), ({"times": 0.7, "at_most": 0.6}, True),
    ({"times": 1.95, "at_least": 1.95}, False), ({"us": 51, "at_most": 50}, True),
    ({"us": 51, "at_most": None}, False)])
def test_targets_are_compared_with_the_right_figure(row: dict[str, Any], missed: bool) -> None:
    assert is_missed(row) == missed


def test_a_checkpoint_is_written_read_and_loaded() -> None:
    bench = Bench("cpu", True, time.monotonic() + 100)
    config = msgspec.structs.replace(shape(bench, "qwen3-8b"), num_hidden_layers=3)
    gpu_load.measure_loading(bench, config)
    assert [row["name"] for row in bench.rows] == [
        "pinned memory to the device", "plain read from the disk", "load from the disk",
        "plain read from the file cache", "load from the file cache"]
    assert all(row["us"] > 0 and row["share"] > 0 for row in bench.rows)


def test_outputs_that_depart_at_equal_logits_are_no_error_and_others_are() -> None:
    bench = Bench("cpu", True, time.monotonic() + 100)
    model = random_model(shape(bench, "qwen3-8b"), torch.float32, "cpu")
    with torch.no_grad():
        model.lm_head.weight[7] = model.lm_head.weight[9]       # two tokens that no rounding may tell apart
    prompt = [3, 4, 5]
    assert is_near_tie(model, prompt, [8, 7, 2], [8, 9, 2], "cpu")
    assert not is_near_tie(model, prompt, [8, 7, 2], [8, 11, 2], "cpu")
    assert not is_near_tie(model, prompt, [8, 7], [8, 7, 2], "cpu")
