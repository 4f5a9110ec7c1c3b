"""bench offline and bench latency on a real engine of the tiny model, and their refusals."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import latency, offline
from bench.offline import random_prompts

SMALL = ["--input-len", "24", "--output-len", "8", "--num-gpu-blocks-override", "128",
         "--attention-backend", "reference"]


def last_json(capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    text = capsys.readouterr().out
    return json.loads(text.splitlines()[-1]), text


def test_offline_counts_every_token_and_prints_the_known_line(tiny_model: str, temp: str, tmp_path: Path,
                                                              capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--model", tiny_model, "--num-prompts", "6", "--prefix-len", "32", "--num-iters", "2", *SMALL]
    assert offline.main(argv) == 0
    result, text = last_json(capsys)
    assert (result["prompt_tokens"], result["output_tokens"], len(result["elapsed_runs_s"])) == (6 * 56, 48, 2)
    assert text.startswith("Throughput: ") and " total tokens/s, " in text and "Compared" not in text
    assert (result["num_repeats"], set(result["noise"])) == (2, {"output_tok_s", "total_tok_s", "request_s"})
    file = tmp_path / "old.json"
    file.write_text(json.dumps({**result, "output_tok_s": result["output_tok_s"] * 1000}))
    assert offline.main([*argv, "--compare", str(file)]) == 0
    result, text = last_json(capsys)
    rows = {row["figure"]: row["verdict"] for row in result["compare"]["rows"]}
    assert set(rows) == {"output_tok_s", "total_tok_s", "request_s"} and rows["output_tok_s"] == "worse"
    assert "run both with --num-iters 3" in text and "loads differ" not in text


def test_latency_measures_one_request_at_a_time(tiny_model: str, temp: str, tmp_path: Path,
                                                capsys: pytest.CaptureFixture[str]) -> None:
    argv = [tiny_model, "--num-iters", "3", "--num-iters-warmup", "1", *SMALL]
    assert latency.main([*argv, "--output-json", str(tmp_path / "old.json")]) == 0
    result, text = last_json(capsys)
    assert latency.main([*argv, "--compare", str(tmp_path / "old.json")]) == 0
    rows = last_json(capsys)[0]["compare"]["rows"]
    assert {row["figure"] for row in rows} >= {"ttft_s.p50", "itl_s.mean", "e2e_s.p99"}
    assert len(result["latencies"]) == 3 and result["ttft_s"]["p50"] <= result["e2e_s"]["p50"]
    assert "Avg latency: " in text and "99% percentile latency: " in text


def test_refusals_are_one_line_and_still_json(tiny_model: str, temp: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert offline.main(["--model", "./nothing"]) == 1
    assert offline.main(["--model", tiny_model, "--compare", "/nowhere.json"]) == 1
    assert "/nowhere.json: No such file" in last_json(capsys)[0]["error"]
    assert offline.main(["--model", "./nothing"]) == 1
    assert "model './nothing'" in last_json(capsys)[0]["error"]
    assert offline.main(["--model", tiny_model, *SMALL[2:], "--input-len", "900000"]) == 2
    assert "900000" in last_json(capsys)[0]["error"]
    with pytest.raises(SystemExit) as error:
        latency.main(["--model", tiny_model, "--batch-size", "0"])
    assert error.value.code == 2


def test_prompts_repeat_with_their_seed_and_share_a_prefix() -> None:
    own = {"bench_seed": 1, "prefix_len": 5, "input_len": 7}
    prompts = random_prompts(own, 3, 100)
    assert prompts == random_prompts(own, 3, 100) != random_prompts({**own, "bench_seed": 2}, 3, 100)
    assert {tuple(prompt[:5]) for prompt in prompts} == {tuple(prompts[0][:5])} and {len(p) for p in prompts} == {12}
