"""What is compiled ahead is what the launches ask for, and found by them; nothing depends on it, nothing is left."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

pytest.importorskip("triton")

import triton  # noqa: E402
from triton.compiler.compiler import ASTSource  # noqa: E402
from triton.runtime.cache import get_cache_key  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from ipc.config import CacheConfig, ModelSection, WorkerProcess  # noqa: E402
from ipc.model_config import from_hf_config  # noqa: E402
from ipc.model_source import ModelFiles  # noqa: E402
from tests.kernels.test_variants import CASES, MODELS, make_engine, offline  # noqa: E402
from worker import compile_ahead as ahead  # noqa: E402
from worker.kernel_compiler import Job  # noqa: E402
from worker.kernel_variants import Variant, find_variants, variants_of  # noqa: E402
from worker.kernels.chip import INTERPRETED, Chip  # noqa: E402
from worker.startup import largest_step  # noqa: E402
from worker.warm_up import launch_all  # noqa: E402

ROOT = Path(__file__).parents[2]
POOLS = {None: "auto", torch.int8: "int8", torch.float8_e4m3fn: "fp8"}
BUDGET = 300


def make_job(name: str = "qwen3", kind: str = "none", pool: torch.dtype | None = None, budget: int = BUDGET) -> Job:
    """As make_engine has it."""
    config = from_hf_config(json.loads(json.dumps(MODELS[name])), name)
    worker = WorkerProcess(
        rank=0, listen="", epoch=1, model=ModelSection(files=ModelFiles("dummy", "", config, name), quantization=kind),
        cache=CacheConfig(kv_cache_dtype=POOLS[pool]), max_num_seqs=40, max_num_batched_tokens=budget,
        num_speculative_tokens=0, device="cuda", attention_backend="triton", cuda_graphs="auto", num_threads=1,
        run_dir="", log_level="warning")
    return Job(worker, "bfloat16", 1024, False, None, INTERPRETED.capability, INTERPRETED.num_processors)


def disk_keys(variants: list[Variant], monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Under which Triton would keep them on the disk, by its own functions. Nothing is compiled."""
    keys: set[str] = set()

    def note(kernel: Any, key: Any, signature: Any, device: Any, constants: Any, options: Any, attributes: Any,
             warmup: bool) -> None:
        backend = kernel.device_caches[device][3]
        keys.add(get_cache_key(ASTSource(kernel, signature, constants, attributes), backend, options, {}))
    with monkeypatch.context() as patch:
        patch.setattr(JITFunction, "_do_compile", note)
        for variant in variants:
            variant.compile()
    return keys


@pytest.mark.parametrize("name, kind, pool", [*CASES, ("mixed", "none", None), ("mixed", "int8", None)])
def test_the_variants_found_without_weights_are_those_of_the_start(
    name: str, kind: str, pool: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By their keys on the disk. The start is the warm-up over real tensors and a pool of another size, and the step
    that sizes the pool."""
    job = make_job(name, kind, pool)
    with offline(monkeypatch):
        engine = make_engine(name, BUDGET, kind, pool)
        start = variants_of(lambda: launch_all(engine.runner, BUDGET))
        model, dtype = engine.runner.model, pool or torch.bfloat16
        step, _ = largest_step(model, engine.runner.backend, 16, dtype, BUDGET, 40, "cpu")
        with torch.inference_mode():
            sizing = variants_of(step)
        found = find_variants(job.config, job.dtype, job.max_model_len, job.keeps_fp8, INTERPRETED, None)
        keys = disk_keys(start, monkeypatch)
        assert disk_keys(found, monkeypatch) == keys and len(keys) == len(start) == len(found) > 15
        assert set() < disk_keys(sizing, monkeypatch) <= keys


def test_looking_for_variants_leaves_launches_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    run, job = JITFunction.run, make_job()
    with offline(monkeypatch):
        found = find_variants(job.config, "bfloat16", 1024, False, Chip(90, 132), None)
        assert [v.kernel.__name__ for v in found][:3] == [*["sample_rows_kernel"] * 2, "paged_attention_kernel"]
        with pytest.raises(ZeroDivisionError):
            variants_of(lambda: 1 // 0)
    assert JITFunction.run is run and triton.knobs.runtime.jit_cache_hook is None


@pytest.mark.timeout(300)  # waits for the compiler
def test_launches_find_what_another_process_has_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start's launches load from the disk all that they need: Triton tells of each whether it was there."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    progress: list[float] = []
    text = ahead.CompileAhead(make_job(budget=64), 2, tmp_path / "stamp").wait(progress.append, 280)
    num_tasks = int(text.split()[0])
    assert text.startswith(f"{num_tasks} of {num_tasks}, 2 processes") and sorted(progress) == progress
    hits: list[bool] = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda *, cache_hit, **rest: hits.append(cache_hit))
    run = JITFunction.run
    with offline(monkeypatch), monkeypatch.context() as patch:
        patch.setattr(JITFunction, "run", lambda kernel, *args, grid, warmup, **options: run(
            kernel, *args, grid=grid, warmup=True, **options))
        launch_all(make_engine("qwen3", 64).runner, 64)
    assert len(hits) == num_tasks - 1 and all(hits)         # one task is the driver's own code


def test_a_failure_is_said_once_and_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No process at all, one that ends at once, and one that does not end."""
    job = make_job()
    broken = msgspec.structs.replace(job, dtype="float7")
    with caplog.at_level(logging.WARNING):
        text = ahead.CompileAhead(broken, 2, tmp_path / "stamp").wait(lambda fraction: None)
        assert text.startswith("0 of 0")
        assert ahead.CompileAhead(job, 2, tmp_path / "stamp").wait(lambda fraction: None, 0.0).startswith("0 of 0")
        if not torch.cuda.is_available():
            assert ahead.compile_ahead(job.config, "bfloat16", 1024, False, None) is None
    first, second, *third = [record.message for record in caplog.records]
    assert first.startswith("compiling kernels ahead failed (status 1)") and "no end within 0 s" in second
    assert [text.partition(":")[0] for text in third] == ["no kernel is compiled ahead"] * len(third)
    assert len(third) == (not torch.cuda.is_available())


def test_what_a_compiler_prints_is_not_taken_for_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "print('0 7\\n2 warnings generated.\\n3 7\\n1\\n12 of 13 14')"
    popen = subprocess.Popen
    monkeypatch.setattr(ahead.subprocess, "Popen", lambda command, **options: popen([sys.executable, "-c", text],
                                                                                    **options))
    assert ahead.CompileAhead(make_job(), 2, tmp_path / "stamp").wait(lambda fraction: None).startswith("3 of 7, 2 p")


def test_nothing_is_compiled_ahead_where_there_is_nothing_to_gain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Any] = []

    class Noted(ahead.CompileAhead):
        def __init__(self, job: Job, num_processes: int, stamp: Path) -> None:
            self.stamp = stamp
            begun.append(num_processes)

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(ahead, "CompileAhead", Noted)
    monkeypatch.setattr(ahead, "chip_of", lambda device: Chip(90, 132))
    cores = [1]
    monkeypatch.setattr(ahead, "usable_cores", lambda: cores[0])
    monkeypatch.setattr(ahead, "cpu_quota", lambda: None)
    monkeypatch.setattr(ahead, "memory", lambda: (100 << 30, 100 << 30, "host"))
    config = make_job().config

    def begin(max_model_len: int = 1024) -> ahead.CompileAhead | None:
        return ahead.compile_ahead(config, "bfloat16", max_model_len, False, None)
    assert begin() is None and not begun        # one core
    cores[0] = 64
    first = begin()
    assert first is not None and begun == [8]
    first.mark()
    assert begin() is None and begin(2048) is not None      # the same start again, and another
    monkeypatch.setattr(ahead, "memory", lambda: (1500 << 20, 100 << 30, "host"))
    assert begin(2048) is not None and begun == [8, 8, 2]


def run_python(text: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-W", "ignore", "-c", text, *arguments], cwd=ROOT, text=True,
                            stdout=subprocess.PIPE, **options)


def test_tasks_that_raise_or_crash_take_no_other_with_them() -> None:
    text = """
import os, signal, sys
from worker.kernel_compiler import run_shared
def crash(): os.kill(os.getpid(), signal.SIGKILL)
def touch(index): return lambda: os.write(2, b"%d " % index)
counts = []
tasks = [crash, lambda: 1 / 0, *map(touch, range(300))]
print(sorted(run_shared(tasks, 3, counts.append)), counts == list(range(1, 302)))
"""
    process = run_python(text, stderr=subprocess.PIPE)
    out, err = process.communicate(timeout=60)
    assert out == "['ZeroDivisionError: division by zero', 'a process ended with status -9'] True\n"
    assert sorted(map(int, err.split())) == list(range(300))


def test_nothing_is_left_when_the_worker_is_killed(tmp_path: Path) -> None:
    """While the forks are at work."""
    text = """
import sys
from pathlib import Path
import msgspec
from worker.compile_ahead import CompileAhead, Job
ahead = CompileAhead(msgspec.json.decode(sys.argv[1], type=Job), 2, Path("stamp"))
print(ahead._process.pid, flush=True)
ahead.wait(lambda fraction: print(fraction, flush=True))
"""
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    env.pop("TRITON_INTERPRET", None)
    with run_python(text, msgspec.json.encode(make_job()).decode(), env=env) as process:
        assert process.stdout is not None
        group = int(process.stdout.readline())
        while float(process.stdout.readline()) == 0:
            os.killpg(group, 0)                 # it is there
        process.send_signal(signal.SIGKILL)
    for _ in range(600):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    pytest.fail("processes are left")
