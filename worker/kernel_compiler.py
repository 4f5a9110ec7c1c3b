"""A process that compiles, in several forks of itself, the kernels that a worker will launch, into Triton's disk cache.

`python -m worker.kernel_compiler --parent PID` reads a Job in one line of JSON and writes `ended total` as kernels are
done. Threads of the worker would do less: they share Python's lock with the loading of weights, and Python 3.11 cannot
parse in two threads at once. Forks share what was imported. All of them, and the assembler and C compiler they call,
are one process group, which ends with the worker. Touches no GPU.
"""
from __future__ import annotations

import argparse
import ctypes
import gc
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ipc.config import WorkerProcess
from ipc.lifeline import PR_SET_PDEATHSIG

NICENESS = 5                                    # loading weights goes first
INDEX_BYTES = 2


class Job(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the worker has resolved when it asks for its kernels."""
    config: WorkerProcess
    dtype: str
    max_model_len: int
    keeps_fp8: bool
    valid_tokens: int | None
    capability: int                             # 90 for compute capability 9.0
    num_processors: int


def die_with(parent: int, death_signal: int) -> None:
    """Get this signal when that process ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0)
    if os.getppid() != parent:                  # it ended before prctl
        os._exit(1)


def end_group(signum: int, frame: object) -> None:
    os.killpg(0, signal.SIGKILL)


def run_shared(tasks: Sequence[Callable[[], object]], num_processes: int, report: Callable[[int], None]) -> list[str]:
    """Run all tasks, begun in their order, each in one of so many forks; what went wrong, a line for each. `report` is
    called with how many have ended. A fork that crashes loses its task only."""
    todo, todo_in = os.pipe()
    ended, ended_in = os.pipe()
    for index in range(len(tasks)):
        os.write(todo_in, index.to_bytes(INDEX_BYTES, "little"))
    os.close(todo_in)
    gc.freeze()                                 # else a collection would copy what the forks share
    this, children = os.getpid(), []
    for _ in range(min(num_processes, len(tasks))):
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            die_with(this, signal.SIGKILL)
            _run_until_empty(tasks, todo, ended_in)
        children.append(child)
    os.close(todo)
    os.close(ended_in)
    num_ended, errors = 0, []
    with open(ended, errors="replace") as lines:    # ends with the last fork
        for line in lines:
            num_ended += 1
            errors += [line.strip()] if line.strip() else []
            report(num_ended)
    for child in children:
        _, status = os.waitpid(child, 0)
        if status:
            errors.append(f"a process ended with status {os.waitstatus_to_exitcode(status)}")
    return errors


def _run_until_empty(tasks: Sequence[Callable[[], object]], todo: int, ended: int) -> None:
    """A fork's life. Reads and writes are so short that forks do not get in each other's way."""
    while index := os.read(todo, INDEX_BYTES):
        try:
            tasks[int.from_bytes(index, "little")]()
            line = ""
        except Exception as error:
            line = f"{type(error).__name__}: {error}".split("\n", 1)[0][:400]
        os.write(ended, f"{line}\n".encode())
    os._exit(0)


def compile_variant(variant: Any) -> None:
    """The kernel, and what starts it: C in some versions of Triton, which needs CUDA's library to link with."""
    kernel = variant.compile()
    from triton.backends.nvidia import driver
    if hasattr(driver, "make_launcher") and _has_library():
        driver.CudaLauncher(kernel.src, kernel.metadata)


def compile_driver() -> None:
    """What Triton's driver compiles at its first use."""
    from triton.backends.nvidia import driver
    if _has_library():
        driver.CudaUtils()


def _has_library() -> bool:
    from triton.backends.nvidia import driver
    try:
        return bool(driver.libcuda_dirs())
    except AssertionError:
        return False


def make_tasks(job: Job) -> list[Callable[[], object]]:
    """One for each variant. From here on this process compiles for the job's chip and launches nothing."""
    import torch
    import triton

    from worker.kernel_variants import find_variants
    from worker.kernels.chip import Chip
    from worker.kernels.offline import OfflineDriver
    torch.set_num_threads(1)                    # a pool of threads would not survive a fork
    triton.runtime.driver.set_active(OfflineDriver(job.capability))
    variants = find_variants(job.config, job.dtype, job.max_model_len, job.keeps_fp8,
                             Chip(job.capability, job.num_processors), job.valid_tokens)

    def task(variant: Any) -> Callable[[], object]:
        return lambda: compile_variant(variant)
    return [compile_driver, *(task(variant) for variant in variants)]


def main(argv: list[str] | None = None) -> int:
    """See the module. Exit status 1 and a line `error: ...` if something could not be compiled."""
    parser = argparse.ArgumentParser(prog="worker.kernel_compiler")
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--processes", type=int, required=True)
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, end_group)
    die_with(args.parent, signal.SIGTERM)
    os.nice(NICENESS)
    tasks = make_tasks(msgspec.json.decode(sys.stdin.buffer.readline(), type=Job))
    print(0, len(tasks), flush=True)
    errors = run_shared(tasks, args.processes, lambda num_ended: print(num_ended, len(tasks), flush=True))
    if errors:
        print(f"error: {len(errors)} of {len(tasks)}, the first: {errors[0]}", flush=True)
    return int(bool(errors))


if __name__ == "__main__":
    sys.exit(main())
