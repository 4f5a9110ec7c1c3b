"""Names of the attention backends, and which of them this machine may use.

Adding one is one line in BACKENDS; heavy imports happen in its factory, so a CPU needs no Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from worker.attention.base import AttentionBackend


@dataclass(frozen=True)
class BackendEntry:
    """factory makes the backend; check returns None if it may run on the device, else why not."""

    factory: Callable[[], AttentionBackend]
    check: Callable[[str], str | None]
    auto_reason: str | None = None  # why `auto` takes it; None: only on request


def _reference() -> AttentionBackend:
    from worker.attention.reference import ReferenceBackend

    return ReferenceBackend()


def _cpu() -> AttentionBackend:
    from worker.attention.cpu import CpuBackend

    return CpuBackend()


def _triton() -> AttentionBackend:
    from worker.attention.triton_paged import TritonBackend

    return TritonBackend()


def _jit() -> AttentionBackend:
    from worker.attention.jit import JitBackend

    return JitBackend()


def _any_device(device: str) -> str | None:
    return None


def _cpu_only(device: str) -> str | None:
    return None if device.split(":")[0] == "cpu" else f"runs on device cpu, not on {device}"


def _cpu_with_numba(device: str) -> str | None:
    from worker.jit import features

    return _cpu_only(device) or features.missing()


def _cuda_or_interpreter(device: str) -> str | None:
    """CUDA devices from Ampere on; CPUs only while kernels run in Triton's interpreter, which tests ask for."""
    try:
        import triton
    except ImportError:
        return "needs the triton package, which is not installed"
    if device.split(":")[0] == "cuda":
        import torch

        major, minor = torch.cuda.get_device_capability(device)
        return None if major >= 8 else f"needs compute capability 8.0 or higher; {device} has {major}.{minor}"
    return None if triton.knobs.runtime.interpret else f"runs on CUDA devices, not on {device}"


# Order is preference: `auto` takes the first entry with an auto_reason whose check passes.
BACKENDS: dict[str, BackendEntry] = {
    "cpu": BackendEntry(_cpu, _cpu_only, "the batched backend for CPUs"),
    "triton": BackendEntry(_triton, _cuda_or_interpreter, "the backend for CUDA devices"),
    "jit": BackendEntry(_jit, _cpu_with_numba),  # beside the compiled model (worker/jit/build.py), or by name
    "reference": BackendEntry(_reference, _any_device, "no faster backend supports this device"),
}


def resolve_backend(name: str, device: str) -> tuple[str, str]:
    """(name, reason) of the backend that `name` means on this device; `auto` is resolved here, once.

    Raises ValueError for an unknown name or one that the device cannot run.
    """
    if name == "auto":
        for known, entry in BACKENDS.items():
            if entry.auto_reason is not None and entry.check(device) is None:
                return known, entry.auto_reason
        raise RuntimeError(f"no attention backend supports {device}, although reference supports every device")
    if name not in BACKENDS:
        raise ValueError(f"unknown attention backend {name!r}; known: auto, {', '.join(sorted(BACKENDS))}")
    refusal = BACKENDS[name].check(device)
    if refusal is not None:
        raise ValueError(f"attention backend {name!r} {refusal}; use auto")
    return name, "asked for by name"


def get_backend(name: str, device: str = "cpu") -> AttentionBackend:
    """A new backend instance by name (or `auto`). Raises as resolve_backend."""
    return BACKENDS[resolve_backend(name, device)[0]].factory()
