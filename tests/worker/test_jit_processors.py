"""The kernels on processors other than this one: all compile to machine code, and what this one can run is right.

LLVM ends the process for what it cannot express, so each processor's code is made in a process of its own.
"""
from __future__ import annotations

import json
import os
import pickle
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba")

from ipc.child import ROOT  # noqa: E402
from tests.worker.compile_kernels import entries  # noqa: E402
from worker.jit import compiler, features  # noqa: E402

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="LLVM generates code for x86 on x86 only")

SSE = "sse2 ssse3 sse4.1 sse4.2 popcnt cx16"
AVX2 = f"{SSE} avx avx2 fma f16c bmi bmi2 lzcnt movbe"
AVX512 = f"{AVX2} avx512f avx512bw avx512cd avx512dq avx512vl"
VNNI = f"{AVX512} avx512vnni avx512vbmi avx512vbmi2 avx512bitalg avx512vpopcntdq avx512ifma avx512bf16"
# LLVM's name -> what it can do, and its widest registers
PROCESSORS = {
    "x86-64-v2": (SSE, "xmm"), "haswell": (AVX2, "ymm"), "skylake-avx512": (AVX512, "zmm"),
    "sapphirerapids": (f"{VNNI} avx512fp16 avxvnni", "zmm"), "znver4": (VNNI, "zmm"),
}
FAST = ["count_tokens", "penalise_rows"]
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")


def warmed_up(scope: str) -> dict[str, Any]:
    """The signatures of every entry point after a worker's warm-up."""
    compiler.compile_kernels(scope, 64)
    return {name: kernel.signatures for name, kernel in entries().items()}


def run(processor: str, home: Path, *command: str, given: bytes = b"", timeout_s: int = 1500) -> str:
    """What `python command` prints in a process whose numba compiles for that processor."""
    listed = ",".join(f"+{name}" for name in PROCESSORS[processor][0].split())
    environment = {**os.environ, "HOME": str(home), "PYTHONPATH": ROOT, "NUMBA_CPU_NAME": processor,
                   "NUMBA_CPU_FEATURES": listed}
    done = subprocess.run([sys.executable, *command], input=given, cwd=ROOT, timeout=timeout_s, capture_output=True,
                          env=environment)
    assert done.returncode == 0, f"status {done.returncode}: {(done.stdout + done.stderr).decode()[-4000:]}"
    return done.stdout.decode()


def compile_for(processor: str, home: Path, names: list[str], signatures: dict[str, Any]) -> None:
    found = json.loads(run(processor, home, "-m", "tests.worker.compile_kernels", *names,
                           given=pickle.dumps(signatures)))
    assert found["processor"].startswith(f"{processor} (")
    assert found["registers"][-1] <= PROCESSORS[processor][1]


def test_a_warm_up_leaves_no_kernel_for_later() -> None:
    """What is first called by a request is compiled in the worker itself."""
    signatures = warmed_up("sampling")
    assert set(signatures) >= {"run_team", "sample_rows", "greedy_rows", "logprob_rows", *FAST}
    assert {name for name, known in signatures.items() if not known} <= {"run_team"}


def test_some_kernels_are_right_on_a_processor_without_avx(tmp_path: Path) -> None:
    compile_for("x86-64-v2", tmp_path, FAST, warmed_up("sampling"))
    run("x86-64-v2", tmp_path, *PYTEST, "tests/worker/test_jit_rows.py", "tests/worker/test_jit_vector.py", "-k",
        "powers_of_two or a_list_has or half_precision")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("processor", PROCESSORS)
def test_all_kernels_compile_and_those_that_run_here_are_right(processor: str, tmp_path: Path) -> None:
    signatures = {**warmed_up("sampling"), **warmed_up("all")}
    compile_for(processor, tmp_path, list(signatures), signatures)
    if features.cpu_features() >= set(PROCESSORS[processor][0].split()):
        run(processor, tmp_path, *PYTEST, "tests/worker/test_sampler_kernels.py", "tests/worker/test_jit_model.py",
            "tests/worker/test_jit_attention.py", "tests/worker/test_jit_vector.py")
