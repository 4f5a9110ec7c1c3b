"""The private directory of an engine."""
from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import pytest

from ipc.run_dir import RunDir, remove_run_dir, sweep


@pytest.fixture(autouse=True)
def temp(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="tf", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
        yield folder


def test_it_is_private_short_and_removed(temp: str) -> None:
    run_dir = RunDir()
    assert os.path.dirname(run_dir.path) == temp
    assert os.stat(run_dir.path).st_mode & 0o777 == 0o700
    assert len(run_dir.address("worker-99-99999999")) < 100
    with open(os.path.join(run_dir.path, "supervisor.pid")) as file:
        assert file.read() == f"{os.getpid()}\n"
    run_dir.remove()
    run_dir.remove()
    assert os.listdir(temp) == []


def test_the_runtime_folder_is_used_unless_its_path_is_long(temp: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, is_used in (("r", True), ("r" * 80, False)):
        folder = os.path.join(temp, name)
        os.mkdir(folder)
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        run_dir = RunDir()
        assert (os.path.dirname(run_dir.path) == folder) is is_used
        run_dir.remove()


def test_a_directory_whose_lock_is_held_stays_and_one_without_goes(temp: str) -> None:
    alive, dead = RunDir(), RunDir()
    os.close(dead._lock)                         # what the kernel does when its process ends
    dead._lock = -1
    assert sweep(temp) == [dead.path]
    assert os.path.isdir(alive.path)
    alive.remove()


def test_a_directory_that_is_just_being_made_stays(temp: str) -> None:
    young, old = os.path.join(temp, "threefold-young"), os.path.join(temp, "threefold-old")
    os.mkdir(young)
    os.mkdir(old)
    os.utime(old, (1, 1))
    assert sweep(temp) == [old]


def test_links_and_folders_of_other_names_are_left_alone(temp: str) -> None:
    other = os.path.join(temp, "other")
    os.mkdir(other)
    os.utime(other, (1, 1))
    os.symlink(other, os.path.join(temp, "threefold-link"))
    assert sweep(temp) == []
    remove_run_dir(other)
    remove_run_dir("")
    assert sorted(os.listdir(temp)) == ["other", "threefold-link"]
