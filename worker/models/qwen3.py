"""Qwen3 (dense): every query and key head is normed before rotation (`qk_norm` of the config)."""
from __future__ import annotations

from worker.models.flat_model import FlatModel


class Qwen3Model(FlatModel):
    """Source: Yang et al. 2025 (Qwen3)."""
