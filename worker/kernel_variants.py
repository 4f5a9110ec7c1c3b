"""Which compiled kernels a worker will ask Triton for, found out before there are weights.

The worker's own warm-up runs over tensors that have shapes, types and addresses but no memory (torch's meta device).
Each launch then asks for a variant. It is the one that the same launch on the GPU asks for: a variant is the kernel's
source, the chip, dtypes, constants, and which numbers and addresses are multiples of 16; torch's allocator gives
addresses that are, and a view's offset is the same. Knows no kernel but for the order in which they are best compiled.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import triton
from torch import Tensor, nn
from triton.runtime.jit import JITFunction

from ipc.config import WorkerProcess
from ipc.model_config import ModelConfig
from worker.attention.triton_paged import TritonBackend
from worker.kernels.chip import Chip, assume
from worker.kv_pool import KVPool
from worker.kv_quant import resolve_kv_dtype
from worker.model_runner import ModelRunner
from worker.models.flat_model import DecoderLayer
from worker.models.layers import RotaryTables
from worker.models.loader import DTYPES, model_skeleton
from worker.models.quant_linear import quantize_linears
from worker.warm_up import launch_all

META = "meta"
FEW_BLOCKS = 8                                  # no variant depends on how many there are
SLOWEST = ("sample_rows_kernel", "narrow_grouped_matmul_kernel", "grouped_matmul_kernel", "quant_linear_kernel",
           "paged_attention_kernel", "combine_splits_kernel")


class Variant(NamedTuple):
    """One kernel as one launch needs it."""
    kernel: Any                                 # JITFunction
    args: tuple[Any, ...]
    options: dict[str, Any]

    def compile(self) -> Any:
        """Triton's compiled kernel, from its cache or else into it: the launch itself, up to where it would start."""
        return JITFunction.run(self.kernel, *self.args, grid=(1,), warmup=True, **self.options)


class HostTables(RotaryTables):
    """Their layout without memory. Made on the host: torch's arithmetic on meta tensors imports its compiler, which
    takes a second."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, "cpu")

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        cos, sin = super().forward(torch.zeros(positions.shape, dtype=positions.dtype), dtype)
        return cos.to(META), sin.to(META)


def skeleton_runner(config: WorkerProcess, dtype: str, max_model_len: int, keeps_fp8: bool, chip: Chip,
                    valid_tokens: int | None) -> ModelRunner:
    """The worker's runner without memory, as it will be on this chip, with one layer of each kind."""
    assume(torch.device(META), chip)
    cache, backend = config.cache, TritonBackend()
    model, _ = model_skeleton(config.model.files, dtype, backend.ops if keeps_fp8 else None)
    kinds = {type(cast(DecoderLayer, layer).mlp): layer for layer in model.layers}
    model.layers, model.rope = nn.ModuleList(kinds.values()), HostTables(config.model.files.config)
    if config.model.quantization not in ("auto", "none"):
        quantize_linears(model, config.model.quantization, backend.ops)
    kv_dtype, _ = resolve_kv_dtype(cache.kv_cache_dtype, DTYPES[dtype], chip.capability)
    pool = KVPool(backend, FEW_BLOCKS, cache.block_size, (len(kinds), *model.kv_spec()[1:]), kv_dtype, META)
    return ModelRunner(model, backend, pool, 0, seats=min(config.max_num_seqs, config.max_num_batched_tokens),
                       max_tokens=config.max_num_batched_tokens, max_model_len=max_model_len, eos_token_ids=[],
                       device=META, num_valid_tokens=valid_tokens, graphs="static", is_resident=True)


def variants_of(launches: Callable[[], object]) -> list[Variant]:
    """Each variant that the launches ask for, once; those that take longest to compile first, so that none is left
    alone at the end. Nothing is compiled or started. No other thread may launch meanwhile."""
    found: dict[tuple[str, str], Variant] = {}
    newest = Variant(None, (), {})
    run, hook = JITFunction.run, triton.knobs.runtime.jit_cache_hook

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        nonlocal newest
        newest = Variant(kernel, args, options)
        return run(kernel, *args, grid=grid, warmup=True, **options)

    def ask(*, fn: Any, key: Any, **rest: Any) -> bool:
        found.setdefault((fn.name, str(key)), newest)
        return True                             # that is all: do not compile
    JITFunction.run, triton.knobs.runtime.jit_cache_hook = note, ask
    try:
        launches()
    finally:
        JITFunction.run, triton.knobs.runtime.jit_cache_hook = run, hook

    def place(variant: Variant) -> int:
        name = variant.kernel.__name__
        return SLOWEST.index(name) if name in SLOWEST else len(SLOWEST)
    return sorted(found.values(), key=place)


def find_variants(config: WorkerProcess, dtype: str, max_model_len: int, keeps_fp8: bool, chip: Chip,
                  valid_tokens: int | None) -> list[Variant]:
    """All that the worker will ask for."""
    with torch.inference_mode():
        runner = skeleton_runner(config, dtype, max_model_len, keeps_fp8, chip, valid_tokens)
        return variants_of(lambda: launch_all(runner, config.max_num_batched_tokens))
