"""Every benchmark that `launch.py bench` offers starts, and the README names no other."""
from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# In one process, which imports torch once.
HELP = """
import contextlib, io, json, sys, traceback
import launch
found = {}
for name in sys.argv[1:]:
    text = io.StringIO()
    try:
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            status = launch.main(["bench", name, "--help"])
    except SystemExit as exit:
        status = exit.code
    except Exception:
        status = traceback.format_exc()
    found[name] = [status, text.getvalue()]
print(json.dumps(found))
"""


def test_every_benchmark_explains_itself_and_the_readme_names_no_other() -> None:
    listed = subprocess.run([sys.executable, "launch.py", "bench"], cwd=ROOT, capture_output=True, text=True)
    offered = listed.stderr.strip().partition("bench needs a name: ")[2].split(", ")
    named = re.findall(r"launch\.py bench ([a-z][\w-]*)", (ROOT / "README.md").read_text())
    assert {name.replace("-", "_") for name in named} <= set(offered) and len(offered) > 20
    result = subprocess.run([sys.executable, "-c", HELP, *(name.replace("_", "-") for name in offered)], cwd=ROOT,
                            capture_output=True, text=True, timeout=250)
    found = json.loads(result.stdout.splitlines()[-1])
    assert len(found) == len(offered)
    assert {name: answer for name, answer in found.items() if answer[0] != 0 or "usage:" not in answer[1]} == {}
