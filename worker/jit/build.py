"""Whether a worker runs the compiled model, and with which weights: every choice with its reason.

Called once at start, before weights are read. Knows the options and the model's shape; the runner does not notice which
model it got.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from ipc.config import WorkerProcess
from ipc.errors import ConfigError
from worker.attention.base import AttentionBackend
from worker.attention.jit_layout import POOL_DTYPES
from worker.jit import features
from worker.kv_quant import KV_DTYPES

if TYPE_CHECKING:
    from worker.jit.model import JitModel

GGUF_MODES = {"auto": "keep", "none": "none", "int8": "int8", "int4": "int4"}
OTHER_MODES = {"auto": "none", "none": "none", "int8": "int8", "int4": "int4"}


class Choice(NamedTuple):
    """What the compiled model is built as; reason is for the log."""
    mode: str                                # of worker/linear/source.py
    weight_dtype: str                        # of float weights
    kv_dtype: torch.dtype
    reason: str


class Compiled(NamedTuple):
    """A model that is ready, its backend and a line for the log."""
    model: JitModel
    backend: AttentionBackend
    text: str


def choose(config: WorkerProcess, device: str) -> tuple[Choice | None, str]:
    """(what to build, why), or (None, why the torch model runs instead).

    Raises ConfigError for an option that only the compiled model can honour.
    """
    section = config.model
    refused = _refusal(config, device)
    if refused is not None:
        is_narrow = section.quantization not in ("auto", "none") and not _quantizes_in_torch(config, device)
        for flag, given in ((f"--quantization {section.quantization}", is_narrow),
                            ("--batch-invariant", section.batch_invariant),
                            ("--attention-backend jit", config.attention_backend == "jit")):
            if given:
                raise ConfigError(f"{flag} needs the compiled CPU kernels, which do not run here: {refused}")
        return None, refused
    if section.quantization not in OTHER_MODES:
        raise ConfigError(f"--quantization {section.quantization} is for GPUs; on this CPU use int8 or int4")
    mode = (GGUF_MODES if section.files.kind == "gguf" else OTHER_MODES)[section.quantization]
    weights = section.dtype
    if weights == "auto":
        # Exact: the kernels read bfloat16 weights and compute in float32, which this processor does fastest.
        weights = "bfloat16" if section.files.config.dtype == "bfloat16" and section.files.kind != "gguf" else "float32"
    wide = mode == "none" and section.dtype != "bfloat16"
    kv = config.cache.kv_cache_dtype
    if kv == "auto":                         # int8 where weights leave room for it: divergence stays within 0.005
        from worker.linear.source import FLOAT_TYPES
        ggml_type = section.files.config.ggml_type
        is_narrow = mode in ("int8", "int4") or (mode == "keep" and ggml_type not in FLOAT_TYPES)
        leaves_room = is_narrow and (mode == "int4" or ggml_type != "Q8_0")
        kv = "float32" if wide else "int8" if leaves_room else "bfloat16"
    if KV_DTYPES[kv] not in POOL_DTYPES:
        raise ConfigError(f"--kv-cache-dtype {kv}: the compiled CPU kernels keep keys and values as float32, bfloat16, "
                          "int8 or fp8; use bfloat16, or --attention-backend cpu")
    return Choice(mode, weights, KV_DTYPES[kv], f"{features.describe()}; weights {mode}, keys and values {kv}"), \
        "the processor is a CPU and numba is installed"


def _quantizes_in_torch(config: WorkerProcess, device: str) -> bool:
    """Whether the torch model takes narrow weights: as Triton kernels, or as their reference."""
    return device != "cpu" or config.attention_backend in ("triton", "reference")


def _refusal(config: WorkerProcess, device: str) -> str | None:
    if device != "cpu":
        return f"the device is {device}"
    if config.attention_backend not in ("auto", "jit"):
        return f"--attention-backend {config.attention_backend} was asked for"
    if config.cuda_graphs == "static":
        return "--cuda-graphs static was asked for, which pads the torch model's steps"
    if config.model.dtype == "float16":
        return "--dtype float16 is computed by torch"
    missing = features.missing()
    if missing is not None:
        return missing
    from worker.jit.model import refusal
    return refusal(config.model.files.config)


def build(config: WorkerProcess, choice: Choice, progress: Callable[[float], None]) -> Compiled:
    """Read or make the weights, pack them. Raises ConfigError."""
    from worker.attention.jit import JitBackend
    from worker.jit.model import JitModel
    from worker.jit.team import get_team
    from worker.linear.route import describe
    from worker.linear.source import GGUFSource, ModelSource, WeightSource
    from worker.models.loader import DTYPES, load_model
    from worker.models.registry import get_model_class

    section, team = config.model, get_team(max(1, config.num_threads))
    source: WeightSource
    if section.files.kind == "gguf":
        family = get_model_class(section.files.config.architecture)
        source = GGUFSource(family(section.files.config, dtype=DTYPES["float32"], device="meta"), section.files.path,
                            choice.mode)
    else:
        source = ModelSource(load_model(section.files, dtype=choice.weight_dtype, device="cpu", seed=section.seed,
                                        progress=lambda fraction: progress(0.7 * fraction)), choice.mode,
                             consume=True)
    model = JitModel(source, max_tokens=config.max_num_batched_tokens, team=team)
    return Compiled(model, JitBackend(team), describe(model.linears))


def start_kernels(num_threads: int) -> None:
    """Compile the kernels, or load them from the disk; then the threads wait for work."""
    from worker.jit.team import get_team
    get_team(max(1, num_threads)).start()
    features.drop_stale_caches()
