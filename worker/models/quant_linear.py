"""Linears and experts with narrow weights in place of a model's own: what `--quantization` means on a GPU.

Projections, MLPs and experts become codes; embedding, head, norms and a router stay as they are. One matrix at a time,
so memory peaks at the model's own size. Does not know the formats (worker/quant/weights.py) or how products are
computed.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from worker.models.flat_model import DecoderLayer, FlatModel
from worker.models.layers import Linear, RotaryTables, SparseMLP, empty_weight
from worker.models.ops import Ops
from worker.quant.weights import QuantWeight, groups_of, quantize, quantize_experts


class Codes(nn.Module):
    """A narrow weight as parameters, which move with the model."""

    def __init__(self, made: QuantWeight) -> None:
        super().__init__()
        self.kind, self.group_n, self.group_k = made.kind, made.group_n, made.group_k
        self.codes = nn.Parameter(made.codes, requires_grad=False)
        self.scales = nn.Parameter(made.scales, requires_grad=False)

    def weight(self) -> QuantWeight:
        return QuantWeight(self.kind, self.codes, self.scales, self.group_n, self.group_k)


class QuantLinear(Codes):
    """As Linear, with codes."""

    def __init__(self, made: QuantWeight, bias: Tensor | None, ops: Ops) -> None:
        super().__init__(made)
        self.bias, self._ops = bias, ops

    def forward(self, x: Tensor) -> Tensor:
        """x [N, in] -> [N, out]."""
        return self._ops.quant_linear(x, self.weight(), self.bias)

    def stored(self, sizes: Sequence[int]) -> Iterator[tuple[str, Sequence[Tensor]]]:
        """As Linear's; a part but the last has whole blocks of scales."""
        yield "weight", self.codes.split(list(sizes))
        yield "weight_scale", self.scales.split([-(-size // self.group_n) for size in sizes])
        if self.bias is not None:
            yield "bias", self.bias.split(list(sizes))


class QuantSparseMLP(SparseMLP):
    """As SparseMLP, with codes of the experts."""

    def __init__(self, mlp: SparseMLP, gate_up: QuantWeight, down: QuantWeight) -> None:
        nn.Module.__init__(self)
        self.size, self.num_experts, self.top_k = mlp.size, mlp.num_experts, mlp.top_k
        self.is_normalized, self.gate = mlp.is_normalized, mlp.gate
        self.gate_up_codes, self.down_codes = Codes(gate_up), Codes(down)

    def weights(self) -> tuple[QuantWeight, QuantWeight]:
        return self.gate_up_codes.weight(), self.down_codes.weight()

    def checkpoint_parts(self) -> Iterator[tuple[str, Tensor]]:
        yield "gate.weight", self.gate.weight
        gate_up, down = self.weights()
        for kind, both, last in (("weight", gate_up.codes, down.codes), ("weight_scale", gate_up.scales, down.scales)):
            half = both.shape[1] // 2
            for index in range(self.num_experts):
                yield f"experts.{index}.gate_proj.{kind}", both[index, :half]
                yield f"experts.{index}.up_proj.{kind}", both[index, half:]
                yield f"experts.{index}.down_proj.{kind}", last[index]


def linears_of(layer: DecoderLayer) -> list[tuple[nn.Module, str, Linear]]:
    """(owner, attribute, linear) of those that become narrow: a router does not."""
    return [(module, name, child) for module in layer.modules() if not isinstance(module, SparseMLP)
            for name, child in module.named_children() if isinstance(child, Linear)]


def quantize_linears(model: FlatModel, kind: str, ops: Ops,
                     progress: Callable[[float], None] = lambda fraction: None) -> int:
    """Replace the linears and experts of every layer, in place; how many matrices there were. Raises ConfigError for
    widths that have no whole groups."""
    count, layers = 0, [cast(DecoderLayer, layer) for layer in model.layers]
    for done, layer in enumerate(layers):
        for module, name, child in linears_of(layer):
            setattr(module, name, QuantLinear(quantize(child.weight, kind), child.bias, ops))
            count += 1
        if isinstance(mlp := layer.mlp, SparseMLP):
            layer.mlp = QuantSparseMLP(mlp, quantize_experts(mlp.gate_up, kind), quantize_experts(mlp.down, kind))
            count += 2 * mlp.num_experts
        progress((done + 1) / len(layers))
    return count


def narrow_skeleton(model: FlatModel, kind: str, ops: Ops) -> None:
    """Unfilled codes in place of all that quantize_linears replaces, on the model's own device (meta, say)."""
    def empty(weight: Tensor) -> QuantWeight:
        *experts, num_out, num_k = weight.shape
        group_n, group_k = groups_of(kind, num_k)
        codes = torch.empty((*experts, num_out, num_k), dtype=torch.float8_e4m3fn, device=weight.device)
        scales = torch.empty((*experts, -(-num_out // group_n), -(-num_k // group_k)), device=weight.device)
        return QuantWeight(kind, codes, scales, group_n, group_k)

    for layer in (cast(DecoderLayer, layer) for layer in model.layers):
        for module, name, child in linears_of(layer):
            setattr(module, name, QuantLinear(empty(child.weight), child.bias, ops))
        if isinstance(mlp := layer.mlp, SparseMLP):
            layer.mlp = QuantSparseMLP(mlp, empty(mlp.gate_up), empty(mlp.down))


def materialise(model: FlatModel, device: str) -> None:
    """Memory on the device for every parameter that has none (meta); shared ones stay shared."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                if id(parameter) not in made:
                    made[id(parameter)] = empty_weight(*parameter.shape, dtype=parameter.dtype, device=device)
                module._parameters[name] = made[id(parameter)]
    model.rope = RotaryTables(model.config, device)
