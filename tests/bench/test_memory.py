"""bench memory: what it reports of real processes."""
from __future__ import annotations

import json
import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from bench import memory
from tests.processes.tools import FLAGS

pytestmark = [pytest.mark.timeout(120), pytest.mark.skipif(
    not Path("/proc/self/smaps_rollup").exists(), reason="this system does not tell what processes weigh")]


def test_memory_that_is_written_is_private_and_resident() -> None:
    pages = mmap.mmap(-1, 32 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)    # an allocator may have some left
    array = np.frombuffer(pages, np.uint8)
    before = memory.weigh(os.getpid())
    array[:] = 1
    after = memory.weigh(os.getpid())
    for field in ("resident", "proportional", "private"):
        assert after[field] - before[field] == pytest.approx(array.nbytes / 1e6, abs=2.0)
    assert after["peak"] >= after["resident"] - 1 and after["resident"] >= after["proportional"] >= after["private"] - 1


def test_every_process_of_a_server_is_weighed(tiny_model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert memory.main([tiny_model, "--requests", "2", *FLAGS]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    for weights in (report["ready"], report["after"]):
        assert set(weights) == {"supervisor", "worker", "engine_core", "frontend", "all"}
        assert weights["all"]["private"] == pytest.approx(
            sum(entry["private"] for name, entry in weights.items() if name != "all"), abs=0.5)
        assert weights["worker"]["private"] > 50 and weights["engine_core"]["private"] < weights["worker"]["private"]
    assert report["options"] == list(FLAGS)
