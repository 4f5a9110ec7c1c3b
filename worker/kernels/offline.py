"""Triton without a GPU: a driver that names a chip to compile for, and can start nothing on it."""

from __future__ import annotations

import torch
from triton.backends.compiler import GPUTarget


class OfflineDriver:
    """As much of a CUDA driver as a compilation asks for. The device number is the capability, so that variants for
    several chips do not share a cache entry."""

    launcher_cls = None

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def is_active(self) -> bool:
        return True
