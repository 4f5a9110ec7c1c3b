"""Qwen3-MoE: the Qwen3 block whose MLP is a mixture of experts in the layers that the config says."""
from __future__ import annotations

from worker.models.flat_model import FlatModel


class Qwen3MoeModel(FlatModel):
    """Source: Yang et al. 2025 (Qwen3)."""
