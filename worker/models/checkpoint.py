"""What both loaders share: the slots a model offers, and the proof that a file fills exactly those.

Knows names and shapes; not file formats.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import Tensor

from ipc.errors import ConfigError

Progress = Callable[[float], None]


class Slot(NamedTuple):
    """Where one checkpoint tensor goes: a view of a fused parameter. `shape` is the checkpoint's; it may broadcast."""
    shape: tuple[int, ...]
    target: Tensor


class Found(NamedTuple):
    """A tensor that a file offers."""
    file: str
    shape: tuple[int, ...]


def check_tensors(where: str, found: Mapping[str, Found], slots: Mapping[str, Slot]) -> None:
    """Each slot has its tensor, of its shape, and no tensor is left over.

    An extra tensor is refused because it means another architecture than the config says: its logits would be wrong
    without any sign of it. Raises ConfigError, one line with file, tensor, expected, found.
    """
    problems = [f"{where}: tensor {name}: expected shape {list(slot.shape)}, found nothing"
                for name, slot in slots.items() if name not in found]
    problems += [f"{tensor.file}: tensor {name}: expected no tensor of this name (the config describes another model), "
                 f"found shape {list(tensor.shape)}" for name, tensor in found.items() if name not in slots]
    problems += [f"{found[name].file}: tensor {name}: expected shape {list(slot.shape)}, "
                 f"found {list(found[name].shape)}"
                 for name, slot in slots.items() if name in found and found[name].shape != slot.shape]
    if problems:
        raise ConfigError(problems[0] + (f" (and {len(problems) - 1} more tensors)" if len(problems) > 1 else ""))
