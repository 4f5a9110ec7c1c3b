"""What this machine has: cores, CPU features, memory with container limits, GPUs, shared memory, limits of the process.

Standard library only, and imports nothing of the project: `doctor` runs it where no package is installed. Every
function takes the root of /proc or /sys, so that tests bring their own. It judges nothing.
"""
from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

CPU_FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16",
             "amx_int8", "asimd", "asimddp", "i8mm", "bf16", "sve")   # those that decide which kernels run
_MEMORY_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def read_text(path: Path) -> str:
    """"" when it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def usable_cores() -> int:
    """Cores this process may be scheduled on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_quota(proc: Path = PROC, cgroups: Path = CGROUPS) -> float | None:
    """Cores' worth of time that the tightest control group allows; None: no limit."""
    quotas = []
    for folder in cgroup_folders(proc, cgroups, "cpu"):
        version_1 = [read_text(folder / name) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
        for text in (read_text(folder / "cpu.max"), " ".join(version_1)):
            match = re.fullmatch(r"(\d+)\s+([1-9]\d*)", text.strip())    # "max" and -1: no limit
            if match:
                quotas.append(int(match[1]) / int(match[2]))
    return min(quotas, default=None)


def cpu_model(proc: Path = PROC) -> tuple[str, list[str]]:
    """(name, those of CPU_FLAGS it has)."""
    text = read_text(proc / "cpuinfo")
    name = re.search(r"^(?:model name|Model|Hardware)\s*:\s*(.+)$", text, re.M)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.M)
    have = set(flags[1].split()) if flags else set()
    return name[1].strip() if name else os.uname().machine, [flag for flag in CPU_FLAGS if flag in have]


def cgroup_folders(proc: Path, cgroups: Path, controller: str) -> Iterator[Path]:
    """Our control group and those above it, versions 1 and 2; inside a container only the root may exist."""
    folders = {cgroups, cgroups / controller}
    for line in read_text(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = cgroups / controller if controllers else cgroups
        group = root / path.lstrip("/")
        folders.update(folder for folder in (group, *group.parents) if folder.is_relative_to(root))
    yield from sorted(folders)


def memory(proc: Path = PROC, cgroups: Path = CGROUPS) -> tuple[int, int, str]:
    """(free bytes, total bytes, "host" or "container"): the smallest of what the host has and what each control group
    above us leaves. What file caches hold counts as free."""
    rows = dict(re.findall(r"^(\w+):\s+(\d+) kB", read_text(proc / "meminfo"), re.M))
    total = int(rows.get("MemTotal", 0)) * 1024
    best = (int(rows.get("MemAvailable", 0)) * 1024, total, "host")
    for folder in cgroup_folders(proc, cgroups, "memory"):
        for limit_file, usage_file in _MEMORY_FILES:
            limit, usage = read_text(folder / limit_file).strip(), read_text(folder / usage_file).strip()
            if limit.isdigit() and usage.isdigit() and (not total or int(limit) < total):
                cached = re.search(r"^(?:total_)?inactive_file (\d+)$", read_text(folder / "memory.stat"), re.M)
                free = int(limit) - int(usage) + (int(cached[1]) if cached else 0)
                best = min(best, (max(0, free), int(limit), "container"))
    return best


def gpus(timeout_s: float = 10.0) -> tuple[list[str], str]:
    """(one line for each NVIDIA GPU, why there are none)."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        driver = read_text(PROC / "driver/nvidia/version").split("\n")[0]
        return [], f"a driver is loaded ({driver}) but nvidia-smi is not on PATH" if driver else ""
    query = [tool, "--query-gpu=name,memory.total,memory.used,driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(query, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], f"nvidia-smi: {error}"
    if result.returncode:
        lines = (result.stderr or result.stdout).strip().splitlines() or [f"exit status {result.returncode}"]
        return [], f"nvidia-smi: {lines[-1]}"
    return [line.strip() for line in result.stdout.splitlines() if line.strip()], ""


def free_space(path: str) -> tuple[int, int]:
    """(free, total) bytes of the file system that holds the nearest existing parent of `path`."""
    while not os.path.exists(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    usage = shutil.disk_usage(path)
    return usage.free, usage.total


def is_writable(path: str) -> bool:
    """Whether `path`, or the nearest existing parent where it would be made, can be written."""
    while not os.path.exists(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    return os.access(path, os.W_OK)
