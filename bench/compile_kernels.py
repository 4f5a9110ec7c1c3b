"""Compiles every kernel for GPUs that are not here, and shows what became of it.

    python launch.py bench compile-kernels [--capabilities 80 90 100] [--quick] [--json FILE]

The serving code's own launches are compiled: the wrappers run on CPU tensors under a driver that compiles for the named
chip and starts nothing. So the table shows the very variants a GPU will run: registers, stack (spills), shared memory
against the chip's limit, and which matrix and copy instructions the machine code contains (HGMMA, QGMMA: wgmma; HMMA,
IMMA: mma; LDGSTS: asynchronous copies). `ahead`: copies that are still on their way when a tile that has arrived is
computed; with none, memory and arithmetic take turns. Exit status 1 if one spills, does not fit, lacks its matrix
instructions, or is an attention without copies ahead. The last line of output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime.jit import JITFunction

from ipc.option_help import OptionParser
from worker.attention.base import BatchMeta
from worker.attention.triton_paged import TritonBackend
from worker.device_rows import ResidentBuilder
from worker.kernels.add_rms_norm import add_rms_norm
from worker.kernels.argmax import argmax
from worker.kernels.chip import Chip, assume
from worker.kernels.configs import shared_limit
from worker.kernels.edit_logits import mask_bits, penalise
from worker.kernels.embedding import embedding
from worker.kernels.logprobs import chosen_logprobs
from worker.kernels.moe import experts
from worker.kernels.offline import OfflineDriver
from worker.kernels.philox import philox_uniform
from worker.kernels.sample_rows import sample_rows
from worker.kernels.qkv_rope_kv_write import qkv_rope_kv_write
from worker.kernels.quant_linear import quant_linear
from worker.kernels.rows import TRITON_ROW_OPS
from worker.kernels.silu_mul import silu_mul
from worker.quant.weights import FP8 as FP8_WEIGHTS
from worker.quant.weights import FP8_PER_BLOCK, INT4, KINDS, QuantWeight, quantize
from worker.quant.weights import INT8 as INT8_WEIGHTS
from worker.request_state import RequestState
from worker.kv_quant import FP8_CAPABILITY

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_OPCODES = ("HGMMA", "QGMMA", "UTCHMMA", "UTCQMMA", "HMMA", "IMMA", "LDGSTS", "UTMALDG", "STL", "LDL")
_MATRIX_KERNELS = ("paged_attention_kernel", "grouped_matmul_kernel", "quant_linear_kernel",
                   "narrow_grouped_matmul_kernel")
_MATRIX = ("HGMMA", "QGMMA", "UTCHMMA", "UTCQMMA", "HMMA", "IMMA")
PROCESSORS = {80: 108, 89: 128, 90: 132, 100: 148, 120: 170}


def inspect_machine_code(compiled: Any) -> dict[str, int]:
    """Registers, stack bytes, shared bytes and instruction counts of one compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()

        def dump(option: str) -> str:
            return subprocess.run(
                [str(_TOOLS / "cuobjdump"), option, file.name], capture_output=True, text=True, check=True
            ).stdout

        usage, code = dump("-res-usage"), dump("-sass")
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump gave no register count: {usage!r}")
    counts = Counter(re.findall(rf"\b({'|'.join(_OPCODES)})\b", code))
    return {
        "registers": int(found[1]),
        "stack": int(found[2]),
        "shared": int(compiled.metadata.shared),
        "warps": int(compiled.metadata.num_warps),
        "ahead": max(map(int, re.findall(r"ttg.async_wait .*num = (\d+)", compiled.asm["ttgir"])), default=0),
        **{name: counts[name] for name in _OPCODES if counts[name]},
    }


def make_meta(query_lens: list[int], seq_lens: list[int], block_size: int) -> BatchMeta:
    """Only shapes and lengths matter: nothing runs."""
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    lengths = np.array(seq_lens, np.int32)
    table = torch.zeros((len(seq_lens), -(-max(seq_lens) // block_size)), dtype=torch.int32)
    return BatchMeta.of(starts, lengths, table, torch.zeros(int(starts[-1]), dtype=torch.long), block_size)


Case = Callable[[int], object]  # launches on a chip of this capability


def attention_case(
    query_lens: list[int],
    seq_lens: list[int],
    *,
    dim: int,
    group: int = 4,
    kv_heads: int = 8,
    dtype: torch.dtype = torch.bfloat16,
    pool: torch.dtype | None = None,
    block_size: int = 16,
    **options: Any,
) -> Case:
    """One attention call."""

    def launch(capability: int) -> object:
        backend = TritonBackend()
        assume(torch.device("cpu"), Chip(capability, PROCESSORS.get(capability, 128)))
        cache = backend.allocate((4, block_size, kv_heads, dim), pool or dtype, "cpu")
        q = torch.zeros((sum(query_lens), kv_heads * group, dim), dtype=dtype)
        sinks = torch.zeros(kv_heads * group) if options.pop("with_sinks", False) else None
        return backend.forward(q, cache, make_meta(query_lens, seq_lens, block_size), sinks=sinks, **options)

    return launch


def rotate_case(*, dim: int, norm: bool, pool: torch.dtype, dtype: torch.dtype = torch.bfloat16) -> Case:
    """The fused head norms, rotation and pool write; and the plain write."""

    def launch(capability: int) -> None:
        backend, meta = TritonBackend(), make_meta([1, 1], [5, 9], 16)
        cache = backend.allocate((4, 16, 8, dim), pool, "cpu")
        tables = torch.zeros((2, 1, dim), dtype=dtype)
        weight = torch.zeros((40, dim), dtype=dtype) if norm else None
        qkv = torch.zeros((2, 48, dim), dtype=dtype)
        qkv_rope_kv_write(qkv, tables, tables, cache, meta.slot_mapping, num_heads=32, norm_weight=weight)
        backend.write(cache, qkv[:, 32:40], qkv[:, 40:], meta)

    return launch


def row_case(dtype: torch.dtype) -> Case:
    """The kernels over rows."""

    def launch(capability: int) -> None:
        x = torch.zeros((2, 4096), dtype=dtype)
        add_rms_norm(x, x.clone(), x[0], 1e-6)
        add_rms_norm(x, None, x[0], 1e-6)
        silu_mul(torch.zeros((2, 2 * 12288), dtype=dtype))
        embedding(torch.zeros(2, dtype=torch.long), x)
        logits = torch.zeros((2, 151936), dtype=torch.float32)
        argmax(logits)
        sampling_kernels(logits)
        ids = torch.zeros(2, dtype=torch.long)
        philox_uniform(ids, ids.int(), ids, 4)

    return launch


def sampling_kernels(logits: torch.Tensor) -> None:
    """Those of a step's sampler."""
    ones, ints, longs = torch.ones(2), torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.long)
    words = torch.zeros((2, logits.shape[1] // 32), dtype=torch.int32)
    columns = ones, ints, ones, ones, longs, ints, longs
    sample_rows(logits, *columns)
    sample_rows(logits, *columns, words=words, word_index=ints)
    chosen_logprobs(logits, longs)
    mask_bits(logits, ints, words)
    starts, pairs = torch.zeros(3, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    penalise(logits, ints, starts, pairs, pairs, torch.ones((2, 3)), longest=64)


def experts_case(num_tokens: int, dtype: torch.dtype = torch.bfloat16) -> Case:
    """A layer of Qwen3-30B-A3B's experts: sort, two grouped products, weighted sum."""

    def launch(capability: int) -> None:
        x = torch.zeros((num_tokens, 2048), dtype=dtype)
        ids = torch.zeros((num_tokens, 8), dtype=torch.long)
        gate_up, down = torch.empty((128, 1536, 2048), dtype=dtype), torch.empty((128, 2048, 768), dtype=dtype)
        experts(x, ids, ids.float(), gate_up, down)

    return launch


def narrow_experts_case(num_tokens: int, kind: str, dtype: torch.dtype = torch.bfloat16) -> Case:
    """The same with narrow weights."""

    def narrow(num_out: int, num_k: int) -> QuantWeight:
        with FakeTensorMode(allow_non_fake_inputs=True):
            made = quantize(torch.empty((num_out, num_k), dtype=torch.float16), kind)
        codes, scales = (torch.empty((128, *t.shape), dtype=t.dtype) for t in (made.codes, made.scales))
        return made._replace(codes=codes, scales=scales)

    def launch(capability: int) -> None:
        x, ids = torch.zeros((num_tokens, 2048), dtype=dtype), torch.zeros((num_tokens, 8), dtype=torch.long)
        experts(x, ids, ids.float(), narrow(1536, 2048), narrow(2048, 768))

    return launch


def linear_case(num_rows: int, kind: str, dtype: torch.dtype = torch.bfloat16) -> Case:
    """The widest projection of Qwen3-8B with narrow weights, and a narrow one whose inputs are split."""

    def launch(capability: int) -> None:
        x = torch.zeros((num_rows, 4096), dtype=dtype)
        for num_out in (24576, 256):
            with FakeTensorMode(allow_non_fake_inputs=True):
                weight = quantize(torch.empty((num_out, 4096), dtype=torch.float16), kind)
            codes, scales = (torch.empty(t.shape, dtype=t.dtype) for t in weight[1:3])
            quant_linear(x, weight._replace(codes=codes, scales=scales))

    return launch


def batch_case() -> Case:
    """The launches that keep the running batch on the device."""

    def launch(capability: int) -> None:
        state = RequestState(256, 40960, 16)
        ResidentBuilder(state, 8192, "cpu", TRITON_ROW_OPS).warm_up()

    return launch


DECODE, MANY, CHUNK = ([1] * 4, [8192] * 4), ([1] * 256, [1024] * 256), ([512] * 3 + [1], [8192] * 4)
DRAFTS = ([5] * 4, [2048] * 4)
BF16, FP8, INT8 = torch.bfloat16, torch.float8_e4m3fn, torch.int8

# name -> (case, needs matrix instructions). The quick ones are those of the large models' usual shapes.
QUICK: dict[str, tuple[Case, bool]] = {
    "decode 128": (attention_case(*DECODE, dim=128), True),
    "chunk 128": (attention_case(*CHUNK, dim=128), True),
    "decode 128 fp8": (attention_case(*DECODE, dim=128, pool=FP8), True),
    "chunk 128 int8": (attention_case(*CHUNK, dim=128, pool=INT8), True),
    "chunk 256 fp8": (attention_case(*CHUNK, dim=256, pool=FP8), True),
    "rotate 128 norm": (rotate_case(dim=128, norm=True, pool=BF16), False),
    "rotate 128 int8": (rotate_case(dim=128, norm=True, pool=INT8), False),
    "rows": (row_case(BF16), False),
    "experts 64": (experts_case(64), True),
    "experts 4096": (experts_case(4096), True),
    "experts int4 64": (narrow_experts_case(64, INT4), True),
    "experts fp8_per_block 4096": (narrow_experts_case(4096, FP8_PER_BLOCK), True),
    "batch": (batch_case(), False),
    "linear int8 8": (linear_case(8, INT8_WEIGHTS), True),
    "linear int4 8": (linear_case(8, INT4), True),
    "linear fp8 8": (linear_case(8, FP8_WEIGHTS), True),
    "linear fp8_per_block 512": (linear_case(512, FP8_PER_BLOCK), True),
}
REST: dict[str, tuple[Case, bool]] = {
    "chunk 64": (attention_case(*CHUNK, dim=64), True),
    "decode 64": (attention_case(*DECODE, dim=64), True),
    "decode 256": (attention_case(*DECODE, dim=256), True),
    "chunk 256": (attention_case(*CHUNK, dim=256), True),
    "decode 96": (attention_case(*DECODE, dim=96), True),
    "chunk 80": (attention_case(*CHUNK, dim=80), True),
    "chunk 96": (attention_case(*CHUNK, dim=96), True),
    "chunk 192": (attention_case(*CHUNK, dim=192), True),
    "decode 128 many rows": (attention_case(*MANY, dim=128), True),
    "decode 128 block 64": (attention_case(*DECODE, dim=128, block_size=64), True),
    "chunk 128 block 64": (attention_case(*CHUNK, dim=128, block_size=64), True),
    "decode 128 group 1": (attention_case(*DECODE, dim=128, group=1), True),
    "decode 128 group 7": (attention_case(*DECODE, dim=128, group=7, kv_heads=4), True),
    "decode 64 group 32": (attention_case(*DECODE, dim=64, group=32, kv_heads=2), True),
    "drafts 64": (attention_case(*DRAFTS, dim=64), True),
    "drafts 128": (attention_case(*DRAFTS, dim=128), True),
    "drafts 256": (attention_case(*DRAFTS, dim=256), True),
    "drafts 128 int8": (attention_case(*DRAFTS, dim=128, pool=INT8), True),
    "chunk 64 int8": (attention_case(*CHUNK, dim=64, pool=INT8), True),
    "chunk 256 int8": (attention_case(*CHUNK, dim=256, pool=INT8), True),
    "chunk 64 f32": (attention_case(*CHUNK, dim=64, dtype=torch.float32), True),
    "chunk 256 f32": (attention_case(*CHUNK, dim=256, dtype=torch.float32), True),
    "decode 256 f32": (attention_case(*DECODE, dim=256, dtype=torch.float32), True),
    "decode 128 f16": (attention_case(*DECODE, dim=128, dtype=torch.float16), True),
    "chunk 128 f16": (attention_case(*CHUNK, dim=128, dtype=torch.float16), True),
    "decode 128 f32": (attention_case(*DECODE, dim=128, dtype=torch.float32), True),
    "chunk 128 f32": (attention_case(*CHUNK, dim=128, dtype=torch.float32), True),
    "chunk 64 window sinks": (attention_case(*CHUNK, dim=64, group=8, window=128, with_sinks=True), True),
    "decode 64 window sinks": (attention_case(*DECODE, dim=64, group=8, window=128, with_sinks=True), True),
    "chunk 128 window": (attention_case(*CHUNK, dim=128, window=4096), True),
    "chunk 128 softcap": (attention_case(*CHUNK, dim=128, softcap=50.0), True),
    "chunk 256 softcap": (attention_case(*CHUNK, dim=256, softcap=50.0), True),
    "chunk 128 fp8": (attention_case(*CHUNK, dim=128, pool=FP8), True),
    "chunk 64 fp8": (attention_case(*CHUNK, dim=64, pool=FP8), True),
    "decode 64 fp8": (attention_case(*DECODE, dim=64, pool=FP8), True),
    "decode 96 fp8": (attention_case(*DECODE, dim=96, pool=FP8), True),
    "decode 256 fp8": (attention_case(*DECODE, dim=256, pool=FP8), True),
    "decode 128 fp8 block 64": (attention_case(*DECODE, dim=128, pool=FP8, block_size=64), True),
    "decode 128 fp8 f16": (attention_case(*DECODE, dim=128, pool=FP8, dtype=torch.float16), True),
    "decode 64 fp8 window sinks": (attention_case(*DECODE, dim=64, group=8, window=128, with_sinks=True, pool=FP8),
                                   True),
    "decode 256 fp8 softcap": (attention_case(*DECODE, dim=256, pool=FP8, softcap=50.0), True),
    "drafts 64 fp8": (attention_case(*DRAFTS, dim=64, pool=FP8), True),
    "drafts 128 fp8": (attention_case(*DRAFTS, dim=128, pool=FP8), True),
    "drafts 256 fp8": (attention_case(*DRAFTS, dim=256, pool=FP8), True),
    "decode 128 int8": (attention_case(*DECODE, dim=128, pool=INT8), True),
    "decode 64 int8": (attention_case(*DECODE, dim=64, pool=INT8), True),
    "rotate 64": (rotate_case(dim=64, norm=False, pool=BF16), False),
    "rotate 128 fp8": (rotate_case(dim=128, norm=True, pool=FP8), False),
    "rotate 256 f32": (rotate_case(dim=256, norm=True, pool=torch.float32, dtype=torch.float32), True),
    "rows f32": (row_case(torch.float32), False),
    "experts 1024": (experts_case(1024), True),
    **{f"linear {kind} {rows}": (linear_case(rows, kind), True) for kind in KINDS for rows in (8, 64, 512)},
    "linear int4 8 f16": (linear_case(8, INT4, torch.float16), True),
    **{f"experts {kind} {rows}": (narrow_experts_case(rows, kind), True) for kind in KINDS for rows in (64, 512, 4096)},
    "experts 64 f16": (experts_case(64, torch.float16), True),
    "experts 64 f32": (experts_case(64, torch.float32), True),
}


def compile_case(name: str, case: Case, needs_matrix: bool, capability: int) -> list[dict[str, Any]]:
    """One table row for each kernel that the case launches, with `problems` in words."""
    compiled: list[Any] = []
    original = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled.append((self.__name__, original(self, *args, grid=grid, warmup=True, **options)))
        return compiled[-1][1]

    triton.runtime.driver.set_active(OfflineDriver(capability))
    JITFunction.run = run
    try:
        case(capability)
    finally:
        JITFunction.run = original
    rows = []
    for kernel, code in compiled:
        row: dict[str, Any] = {"case": name, "kernel": kernel.removesuffix("_kernel"), "capability": capability}
        row |= inspect_machine_code(code)
        row["problems"] = []
        if row["stack"] or row.get("STL") or row.get("LDL"):
            row["problems"].append(f"spills: {row['stack']} bytes of stack")
        if row["shared"] > shared_limit(capability):
            row["problems"].append(f"shared memory {row['shared']} over {shared_limit(capability)}")
        if needs_matrix and kernel in _MATRIX_KERNELS and not any(row.get(op) for op in _MATRIX):
            row["problems"].append("no matrix instructions")
        if kernel == "paged_attention_kernel" and "f32" not in name and not row["ahead"]:
            row["problems"].append("no keys are on their way while others are computed")
        rows.append(row)
    return rows


def count_variants(capability: int) -> tuple[int, int]:
    """Compiled variants after the backend's warm-up, and after steps of many shapes: equal, or requests would wait for
    the compiler."""
    seen: set[int] = set()
    original = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled = original(self, *args, grid=grid, warmup=True, **options)
        seen.add(id(compiled))
        return compiled

    triton.runtime.driver.set_active(OfflineDriver(capability))
    backend = TritonBackend()
    assume(torch.device("cpu"), Chip(capability, PROCESSORS[capability]))
    cache = backend.allocate((4, 16, 2, 64), torch.bfloat16, "cpu")
    JITFunction.run = run
    try:
        backend.warm_up(cache, num_heads=8, dtype=torch.bfloat16, block_size=16)
        after_warm_up = len(seen)
        for query_lens, longest in [
            ([1], 1),
            ([1] * 7, 9000),
            ([1] * 16, 16),
            ([1] * 300, 300),
            ([3] * 5, 77),
            ([7] * 33, 5000),
            ([1, 130], 130),
            ([500] * 20 + [1], 40000),
            ([16], 16),
        ]:
            meta = make_meta(query_lens, [longest] * len(query_lens), 16)
            backend.forward(torch.zeros((sum(query_lens), 8, 64), dtype=torch.bfloat16), cache, meta)
    finally:
        JITFunction.run = original
    return after_warm_up, len(seen)


def print_table(rows: list[dict[str, Any]]) -> None:
    """One line a kernel."""
    print(f"{'case':24} {'kernel':20} {'sm':>4} {'warps':>5} {'regs':>5} {'stack':>5} {'shared':>7} {'ahead':>5}  "
          "instructions")
    for row in rows:
        mix = " ".join(f"{op}:{row[op]}" for op in _OPCODES if op in row)
        flag = "  <-- " + "; ".join(row["problems"]) if row["problems"] else ""
        print(
            f"{row['case']:24} {row['kernel']:20} {row['capability']:>4} {row['warps']:>5} {row['registers']:>5} "
            f"{row['stack']:>5} {row['shared']:>7} {row['ahead']:>5}  {mix}{flag}"
        )


def main(argv: list[str] | None = None) -> int:
    """Compile all cases; see the module."""
    parser = OptionParser(prog="launch.py bench compile-kernels", description=__doc__,
                          formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capabilities", type=int, nargs="+", default=[80, 90, 100])
    parser.add_argument("--quick", action="store_true", help="only the usual shapes")
    parser.add_argument("--only", default="", help="cases whose name contains one of these, comma-separated")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    args = parser.parse_args(argv)
    if triton.knobs.runtime.interpret:
        parser.error("TRITON_INTERPRET is set, which replaces the compiler; unset it")
    rows: list[dict[str, Any]] = []
    for name, (case, needs_matrix) in (QUICK if args.quick else QUICK | REST).items():
        for capability in args.capabilities:
            if any(part in name for part in args.only.split(",")) and not (
                "fp8" in name and capability < FP8_CAPABILITY
            ):
                rows += compile_case(name, case, needs_matrix, capability)
    print_table(rows)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    after_warm_up, after_steps = count_variants(args.capabilities[-1])
    print(f"variants after warm-up: {after_warm_up}, after steps of many shapes: {after_steps}")
    failed = (after_steps > after_warm_up) + sum(bool(row["problems"]) for row in rows)
    print(
        json.dumps(
            {"benchmark": "compile_kernels", "triton": triton.__version__, "compiled": len(rows), "failed": failed}
        )
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
