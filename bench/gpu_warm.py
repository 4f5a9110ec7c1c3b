"""Compiles what the other GPU measurements launch, in several processes at once, into Triton's cache on the disk.

    python -m bench.gpu_warm [--processes 8]
    TRITON_INTERPRET=1 python -m bench.gpu_warm --dry --processes 2     the same code, tiny shapes, no GPU

The measurements' own calls run with launches that only compile, each process a share of them; whole models have one
layer, since all layers launch the same. Without this a machine's first run would spend most of its time compiling one
kernel after another. Exit status 1 if a process fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from bench import gpu_kernels
from bench.gpu_bench import Bench
from bench.gpu_engine import checked_config, shape
from bench.gpu_in_process import Setup, make_runner, random_model
from ipc.model_config import ModelConfig
from worker.kernels.interpreter import install_if_interpreted, is_interpreted
from worker.warm_up import warm_up

LIMIT_S = 1e9


class Share(Bench):
    """Does every `count`th thing and measures nothing."""

    def __init__(self, device: str, dry: bool, index: int, count: int) -> None:
        super().__init__(device, dry, time.monotonic() + LIMIT_S)
        self.index, self.count, self._seen = index, count, 0

    def wants(self, name: str) -> bool:
        self._seen += 1
        return self._seen % self.count == self.index

    def seconds(self, calls: Sequence[Callable[[], object]], repeats: int = 5) -> float:
        calls[0]()
        return 1.0

    def check(self, name: str, actual: Tensor, expected: Tensor, limit: float) -> None: ...


def compile_only() -> None:
    """From here on a launch compiles its kernel, or loads it from the disk, and starts nothing."""
    original = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return original(self, *args, grid=grid, warmup=True, **options)
    JITFunction.run = run


def warm_model(bench: Bench, config: ModelConfig, dtype: torch.dtype) -> None:
    """What steps of this shape launch."""
    if not bench.wants(config.architecture):
        return
    with bench.attempt(config.architecture):
        model = random_model(msgspec.structs.replace(config, num_hidden_layers=1), dtype, bench.device)
        budget = 16 if bench.dry else 8192
        setup = Setup(8, seats=min(256, budget), budget=budget, max_model_len=1024, graphs="static")
        warm_up(make_runner(model, setup, bench.device), budget)


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=min(8, os.cpu_count() or 1))
    parser.add_argument("--share", type=int, help="be one of the processes")
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    if args.dry != is_interpreted():
        parser.error("--dry needs TRITON_INTERPRET=1, and a GPU run must not have it")
    if args.share is None:
        begin = time.monotonic()
        command = [sys.executable, "-W", "ignore", "-m", "bench.gpu_warm", "--processes", str(args.processes),
                   *(["--dry"] if args.dry else []), "--share"]
        started = [subprocess.Popen([*command, str(index)]) for index in range(args.processes)]
        failed = sum(process.wait() != 0 for process in started)
        print(f"{args.processes} processes, {time.monotonic() - begin:.1f} s, {failed} failed")
        return 1 if failed else 0
    install_if_interpreted()
    compile_only()
    bench = Share("cpu" if args.dry else "cuda", args.dry, args.share, args.processes)
    for name, dtype in (("qwen3-8b", torch.bfloat16), ("qwen3-0.6b", torch.bfloat16)):
        warm_model(bench, shape(bench, name), dtype)
    for dtype in (torch.float32, torch.bfloat16):
        warm_model(bench, checked_config(bench), dtype)
    with torch.inference_mode():
        for part in gpu_kernels.PARTS:
            with bench.attempt(part.__name__):
                part(bench)
    return int(any("ok" in row for row in bench.rows))


if __name__ == "__main__":
    sys.exit(main())
