"""Build a model and fill it: from safetensors, from GGUF, or with seeded random numbers.

Knows which loader reads what, and whether the weights fit in memory; not where the files came from
(ipc/model_source.py), nor what is inside them (the loaders).
"""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ipc.errors import ConfigError
from worker.models.checkpoint import Progress
from worker.models.flat_model import FlatModel
from worker.models.quant_linear import materialise, narrow_skeleton
from worker.models.registry import get_model_class

if TYPE_CHECKING:
    from ipc.model_source import ModelFiles
    from worker.models.ops import Ops

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
GIB = 1 << 30


def load_model(files: ModelFiles, *, dtype: str, device: str, seed: int = 0,
               progress: Callable[[float], None] | None = None, narrow_ops: Ops | None = None) -> FlatModel:
    """The model with its weights, in `dtype` on `device`. `seed` is for dummy weights only; `progress` is called from
    this thread with the fraction done. With `narrow_ops`, which then compute the products, the matrices of an fp8
    checkpoint stay as they are stored.

    Raises ConfigError, one line: a file that does not match its config, or weights that do not fit.
    """
    model, is_narrow = model_skeleton(files, dtype, narrow_ops)
    check_memory(model, dtype, device)
    if is_narrow:
        materialise(model, device)
    else:
        model = get_model_class(files.config.architecture)(files.config, dtype=DTYPES[dtype], device=device)
    report = progress or (lambda fraction: None)
    if files.kind == "safetensors":
        from worker.models.safetensors_loader import load_safetensors
        load_safetensors(model, files.path, report)
    elif files.kind == "gguf":
        from worker.models.gguf_loader import load_gguf
        load_gguf(model, files.path, report)
    elif files.kind == "dummy":
        fill_random(model, seed, report)
    else:
        raise ConfigError(f"model kind {files.kind!r} is not supported; supported: safetensors, gguf, dummy")
    return model.eval()


def model_skeleton(files: ModelFiles, dtype: str, narrow_ops: Ops | None) -> tuple[FlatModel, bool]:
    """(the model on the meta device, whether its matrices are those of an fp8 file). Raises as load_model."""
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is not supported; supported: {', '.join(DTYPES)}")
    model = get_model_class(files.config.architecture)(files.config, dtype=DTYPES[dtype], device="meta")
    if narrow_ops is None or files.kind != "safetensors":
        return model, False
    from worker.models.safetensors_loader import kind_in_file
    kind = kind_in_file(model, files.path)
    if kind is not None:
        narrow_skeleton(model, kind, narrow_ops)
    return model, kind is not None


def fill_random(model: FlatModel, seed: int, progress: Progress) -> None:
    """Normal weights of deviation 0.02 (what most models start their training from) and norms of one, so that
    activations keep their scale through any number of layers. The same seed and device give the same weights."""
    generator = torch.Generator(model.embed_tokens.device).manual_seed(seed)
    parameters = list(model.named_parameters())
    total, done = sum(parameter.numel() for _, parameter in parameters), 0
    for name, parameter in parameters:
        if "norm" in name:
            parameter.fill_(1.0)
        else:
            parameter.normal_(0.0, 0.02, generator=generator)
        done += parameter.numel()
        progress(done / total)


def check_memory(model: FlatModel, dtype: str, device: str) -> None:
    """Refuse weights that cannot fit before allocating them: the host would not fail at allocation but be killed while
    loading. `model` is on the meta device."""
    needed = sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())
    available = available_memory(device)
    if available is not None and needed > available:
        raise ConfigError(f"the weights need {needed / GIB:.1f} GiB as {dtype} and {available / GIB:.1f} GiB of memory "
                          f"is free on {device}: {(needed - available) / GIB:.1f} GiB are missing; use a smaller model"
                          + ("" if dtype != "float32" else " or --dtype bfloat16"))


def available_memory(device: str) -> int | None:
    """Bytes that can still be allocated, or None where the host does not say. A container's limit counts too."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(torch.device(device))[0]
    limits = []
    try:
        with open("/proc/meminfo") as file:
            lines = dict(line.split(":", 1) for line in file)
        limits.append(int(lines["MemAvailable"].split()[0]) * 1024)
    except (OSError, KeyError, ValueError):
        pass
    try:
        with open("/sys/fs/cgroup/memory.max") as maximum, open("/sys/fs/cgroup/memory.current") as current, \
                open("/sys/fs/cgroup/memory.stat") as stat:
            counts = dict(line.split() for line in stat)
            cached = int(counts["inactive_file"]) + int(counts["active_file"])     # given up when memory is asked for
            limits.append(int(maximum.read()) - int(current.read()) + cached)
    except (OSError, KeyError, ValueError):        # no such hierarchy, or no limit ("max")
        pass
    return min(limits, default=None)
