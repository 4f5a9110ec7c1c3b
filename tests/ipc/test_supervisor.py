"""Real processes: the supervisor with fake children, ended in every way that processes end."""
from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ipc.child import ROOT
from ipc.errors import ConfigError
from ipc.supervisor import Supervisor
from ipc.system import bind_listener
from tests.ipc.engine_fakes import ROLES, Fakes, make_config, run_dirs, wait_until_gone


class Run:
    """A supervisor in a process of its own, and its report lines."""
    alive: list[subprocess.Popen[str]] = []

    def __init__(self, fakes: Fakes, temp: str, **options: object) -> None:
        self.temp = temp
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([ROOT, str(fakes.folder)]), "TMPDIR": temp}
        env.pop("XDG_RUNTIME_DIR", None)
        self.process = subprocess.Popen([sys.executable, "-P", fakes.driver(make_config(**options))], env=env,
                                        stdout=subprocess.PIPE, text=True)
        Run.alive.append(self.process)
        self.lines: list[str] = []
        self.pids: list[int] = []

    def read_until(self, kind: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.strip())
            if line.startswith(kind + "|"):
                if kind == "EngineUp":
                    self.pids = [int(pid) for pid in line.strip().rsplit("|", 1)[1].strip("[]").split(",")]
                return line.strip()
        raise AssertionError(f"no {kind} in {self.lines}")

    def up(self) -> Run:
        self.read_until("EngineUp")
        return self

    def pid_of(self, role: str) -> int:
        return self.pids[1 + ROLES.index(role)]

    def end(self) -> int:
        """Read the rest; the exit status. Nothing may be left."""
        assert self.process.stdout is not None
        self.lines += [line.strip() for line in self.process.stdout]
        self.process.stdout.close()
        status = self.process.wait(10)
        assert wait_until_gone(self.pids) == []
        return status

    @property
    def failures(self) -> list[str]:
        return [line.split("|")[2] for line in self.lines if line.startswith("Failure|")]


@pytest.fixture
def fakes(tmp_path: Path) -> Fakes:
    return Fakes(tmp_path)


@pytest.fixture
def temp() -> Iterator[str]:
    """A short temporary folder: sockets have short names."""
    with tempfile.TemporaryDirectory(prefix="tf", dir="/tmp") as folder:
        yield folder
        for process in Run.alive:                # of a test that failed
            process.kill()
            process.wait()
        Run.alive.clear()


def test_children_get_their_sections_and_thread_limits_and_all_ready_means_up(fakes: Fakes, temp: str) -> None:
    run = Run(fakes, temp, num_threads=3).up()
    assert sorted(fakes.notes()) == [
        "engine_core configured CoreProcess OMP=1", "frontend configured FrontendProcess OMP=1",
        "worker configured WorkerProcess OMP=3"]
    assert "Phase|worker 0|worker|think|1.0|0.25|thought" in run.lines
    assert "Ready|engine_core|detail of engine_core|0" in run.lines
    assert run.pids[0] == run.process.pid and len(run.pids) == 4
    assert len(run_dirs(temp)) == 1
    assert os.stat(os.path.join(temp, run_dirs(temp)[0])).st_mode & 0o777 == 0o700
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_frontend_first_and_leaves_nothing(fakes: Fakes, temp: str, number: signal.Signals) -> None:
    run = Run(fakes, temp).up()
    run.process.send_signal(number)
    assert run.end() == 0
    assert [note for note in fakes.notes() if "shutdown" in note] == [
        "frontend shutdown", "engine_core shutdown", "worker shutdown"]
    assert run_dirs(temp) == []
    assert run.failures == []


def test_ctrl_c_in_the_terminal_reaches_the_supervisor_only(fakes: Fakes, temp: str) -> None:
    """Children have process groups of their own: a group-wide SIGINT must not cut streams before their drain."""
    run = Run(fakes, temp).up()
    assert [os.getpgid(pid) for pid in run.pids[1:]] == run.pids[1:]
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 0


@pytest.mark.parametrize("role", ROLES)
def test_kill_9_of_a_child_ends_everything_with_its_name(fakes: Fakes, temp: str, role: str) -> None:
    run = Run(fakes, temp).up()
    os.kill(run.pid_of(role), signal.SIGKILL)
    assert run.end() == 3
    name = "worker 0" if role == "worker" else role
    assert run.failures == [f"{name} (pid {run.pid_of(role)}) ended with signal SIGKILL"]
    assert run_dirs(temp) == []


def test_kill_9_of_the_supervisor_leaves_no_child_and_the_next_start_sweeps_its_directory(
        fakes: Fakes, temp: str) -> None:
    run = Run(fakes, temp).up()
    run.process.kill()
    assert run.end() == -signal.SIGKILL
    second = Run(fakes, temp).up()
    assert len(run_dirs(temp)) == 1
    second.process.send_signal(signal.SIGTERM)
    assert second.end() == 0


def test_kill_9_of_the_supervisor_ends_a_child_that_is_still_importing(fakes: Fakes, temp: str) -> None:
    """A worker imports for seconds before its first statement can ask for a death signal."""
    fakes.set("worker", "slow import")
    run = Run(fakes, temp)
    marker = Path(str(fakes.log) + ".importing")
    deadline = time.monotonic() + 20
    while not (marker.exists() and marker.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    pid = int(marker.read_text())
    run.process.kill()
    run.process.wait()
    assert run.process.stdout is not None
    run.process.stdout.close()
    assert wait_until_gone([pid]) == []


def test_a_child_that_fails_to_start_says_why(fakes: Fakes, temp: str) -> None:
    fakes.set("worker", "fail")
    run = Run(fakes, temp)
    assert run.end() == 1
    assert run.failures == ["the weights are not there"]


def test_a_child_that_ends_without_words_is_named_with_its_status(fakes: Fakes, temp: str) -> None:
    fakes.set("engine_core", "crash")
    run = Run(fakes, temp)
    assert run.end() == 1
    assert len(run.failures) == 1
    assert run.failures[0].startswith("engine_core (pid ") and run.failures[0].endswith("ended with exit status 7")


def test_a_child_of_another_version_is_refused_with_both_hashes(fakes: Fakes, temp: str) -> None:
    fakes.set("engine_core", "other schema")
    run = Run(fakes, temp)
    assert run.end() == 1
    assert b"other-id".hex() in run.failures[0] and "same version" in run.failures[0]


def test_bytes_that_are_no_message_end_the_start_without_a_traceback(fakes: Fakes, temp: str) -> None:
    fakes.set("worker", "garbage")
    run = Run(fakes, temp)
    assert run.end() == 1
    assert run.failures[0].startswith("worker 0 (pid ")


def test_a_child_that_ignores_shutdown_and_sigterm_is_killed(fakes: Fakes, temp: str) -> None:
    for role in ROLES:
        fakes.set(role, "stubborn")
    run = Run(fakes, temp).up()
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 0


def test_a_second_signal_does_not_wait(fakes: Fakes, temp: str) -> None:
    fakes.set("frontend", "stubborn")
    run = Run(fakes, temp).up()
    run.process.send_signal(signal.SIGINT)
    while "frontend shutdown" not in fakes.notes():
        time.sleep(0.01)
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 0
    assert "worker shutdown" not in fakes.notes()


def test_a_signal_during_the_start_ends_it(fakes: Fakes, temp: str) -> None:
    fakes.set("worker", "never ready")
    run = Run(fakes, temp)
    run.read_until("Phase")
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == 0
    assert run_dirs(temp) == []


def test_eight_engines_start_at_once_on_one_host(fakes: Fakes, temp: str) -> None:
    runs = [Run(fakes, temp) for _ in range(8)]
    for run in runs:
        run.up()
    assert len(run_dirs(temp)) == 8
    for run in runs:
        run.process.send_signal(signal.SIGTERM)
    assert [run.end() for run in runs] == [0] * 8


def test_a_taken_port_is_an_early_error_that_says_what_to_do() -> None:
    with bind_listener("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is taken; choose another with --port"):
            bind_listener("127.0.0.1", port)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match="--host"):
        bind_listener("192.0.2.1", 0)


def test_without_serving_no_port_is_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", None)
    supervisor = Supervisor(make_config(serve=False), lambda name, event: None)
    try:
        assert supervisor.listeners == [] and supervisor.port == 0
        assert [child.name for child in supervisor.children] == ["worker 0", "engine_core"]
    finally:
        supervisor.run_dir.remove()
