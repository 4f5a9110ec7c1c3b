"""What launches depend on besides shapes: the GPU behind a device. Does not know kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Chip:
    """A GPU, as far as tiles and splits are chosen by it."""

    capability: int  # 90 for compute capability 9.0
    num_processors: int


# Few processors, so that tests in the interpreter reach every kind of split with small shapes.
INTERPRETED = Chip(capability=90, num_processors=8)
_known: dict[torch.device, Chip] = {}


def chip_of(device: torch.device) -> Chip:
    """What is there, or was assumed; without a GPU, what the interpreter pretends to be."""
    found = _known.get(device)
    if found is None:
        found = INTERPRETED
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            found = Chip(10 * properties.major + properties.minor, properties.multi_processor_count)
        _known[device] = found
    return found


def assume(device: torch.device, chip: Chip) -> None:
    """From here on tensors of `device` count as those of a chip that is not here: to compile for it."""
    _known[device] = chip
