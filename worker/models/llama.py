"""Llama (also SmolLM2): the plain block; its rotary scaling is numbers in the config, not code."""
from __future__ import annotations

from typing import ClassVar

from worker.models.flat_model import FlatModel


class LlamaModel(FlatModel):
    """Source: Touvron et al. 2023; Grattafiori et al. 2024 (Llama 3)."""
    gguf_permutes_qk: ClassVar[bool] = True
