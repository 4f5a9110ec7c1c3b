"""The ops of a model as Triton kernels; see worker/models/ops.py, which is their reference.

Does not know models: it unpacks their parts and calls the kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from worker.kernels.add_rms_norm import add_rms_norm
from worker.kernels.argmax import argmax
from worker.kernels.embedding import embedding
from worker.kernels.moe import experts
from worker.kernels.qkv_rope_kv_write import qkv_rope_kv_write
from worker.kernels.quant_linear import quant_linear
from worker.kernels.rows import TRITON_ROW_OPS
from worker.kernels.silu_mul import silu_mul
from worker.models.layers import HeadNorm, RMSNorm
from worker.models.ops import Ops
from worker.quant.weights import QuantWeight
from worker.sampling import device_rows

if TYPE_CHECKING:
    from worker.attention.base import AttentionBackend, BatchMeta


class TritonOps(Ops):
    """Fused kernels, for CUDA devices and Triton's interpreter."""

    rows = TRITON_ROW_OPS
    draw = staticmethod(device_rows.sample)

    def embed(self, ids: Tensor, table: Tensor) -> Tensor:
        return embedding(ids, table)

    def add_norm(self, norm: RMSNorm, residual: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        return add_rms_norm(residual, delta, norm.weight, norm.eps), residual

    def arg_max(self, logits: Tensor) -> Tensor:
        return argmax(logits)

    def silu_mul(self, both: Tensor) -> Tensor:
        return silu_mul(both)

    def rotate_and_write(self, qkv: Tensor, norm: HeadNorm | None, rope: tuple[Tensor, Tensor], num_heads: int,
                         num_kv_heads: int, cache: Any, meta: BatchMeta, backend: AttentionBackend) -> Tensor:
        return qkv_rope_kv_write(qkv, *rope, cache, meta.slot_mapping, num_heads=num_heads,
                                 norm_weight=None if norm is None else norm.weight, eps=norm.eps if norm else 0.0)

    def quant_linear(self, x: Tensor, weight: QuantWeight, bias: Tensor | None) -> Tensor:
        return quant_linear(x, weight, bias)

    def experts(self, x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor | QuantWeight,
                down: Tensor | QuantWeight) -> Tensor:
        return experts(x, ids, weights, gate_up, down)


TRITON_OPS: Ops = TritonOps()
