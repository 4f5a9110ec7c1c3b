"""Copies between host and device that nobody waits for: a ring of pinned buffers down, pinned results with an event up.

On a CPU both are plain copies that are done at once, so the same code runs there. Does not know what it carries.
"""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

RING = 4                                        # copies under way at once; two plans are in flight


class StagingRing:
    """int32 numbers to the device, one copy a call."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self._is_cuda = self.device.type == "cuda"
        self._host: list[Tensor] = [torch.empty(0, dtype=torch.int32)] * RING
        self._events: list[torch.cuda.Event | None] = [None] * RING
        self._next = 0

    def send(self, parts: Sequence[np.ndarray]) -> Tensor:
        """The parts one after another on the device. The host arrays are free when this returns."""
        size = sum(part.size for part in parts)
        at, self._next = self._next, (self._next + 1) % RING
        event = self._events[at]
        if event is not None:
            event.synchronize()                 # long done: its copy was RING plans ago
        if self._host[at].numel() < size:
            capacity = max(1024, 1 << (size - 1).bit_length())
            self._host[at] = torch.empty(capacity, dtype=torch.int32, pin_memory=self._is_cuda)
        host = self._host[at][:size]
        np.concatenate([part.reshape(-1) for part in parts], out=host.numpy(), casting="same_kind")
        if not self._is_cuda:
            return host.clone()
        sent = torch.empty(size, dtype=torch.int32, device=self.device)
        sent.copy_(host, non_blocking=True)
        event = self._events[at] = torch.cuda.Event()
        event.record()
        return sent


class ResultReader:
    """int32 results to the host. `read` returns a handle; the device goes on."""

    def __init__(self, device: str, capacity: int) -> None:
        self._is_cuda = torch.device(device).type == "cuda"
        self._host = [torch.empty(capacity if self._is_cuda else 0, dtype=torch.int32, pin_memory=self._is_cuda)
                      for _ in range(RING)]
        self._next = 0

    def read(self, values: Tensor, begin: torch.cuda.Event | None = None) -> Result:
        """values int32 [n] on the device. `begin`: an event recorded earlier, for the time between."""
        if not self._is_cuda:
            return Result(values.clone(), None, None)
        at, self._next = self._next, (self._next + 1) % RING
        host = self._host[at][:len(values)]
        host.copy_(values, non_blocking=True)
        event = torch.cuda.Event(enable_timing=begin is not None)
        event.record()
        return Result(host, begin, event)


class Result:
    """Numbers on their way. Valid until RING more are read."""

    def __init__(self, host: Tensor, begin: torch.cuda.Event | None, event: torch.cuda.Event | None) -> None:
        self._host, self._begin, self._event = host, begin, event

    def is_ready(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self) -> np.ndarray:
        """int32 [n], the caller's own."""
        if self._event is not None:
            self._event.synchronize()
        values: np.ndarray = self._host.numpy().copy()
        return values

    def device_ns(self) -> int:
        """Device time since `begin`, once ready; 0 where it is not measured."""
        if self._begin is None or self._event is None:
            return 0
        return int(self._begin.elapsed_time(self._event) * 1e6)
