"""Runs tests/kernels/interpreted in a subprocess whose Triton interprets kernels on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.timeout(1200)          # half a minute of one core, which may be shared with much else
ROOT = Path(__file__).parents[2]
# numpy warns inside Triton's interpreter where a GPU computes on: exp2 that overflows, the largest of NaNs, a loop
# bound that is an array of one element.
QUIET = ["-W", "ignore::RuntimeWarning", "-W", "ignore::DeprecationWarning"]


FILES = sorted(path.name for path in (ROOT / "tests/kernels/interpreted").glob("test_*.py"))


@pytest.fixture(scope="module")
def runs() -> Iterator[dict[str, Future[subprocess.CompletedProcess[str]]]]:
    """Each file's run, several at a time; the interpreter uses one core."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

    def run(name: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pytest", f"tests/kernels/interpreted/{name}", "--confcutdir=tests/kernels",
                   "-p", "no:cacheprovider", "--timeout=900", *QUIET]
        return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1100)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {name: pool.submit(run, name) for name in FILES}


@pytest.mark.parametrize("name", FILES)
def test_every_kernel_equals_its_torch_reference_in_the_interpreter(
        name: str, runs: dict[str, Future[subprocess.CompletedProcess[str]]]) -> None:
    result = runs[name].result()
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
