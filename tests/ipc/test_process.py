"""Whose lines a process writes at which level."""
from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import logging, sys
from ipc.process import configure_logging
configure_logging("worker 0", sys.argv[1])
for name in ("numba.core.ssa", "uvicorn", "worker", "engine_core.core", "frontend.openai.app", "ipc.sockets"):
    for level in ("debug", "info", "warning", "error"):
        getattr(logging.getLogger(name), level)(f"{name}-{level}")
"""
OURS = ("worker", "engine_core.core", "frontend.openai.app", "ipc.sockets")


@pytest.mark.parametrize(("level", "ours", "theirs"), [
    ("debug", {"debug", "info", "warning", "error"}, {"warning", "error"}),
    ("info", {"info", "warning", "error"}, {"warning", "error"}), ("error", {"error"}, {"error"})])
def test_libraries_stay_at_warning_whatever_our_own_level_is(level: str, ours: set[str], theirs: set[str]) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, level], capture_output=True, text=True, check=True)
    found = {line.split()[-1] for line in done.stderr.splitlines()}
    assert found == ({f"{name}-{at}" for name in OURS for at in ours}
                     | {f"{name}-{at}" for name in ("numba.core.ssa", "uvicorn") for at in theirs})
    assert all(" worker 0 " in line for line in done.stderr.splitlines())
