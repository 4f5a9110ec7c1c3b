"""An engine beside a Python program: its supervisor lives and dies with the program, never with a thread or a fork."""
from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from ipc.child import ROOT
from ipc.engine_process import EngineProcess
from ipc.errors import EngineDeadError
from ipc.messages import EngineUp, Phase
from ipc.system import is_running
from tests.ipc.engine_fakes import Fakes, make_config, run_dirs, wait_until_gone

CONFIG = make_config(serve=False)


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fakes]:
    with tempfile.TemporaryDirectory(prefix="tf", dir="/tmp") as temp:
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setenv("TMPDIR", temp)
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
        yield Fakes(tmp_path)
        assert run_dirs(temp) == []


@pytest.fixture
def engine(fakes: Fakes) -> Iterator[EngineProcess]:
    engine = EngineProcess(module="fake_supervisor")
    yield engine
    engine.stop()


def test_start_reports_phases_and_says_where_the_core_listens(engine: EngineProcess) -> None:
    phases: list[Phase] = []
    up = engine.start(CONFIG, phases.append)
    assert {phase.role for phase in phases} == {"worker", "engine_core"}
    assert up.core_address == f"ipc://{up.run_dir}/core-1" and up.core_epoch == 1
    assert len(up.core_address) < 100
    assert up.pids[0] == engine.pid and len(up.pids) == 3
    assert engine.died() is None
    engine.stop()
    assert wait_until_gone(up.pids) == [] and not os.path.exists(up.run_dir)
    assert engine.died() == "the engine was stopped"
    engine.stop()


def test_cycles_leave_no_process_descriptor_or_file(fakes: Fakes) -> None:
    engine = EngineProcess(module="fake_supervisor")
    engine.start(CONFIG)
    engine.stop()
    before = os.listdir("/proc/self/fd")
    for _ in range(10):
        engine = EngineProcess(module="fake_supervisor")
        up = engine.start(CONFIG)
        engine.stop()
        assert wait_until_gone(up.pids) == []
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_loop_can_watch_the_start_without_blocking(engine: EngineProcess) -> None:
    engine.spawn(CONFIG)
    messages: list[object] = []
    while not any(isinstance(message, EngineUp) for message in messages):
        assert select.select([engine.fileno()], [], [], 30)[0]
        messages += engine.receive()
    assert isinstance(messages[0], Phase)
    assert engine.receive() == []


def test_a_child_that_fails_at_start_raises_its_reason(fakes: Fakes, engine: EngineProcess) -> None:
    fakes.set("worker", "fail")
    with pytest.raises(EngineDeadError, match="the weights are not there"):
        engine.start(CONFIG)
    assert engine.fileno() == -1


def test_a_killed_worker_is_the_reason_that_died_gives(engine: EngineProcess) -> None:
    up = engine.start(CONFIG)
    os.kill(up.pids[1], signal.SIGKILL)
    assert select.select([engine.fileno()], [], [], 10)[0]
    assert engine.died() == f"worker 0 (pid {up.pids[1]}) ended with signal SIGKILL"
    assert wait_until_gone(up.pids[1:]) == []


def test_a_killed_supervisor_takes_its_children_along_and_is_noticed(engine: EngineProcess) -> None:
    up = engine.start(CONFIG)
    os.kill(up.pids[0], signal.SIGKILL)
    assert wait_until_gone(up.pids[1:]) == []
    assert select.select([engine.fileno()], [], [], 10)[0]
    assert engine.died() == f"the engine's supervisor (pid {up.pids[0]}) ended with signal SIGKILL"
    engine.stop()
    assert not os.path.exists(up.run_dir)


def test_the_engine_outlives_the_thread_that_started_it(engine: EngineProcess) -> None:
    """The kernel's death signal follows the spawning thread: children of a thread would end with it."""
    ups: list[EngineUp] = []
    thread = threading.Thread(target=lambda: ups.append(engine.start(CONFIG)))
    thread.start()
    thread.join()
    assert not select.select([engine.fileno()], [], [], 0.5)[0]
    assert all(is_running(pid) for pid in ups[0].pids) and engine.died() is None


def test_ctrl_c_in_the_users_terminal_does_not_reach_the_engine(engine: EngineProcess) -> None:
    up = engine.start(CONFIG)
    assert os.getpgrp() not in {os.getpgid(pid) for pid in up.pids}


def test_a_line_printed_in_the_background_stops_no_process(engine: EngineProcess) -> None:
    """A terminal with `stty tostop` sends SIGTTOU to a group that prints there."""
    for pid in engine.start(CONFIG).pids:
        ignored, = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigIgn"))
        assert int(ignored.split()[1], 16) >> (signal.SIGTTOU - 1) & 1


def test_the_engine_stays_in_its_hosts_session(engine: EngineProcess) -> None:
    """Niceness counts within a session: a helper of low priority in another would make the engine wait."""
    assert {os.getsid(pid) for pid in engine.start(CONFIG).pids} == {os.getsid(0)}


def test_stop_from_another_thread_ends_a_start_that_waits(fakes: Fakes, engine: EngineProcess) -> None:
    fakes.set("worker", "never ready")
    errors: list[Exception] = []

    def start() -> None:
        try:
            engine.start(CONFIG)
        except EngineDeadError as error:
            errors.append(error)
    thread = threading.Thread(target=start)
    thread.start()
    while "worker configured WorkerProcess" not in " ".join(fakes.notes()):
        pass
    engine.stop()
    thread.join(10)
    assert [str(error) for error in errors] == ["the engine was stopped"]


_HOST = '''
import os, sys, time
import msgspec
from ipc.config import EngineConfig
from ipc.engine_process import EngineProcess
engine = EngineProcess(module="fake_supervisor")
up = engine.start(msgspec.json.decode({config!r}, type=EngineConfig))
child = os.fork()                       # holds a copy of the control socket
if child == 0:
    if {child_stops!r}:
        engine.stop()
        print(*up.pids, os.getpid(), flush=True)
    time.sleep(600)
if not {child_stops!r}:
    print(*up.pids, child, flush=True)
time.sleep(600)
'''


def _host(fakes: Fakes, child_stops: bool) -> tuple[subprocess.Popen[str], list[int], int]:
    script = fakes.folder / "host.py"
    script.write_text(_HOST.format(config=msgspec.json.encode(CONFIG), child_stops=child_stops))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([ROOT, str(fakes.folder)])}
    host = subprocess.Popen([sys.executable, "-P", str(script)], env=env, stdout=subprocess.PIPE, text=True)
    assert host.stdout is not None
    *pids, forked = map(int, host.stdout.readline().split())
    host.stdout.close()
    return host, pids, forked


def test_a_killed_host_takes_the_engine_along_although_its_fork_lives(fakes: Fakes) -> None:
    host, pids, forked = _host(fakes, child_stops=False)
    try:
        host.kill()
        host.wait()
        assert wait_until_gone(pids) == []
        assert is_running(forked)
    finally:
        os.kill(forked, signal.SIGKILL)


def test_a_forked_copy_cannot_stop_its_parents_engine(fakes: Fakes) -> None:
    host, pids, forked = _host(fakes, child_stops=True)
    try:
        assert all(is_running(pid) for pid in pids)
    finally:
        os.kill(forked, signal.SIGKILL)
        host.kill()
        host.wait()
    assert wait_until_gone(pids) == []
