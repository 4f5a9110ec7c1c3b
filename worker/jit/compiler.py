"""Compiles every kernel in a process of its own, so that a first start serves by torch meanwhile.

`python -m worker.jit.compiler --parent PID --width V` fills the cache on the disk and leaves a stamp there; whoever
starts later finds the stamp and loads the code in half a second. Compilation is mostly Python: in a thread of the
worker it would hold the interpreter for most of the time. One process compiles at a time; the next one finds the work
done. It ends with its parent.
"""
from __future__ import annotations

import argparse
import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

from ipc.lifeline import PR_SET_PDEATHSIG
from worker.jit import features

NICENESS = 5                                    # serving goes first
ROOT = Path(__file__).parents[2]


@functools.cache
def stamp_path() -> Path:
    """What the stamp's name covers: processor, versions, and the kernels outside this package."""
    import llvmlite.binding as llvm
    import numba
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted((ROOT / "worker" / "sampling").glob("jit_*.py")):
        digest.update(path.read_bytes())
    for fact in (llvm.get_host_cpu_name(), ",".join(sorted(features.cpu_features())), numba.__version__,
                 platform.python_version()):
        digest.update(fact.encode() + b"\0")
    return features.cache_folder() / f"compiled-{digest.hexdigest()}"


def is_compiled() -> bool:
    """Whether all kernels were compiled on this machine, for this code."""
    return stamp_path().exists()


def mark_compiled() -> None:
    """Called when every kernel has run once in this process. A cache that cannot be written is no error."""
    try:
        stamp_path().parent.mkdir(parents=True, exist_ok=True)
        stamp_path().touch()
    except OSError:
        pass


def start(width: int) -> subprocess.Popen[bytes]:
    """A process that compiles and exits with 0. width: of the model's logits. Called by the main thread: the child dies
    with the thread that started it."""
    return subprocess.Popen([sys.executable, "-m", "worker.jit.compiler", "--parent", str(os.getpid()), "--width",
                             str(width)], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="worker.jit.compiler")
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--width", type=int, required=True)
    args = parser.parse_args(argv)
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != args.parent:             # it died before prctl
        return 1
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICENESS)
    folder = features.cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        from worker.jit.team import get_team
        from worker.sampling import jit_threads
        get_team(1).start()
        jit_threads.warm_up(args.width)
        mark_compiled()
    return 0


if __name__ == "__main__":
    sys.exit(main())
