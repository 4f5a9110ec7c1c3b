"""/metrics, /debug/timeline and `launch.py profile` on the real three processes."""
from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from frontend import SamplingParams
from frontend.request_log import PARTS, parts
from frontend.step_report import IDLE_CAUSES
from frontend.timeline import STAGES
from frontend.trace import PIDS
from tests.processes.tools import FLAGS, engine_environment

ROOT = Path(__file__).resolve().parents[2]


def get(engine: Any, path: str) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{engine.server.port}{path}", timeout=30) as answer:
        return bytes(answer.read())


def post(engine: Any, max_tokens: int) -> None:
    body = json.dumps({"prompt": "Go on", "max_tokens": max_tokens, "ignore_eos": True}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{engine.server.port}/v1/completions", body,
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.read()


def samples(engine: Any) -> dict[str, float]:
    families = text_string_to_metric_families(get(engine, "/metrics").decode())
    return {sample.name: sample.value for family in families for sample in family.samples}


def test_metrics_count_what_was_served_in_the_known_names(engine: Any) -> None:
    before = samples(engine)
    post(engine, 7)
    after = samples(engine)
    assert after["vllm:generation_tokens_total"] - before.get("vllm:generation_tokens_total", 0) == 7
    for name in ("vllm:time_to_first_token_seconds_count", "vllm:e2e_request_latency_seconds_count",
                 "vllm:request_prompt_tokens_count"):
        assert after[name] - before.get(name, 0) == 1
    assert after["vllm:num_requests_running"] == 0 and 0 <= after["vllm:kv_cache_usage_perc"] <= 1


def test_the_dashboard_asks_only_for_what_metrics_export(engine: Any) -> None:
    post(engine, 7)
    board = json.loads((ROOT / "frontend/dashboards/grafana.json").read_text())
    asked = set(re.findall(r"\$\{prefix\}:(\w+)", json.dumps(board)))
    exported = {name.removeprefix("vllm:") for name in samples(engine)}
    assert len(asked) > 30 and asked - exported == set()
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids)) and all(panel["targets"] for panel in board["panels"] if panel["type"] != "row")


def test_counters_of_steps_grow_by_what_the_timeline_saw(engine: Any) -> None:
    before = samples(engine)
    post(engine, 40)
    after = samples(engine)
    gained = {name.removeprefix("vllm:"): value - before.get(name, 0.0) for name, value in after.items()}
    assert gained["iteration_tokens_total_count"] >= 40 and gained["iteration_tokens_total_sum"] >= 40
    for name in ("scheduler", "device", "wire"):
        assert 0 < gained[f"{name}_seconds_total"]
    assert gained["inter_token_latency_seconds_count"] == 39
    found = labelled(engine)
    assert {labels["process"] for labels in found["vllm:process_rss_bytes"]} == {"frontend", "engine_core", "worker"}
    assert {labels["kind"] for labels in found["vllm:preemptions_by_kind_total"]} == {"swap", "recompute"}
    assert {labels["cause"] for labels in found["vllm:device_idle_seconds_total"]} == set(IDLE_CAUSES)


def labelled(engine: Any) -> dict[str, list[dict[str, str]]]:
    found: dict[str, list[dict[str, str]]] = {}
    for family in text_string_to_metric_families(get(engine, "/metrics").decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    return found


def test_the_timeline_has_every_step_in_causal_order(engine: Any) -> None:
    post(engine, 30)
    report = json.loads(get(engine, "/debug/timeline?seconds=60"))
    assert report["num_steps"] >= 30 and set(report["stages"]) == {name for name, *_ in STAGES}
    assert {p["role"] for p in report["processes"]} >= {"worker", "engine_core", "frontend"}
    trace = json.loads(get(engine, "/debug/timeline?seconds=60&format=trace"))["traceEvents"]
    arrows: dict[int, list[float]] = {}
    for event in trace:
        if event.get("cat") == "step":
            arrows.setdefault(event["id"], []).append(event["ts"])
    assert len(arrows) == report["num_steps"] and all(times == sorted(times) for times in arrows.values())


@pytest.mark.parametrize("query", ["seconds=-1", "seconds=x", "seconds=1e9"])
def test_a_bad_window_is_a_400(engine: Any, query: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as failure:
        get(engine, f"/debug/timeline?{query}")
    assert failure.value.code == 400 and b"seconds" in failure.value.read()


def test_profile_attaches_to_a_running_server_and_says_what_bounds_it(engine: Any, tmp_path: Path) -> None:
    post(engine, 20)
    trace = tmp_path / "t.json"
    done = subprocess.run([sys.executable, str(ROOT / "launch.py"), "profile", "--url",
                           f"http://127.0.0.1:{engine.server.port}", "--seconds", "1", "--trace", str(trace)],
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "bound" in done.stdout or "idle" in done.stdout
    assert "traceEvents" in json.loads(trace.read_text())


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(ROOT / "launch.py"), *words], capture_output=True, text=True, timeout=60)


def test_top_prints_once_where_there_is_no_terminal(engine: Any) -> None:
    stopping = threading.Event()

    def ask() -> None:
        while not stopping.is_set():
            post(engine, 200)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    done = command("top", "--url", engine.server.url, "--interval", "0.2")
    stopping.set()
    for thread in threads:
        thread.join()
    assert done.returncode == 0, done.stderr
    assert "tiny" in done.stdout.splitlines()[0] and "steps/s" in done.stdout
    for word in ("frontend", "engine_core", "worker", "KV pool", "of 512 blocks", "slowest request", "nobody waits",
                 "of the last "):
        assert word in done.stdout


@pytest.mark.parametrize("words, says", [
    (("top", "--url", "http://127.0.0.1:9"), "127.0.0.1:9"), (("top", "--interval", "0"), "--interval is 0"),
    (("profile", "--url", "http://127.0.0.1:9"), "127.0.0.1:9"),
    (("profile", "--url", "http://127.0.0.1:9", "--torch-profiler"), "--trace FILE"),
    (("profile", "--trace", "/nowhere/x.json"), "no such folder"),
    (("profile", "--steps", "/nowhere/x.msgpack"), "No such file"),
    (("profile", "--concurrency", "0"), "--concurrency is 0"),
])
def test_a_command_that_cannot_work_says_why_in_one_line(words: tuple[str, ...], says: str) -> None:
    done = command(*words)
    assert done.returncode in (1, 2) and says in done.stderr and done.stderr.count("\n") == 1


def test_live_tells_each_step_once(engine: Any) -> None:
    post(engine, 10)
    first = json.loads(get(engine, "/debug/live"))
    post(engine, 5)
    second = json.loads(get(engine, f"/debug/live?after={first['count']}"))
    assert len(second["steps"]) == second["count"] - first["count"] >= 5
    place = second["fields"].index("step")
    assert {row[place] for row in first["steps"]}.isdisjoint({row[place] for row in second["steps"]})
    assert sum(second["pool"]["blocks"][1::2]) == second["pool"]["num_blocks"] == 512
    with pytest.raises(urllib.error.HTTPError) as failure:
        get(engine, "/debug/live?after=x")
    assert failure.value.code == 400 and b"count of an earlier answer" in failure.value.read()


def test_parts_of_requests_sum_to_what_the_caller_waited(engine: Any) -> None:
    """Their sum against a clock around the call, which starts before the first part and ends after the last."""
    async def run() -> tuple[float, Any]:
        begin = time.monotonic()
        stream = engine.llm.generate([1, 2, 3] * 20, SamplingParams(max_tokens=300, ignore_eos=True))
        async for _ in stream:
            pass
        return time.monotonic() - begin, engine.llm.request_log.ended[-1]

    wall, record = engine.loop.run(run())
    spans = parts(record.metrics)
    assert list(spans) == list(PARTS) and all(end >= begin for begin, end in spans.values())
    assert [begin for begin, _ in spans.values()][1:] == [end for _, end in spans.values()][:-1]
    assert wall * 0.99 <= sum(end - begin for begin, end in spans.values()) <= wall
    assert len(record.token_ns[0]) == record.num_output_tokens == 300


def test_the_library_has_the_same_timeline(engine: Any) -> None:
    async def run() -> int:
        async for _ in engine.llm.generate([1, 2, 3], SamplingParams(max_tokens=12, ignore_eos=True)):
            pass
        return len(engine.llm.timeline.window())

    assert engine.loop.run(run()) >= 12


def test_torch_operators_stand_in_the_trace_on_the_clock_of_the_steps(tiny_model: str, temp: str,
                                                                      tmp_path: Path) -> None:
    """Each step's own range of the profiler lies where the worker's stamps say that the step was."""
    trace = tmp_path / "t.json"
    with_operators = ("profile", tiny_model, *FLAGS, "--requests", "4", "--prompt-tokens", "20", "--output-tokens", "8",
                      "--torch-profiler", "--trace", str(trace))
    done = subprocess.run([sys.executable, str(ROOT / "launch.py"), *with_operators], capture_output=True, text=True,
                          timeout=120, env=engine_environment(temp))
    assert done.returncode == 0, done.stderr
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    operators = [event for event in events if event["pid"] == PIDS["worker operators"]]
    assert {"aten::embedding", "forward", "sample"} <= {event["name"] for event in operators}
    forwards = {event["args"]["step"]: event for event in events
                if event["pid"] == PIDS["worker"] and event["name"] == "forward"}
    ranges = {int(event["name"].split()[1]): event for event in operators if event["name"].startswith("step ")}
    both = forwards.keys() & ranges.keys()
    assert len(both) >= 8
    slack = 2_000.0                             # of the two clocks' marks, microseconds
    for step in both:
        inner, outer = forwards[step], ranges[step]
        assert outer["ts"] - slack <= inner["ts"] and (inner["ts"] + inner["dur"]
                                                       <= outer["ts"] + outer["dur"] + slack)


def test_the_profiler_is_behind_the_admin_key(engine: Any) -> None:
    with pytest.raises(urllib.error.HTTPError) as failure:
        urllib.request.urlopen(urllib.request.Request(f"{engine.server.url}/start_profile", b"", method="POST"))
    assert failure.value.code == 404 and b"--admin-api-key" in failure.value.read()


def test_a_profiler_that_does_not_record_cannot_be_stopped(engine: Any) -> None:
    with pytest.raises(ValueError, match="does not record"):
        engine.loop.run(engine.llm.stop_profile())
