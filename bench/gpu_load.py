"""How fast weights come from files to the device, and how soon a worker is ready once they are there.

    python -m bench.gpu_load [--json FILE] [--seconds 60]
    TRITON_INTERPRET=1 python -m bench.gpu_load --dry      the same code, tiny shape, no GPU: times mean nothing

Writes a checkpoint of Qwen3-8B's widths and two layers (3.3 GB, four files) into a temporary folder (TMPDIR names
another), then: plain reads by as many threads as the loader has, copies from pinned memory to the device, the loader.
Each once with the system's file cache emptied of these files, once with them in it. A share is the loader's rate over
the lower of reading's and copying's. Then a whole worker starts with random weights at Qwen3-8B's shape, in a process
without compiled kernels and again in one that finds them: seconds from its weights to the end of its start, graphs
captured. Prints one table, and one JSON object after it. A missed target is reported, not an error.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import torch

from bench.gpu_bench import Bench, make_bench, make_parser, missed, print_table
from bench.gpu_engine import collect, shape, synchronize
from ipc.config import CacheConfig, ModelSection, WorkerProcess
from ipc.model_config import ModelConfig
from ipc.model_source import ModelFiles
from worker.models.loader import load_model
from worker.models.parallel_read import CHUNK_BYTES, NUM_THREADS
from worker.models.registry import get_model_class
from worker.models.safetensors_header import INDEX_NAME

NUM_FILES, NUM_LAYERS = 4, 2
TARGET_SHARE, TARGET_READY_S = 0.7, 20.0


def write_checkpoint(folder: Path, config: ModelConfig) -> tuple[list[Path], int]:
    """(files, bytes of weights): random bytes as bfloat16, on the disk when this returns."""
    slots = get_model_class(config.architecture)(config, dtype=torch.bfloat16, device="meta").checkpoint_slots()
    noise = np.random.default_rng(0).integers(0, 255, CHUNK_BYTES, np.uint8).tobytes()
    names = list(slots)
    files, index, total = [], {}, 0
    for part in range(NUM_FILES):
        header, begin = {}, 0
        for name in names[part::NUM_FILES]:
            nbytes = 2 * int(np.prod(slots[name].shape))
            header[name] = {"dtype": "BF16", "shape": list(slots[name].shape), "data_offsets": [begin, begin + nbytes]}
            begin += nbytes
            index[name] = f"part-{part}.safetensors"
        files.append(folder / f"part-{part}.safetensors")
        raw = json.dumps(header).encode()
        with open(files[-1], "wb") as file:
            file.write(len(raw).to_bytes(8, "little") + raw)
            for left in range(begin, 0, -len(noise)):
                file.write(noise[:left])
            file.flush()
            os.fsync(file.fileno())
        total += begin
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": index}))
    return files, total


def forget(files: list[Path]) -> None:
    """The system's cache gives their pages back."""
    for path in files:
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_plainly(files: list[Path]) -> float:
    """Seconds to read all bytes, with the loader's threads and chunks, and do nothing with them."""
    local = threading.local()

    def read(path: Path, offset: int) -> None:
        if not hasattr(local, "buffer"):
            local.buffer = bytearray(CHUNK_BYTES)
        with open(path, "rb", buffering=0) as file:
            file.seek(offset)
            while (at := file.tell()) < offset + CHUNK_BYTES and file.readinto(memoryview(local.buffer)[at - offset:]):
                pass
    begin = time.perf_counter()
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for future in [pool.submit(read, path, offset) for path in files
                       for offset in range(0, path.stat().st_size, CHUNK_BYTES)]:
            future.result()
    return time.perf_counter() - begin


def copy_rate(bench: Bench) -> float:
    """Bytes a second from pinned memory to the device."""
    source = torch.zeros(1 << 12 if bench.dry else 256 << 20, dtype=torch.uint8, pin_memory=bench.device != "cpu")
    target, rounds = source.to(bench.device), 8
    synchronize(bench)
    begin = time.perf_counter()
    for _ in range(rounds):
        target.copy_(source, non_blocking=True)
    synchronize(bench)
    return rounds * source.numel() / (time.perf_counter() - begin)


def measure_loading(bench: Bench, config: ModelConfig) -> None:
    """Reads, copies and loads of one checkpoint."""
    if not bench.wants("load"):
        return
    with tempfile.TemporaryDirectory() as folder:
        files, total = write_checkpoint(Path(folder), config)
        rate = copy_rate(bench)
        bench.rows.append({"name": "pinned memory to the device", "us": round(total / rate * 1e6), "share": 1.0,
                           "GB/s": round(rate / 1e9, 2), "target": None})
        for where, prepare in (("disk", forget), ("file cache", read_plainly)):
            prepare(files)
            read_s = read_plainly(files)
            prepare(files)
            begin = time.perf_counter()
            model = load_model(ModelFiles("safetensors", folder, config, "bench"), dtype="bfloat16",
                               device=bench.device)
            load_s = time.perf_counter() - begin
            del model
            limit = min(rate, total / read_s)
            for name, seconds, target in ((f"plain read from the {where}", read_s, None),
                                          (f"load from the {where}", load_s, None if bench.dry else TARGET_SHARE)):
                bench.rows.append({"name": name, "us": round(seconds * 1e6), "GB/s": round(total / seconds / 1e9, 2),
                                   "share": total / seconds / limit, "target": target})


class Phases:
    """What a start reports to, in place of worker.main.Starting: when each phase ended."""

    def __init__(self) -> None:
        self.ended: dict[str, float] = {}
        self._name, self._began = "", 0.0

    def begin(self, name: str) -> None:
        self._name, self._began = name, time.perf_counter()

    def advance(self, fraction: float, detail: str = "") -> None: ...

    def end(self, detail: str = "") -> None:
        self.ended[self._name] = time.perf_counter()
        print(f"    {self._name}: {self.ended[self._name] - self._began:.1f} s  {detail}", flush=True)


def seconds_to_ready(bench: Bench, config: ModelConfig) -> float:
    """From the weights on the device to a worker that is ready, with its graphs."""
    from worker.startup import build_runner
    phases = Phases()
    worker = WorkerProcess(
        rank=0, listen="", epoch=1, model=ModelSection(files=ModelFiles("dummy", "", config, "bench"),
                                                       max_model_len=256 if bench.dry else 8192),
        cache=CacheConfig(num_gpu_blocks_override=64 if bench.dry else None), max_num_seqs=4 if bench.dry else 256,
        max_num_batched_tokens=64 if bench.dry else 8192, num_speculative_tokens=0, device=bench.device,
        attention_backend="triton", cuda_graphs="static" if bench.dry else "on", num_threads=1, run_dir="",
        log_level="warning")
    build_runner(worker, cast(Any, phases), lambda: None)
    return time.perf_counter() - phases.ended["load weights"]


def measure_ready(bench: Bench) -> None:
    """Two processes, one after the other: the first finds no compiled kernels, the second those of the first."""
    collect(bench)                              # they need the device's memory
    with tempfile.TemporaryDirectory() as folder:
        for what in ("compiled anew", "from the disk"):
            if not bench.wants(name := f"seconds from weights to ready, kernels {what}"):
                continue
            done = subprocess.run([sys.executable, "-W", "ignore", "-m", "bench.gpu_load", "--ready",
                                   *(["--dry"] if bench.dry else [])], env={**os.environ, "TRITON_CACHE_DIR": folder},
                                  capture_output=True, text=True)
            if done.returncode:
                bench.rows.append({"name": name, "skipped": done.stderr[-200:].replace("\n", " ")})
                continue
            *phases, seconds = done.stdout.splitlines()
            print(f"start, kernels {what}:", *phases, sep="\n", flush=True)
            bench.rows.append({"name": name, "times": float(seconds), "at_most": None if bench.dry else TARGET_READY_S})


def main() -> None:
    """See the module."""
    parser = make_parser(__doc__, 60.0)
    parser.add_argument("--ready", action="store_true", help="only start a worker here; prints its phases and seconds")
    args, bench = make_bench(parser)
    config = shape(bench, "qwen3-8b")
    if args.ready:
        print(f"{seconds_to_ready(bench, config):.1f}")
        return
    measure_loading(bench, msgspec.structs.replace(config, num_hidden_layers=NUM_LAYERS))
    measure_ready(bench)
    print_table(bench.rows)
    result = {"benchmark": "gpu_load", "dry": args.dry, "rows": bench.rows,
              "missed": missed(bench)}
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
