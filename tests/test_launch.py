"""launch.py before anything is installed, and the set-up with pip replaced by a recorder."""
from __future__ import annotations

import ast
import collections
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ipc import launch_setup
from ipc.launch_setup import SetupError, install, missing, requirements

ROOT = Path(__file__).parent.parent
BARE = [sys.executable, "-S"]                    # no site-packages: a fresh machine


def run(command: list[str], cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("THREEFOLD")}
    return subprocess.run(command, cwd=cwd, env={**clean, **env}, capture_output=True, text=True, timeout=60)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """launch.py and what it imports, in a folder without .venv."""
    root = tmp_path / "copy"
    (root / "ipc").mkdir(parents=True)
    (root / "bench").mkdir()
    for name in ("launch.py", "pyproject.toml", "constraints-ci.txt", "ipc/__init__.py", "ipc/launch_setup.py",
                 "ipc/option_help.py", "ipc/option_answers.py"):
        shutil.copy(ROOT / name, root / name)
    return root


@pytest.fixture
def setup(copy: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """launch_setup works in the copy; its commands are recorded, and `pip list` tells of torch."""
    monkeypatch.setattr(launch_setup, "ROOT", str(copy))
    for name, path in (("VENV", ".venv"), ("VENV_PYTHON", ".venv/bin/python"), ("STAMP", ".venv/threefold-setup.json"),
                       ("CONSTRAINTS", "constraints-ci.txt")):
        monkeypatch.setattr(launch_setup, name, str(copy / path))
    commands: list[list[str]] = []

    def call(command: list[str], **_: Any) -> int:
        commands.append(command)
        (copy / ".venv/bin").mkdir(parents=True, exist_ok=True)
        return 0
    monkeypatch.setattr(subprocess, "call", call)
    listing = json.dumps([{"name": "torch", "version": "2.13.0+cpu"}, {"name": "numpy", "version": "2.0.0"}]).encode()
    monkeypatch.setattr(subprocess, "check_output", lambda *args, **kwargs: listing)
    return commands


# ---------------------------------------------------------------- the first lines a stranger may see

def test_help_needs_nothing(copy: Path) -> None:
    result = run([*BARE, "launch.py", "--help"], copy)
    assert result.returncode == 0 and "python launch.py demo" in result.stdout and result.stderr == ""


def test_help_names_every_command_of_the_readme(copy: Path) -> None:
    shown = run([*BARE, "launch.py", "--help"], copy).stdout
    table = (ROOT / "README.md").read_text().split("## Commands")[1].split("## ")[0]
    commands = re.findall(r"^\| `python launch.py ([a-z][a-z-]+)", table, re.M)
    assert len(commands) > 15 and [name for name in commands if not re.search(rf"\b{name}\b", shown)] == []


@pytest.mark.parametrize(("arguments", "status", "text"), [
    (["replay", "./nothing"], 2, "./nothing: No such file or directory"),
    (["replay", "README.md"], 2, "README.md is no flight recording of this version"),
    (["bench", "speculation", "--model", "./nothing"], 1, "model './nothing': no such file or folder"),
    (["serv"], 2, "there is no command serv; did you mean serve?"),
    (["bench", "serv"], 2, "there is no bench serv; did you mean serve?"), (["bench", "x"], 2, "bench needs a name: "),
    (["--model", "a", "--trust-remote-code"], 2, "see launch.py --help")])
def test_what_cannot_be_used_is_one_line_without_a_traceback(arguments: list[str], status: int, text: str) -> None:
    done = run([sys.executable, "launch.py", *arguments], ROOT)
    assert (done.returncode, "Traceback" in done.stderr) == (status, False)
    assert text in "".join(done.stderr.splitlines()[-2:])


def test_names_of_vllm_are_understood_and_the_version_is_that_of_the_package() -> None:
    done = run([sys.executable, "launch.py", "--version"], ROOT)
    assert done.returncode == 0
    assert f'version = "{done.stdout.split()[1]}"' in (ROOT / "pyproject.toml").read_text()
    assert "--num-iters" in run([sys.executable, "launch.py", "bench", "throughput", "--help"], ROOT).stdout
    assert "--no-self-test" in run([sys.executable, "launch.py", "collect-env", "--help"], ROOT).stdout


@pytest.mark.parametrize(("command", "flag"), [
    ("serve --model x", "--max-model-len"), ("bench serve", "--max-concurrency"), ("bench cpu", "--accuracy"),
    ("bench offline", "--num-prompts"), ("top", "--interval"), ("models", "--cached"), ("doctor", "--no-self-test"),
    ("setup", "--extra"), ("profile --url x", "--seconds"), ("complete", "--max-tokens"), ("run-batch", "--overwrite"),
    ("chat", "--system"), ("tokenize", "--count"), ("soak", "--requests"), ("tune", "--quick"), ("fuzz", "--frames")])
def test_every_command_names_the_flag_that_a_typing_error_meant(command: str, flag: str) -> None:
    done = run([sys.executable, "launch.py", *command.split(), flag[:-2] + flag[-1]], ROOT)
    assert done.returncode == 2 and f"did you mean {flag}?" in done.stderr


def test_an_old_python_can_read_the_file_and_is_refused_in_one_line(copy: Path) -> None:
    ast.parse((ROOT / "launch.py").read_text(), feature_version=(3, 8))
    old = "import sys, runpy; sys.version_info = (3, 8, 18); runpy.run_path('launch.py', run_name='__main__')"
    result = run([sys.executable, "-c", old], copy)
    assert result.returncode == 1 and result.stderr.count("\n") == 1
    assert "needs Python 3.11 or newer" in result.stderr


@pytest.mark.parametrize("arguments", [["--model", "smollm2-135m"], ["serve", "--help"]])
def test_missing_packages_are_named_without_a_traceback(copy: Path, arguments: list[str]) -> None:
    result = run([*BARE, "launch.py", *arguments], copy)
    assert result.returncode == 1 and result.stderr.count("\n") == 1
    assert "lacks torch, numpy, pyzmq, msgspec" in result.stderr
    assert result.stderr.rstrip().endswith("run: python launch.py setup")


def test_a_package_that_is_missing_further_in_is_named(copy: Path) -> None:
    (copy / "bench/hole.py").write_text("import no_such_package\n\ndef main(argv):\n    return 0\n")
    result = run([sys.executable, "launch.py", "bench", "hole"], copy)
    assert result.returncode == 1
    assert result.stderr == "launch.py: the package no_such_package is missing; run: python launch.py setup\n"


def test_an_unknown_bench_or_extra_is_answered_with_the_known_ones(copy: Path) -> None:
    (copy / "bench/seed.py").write_text("\ndef main(argv):\n    print(argv)\n")
    assert "did you mean seed?" in run([*BARE, "launch.py", "bench", "sed"], copy).stderr
    assert "bench needs a name: seed" in run([*BARE, "launch.py", "bench", "x"], copy).stderr
    assert run([sys.executable, "launch.py", "bench", "seed", "-x"], copy).stdout == "['-x']\n"
    assert "no extra 'tests'; known are triton, otel, fuzz, test" in run(
        [*BARE, "launch.py", "setup", "--extra", "tests"], copy).stderr


@pytest.mark.parametrize("on_path", [False, True])
def test_a_users_folder_of_our_name_is_not_imported_and_named(tmp_path: Path, on_path: bool) -> None:
    for name in ("frontend", "worker", "ipc"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('the wrong package')")
    result = run([sys.executable, str(ROOT / "launch.py"), "--model", "./nothing-here"], tmp_path,
                 **({"PYTHONPATH": str(tmp_path)} if on_path else {}))
    lines = result.stderr.splitlines()
    assert lines[0] == (f"launch.py: not used: ipc, worker, frontend in {tmp_path.resolve()}; here these names mean "
                        f"Threefold's own, in {ROOT}")
    assert result.returncode == 1 and "the wrong package" not in result.stderr
    assert lines[-1].startswith("launch.py: model './nothing-here'")


# ---------------------------------------------------------------- set-up

def test_ranges_are_compared_as_versions_not_as_text() -> None:
    satisfies = launch_setup._satisfies
    assert satisfies("2.13.0+cpu", ">=2.9") and satisfies("2.14.1", "<2.15") and not satisfies("2.15.0", "<2.15")
    assert satisfies("2.13.0+cpu", "==2.13.0") and satisfies("26.0", ">=26") and not satisfies("0.8", ">=0.19")
    assert missing(["pytest>=8", "pytest>=900", "no-such-package>=1"])[-1] == "no-such-package"
    assert len(missing(["pytest>=8"])) == 0


def test_torch_comes_first_and_alone_and_stays_what_it_is(setup: list[list[str]], copy: Path) -> None:
    install(["test"], "cpu", "")
    venv, torch, rest = setup
    assert venv[1:] == ["-m", "venv", "--clear", str(copy / ".venv")]
    assert torch[-1] == "torch==2.13.0" and not any("numpy" in word for word in torch)
    assert rest[-len(requirements(["test"])):] == requirements(["test"])
    constraints = (copy / ".venv/constraints.txt").read_text().splitlines()
    assert constraints == ["torch==2.13.0+cpu", "triton==3.6.0", "numpy<2.4"]


def test_another_index_is_used_for_torch_only(setup: list[list[str]]) -> None:
    install([], "https://wheels.example/cpu", "cpu")
    _, torch, rest = setup
    assert torch[-4:] == ["--force-reinstall", "--index-url", "https://wheels.example/cpu", "torch>=2.9,<2.15"]
    assert "--index-url" not in rest


def test_a_finished_set_up_is_recognised_until_its_requirements_change(setup: list[list[str]], copy: Path) -> None:
    install(["test"], "cpu", "")
    python = copy / ".venv/bin/python"
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    result = run([*BARE, "launch.py", "serve", "--port", "0"], copy)
    assert result.stdout == f"{copy}/launch.py serve --port 0\n"
    project = copy / "pyproject.toml"
    project.write_text(project.read_text().replace("tqdm>=4.60", "tqdm>=4.61"))
    assert "run: python launch.py setup" in run([*BARE, "launch.py", "serve"], copy).stderr


def test_a_failed_step_leaves_no_stamp_and_says_which_command(setup: list[list[str]], copy: Path,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "call", lambda command, **_: 1 if "pip" in command else 0)
    with pytest.raises(SetupError, match="install torch failed .* torch==2.13.0"):
        install([], "cpu", "")
    assert not (copy / ".venv/threefold-setup.json").exists()


def test_sizes_are_said_before_a_download(setup: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    install([], "cuda", "")
    first = capsys.readouterr().err.splitlines()[0]
    assert "about 2590 MB to download, 5850 MB on disk" in first
    assert setup[1][-1] == "torch>=2.9,<2.15"


def test_places_that_cannot_work_are_one_line_each(setup: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    usage = collections.namedtuple("usage", "total used free")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 900 << 20))
        with pytest.raises(SetupError, match="900 MB are free .* 1250 MB are needed"):
            install([], "cpu", "")
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: False)
        with pytest.raises(SetupError, match="cannot write in"):
            install([], "cpu", "")
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(SetupError, match="no venv module; on Debian and Ubuntu: apt install python3-venv"):
            install([], "cpu", "")
    assert setup == []
