"""A linear layer over packed weights: y = x W^T + b, for any number of rows.

`PackedLinear` is one or more packed weights side by side (q, k and v of a file may be of different types). The route is
the kernel when numba is there, else torch with the same formula (`torch_linear`, also the tests' reference). The kernel
is row-independent: a row's bits are those it has alone, so choosing a variant by row count never changes a token.
"""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.jit import features
from worker.linear.formats import BLOCK, KIND_NAMES, WIDE_BLOCK, PackedWeight
from worker.linear.pack import unpack


class PackedLinear:
    """Weights stacked along the outputs, all with the same K; bias [num_out] float32 or None.

    pair: outputs of two tensors of one size lie in turn, so many of each; 0: the tensors one after the other.
    """

    def __init__(self, weights: Sequence[PackedWeight], bias: NDArray[np.float32] | None = None, pair: int = 0) -> None:
        widths = {weight.num_k for weight in weights}
        if len(widths) != 1:
            raise ValueError(f"weights of {sorted(widths)} inputs cannot share a linear layer")
        blocks = {weight.block for weight in weights if weight.is_integer} or {BLOCK}
        if len(blocks) != 1:
            raise ValueError(f"weights with scales over {sorted(blocks)} inputs cannot share a linear layer: their "
                             "activations are quantized once")
        self.weights, self.block, self.pair = list(weights), blocks.pop(), pair
        self.num_k = self.weights[0].num_k
        self.num_out = sum(weight.num_out for weight in self.weights)
        # Each weight writes whole tiles; what sticks out is overwritten by the next one, so they run in order.
        starts = np.cumsum([0, *(weight.num_out for weight in self.weights)]).tolist()
        self.starts = starts[:-1]
        self.padded_out = max(start + weight.padded_out for start, weight in zip(self.starts, self.weights))
        self.bias = None
        if bias is not None:
            self.bias = np.zeros(self.padded_out, np.float32)
            self.bias[:self.num_out] = bias
        self.is_integer = any(weight.is_integer for weight in self.weights)
        self.nbytes = sum(weight.nbytes for weight in self.weights)

    @property
    def name(self) -> str:
        return "+".join(dict.fromkeys(weight.name for weight in self.weights))

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, K] float32 -> [M, num_out] float32, a new tensor."""
        if x.dim() != 2 or x.shape[1] != self.num_k:
            raise ValueError(f"x is {list(x.shape)}; this layer takes [rows, {self.num_k}]")
        if features.missing() is not None:
            return torch_linear(self, x)
        from worker.linear.kernel import KernelLinear
        return KernelLinear.of(self)(x)


def quantize_activations(x: Tensor, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """(q [M, K] float32 holding integers -127 .. 127, scale [M, K / block]): blocks and rounding of the kernel. Blocks
    of 64 are rotated: q * scale is x times formats.ROTATION."""
    blocks = x.view(x.shape[0], x.shape[1] // block, block)
    if block == WIDE_BLOCK:
        blocks = _rotated(blocks)
    largest = blocks.abs().amax(-1)
    steps = torch.tensor(127.0)              # a tensor: `127.0 / x` would be a reciprocal and a product, rounded twice
    inverse = torch.where(largest > 1e-36, steps / largest, torch.zeros_like(largest))
    q = torch.round(blocks * inverse[..., None])
    scale = torch.where(torch.isfinite(largest), largest / steps, torch.nan)
    return q.view_as(x), scale * 0.25 if block == WIDE_BLOCK else scale


def _rotated(blocks: Tensor) -> Tensor:
    """[..., 64] times 4 ROTATION, in the kernel's order of sums: pairs 16, 32, 4 and 8 apart."""
    for distance in (16, 32, 4, 8):
        pairs = blocks.unflatten(-1, (-1, 2, distance))
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        blocks = torch.stack((first + second, first - second), -2).flatten(-3)
    return blocks


def torch_linear(layer: PackedLinear, x: Tensor) -> Tensor:
    """The same formula in plain torch: the weights are decoded for the call, so it needs no JIT and much patience."""
    x = x.float().contiguous()
    parts = []
    for weight in layer.weights:
        rows = x
        if weight.is_integer:
            q, scale = quantize_activations(x, layer.block)
            blocks = q.view(*scale.shape, layer.block) * scale[..., None]
            rows = (_rotated(blocks) * 0.25 if layer.block == WIDE_BLOCK else blocks).view_as(x)
        parts.append(rows @ torch.from_numpy(unpack(weight)).T)
    out = torch.cat(parts, 1)
    return out if layer.bias is None else out + torch.from_numpy(layer.bias[:layer.num_out])


def describe(layers: Sequence[PackedLinear]) -> str:
    """"int4_min 76 MiB, int8 29 MiB" for the log."""
    sizes: dict[str, int] = {}
    for layer in layers:
        for weight in layer.weights:
            sizes[KIND_NAMES[weight.kind]] = sizes.get(KIND_NAMES[weight.kind], 0) + weight.nbytes
    return ", ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in sizes.items())
