"""The linears of a model, replaced by narrow ones after loading: what `--quantization` means on a GPU.

Projections and MLPs become codes; embedding, head, norms and a router stay as they are. One linear at a time, so memory
peaks at the model's own size. Does not know the formats (worker/quant/weights.py) or how products are computed.
"""
from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from ipc.errors import ConfigError
from worker.models.flat_model import FlatModel
from worker.models.layers import Linear
from worker.models.ops import Ops
from worker.quant.weights import QuantWeight, quantize

class QuantLinear(nn.Module):
    """As Linear, with codes."""

    def __init__(self, linear: Linear, kind: str, ops: Ops) -> None:
        super().__init__()
        made = quantize(linear.weight, kind)
        self.kind, self.group_n, self.group_k = made.kind, made.group_n, made.group_k
        self.codes = nn.Parameter(made.codes, requires_grad=False)
        self.scales = nn.Parameter(made.scales, requires_grad=False)
        self.bias, self._ops = linear.bias, ops

    def forward(self, x: Tensor) -> Tensor:
        """x [N, in] -> [N, out]."""
        weight = QuantWeight(self.kind, self.codes, self.scales, self.group_n, self.group_k)
        return self._ops.quant_linear(x, weight, self.bias)


def quantize_linears(model: FlatModel, kind: str, ops: Ops,
                     progress: Callable[[float], None] = lambda fraction: None) -> int:
    """Replace the linears of every layer, in place; how many there were. Raises ConfigError for experts."""
    if model.config.num_experts:
        raise ConfigError(f"--quantization {kind} does not cover mixtures of experts; use --quantization none")
    found = [(module, name, child) for layer in model.layers for module in layer.modules()
             for name, child in module.named_children() if isinstance(child, Linear)]
    for done, (module, name, child) in enumerate(found):
        setattr(module, name, QuantLinear(child, kind, ops))
        progress((done + 1) / len(found))
    return len(found)
