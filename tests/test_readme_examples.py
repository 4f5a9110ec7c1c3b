"""The Python blocks of README run as they stand, with the tiny model in place of the demo model."""
from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes.tools import assert_nothing_left, engine_environment

README = Path(__file__).resolve().parents[1] / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.M | re.S)
DEMO = '"smollm2-135m"'
TIMEOUT_S = 100.0                               # two starts, on a machine whose kernels may not be compiled yet


def test_there_are_examples_and_all_name_the_demo_model() -> None:
    assert len(BLOCKS) >= 3 and all(DEMO in block for block in BLOCKS)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_an_example_runs_and_prints(number: int, tiny_model: str, temp: str, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(BLOCKS[number].replace(DEMO, repr(tiny_model)))
    result = subprocess.run([sys.executable, str(script)], env=engine_environment(temp), cwd=tmp_path,
                            capture_output=True, text=True, timeout=TIMEOUT_S)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() and "Traceback" not in result.stderr
    assert_nothing_left(temp)
