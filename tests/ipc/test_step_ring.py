"""Rings of last steps: what a process wrote is there after its end, and the parts of a step come together."""
from __future__ import annotations

import os
from pathlib import Path

import pytest

from ipc.errors import ConfigError
from ipc.messages import STAMPS
from ipc.step_ring import RING_STEPS, StepRing, load_steps, save_steps


def row(step: int, **stamps: int) -> tuple[int, ...]:
    return tuple({**stamps, "step": step}.get(name, 0) for name in STAMPS)


def test_a_step_is_put_together_and_one_under_way_shows_how_far_it_came(tmp_path: Path) -> None:
    core, worker = StepRing(str(tmp_path), "engine_core-0"), StepRing(str(tmp_path), "worker-0")
    for step in (RING_STEPS - 1, RING_STEPS, RING_STEPS + 1):
        core.put(step, row(step, plan_begin=10 * step, plan_sent=10 * step + 1, num_tokens=7))
        worker.put(step, row(step, worker_received=10 * step + 2))
    worker.put(RING_STEPS, row(RING_STEPS, worker_received=10 * RING_STEPS + 2, worker_prepared=10 * RING_STEPS + 3))
    worker.put(5, row(5, worker_received=50))                                      # the core knows no such step
    worker.put(RING_STEPS + 1, row(RING_STEPS + 1, worker_received=3))             # of a core before this one
    path = save_steps(str(tmp_path), str(tmp_path), "worker 0 was killed")
    assert os.stat(path).st_mode & 0o777 == 0o600
    reason, rows = load_steps(path)
    found = [dict(zip(STAMPS, one)) for one in rows.tolist()]
    assert reason == "worker 0 was killed"
    assert [one["step"] for one in found] == [RING_STEPS - 1, RING_STEPS, RING_STEPS + 1]
    assert [one["worker_received"] % 10 for one in found] == [(10 * RING_STEPS - 8) % 10, (10 * RING_STEPS + 2) % 10, 0]
    assert [one["worker_prepared"] for one in found] == [0, 10 * RING_STEPS + 3, 0]
    assert {one["num_tokens"] for one in found} == {7}


def test_a_successor_goes_on_in_the_same_ring(tmp_path: Path) -> None:
    StepRing(str(tmp_path), "engine_core-0").put(3, row(3, plan_begin=9))
    StepRing(str(tmp_path), "engine_core-0").put(1, row(1, plan_begin=20))
    _, rows = load_steps(save_steps(str(tmp_path), str(tmp_path), ""))
    assert rows[:, STAMPS.index("step")].tolist() == [3, 1]


def test_nothing_to_save_and_nowhere_to_save_it_are_no_errors(tmp_path: Path) -> None:
    assert save_steps(str(tmp_path), str(tmp_path), "") == ""
    ring = StepRing(str(tmp_path), "engine_core-0")
    assert save_steps(str(tmp_path), str(tmp_path), "") == ""                       # no step yet
    ring.put(1, row(1, plan_begin=1))
    assert save_steps(str(tmp_path), str(tmp_path / "absent"), "") == ""


def test_another_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\x01")
    with pytest.raises(ConfigError, match="x is no file of saved steps"):
        load_steps(str(tmp_path / "x"))
    with pytest.raises(ConfigError, match="No such file"):
        load_steps(str(tmp_path / "y"))
