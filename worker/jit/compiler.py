"""Compiles kernels in a process of its own: LLVM may take as long as it likes there, and a crash of it costs no worker.

`python -m worker.jit.compiler --parent PID --width V --scope SCOPE` fills the cache on the disk and leaves a stamp
there; whoever starts later finds the stamp and loads the code in half a second. Compilation is mostly Python: in a
thread of the worker it would hold the interpreter for most of the time. One process compiles at a time; the next one
finds the work done. It ends with its parent. A failure leaves no trace: the next start tries again.
"""
from __future__ import annotations

import argparse
import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from ipc.lifeline import PR_SET_PDEATHSIG
from worker.jit import features

logger = logging.getLogger("worker")

SCOPES = ("counts", "sampling", "all")          # what a GPU's worker uses, torch's on a CPU, the compiled model's
NICENESS = 5                                    # serving goes first
POLL_S = 0.1
MAX_STDERR = 1 << 16                            # bytes of it that are looked at
ROOT = Path(__file__).parents[2]


@functools.cache
def stamp_path(scope: str) -> Path:
    """What the stamp's name covers: processor, versions, and the kernels outside this package."""
    import numba
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted((ROOT / "worker" / "sampling").glob("jit_*.py")):
        digest.update(path.read_bytes())
    for fact in (features.cpu_name(), ",".join(sorted(features.cpu_features())), numba.__version__,
                 platform.python_version()):
        digest.update(fact.encode() + b"\0")
    return features.cache_folder() / f"compiled-{scope}-{digest.hexdigest()}"


def is_compiled(scope: str = "all") -> bool:
    """Whether the kernels of this scope were compiled on this machine, for this code, and can be loaded."""
    return features.is_cache_writable() and any(
        stamp_path(wider).exists() for wider in SCOPES[SCOPES.index(scope):])


def mark_compiled(scope: str) -> None:
    """Called when every kernel of the scope has been compiled. A cache that cannot be written is no error."""
    try:
        stamp_path(scope).parent.mkdir(parents=True, exist_ok=True)
        stamp_path(scope).touch()
    except OSError:
        pass


def command(width: int, scope: str, niceness: int) -> list[str]:
    return [sys.executable, "-m", "worker.jit.compiler", "--parent", str(os.getpid()), "--width", str(width),
            "--scope", scope, "--niceness", str(niceness)]


class Compilation:
    """A process that compiles."""

    def __init__(self, width: int, scope: str = "all", niceness: int = NICENESS) -> None:
        """width: of the model's logits. Called by the main thread: the process ends with the thread that started it."""
        self._stderr = open(os.memfd_create("stderr"), "w+b")
        self._process = subprocess.Popen(command(width, scope, niceness), cwd=ROOT, stdin=subprocess.DEVNULL,
                                         stdout=subprocess.DEVNULL, stderr=self._stderr)

    def is_over(self) -> bool:
        return self._process.poll() is not None

    def failure(self) -> str | None:
        """Of a process that is over: why it failed, in a line. Called once."""
        status = self._process.returncode
        with self._stderr as messages:
            messages.seek(max(0, messages.seek(0, os.SEEK_END) - MAX_STDERR))
            text = messages.read().decode(errors="replace")
        if status == 0:
            return None
        name = f"status {status}"
        if status < 0:
            name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
        logger.debug("the compiler's messages:\n%s", text)
        return f"the compiler ended with {name}: {_essence(text)}".removesuffix(": ")

    def wait(self, advance: Callable[[float], None], between: Callable[[], None]) -> str | None:
        """Until it is over. A failure is returned, and features.missing gives it from then on."""
        while not self.is_over():
            between()
            advance(0.001)                      # nobody knows how far LLVM is
            try:
                self._process.wait(POLL_S)
            except subprocess.TimeoutExpired:
                pass
        failure = self.failure()
        if failure is not None:
            features.give_up(failure)
            logger.error("no compiled kernels (%s); torch and numpy do their work", failure)
        return failure


def _essence(text: str) -> str:
    """LLVM's reason, which a list of calls may follow; else the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    reasons = [line for line in lines if "LLVM ERROR" in line or "Assertion" in line]
    return (reasons or lines or [""])[-1]


def begin(width: int, scope: str) -> Compilation | None:
    """For a start that waits for it. None: all is compiled, nothing can be, or it could not be kept."""
    if features.missing() is not None or is_compiled(scope):
        return None
    if not features.is_cache_writable():
        logger.warning("%s cannot be written: each start compiles its kernels anew, in the worker itself",
                       features.cache_folder())
        return None
    return Compilation(width, scope, niceness=0)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="worker.jit.compiler")
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--scope", choices=SCOPES, default="all")
    parser.add_argument("--niceness", type=int, default=NICENESS)
    args = parser.parse_args(argv)
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != args.parent:             # it died before prctl
        return 1
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(args.niceness)
    folder = features.cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for scope in SCOPES[:SCOPES.index(args.scope) + 1]:
            compile_kernels(scope, args.width)
            mark_compiled(scope)
    return 0


def compile_kernels(scope: str, width: int) -> None:
    """Those that are in no narrower scope, or load what was compiled before."""
    from worker.sampling import jit_threads
    if scope == "counts":
        jit_threads.warm_up_counts(width)
    elif scope == "sampling":
        jit_threads.warm_up(width)
    else:
        from worker.jit.team import get_team
        get_team(1).start()


if __name__ == "__main__":
    sys.exit(main())
