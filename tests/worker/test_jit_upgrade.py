"""When a worker compiles behind torch, and what becomes of a compiler that fails."""
from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("numba")

from ipc.cli import build_config  # noqa: E402
from tests.worker.test_linear_source import make_process, write_model  # noqa: E402
from worker import startup  # noqa: E402
from worker.jit import build, compiler, features, upgrade  # noqa: E402
from worker.jit.upgrade import Upgrade, reason_to_wait  # noqa: E402
from worker.sampling import jit_threads  # noqa: E402

STARTING: Any = SimpleNamespace(begin=lambda name: None, advance=lambda *_: None, end=lambda detail="": None)


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(features, "CACHE_ROOT", str(tmp_path))
    for function in (features.cache_folder, features.is_cache_writable, compiler.stamp_path):
        function.cache_clear()
    yield tmp_path
    for function in (features.cache_folder, features.is_cache_writable, compiler.stamp_path):
        function.cache_clear()


@pytest.fixture(autouse=True)
def no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process learns about its compiler is forgotten after each test."""
    monkeypatch.setattr(features, "_failure", None)


def test_the_stamp_is_of_this_code_and_these_versions(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not compiler.is_compiled()
    compiler.mark_compiled("all")
    assert compiler.is_compiled() and compiler.stamp_path("all").is_relative_to(empty_cache)
    monkeypatch.setattr("numba.__version__", "0.0")
    compiler.stamp_path.cache_clear()
    assert not compiler.is_compiled()


def test_a_stamp_holds_for_what_is_in_it(empty_cache: Path) -> None:
    compiler.mark_compiled("sampling")
    assert [compiler.is_compiled(scope) for scope in compiler.SCOPES] == [True, True, False]


def test_the_stamp_is_of_the_processor_that_code_is_generated_for(empty_cache: Path,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    compiler.mark_compiled("all")
    monkeypatch.setattr("numba.core.config.CPU_NAME", "haswell")
    for function in (features.cpu_name, compiler.stamp_path):
        function.cache_clear()
    try:
        assert features.cpu_name() == "haswell" and not compiler.is_compiled()
    finally:
        features.cpu_name.cache_clear()


@pytest.mark.parametrize("listed, dot_form", [("+avx2,+fma,-avx512f", "avx2"), ("", "generic"), (
    "+avx512vnni,+avx512f,+avx512bw,+avx512vl,+avx2", "vnni512"), ("+avx2,-avx2", "generic")])
def test_the_kernels_are_of_the_features_that_numba_was_given(listed: str, dot_form: str,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    """They went by the processor itself, and so asked LLVM for instructions that it was told not to use."""
    monkeypatch.setattr("numba.core.config.CPU_FEATURES", listed)
    caches = features.cpu_features, features.dot_form
    for function in caches:
        function.cache_clear()
    try:
        assert features.dot_form() == dot_form and f"int8 products by {dot_form}" in features.describe()
    finally:
        for function in caches:
            function.cache_clear()


def test_every_checkout_of_the_same_code_finds_what_one_compiled() -> None:
    """The folder was named by the checkout's path, so the stamp was right in one of them only, and others waited."""
    from worker.jit.cache import SharedCacheLocator
    from worker.sampling.jit_rows import greedy_rows
    assert Path(greedy_rows._cache.cache_path) == features.cache_folder() / "sampling"
    places = {SharedCacheLocator.get_suitable_cache_subpath(f"{place}/worker/jit/team.py") for place in ("/a", "/b/c")}
    assert places == {"jit"}


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(compiler, "stamp_path", lambda scope: tmp_path / "file" / "below")
    compiler.mark_compiled("all")
    assert not compiler.is_compiled()


def test_a_start_waits_for_the_kernels_where_torch_must_not_or_cannot_serve(tmp_path: Path) -> None:
    files = write_model(tmp_path / "m.gguf", {})
    assert reason_to_wait(make_process(files), 1 << 30) is None
    assert "--batch-invariant" in str(reason_to_wait(make_process(files, batch_invariant=True), 1 << 30))
    assert "--attention-backend jit" in str(reason_to_wait(make_process(files, backend="jit"), 1 << 30))
    assert "more than half of the free memory" in str(reason_to_wait(make_process(files), 1 << 10))


def run_upgrade(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, made: Any) -> tuple[Upgrade, list[Any]]:
    """The upgrade when it is over, and what `take` gave; `script` stands for the compiler, `made` for the model."""
    def build_or_fail(*_: Any) -> Any:
        if isinstance(made, Exception):
            raise made
        return made

    config = make_process(write_model(tmp_path / "m.gguf", {}))
    choice, _ = build.choose(config, "cpu")
    assert choice is not None
    monkeypatch.setattr(compiler, "command", lambda *arguments: [sys.executable, "-c", script])
    monkeypatch.setattr(upgrade.build, "start_kernels", lambda threads: None)
    monkeypatch.setattr(upgrade.jit_threads, "warm_up", lambda width: None)
    monkeypatch.setattr(upgrade.build, "build", build_or_fail)
    monkeypatch.setattr(upgrade, "torch", SimpleNamespace(set_num_threads=lambda count: None))
    running, taken = Upgrade(config, choice), []
    assert running.take() is None and not running.is_over
    deadline = time.monotonic() + 30
    while not running.is_over and time.monotonic() < deadline:
        taken.append(running.take())
        time.sleep(0.01)
    return running, [*taken, running.take()]


def test_the_model_is_given_once_when_the_compiler_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = object()
    running, taken = run_upgrade(tmp_path, monkeypatch, "import time; time.sleep(0.2)", model)
    assert running.is_over and [x for x in taken if x is not None] == [model] and running.seconds > 0.2


@pytest.mark.parametrize("script, made, reason", [
    ("raise SystemExit(3)", object(), "the compiler ended with status 3"),
    ("import os; os.kill(os.getpid(), 9)", object(), "the compiler ended with SIGKILL"),
    ("", MemoryError("no room"), "MemoryError: no room"),
])
def test_without_kernels_torch_goes_on(script: str, made: Any, reason: str, tmp_path: Path,
                                       monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    running, taken = run_upgrade(tmp_path, monkeypatch, script, made)
    assert running.is_over and not any(taken)
    assert f"no compiled kernels ({reason}); torch goes on serving" in caplog.text
    assert features.missing() == reason and jit_threads.load() is None


def test_a_sleep_keeps_the_model_that_serves_meanwhile_and_its_successor_to_be(
        tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wake-up read the weights again when the kernels were still being compiled."""
    section = build_config(tiny_model, {}, serve=False).model
    config = make_process(section.files, cache=dict(num_gpu_blocks_override=16), max_model_len=64)
    monkeypatch.setattr(compiler, "command", lambda *arguments: [sys.executable, "-c", "import time; time.sleep(60)"])
    monkeypatch.setattr(compiler, "is_compiled", lambda scope="all": False)
    runner, ready = startup.build_runner(config, STARTING, lambda: None)
    try:
        kept = startup.Weights.of(runner)
        again, ready_again = startup.build_runner(config, STARTING, lambda: None, kept)
        assert again.model is runner.model is not None and again.upgrade is runner.upgrade is not None
        assert ready_again.num_blocks == ready.num_blocks and again.pool is not runner.pool
    finally:
        assert runner.upgrade is not None
        runner.upgrade._compilation._process.kill()
        runner.upgrade._compilation._process.wait()
        assert "SIGKILL" in str(runner.upgrade._compilation.failure())


def test_a_compiler_whose_parent_is_gone_ends_at_once() -> None:
    command = [sys.executable, "-m", "worker.jit.compiler", "--parent", "1", "--width", "64"]
    assert subprocess.run(command, timeout=20).returncode == 1
