"""The doctor: marks, verdict, exit status; each check against a machine that has the fault."""
from __future__ import annotations

import json
import os
import shutil
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ipc import doctor, machine
from ipc.child import ROOT
from ipc.doctor import Finding, conclude, examine, judge_backends


def only(found: Iterator[Finding]) -> Finding:
    [one] = found
    return one


def test_nothing_to_fix_ends_in_ok(capsys: pytest.CaptureFixture[str]) -> None:
    assert conclude([Finding("cpu", "fine")], False) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "OK"


def test_a_warning_is_still_ok_and_a_fatal_finding_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    warning = Finding("shm", "small", "make it larger")
    fatal = Finding("packages", "none", "run: python launch.py setup", True)
    assert (warning.mark, fatal.mark, Finding("x", "y", "", True).mark) == ("warn", "FAIL", "ok")
    assert conclude([warning], False) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == ["consider  shm: make it larger", "OK, with the remarks above"]
    assert conclude([warning, fatal], False) == 1
    assert capsys.readouterr().out.splitlines()[1] == "fix       packages: run: python launch.py setup"
    assert conclude([warning, fatal], True) == 1
    result = json.loads(capsys.readouterr().out)
    assert not result["ok"] and [finding["mark"] for finding in result["findings"]] == ["warn", "FAIL"]


def test_a_check_that_fails_itself_is_a_finding() -> None:
    def check_moon() -> Iterator[Finding]:
        raise OSError("no moon")
    assert only(examine([check_moon])).text == "could not be examined: OSError: no moon"


def test_a_taken_port_names_another(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        finding = only(doctor.check_port("127.0.0.1", port))
    assert finding.text.endswith("is taken") and finding.fix == f"choose another: --port {port + 1}"
    assert only(doctor.check_port("127.0.0.1", 0)).fix == ""


def test_a_low_limit_of_open_files_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (256, 1024))
    assert only(doctor.check_limits()).fix.startswith("ulimit -n 4096 (as root")


def test_a_containers_quota_suggests_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cpu_quota", lambda: 2.0)
    monkeypatch.setattr(machine, "usable_cores", lambda: 64)
    monkeypatch.setattr(machine, "cpu_model", lambda: ("X", ["avx2"]))
    assert only(doctor.check_cpu()).fix.startswith("start with --num-threads 2")


def test_little_memory_is_a_warning_and_says_whose_limit_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "memory", lambda: (500 << 20, 2 << 30, "container"))
    finding = only(doctor.check_memory())
    assert finding.text == "0.5 GiB free of 2.0 GiB (container)" and finding.mark == "warn"


def test_the_self_tests_lines_become_findings() -> None:
    lines = [{"torch": "2.9+cpu", "device": "cpu", "has_cuda": False},
             {"backend": "cpu", "difference": 1e-6, "limit": 1e-4, "step_us": 80.0, "ok": True},
             {"backend": "fast", "difference": 0.5, "limit": 1e-4, "step_us": 8.0, "ok": False},
             {"backend": "odd", "ok": False, "error": "RuntimeError: no"},
             {"backend": "gpu", "skipped": "runs on CUDA"}]
    found = list(judge_backends(lines, has_gpu=True))
    assert [finding.mark for finding in found] == ["warn", "ok", "FAIL", "FAIL", "ok"]
    assert "setup --torch cuda" in found[0].fix and "--attention-backend reference" in found[2].fix
    assert [finding.mark for finding in judge_backends(lines[:1], has_gpu=False)] == ["ok"]


def test_it_runs_without_any_package_and_names_the_fix(tmp_path: Path) -> None:
    """Through launch.py, with no site-packages: what a stranger with a bare Python sees. In a copy, because a checkout
    that was set up has a .venv, which launch.py would use."""
    for name in ("ipc", "engine_core", "worker", "frontend", "bench"):
        shutil.copytree(os.path.join(ROOT, name), tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("launch.py", "pyproject.toml", "constraints-ci.txt"):
        shutil.copy(os.path.join(ROOT, name), tmp_path)
    env = {key: value for key, value in os.environ.items() if not key.startswith("THREEFOLD")}
    result = subprocess.run([sys.executable, "-S", str(tmp_path / "launch.py"), "doctor", "--port", "0"],
                            capture_output=True, text=True, timeout=60, env=env)
    assert result.stderr == "" and "FAIL  packages" in result.stdout
    assert result.stdout.splitlines()[-1].endswith("packages: run: python launch.py setup") and result.returncode == 1


def test_a_folder_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "is_writable", lambda path: False)
    found = list(doctor.check_folders())
    assert [finding.mark for finding in found] == ["warn", "warn", "FAIL"] and "--download-dir" in found[0].fix
