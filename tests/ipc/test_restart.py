"""The supervisor restarts what ends, tells the others, and gives up when it happens too often."""
from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from ipc.progress import Progress, ProgressReader
from ipc.supervisor import MAX_RESTARTS
from tests.ipc.engine_fakes import ROLES, Fakes
from tests.ipc.test_supervisor import Run, fakes, temp  # noqa: F401  (fixtures)


@pytest.mark.parametrize("role", ROLES)
def test_a_killed_child_is_replaced_and_the_engine_is_up_again(fakes: Fakes, temp: str, role: str) -> None:  # noqa: F811
    run = Run(fakes, temp, restart=True).up()
    before = list(run.pids)
    os.kill(run.pid_of(role), signal.SIGKILL)
    run.up()
    changed = [i for i, (a, b) in enumerate(zip(before, run.pids)) if a != b]
    assert changed == [1 + ROLES.index(role)]
    assert any("SIGKILL; restarting it (1 of" in text for text in run.failures)
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == 0


def test_a_child_that_dies_too_often_ends_the_engine_with_its_reason(fakes: Fakes, temp: str) -> None:  # noqa: F811
    run = Run(fakes, temp, restart=True).up()
    for _ in range(MAX_RESTARTS):
        os.kill(run.pid_of("worker"), signal.SIGKILL)
        run.up()
    os.kill(run.pid_of("worker"), signal.SIGKILL)
    assert run.end() == 3
    assert sum("restarting it" in text for text in run.failures) == MAX_RESTARTS
    assert run.failures[-1].endswith("ended with signal SIGKILL")


def test_a_child_that_cannot_start_again_ends_the_engine(fakes: Fakes, temp: str) -> None:  # noqa: F811
    run = Run(fakes, temp, restart=True).up()
    fakes.set("worker", "fail")
    os.kill(run.pid_of("worker"), signal.SIGKILL)
    assert run.end() == 3
    assert run.failures[-1] == "the weights are not there"


def test_a_failure_before_the_engine_was_up_is_no_restart(fakes: Fakes, temp: str) -> None:  # noqa: F811
    fakes.set("engine_core", "crash")
    run = Run(fakes, temp, restart=True)
    assert run.end() == 1
    assert not any("restarting" in text for text in run.failures)


def test_progress_is_overdue_only_when_something_was_to_be_done(tmp_path: Path) -> None:
    writer, reader = Progress(str(tmp_path), "worker-0"), ProgressReader(str(tmp_path), "worker-0")
    assert reader.overdue_s() == 0.0
    writer.working(predicted_s=2.0)             # 20 s are allowed
    assert reader.overdue_s() == 0.0
    writer._map[8:16] = (time.monotonic_ns() - 3_000_000_000).to_bytes(8, "little")
    assert 2.9 < reader.overdue_s() < 60
    writer.waiting()
    assert reader.overdue_s() == 0.0
    writer.working()
    reader.clear()
    assert reader.overdue_s() == 0.0
    reader.close()
