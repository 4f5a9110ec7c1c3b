"""A compiler that crashes costs a worker its kernels, and nothing else."""
from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("numba")

from ipc.cli import build_config  # noqa: E402
from ipc.config import WorkerProcess  # noqa: E402
from ipc.errors import ConfigError  # noqa: E402
from tests.worker.test_linear_source import make_process  # noqa: E402
from worker import startup  # noqa: E402
from worker.attention.jit_layout import LayoutBackend  # noqa: E402
from worker.jit import build, compiler, features, upgrade  # noqa: E402
from worker.models.flat_model import FlatModel  # noqa: E402
from worker.sampling import jit_threads  # noqa: E402

ASSERTION = "python: SelectionDAG.cpp:1: getNode(): Assertion `isFloat()' failed."
CRASH = f'''import os, sys
print("a warning", "{ASSERTION}", "#0 0x1 abort", sep=chr(10), file=sys.stderr, flush=True)
os.abort()'''
REASON = f"the compiler ended with SIGABRT: {ASSERTION}"
STARTING: Any = SimpleNamespace(begin=lambda name: None, advance=lambda *_: None, end=lambda detail="": None)


def compiled_here(*arguments: Any) -> None:
    raise AssertionError("the worker compiles in its own process")


@pytest.fixture
def crashing(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Nothing is compiled yet, and the compiler crashes. Gives the scopes that it was started for."""
    scopes: list[str] = []

    def command(width: int, scope: str, niceness: int) -> list[str]:
        scopes.append(scope)
        return [sys.executable, "-c", CRASH]
    monkeypatch.setattr(features, "_failure", None)
    monkeypatch.setattr(compiler, "is_compiled", lambda scope="all": False)
    monkeypatch.setattr(compiler, "command", command)
    monkeypatch.setattr(build, "start_kernels", compiled_here)
    monkeypatch.setattr(jit_threads, "_row_kernels", compiled_here)
    return scopes


def make_config(tiny_model: str, **options: Any) -> WorkerProcess:
    return make_process(build_config(tiny_model, {}, serve=False).model.files, cache=dict(num_gpu_blocks_override=16),
                        max_model_len=64, **options)


def test_torchs_model_is_sampled_from_without_kernels(tiny_model: str, crashing: list[str],
                                                      caplog: pytest.LogCaptureFixture) -> None:
    runner, _ = startup.build_runner(make_config(tiny_model, backend="cpu"), STARTING, lambda: None)
    assert crashing == ["sampling"] and runner.sampler.sampler.kernels is None
    assert features.missing() == REASON and caplog.text.count(REASON) == 1


@pytest.mark.parametrize("options, flag", [(dict(backend="jit"), "--attention-backend jit"),
                                           (dict(batch_invariant=True), "--batch-invariant")])
def test_a_start_that_needs_the_kernels_ends_with_the_reason(options: dict[str, Any], flag: str, tiny_model: str,
                                                             crashing: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        startup.build_runner(make_config(tiny_model, **options), STARTING, lambda: None)
    assert str(caught.value) == f"{flag} needs the compiled CPU kernels, which do not run here: {REASON}"
    assert crashing == ["all"]


def test_a_start_that_waits_for_want_of_memory_goes_on_with_torch(tiny_model: str, crashing: list[str],
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "free_memory", lambda: (1 << 10, 1 << 30))
    runner, _ = startup.build_runner(make_config(tiny_model), STARTING, lambda: None)
    assert isinstance(runner.model, FlatModel) and runner.backend.name == "cpu" and runner.upgrade is None
    assert crashing == ["all"] and runner.sampler.sampler.kernels is None
    with pytest.raises(ConfigError, match="--quantization int8 needs the compiled CPU kernels"):
        startup.build_runner(make_config(tiny_model, quantization="int8"), STARTING, lambda: None)
    assert crashing == ["all"]                  # once in a process


def test_after_a_failed_upgrade_torch_serves_also_when_it_slept(tiny_model: str, crashing: list[str]) -> None:
    """The pool keeps its layout: its blocks were counted in it."""
    config = make_config(tiny_model)
    runner, _ = startup.build_runner(config, STARTING, lambda: None)
    assert runner.upgrade is not None
    deadline = time.monotonic() + 30
    while not runner.upgrade.is_over and time.monotonic() < deadline:
        assert runner.upgrade.take() is None
        time.sleep(0.01)
    assert runner.upgrade.is_over and features.missing() == REASON
    again, _ = startup.build_runner(config, STARTING, lambda: None, startup.Weights.of(runner))
    assert again.model is runner.model and isinstance(again.backend, LayoutBackend)
    assert again.sampler.sampler.kernels is None and crashing == ["all"]


def test_the_next_process_tries_again(tiny_model: str, crashing: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    first = compiler.begin(64, "sampling")
    assert first is not None and first.wait(lambda fraction: None, lambda: None) == REASON
    assert compiler.begin(64, "sampling") is None
    monkeypatch.setattr(features, "_failure", None)             # as in a new process
    again = compiler.begin(64, "sampling")
    assert again is not None and again.wait(lambda fraction: None, lambda: None) == REASON
    assert crashing == ["sampling", "sampling"]


def test_supervisor_and_core_hear_of_a_start_that_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler of this test ends when both have been told something."""
    script = f"import os, time\nwhile len(os.listdir({str(tmp_path)!r})) < 2: time.sleep(0.01)"
    monkeypatch.setattr(compiler, "command", lambda *arguments: [sys.executable, "-c", script])
    compilation = compiler.Compilation(64, "sampling")
    assert compilation.wait(lambda fraction: (tmp_path / "advance").touch(), (tmp_path / "between").touch) is None


def test_without_a_writable_folder_the_worker_compiles_itself(monkeypatch: pytest.MonkeyPatch, crashing: list[str],
                                                              tiny_model: str, caplog: pytest.LogCaptureFixture
                                                              ) -> None:
    monkeypatch.setattr(features, "is_cache_writable", lambda: False)
    assert "cannot be written" in str(upgrade.reason_to_wait(make_config(tiny_model), 1 << 40))
    with caplog.at_level(logging.WARNING):
        assert compiler.begin(64, "sampling") is None
    assert "cannot be written: each start compiles its kernels anew" in caplog.text and not crashing


def test_kernels_can_be_used_where_nothing_can_be_written(tmp_path: Path) -> None:
    """Their import failed: numba refuses to cache there."""
    script = ("import numpy as np\n"
              "from worker.jit import compiler, features\n"
              "from worker.sampling.jit_penalties import count_tokens\n"
              "assert not features.is_cache_writable() and not compiler.is_compiled('counts')\n"
              "print(type(count_tokens._cache).__name__)")
    (tmp_path / "file").touch()
    done = subprocess.run([sys.executable, "-c", script], env={**os.environ, "HOME": str(tmp_path / "file")},
                          cwd=compiler.ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("NullCache\n", 0), done.stderr
