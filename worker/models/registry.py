"""From an `architectures` string to the class of its family.

A new family is one file here, one line below, its shape in ipc/model_config.py, and its tiny config in the parity test.
"""
from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from ipc.errors import ConfigError
from worker.models.flat_model import FlatModel


def _family(module: str, name: str) -> Callable[[], type[FlatModel]]:
    def load() -> type[FlatModel]:
        family: type[FlatModel] = getattr(import_module(f"worker.models.{module}"), name)
        return family
    return load


MODELS: dict[str, Callable[[], type[FlatModel]]] = {
    "LlamaForCausalLM": _family("llama", "LlamaModel"),
    "Qwen2ForCausalLM": _family("qwen2", "Qwen2Model"),
    "Qwen3ForCausalLM": _family("qwen3", "Qwen3Model"),
    "Qwen3MoeForCausalLM": _family("qwen3_moe", "Qwen3MoeModel"),
}


def get_model_class(architecture: str) -> type[FlatModel]:
    """Raises ConfigError that lists the known names."""
    if architecture not in MODELS:
        raise ConfigError(f"architecture {architecture!r} is not supported; supported: {', '.join(MODELS)}")
    return MODELS[architecture]()
