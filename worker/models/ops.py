"""What a model does between its matrix products, in plain torch: the reference of every fused version of it.

An attention backend brings the ops that suit its device (`backend.ops`), so the same FlatModel runs as torch on a CPU
and as fused kernels on a GPU (worker/kernels/ops.py). Knows shapes of one step's rows; no requests, no weights of its
own.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.models.layers import HeadNorm, RMSNorm, apply_rope
from worker.quant.weights import QuantWeight, dequantize
from worker.row_ops import TORCH_ROW_OPS

if TYPE_CHECKING:
    from worker.attention.base import AttentionBackend, BatchMeta
    from worker.sampling.sampler import SamplingColumns


class Ops:
    """Stateless; one instance serves every model. `rows`: how batches are made on this device."""

    rows = TORCH_ROW_OPS
    # int32 [L] on the device: one token a row of logits [L, V] among the first `width`, as its columns ask; below 0
    # where the row's largest logit is not finite. Nobody waits for the device. None: drawing takes the host.
    draw: Callable[[Tensor, int, SamplingColumns], Tensor] | None = None

    def embed(self, ids: Tensor, table: Tensor) -> Tensor:
        """ids [N], table [V, E] -> [N, E], the step's own copy: the residual stream starts as it."""
        return F.embedding(ids, table)

    def add_norm(self, norm: RMSNorm, residual: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """(norm(residual + delta), residual + delta): the residual add and the norm that follows it. The residual
        stream is updated in place."""
        if delta is not None:
            residual = residual.add_(delta)
        return norm(residual), residual

    def arg_max(self, logits: Tensor) -> Tensor:
        """logits [L, V] -> int32 [L]: the first index of each row's largest; -1 where that is not finite."""
        largest, index = logits.max(-1)
        return torch.where(torch.isfinite(largest), index, -1).int()

    def silu_mul(self, both: Tensor) -> Tensor:
        """both [N, 2F], gate then up -> silu(gate) * up [N, F]."""
        size = both.shape[1] // 2
        return F.silu(both[:, :size]).mul_(both[:, size:])

    def rotate_and_write(self, qkv: Tensor, norm: HeadNorm | None, rope: tuple[Tensor, Tensor], num_heads: int,
                         num_kv_heads: int, cache: Any, meta: BatchMeta, backend: AttentionBackend) -> Tensor:
        """qkv [N, H + 2 Hkv, D] -> rotated q [N, H, D]; k (normed and rotated) and v are in the pool afterwards."""
        num_rotated = num_heads + num_kv_heads
        rotated = qkv[:, :num_rotated]
        if norm is not None:
            rotated = norm(rotated)
        rotated = apply_rope(rotated, *rope)
        backend.write(cache, rotated[:, num_heads:], qkv[:, num_rotated:], meta)
        return rotated[:, :num_heads]

    def quant_linear(self, x: Tensor, weight: QuantWeight, bias: Tensor | None) -> Tensor:
        """x [N, K], weight [out, K] in codes -> [N, out]. Widens the whole weight at every call."""
        return F.linear(x, dequantize(weight).to(x.dtype), bias)

    def experts(self, x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor | QuantWeight,
                down: Tensor | QuantWeight) -> Tensor:
        """x [N, E], ids and weights [N, k], gate_up [X, 2F, E], down [X, E, F] -> [N, E]: the weighted sum of each
        token's experts, accumulated in float32; weights may be codes. Experts without a token are not read; which ones
        those are is asked of the device, so this form waits for it."""
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in ids.unique().tolist():
            tokens, places = (ids == expert).nonzero(as_tuple=True)
            hidden = self.silu_mul(F.linear(x[tokens], _matrix(gate_up, expert, x.dtype)))
            part = F.linear(hidden, _matrix(down, expert, x.dtype)).float() * weights[tokens, places, None]
            out.index_add_(0, tokens, part)
        return out.to(x.dtype)


def _matrix(weights: Tensor | QuantWeight, expert: int, dtype: torch.dtype) -> Tensor:
    """One expert's weights [out, K]."""
    if isinstance(weights, QuantWeight):
        return dequantize(weights.part(expert)).to(dtype)
    return weights[expert]


TORCH_OPS = Ops()
