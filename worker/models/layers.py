"""The parts that families are built from: Linear, RMSNorm, rotary positions, gated MLP, experts.

Shapes are those of one step's rows (letters in worker/__init__.py); nothing here knows requests or the pool. A decode
step of a small model is bound by the number of torch calls, so each part is written in as few as it can be.
"""
from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ipc.errors import ConfigError
from ipc.model_config import ModelConfig

if TYPE_CHECKING:
    from worker.models.ops import Ops
    from worker.quant.weights import QuantWeight


def empty_weight(*shape: int, dtype: torch.dtype, device: torch.device | str) -> nn.Parameter:
    """Uninitialised on purpose: a loader writes every element, and proves that it did."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


class Linear(nn.Module):
    """y = x W^T + b. The one seam through which every matmul of a model goes, so that a route with quantised weights
    replaces this class and nothing else."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype,
                 device: torch.device | str) -> None:
        super().__init__()
        self.weight = empty_weight(out_features, in_features, dtype=dtype, device=device)
        self.bias = empty_weight(out_features, dtype=dtype, device=device) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x [N, in] -> [N, out]."""
        return F.linear(x, self.weight, self.bias)

    def stored(self, sizes: Sequence[int]) -> Iterator[tuple[str, Sequence[Tensor]]]:
        """(what a checkpoint calls it, the rows of each part) of parts with so many outputs."""
        yield "weight", self.weight.split(list(sizes))
        if self.bias is not None:
            yield "bias", self.bias.split(list(sizes))


class RMSNorm(nn.Module):
    """x / rms(x) * weight, with the mean of squares in float32 whatever the dtype of x."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.weight = empty_weight(size, dtype=dtype, device=device)
        self.shape, self.eps = (size,), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.shape, self.weight, self.eps)


class HeadNorm(nn.Module):
    """RMSNorm of each head, for query and key heads in one call: one weight row per head, as the two kinds differ."""

    def __init__(self, num_heads: int, head_dim: int, eps: float, *, dtype: torch.dtype,
                 device: torch.device | str) -> None:
        super().__init__()
        self.weight = empty_weight(num_heads, head_dim, dtype=dtype, device=device)
        self.shape, self.eps = (head_dim,), eps

    def forward(self, x: Tensor) -> Tensor:
        """x [N, H + Hkv, D]."""
        return F.rms_norm(x, self.shape, None, self.eps).mul_(self.weight)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), with gate and up as one matmul."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.size, self.hidden_size = config.intermediate_size, config.hidden_size
        self.gate_up_proj = Linear(config.hidden_size, 2 * self.size, bias=False, dtype=dtype, device=device)
        self.down_proj = Linear(self.size, config.hidden_size, bias=False, dtype=dtype, device=device)

    def forward(self, x: Tensor, ops: Ops) -> Tensor:
        """x [N, E] -> [N, E]."""
        return self.down_proj(ops.silu_mul(self.gate_up_proj(x)))

    def checkpoint_parts(self) -> Iterator[tuple[str, Tensor]]:
        """(name in the checkpoint, the rows it fills)."""
        for kind, (gate, up) in self.gate_up_proj.stored([self.size, self.size]):
            yield f"gate_proj.{kind}", gate
            yield f"up_proj.{kind}", up
        for kind, (down,) in self.down_proj.stored([self.hidden_size]):
            yield f"down_proj.{kind}", down


class SparseMLP(nn.Module):
    """A mixture of experts: a router gives each token its `top_k` experts and their weights, each expert is a gated
    MLP, the token gets the weighted sum. All experts are two tensors, so that one launch serves them all.

    Source: Shazeer et al. 2017; Yang et al. 2025 (Qwen3-MoE).
    """

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.size, self.num_experts = config.moe_intermediate_size, config.num_experts
        self.top_k, self.is_normalized = config.num_experts_per_tok, config.norm_topk_prob
        self.gate = Linear(config.hidden_size, self.num_experts, bias=False, dtype=dtype, device=device)
        self.gate_up = empty_weight(self.num_experts, 2 * self.size, config.hidden_size, dtype=dtype, device=device)
        self.down = empty_weight(self.num_experts, config.hidden_size, self.size, dtype=dtype, device=device)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [N, E] -> (expert ids [N, k] int64, their weights [N, k] float32)."""
        weights, ids = torch.topk(torch.softmax(self.gate(x), -1, dtype=torch.float32), self.top_k, dim=-1)
        return ids, weights / weights.sum(-1, keepdim=True) if self.is_normalized else weights

    def forward(self, x: Tensor, ops: Ops) -> Tensor:
        """x [N, E] -> [N, E]."""
        return ops.experts(x, *self.route(x), *self.weights())

    def weights(self) -> tuple[Tensor | QuantWeight, Tensor | QuantWeight]:
        """(gate_up [X, 2F, E], down [X, E, F])."""
        return self.gate_up, self.down

    def checkpoint_parts(self) -> Iterator[tuple[str, Tensor]]:
        """(name in the checkpoint, the part it fills): three matrices of each expert."""
        yield "gate.weight", self.gate.weight
        for index in range(self.num_experts):
            yield f"experts.{index}.gate_proj.weight", self.gate_up[index, :self.size]
            yield f"experts.{index}.up_proj.weight", self.gate_up[index, self.size:]
            yield f"experts.{index}.down_proj.weight", self.down[index]


def rope_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """(frequencies [D/2] float32, factor on cos and sin). Always computed on the CPU: a float32 power differs in its
    last bit between devices, and that bit grows with the position.

    Sources: Su et al. 2021 (RoPE); Peng et al. 2023 (YaRN); the Llama 3.1 model card.
    """
    dim, base = config.head_dim, config.rope_theta
    powers = base ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
    frequencies = 1.0 / powers
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies, 1.0
    kind = scaling.get("rope_type")
    if kind == "linear":
        return frequencies / scaling["factor"], 1.0
    if kind == "divisors":
        return frequencies / torch.tensor(scaling["divisors"], dtype=torch.float32), 1.0
    if kind == "llama3":
        return _llama3(frequencies, scaling), 1.0
    if kind == "yarn":
        return _yarn(powers, dim, base, scaling), float(scaling["attention_factor"])
    raise ConfigError(f"rope_type {kind!r} is not supported; supported: linear, llama3, yarn")


def _llama3(frequencies: Tensor, scaling: dict[str, float]) -> Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between are a mix."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / frequencies
    stretched = frequencies / scaling["factor"]
    smooth = (original / wavelengths - low) / (high - low)
    mixed = (1 - smooth) * frequencies / scaling["factor"] + smooth * frequencies
    result = torch.where(wavelengths > original / low, stretched, mixed)
    return torch.where(wavelengths < original / high, frequencies, result)


def _yarn(powers: Tensor, dim: int, base: float, scaling: dict[str, float]) -> Tensor:
    """A linear ramp, over the dimensions, from kept to stretched frequencies."""
    def dimension_of(rotations: float) -> float:
        turns = scaling["original_max_position_embeddings"] / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(base))
    first, last = dimension_of(scaling["beta_fast"]), dimension_of(scaling["beta_slow"])
    if scaling["truncate"]:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    keep = 1 - ramp
    return 1.0 / (scaling["factor"] * powers) * (1 - keep) + 1.0 / powers * keep


class RotaryTables(nn.Module):
    """cos and sin of the rows of one step. Computed once per step, not per layer, and not for positions that never
    come: a full table of a 128k-token model is 64 MB that a cache does not hold."""

    frequencies: Tensor

    def __init__(self, config: ModelConfig, device: torch.device | str) -> None:
        super().__init__()
        frequencies, self.factor = rope_frequencies(config)
        self.register_buffer("frequencies", frequencies.to(device), persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions [N] -> cos, sin [N, 1, D]. The first half of sin is negated, see `apply_rope`."""
        angles = positions[:, None, None] * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        if self.factor != 1.0:
            cos, sin = cos * self.factor, sin * self.factor
        return cos.to(dtype), sin.to(dtype)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + D/2) of every head. x [N, heads, D], query and key heads together.

    x cos + (-x2, x1) sin is written as x cos + roll(x) (-sin, sin): three calls, and no negation of x.
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
