"""Logits processors of the embedding program, by name.

A processor is a function of (prompt token ids, output token ids, logits) for one row: two int32 numpy arrays that it
must not change, and a float32 tensor [V], which it may change or replace by its result. It is called once per output
token of the requests that name it, so it costs all of them the time it takes. `--logits-processor name=module:function`
registers one in the worker; `register` does so inside one process. Knows no requests.
"""
from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable

import numpy as np
from torch import Tensor

from ipc.errors import ConfigError

Processor = Callable[[np.ndarray, np.ndarray, Tensor], "Tensor | None"]
_registry: dict[str, Processor] = {}


def register(name: str, processor: Processor) -> None:
    """A later one of the same name replaces it."""
    _registry[name] = processor


def find(names: Iterable[str]) -> list[Processor]:
    """In order. Raises ValueError for an unknown name, with the known ones."""
    found = []
    for name in names:
        if name not in _registry:
            known = ", ".join(sorted(_registry)) or "none; start with --logits-processor NAME=MODULE:FUNCTION"
            raise ValueError(f"logits_processors names {name[:60]!r}; known are: {known}")
        found.append(_registry[name])
    return found


def load(specs: Iterable[str]) -> None:
    """Register each "name=module:function". Raises ConfigError."""
    for spec in specs:
        name, _, where = spec.partition("=")
        module, _, attribute = where.partition(":")
        if not (name and module and attribute):
            raise ConfigError(f"--logits-processor {spec!r} must be NAME=MODULE:FUNCTION")
        try:
            processor = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"--logits-processor {spec!r} cannot be loaded: {error}") from error
        if not callable(processor):
            raise ConfigError(f"--logits-processor {spec!r}: {attribute} is no function")
        register(name, processor)
