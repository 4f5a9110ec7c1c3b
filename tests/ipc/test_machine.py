"""What the machine has, read from folders that each test writes."""
from __future__ import annotations

import os
from pathlib import Path

import pytest

from ipc import machine

MEMINFO = "MemTotal:       16000000 kB\nMemFree:  1 kB\nMemAvailable:    8000000 kB\n"


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    folder = tmp_path / "proc"
    (folder / "self").mkdir(parents=True)
    (folder / "meminfo").write_text(MEMINFO)
    (folder / "self/cgroup").write_text("0::/box/inner\n")
    return folder


@pytest.fixture
def cgroups(tmp_path: Path) -> Path:
    folder = tmp_path / "cgroup"
    (folder / "box/inner").mkdir(parents=True)
    return folder


def test_without_limits_memory_is_the_hosts(proc: Path, cgroups: Path) -> None:
    assert machine.memory(proc, cgroups) == (8_000_000 * 1024, 16_000_000 * 1024, "host")


def test_the_tightest_control_group_above_us_counts_and_its_file_cache_is_free(proc: Path, cgroups: Path) -> None:
    (cgroups / "box/memory.max").write_text("4000000000\n")
    (cgroups / "box/memory.current").write_text("3000000000\n")
    (cgroups / "box/memory.stat").write_text("anon 1\ninactive_file 500000000\n")
    (cgroups / "box/inner/memory.max").write_text("max\n")
    (cgroups / "box/inner/memory.current").write_text("1\n")
    assert machine.memory(proc, cgroups) == (1_500_000_000, 4_000_000_000, "container")


@pytest.mark.parametrize(("files", "quota"), [
    ({"box/cpu.max": "150000 100000\n"}, 1.5), ({"box/cpu.max": "max 100000\n"}, None), ({}, None),
    ({"box/cpu.max": "400000 100000\n", "box/inner/cpu.max": "200000 100000"}, 2.0),
    ({"cpu.cfs_quota_us": "50000", "cpu.cfs_period_us": "100000"}, 0.5), ({"cpu.cfs_quota_us": "-1",
                                                                          "cpu.cfs_period_us": "100000"}, None)])
def test_the_share_of_cores_is_the_smallest_quota(proc: Path, cgroups: Path, files: dict[str, str],
                                                  quota: float | None) -> None:
    for name, text in files.items():
        (cgroups / name).write_text(text)
    assert machine.cpu_quota(proc, cgroups) == quota


def test_the_features_of_a_cpu_are_those_that_choose_kernels(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("model name\t: Some CPU\nflags\t\t: fpu avx2 avx512f sse4_2 amx_tile\n")
    assert machine.cpu_model(tmp_path) == ("Some CPU", ["avx2", "avx512f", "amx_tile"])
    assert machine.cpu_model(tmp_path / "nothing")[1] == []


def test_gpus_are_listed_by_the_drivers_tool_and_a_broken_driver_is_told(tmp_path: Path,
                                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=None)
    assert machine.gpus()[0] == []
    tool.write_text("#!/bin/sh\necho 'NVIDIA X, 81559 MiB, 10 MiB, 570.1'\n")
    tool.chmod(0o755)
    assert machine.gpus() == (["NVIDIA X, 81559 MiB, 10 MiB, 570.1"], "")
    tool.write_text("#!/bin/sh\necho 'driver mismatch' >&2\nexit 9\n")
    assert machine.gpus() == ([], "nvidia-smi: driver mismatch")


def test_a_folder_that_is_not_there_yet_is_judged_by_its_parent(tmp_path: Path) -> None:
    path = str(tmp_path / "a/b/c")
    assert machine.is_writable(path) and machine.free_space(path)[0] > 0
    assert machine.usable_cores() == len(os.sched_getaffinity(0))
