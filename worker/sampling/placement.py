"""Where a step's logits are, and how small arrays get there: on CUDA in one copy that the host does not wait for.

Knows no stage.
"""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def on_device(logits: Tensor) -> bool:
    """Whether the Triton kernels take these logits."""
    return logits.is_cuda


def upload(columns: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Arrays as tensors on the device. On CUDA they share one pinned buffer, which its allocator does not hand out
    again before the copy is done; on a CPU they share the arrays' memory."""
    arrays = [np.ascontiguousarray(column) for column in columns]
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    sizes = [-(-array.nbytes // 16) * 16 for array in arrays]
    staging = torch.empty(max(16, sum(sizes)), dtype=torch.uint8, pin_memory=device.type == "cuda")
    view, begin, places = staging.numpy(), 0, []
    for array, size in zip(arrays, sizes):
        view[begin:begin + array.nbytes] = array.reshape(-1).view(np.uint8)
        places.append(slice(begin, begin + array.nbytes))
        begin += size
    sent = staging.to(device, non_blocking=True)
    return [sent[place].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
            for place, array in zip(places, arrays)]
