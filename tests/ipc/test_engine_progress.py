"""Who is late, from the files in which processes write their progress."""
from __future__ import annotations

from pathlib import Path

import pytest

from ipc import progress
from ipc.progress import PLANS, EngineProgress, Progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress.time, "monotonic_ns", lambda: int(now[0] * 1e9))
    return now


def test_a_worker_that_was_stopped_in_its_wait_is_late_when_the_core_waits_for_it(tmp_path: Path,
                                                                                 clock: list[float]) -> None:
    engine = EngineProgress(str(tmp_path))
    core, worker, plans = (Progress(str(tmp_path), name) for name in ("engine_core-0", "worker-0", PLANS))
    early = EngineProgress(str(tmp_path))
    core.working()
    worker.waiting()
    plans.working()
    clock[0] += 4.5
    core.working()
    assert engine.silent(0.0) == early.silent(1.0) == ""            # it may be for a moment only
    clock[0] += 0.45
    assert engine.silent(0.0) == "" and early.silent(1.0) == "the worker makes no progress"
    clock[0] += 0.55
    assert engine.worker_overdue_s() == pytest.approx(0.5)
    worker.waiting()                                                # it moved: an answer is on its way
    assert engine.worker_overdue_s() == 0.0
    plans.waiting()
    clock[0] += 100
    assert engine.worker_overdue_s() == 0.0
    engine.close()
    early.close()


def test_a_stopped_core_blames_no_worker(tmp_path: Path, clock: list[float]) -> None:
    engine = EngineProgress(str(tmp_path))
    core, worker, plans = (Progress(str(tmp_path), name) for name in ("engine_core-0", "worker-0", PLANS))
    plans.working()
    worker.waiting()
    clock[0] += 0.2
    core.working()
    for _ in range(20):
        clock[0] += 0.5
        assert engine.worker_overdue_s() == engine.worker_overdue_s(1.0) == 0.0
    assert engine.silent(0.0) == "the engine core makes no progress"
    engine.close()


def test_a_slow_step_has_the_time_it_was_predicted_to_take(tmp_path: Path, clock: list[float]) -> None:
    engine = EngineProgress(str(tmp_path))
    core, worker, plans = (Progress(str(tmp_path), name) for name in ("engine_core-0", "worker-0", PLANS))
    worker.working(3.0)
    plans.working()
    clock[0] += 29
    core.working()
    assert engine.silent(0.0) == ""
    clock[0] += 2
    assert engine.silent(0.0) == "the worker makes no progress"
    clock[0] += 5
    assert engine.silent(0.0) == "the engine core makes no progress"
    engine.close()
