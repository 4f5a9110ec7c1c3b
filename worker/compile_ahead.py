"""While weights are loaded, another process (worker/kernel_compiler.py) compiles what the start will launch.

Nothing depends on it: what fails or is missing is compiled when it is launched. A stamp in the folder of Triton's cache
tells that all was compiled before. Does not know which kernels there are.
"""
from __future__ import annotations

import hashlib
import logging
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
import triton

from ipc.config import WorkerProcess
from ipc.machine import cpu_quota, memory, usable_cores
from worker.kernel_compiler import Job
from worker.kernels.chip import chip_of

logger = logging.getLogger("worker")

MAX_PROCESSES = 8
BYTES_PER_PROCESS = 512 << 20                   # one takes 350 MB, part of them shared
WAIT_LIMIT_S = 120.0
POLL_S = 0.1
END_S = 5.0
COUNTS = re.compile(rb"^(\d+) (\d+)\n", re.MULTILINE)     # among what compilers may print
ROOT = Path(__file__).parents[1]


class CompileAhead:
    """The process at work. `stamp`: see `mark`."""

    phase = "compile kernels"

    def __init__(self, job: Job, num_processes: int, stamp: Path) -> None:
        """Begin. The process ends with the thread that calls this. Raises OSError."""
        self.num_processes, self.stamp, self._began = num_processes, stamp, time.monotonic()
        self._lines, lines_in = os.pipe()
        try:
            with open(os.memfd_create("job"), "w+b") as text:
                text.write(msgspec.json.encode(job) + b"\n")
                text.seek(0)
                self._process = subprocess.Popen(
                    [sys.executable, "-W", "ignore", "-m", "worker.kernel_compiler", "--parent", str(os.getpid()),
                     "--processes", str(num_processes)], cwd=ROOT, stdin=text, stdout=lines_in, start_new_session=True)
        finally:
            os.close(lines_in)

    def wait(self, progress: Callable[[float], None], limit_s: float = WAIT_LIMIT_S) -> str:
        """Until it has ended, or for so long; says in a line what became of it. Call it once."""
        until, text, ended, total = time.monotonic() + limit_s, b"", 0, 0
        while (left := until - time.monotonic()) > 0:
            if select.select([self._lines], [], [], min(POLL_S, left))[0]:
                data = os.read(self._lines, 1 << 16)
                if not data:
                    break
                text += data
            if counts := COUNTS.findall(text):
                ended, total = map(int, counts[-1])
            progress(0.999 * ended / max(1, total))
        os.close(self._lines)
        status = self._end(max(0.0, left))
        error = text.partition(b"error: ")[2].split(b"\n")[0].decode(errors="replace")
        if status:
            why = error or (f"no end within {limit_s:.0f} s" if left <= 0 else f"status {status}")
            logger.warning("compiling kernels ahead failed (%s); what is missing is compiled when it is launched", why)
        seconds = time.monotonic() - self._began
        return f"{ended} of {total}, {self.num_processes} processes, {seconds:.1f} s since they began"

    def _end(self, limit_s: float) -> int:
        """The exit status; the process is ended if it does not end."""
        try:
            return self._process.wait(min(END_S, limit_s))
        except subprocess.TimeoutExpired:
            self._process.terminate()           # and all that it started
        try:
            return self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def mark(self) -> None:
        """Everything has been launched: the next start need not compile. It is no error if that cannot be written."""
        try:
            self.stamp.parent.mkdir(parents=True, exist_ok=True)
            self.stamp.touch()
        except OSError:
            pass


def spare_processes() -> int:
    """One a core, within bounds of number and memory. Below 2 there is nothing to gain."""
    return min(MAX_PROCESSES, usable_cores(), int(cpu_quota() or MAX_PROCESSES), memory()[0] // BYTES_PER_PROCESS)


def stamp_path(job: Job) -> Path:
    """Its name covers what variants depend on: the worker's code, options, the model's shape, versions, the chip."""
    digest, model, cache = hashlib.blake2b(digest_size=12), job.config.model, job.config.cache
    for path in sorted((ROOT / "worker").rglob("*.py")):
        digest.update(path.read_bytes())
    digest.update(msgspec.json.encode((
        triton.__version__, str(torch.__version__), model.files.kind, model.files.config, model.quantization,
        cache.kv_cache_dtype, cache.block_size, job.config.max_num_seqs, job.config.max_num_batched_tokens,
        job.dtype, job.max_model_len, job.keeps_fp8, job.valid_tokens, job.capability, job.num_processors)))
    return Path(triton.knobs.cache.dir) / f"threefold-{digest.hexdigest()}"


def compile_ahead(config: WorkerProcess, dtype: str, max_model_len: int, keeps_fp8: bool, valid_tokens: int | None
                  ) -> CompileAhead | None:
    """Begin, for the first CUDA device. None where there is nothing to gain, or where it fails, whatever the reason."""
    try:
        chip, num_processes = chip_of(torch.device("cuda", 0)), spare_processes()
        job = Job(config, dtype, max_model_len, keeps_fp8, valid_tokens, chip.capability, chip.num_processors)
        stamp = stamp_path(job)
        if num_processes < 2 or stamp.exists():
            return None
        return CompileAhead(job, num_processes, stamp)
    except Exception as error:
        logger.warning("no kernel is compiled ahead: %s: %s", type(error).__name__, error)
        return None
