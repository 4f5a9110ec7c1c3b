"""Every benchmark that `launch.py bench` offers starts; so does every one that the README names."""
from __future__ import annotations

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "launch.py", "bench", *arguments], cwd=ROOT, capture_output=True, text=True,
                          timeout=300)


def test_every_benchmark_explains_itself_and_the_readme_names_only_such() -> None:
    offered = bench().stderr.strip().partition("bench needs a name: ")[2].split(", ")
    named = re.findall(r"launch\.py bench ([a-z][a-z-]*)", (ROOT / "README.md").read_text())
    assert {name.replace("-", "_") for name in named} <= set(offered) and len(offered) > 20
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda name: bench(name.replace("_", "-"), "--help"), offered))
    wrong = {name: found.stderr[-500:] for name, found in zip(offered, results)
             if (found.returncode, found.stdout[:6]) != (0, "usage:")}
    assert wrong == {}
