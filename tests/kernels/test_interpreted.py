"""Runs tests/kernels/interpreted in a subprocess whose Triton interprets kernels on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.timeout(1200)          # half a minute of one core, which may be shared with much else
ROOT = Path(__file__).parents[2]
# numpy warns inside Triton's interpreter where a GPU computes on: exp2 that overflows, the largest of NaNs, a loop
# bound that is an array of one element.
QUIET = ["-W", "ignore::RuntimeWarning", "-W", "ignore::DeprecationWarning"]


FILES = sorted(path.name for path in (ROOT / "tests/kernels/interpreted").glob("test_*.py"))


@pytest.mark.parametrize("name", FILES)
def test_every_kernel_equals_its_torch_reference_in_the_interpreter(name: str) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        f"tests/kernels/interpreted/{name}",
        "--confcutdir=tests/kernels",
        "-p",
        "no:cacheprovider",
        "--timeout=900",
        *QUIET,
    ]
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1100)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
