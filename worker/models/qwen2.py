"""Qwen2 and Qwen2.5: biases on q, k and v (`attention_bias` of the config), never on the output projection."""
from __future__ import annotations

from typing import ClassVar

from worker.models.flat_model import FlatModel


class Qwen2Model(FlatModel):
    """Source: Yang et al. 2024 (Qwen2)."""
    output_has_bias: ClassVar[bool] = False
