"""`launch.py doctor`: what this machine and installation have, what is wrong with them, and the fix for each.

Runs where packages are missing: standard library, machine.py and launch_setup.py only; what needs more (the attention
self-test) is a process of its own. Ends in OK, or in the list of fixes and exit status 1. Changes nothing.
"""
from __future__ import annotations

import errno
import json
import os
import platform
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

from ipc import machine
from ipc.launch_setup import ROOT, VENV, missing, requirements
from ipc.option_help import OptionParser

GIB = 1 << 30
LEAST_FILES, LEAST_MEMORY, LEAST_DISK = 4096, GIB, GIB
SELF_TEST = "worker.attention.self_test"
USE_REFERENCE = "start with --attention-backend reference"
MAX_SOCKET_PATH = 72                             # of the folder for run directories, as run_dir.py has it


class Finding(NamedTuple):
    """One line. `fix` is set when something should be done; `is_fatal` when the engine will not run without it."""
    name: str
    text: str
    fix: str = ""
    is_fatal: bool = False

    @property
    def mark(self) -> str:
        return "ok" if not self.fix else "FAIL" if self.is_fatal else "warn"


def gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


# ---------------------------------------------------------------- the checks; each yields findings

def check_python() -> Iterator[Finding]:
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    text = f"{platform.python_version()} at {sys.executable}, {system}"
    fix = "" if sys.version_info >= (3, 11) else "use Python 3.11 or newer"
    if platform.system() != "Linux":
        fix = "run it on Linux: the processes need its signals and descriptors"
    yield Finding("python", text, fix, True)


def check_packages() -> Iterator[Finding]:
    try:
        lines = requirements(())
    except OSError as error:
        yield Finding("packages", f"pyproject.toml: {error}", "restore pyproject.toml beside launch.py", True)
        return
    found = []
    for line in lines:
        name = line.split(">")[0].split("<")[0].split("=")[0].strip()
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    gaps = missing(lines)
    text = ", ".join(found) or "none"
    if gaps:
        text += f"; missing: {', '.join(gaps)}"
    yield Finding("packages", text, "run: python launch.py setup" if gaps else "", True)
    if os.path.isdir(VENV) and os.path.realpath(sys.prefix) != os.path.realpath(VENV):
        yield Finding("environment", f"this Python is used; {VENV} exists too and is used when this one lacks packages")


def check_cpu() -> Iterator[Finding]:
    name, flags = machine.cpu_model()
    cores, quota = machine.usable_cores(), machine.cpu_quota()
    text = f"{name}: {cores} of {os.cpu_count()} cores usable; {' '.join(flags) or 'no vector extensions known here'}"
    fix = ""
    if quota is not None:
        text += f"; the container may use {quota:.1f} cores' worth of time"
        if quota + 0.5 < cores:
            fix = f"start with --num-threads {max(1, int(quota))}: more threads than the quota wait for each other"
    yield Finding("cpu", text, fix)
    if platform.machine() in ("x86_64", "AMD64") and "avx2" not in flags:
        yield Finding("cpu features", "no AVX2", "expect a tenth of the speed; use a newer CPU, or expose it in the VM")


def check_memory() -> Iterator[Finding]:
    free, total, where = machine.memory()
    fix = "" if free >= LEAST_MEMORY else "free some memory or raise the container's limit; the demo model needs 1 GiB"
    yield Finding("memory", f"{gib(free)} free of {gib(total)} ({where})", fix)


def check_gpu() -> Iterator[Finding]:
    found, trouble = machine.gpus()
    if trouble:
        yield Finding("gpu", trouble, "repair the NVIDIA driver (nvidia-smi must work), or start with --device cpu")
    for index, line in enumerate(found):
        yield Finding(f"gpu {index}", line)
    if not found and not trouble:
        yield Finding("gpu", "none; the engine runs on the CPU")


def check_shared_memory() -> Iterator[Finding]:
    try:
        free, total = machine.free_space("/dev/shm")
    except OSError as error:
        yield Finding("shm", str(error), "mount a tmpfs at /dev/shm (containers: --shm-size 1g)")
        return
    fix = "" if free >= 64 << 20 else "give the container more (--shm-size 1g): workers on several GPUs exchange there"
    yield Finding("shm", f"/dev/shm {gib(free)} free of {gib(total)}", fix)


def check_limits() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    infinite = resource.RLIM_INFINITY
    fix = ""
    if soft != infinite and soft < LEAST_FILES:
        can_raise = hard == infinite or hard >= LEAST_FILES
        fix = f"ulimit -n {LEAST_FILES}" + ("" if can_raise else " (as root, or in limits.conf)") + (
            ": each connection is a descriptor")
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    processes = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    words = [f"{name} {'unlimited' if value == infinite else value}"
             for name, value in (("open files", soft), ("processes", processes), ("locked bytes", locked))]
    yield Finding("ulimits", ", ".join(words), fix)


def check_port(host: str, port: int) -> Iterator[Finding]:
    """Binds and lets go at once."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(1)
    except OSError as error:
        is_taken = error.errno == errno.EADDRINUSE
        yield Finding("port", f"{host}:{port} {'is taken' if is_taken else error.strerror or error}",
                      f"choose another: --port {port + 1}" if is_taken else "see --host and --port")
        return
    yield Finding("port", f"{host}:{port} is free")


def check_folders() -> Iterator[Finding]:
    hub = os.environ.get("HF_HUB_CACHE") or os.path.join(os.environ.get("HF_HOME") or "~/.cache/huggingface", "hub")
    for name, path in (("cache", "~/.cache/threefold"), ("hub cache", hub)):
        path = os.path.expanduser(path)
        free, _ = machine.free_space(path)
        fix = "" if machine.is_writable(path) else (
            f"make {path} writable, or choose another folder ({'--download-dir' if name == 'cache' else 'HF_HOME'})")
        fix = fix or ("" if free >= LEAST_DISK else f"free some space: {gib(free)} left on its disk")
        yield Finding(name, f"{path}{'' if os.path.isdir(path) else ' (not there yet)'}, {gib(free)} free", fix)
    folder = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    fix = "" if machine.is_writable(folder) else f"make {folder} writable: the processes' sockets are made there"
    if len(folder) + 20 > MAX_SOCKET_PATH and len(tempfile.gettempdir()) + 20 > MAX_SOCKET_PATH:
        fix = "set TMPDIR to a shorter path, for example /tmp: names of sockets may have 100 bytes"
    yield Finding("run folder", folder, fix, True)


def check_backends(timeout_s: float = 90.0) -> Iterator[Finding]:
    """Each attention backend against the reference, in a process of its own."""
    began = time.monotonic()
    try:
        result = subprocess.run([sys.executable, "-P", "-m", SELF_TEST], cwd=ROOT, timeout=timeout_s, text=True,
                                capture_output=True, stdin=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": ROOT})
    except subprocess.TimeoutExpired:
        yield Finding("self-test", f"not done after {timeout_s:.0f} s", f"see: python -m {SELF_TEST}")
        return
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    yield from judge_backends(lines, bool(machine.gpus()[0]))
    if result.returncode < 0 or not lines or (result.returncode and all(line.get("ok", True) for line in lines)):
        last = (result.stderr.strip().splitlines() or [f"it ended with {result.returncode}"])[-1]
        yield Finding("self-test", last, f"see: python -m {SELF_TEST}", True)
    else:
        yield Finding("self-test", f"done in {time.monotonic() - began:.1f} s, the import of torch included")


def judge_backends(lines: Iterable[dict[str, Any]], has_gpu: bool) -> Iterator[Finding]:
    """From what the self-test printed."""
    for line in lines:
        if "torch" in line:
            text = f"{line['torch']}, runs on {line['device']}"
            is_wrong_build = has_gpu and not line["has_cuda"]
            yield Finding("torch", text, "this build cannot use the GPU; run: python launch.py setup --torch cuda"
                          if is_wrong_build else "")
        elif "skipped" in line:
            yield Finding(f"attention {line['backend']}", f"not here: {line['skipped']}")
        elif "error" in line:
            yield Finding(f"attention {line['backend']}", line["error"], USE_REFERENCE, True)
        else:
            text = f"differs from the reference by {line['difference']:.1e} at most; {line['step_us']:.0f} us a step"
            fix = "" if line["ok"] else f"wrong results (limit {line['limit']}); {USE_REFERENCE}"
            yield Finding(f"attention {line['backend']}", text, fix, True)


# ---------------------------------------------------------------- the command

def examine(checks: Iterable[Callable[[], Iterator[Finding]]]) -> Iterator[Finding]:
    """All findings; a check that fails itself is one."""
    for check in checks:
        try:
            yield from check()
        except Exception as error:               # a doctor must not die of a symptom
            yield Finding(getattr(check, "__name__", "check").removeprefix("check_"),
                          f"could not be examined: {type(error).__name__}: {error}", "report this line")


def main(argv: list[str]) -> int:
    """0: OK, perhaps with warnings; 1: something must be fixed first."""
    parser = OptionParser(prog="launch.py doctor",
                          description="Examine this machine and installation; ends in OK or the fixes.")
    parser.add_argument("--host", default="127.0.0.1", help="address whose port is tried (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="port to try (default: 8000)")
    parser.add_argument("--no-self-test", action="store_true", help="skip the attention backends")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    args = parser.parse_args(argv)

    def check_this_port() -> Iterator[Finding]:
        return check_port(args.host, args.port)

    checks = [check_python, check_packages, check_cpu, check_memory, check_gpu, check_shared_memory, check_limits,
              check_this_port, check_folders]
    findings = []
    has_packages = True
    for finding in examine(checks):
        findings.append(finding)
        has_packages = has_packages and not (finding.name == "packages" and finding.fix)
        show(finding, args.json)
    if not args.no_self_test and has_packages:
        for finding in examine([check_backends]):
            findings.append(finding)
            show(finding, args.json)
    return conclude(findings, args.json)


def show(finding: Finding, as_json: bool) -> None:
    if not as_json:
        print(f"{finding.mark:<5} {finding.name:<20} {finding.text}", flush=True)


def conclude(findings: list[Finding], as_json: bool) -> int:
    """Print the verdict; the exit status."""
    to_fix = [finding for finding in findings if finding.fix]
    is_fatal = any(finding.is_fatal for finding in to_fix)
    if as_json:
        print(json.dumps({"ok": not is_fatal, "findings": [{**finding._asdict(), "mark": finding.mark}
                                                           for finding in findings]}))
    else:
        print()
        for finding in sorted(to_fix, key=lambda finding: not finding.is_fatal):
            print(f"{'fix' if finding.is_fatal else 'consider':<9} {finding.name}: {finding.fix}")
        if not is_fatal:
            print("OK" if not to_fix else "OK, with the remarks above")
    return 1 if is_fatal else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
