"""Where packed weights come from: a loaded torch model, or a GGUF file read block by block.

`linear(names)` gives one layer for checkpoint tensors stacked along the outputs (q, k and v; gate and up), `vector` a
small float32 tensor. Mode says what the weights become:

    none   float32, or bfloat16 where they are bfloat16 already: exact
    int8   blocks of 64, rotated, int8 (a Q8_0 tensor of a file stays as it is)
    int4   blocks of 32, 4 bits (Q4_0 and Q4_1 tensors stay as they are); the output head int8
           (a Q8_0 head as it is)
    keep   what the file holds: Q4_0, Q4_1 and Q8_0 blocks unchanged, other quantized types as int8, floats as floats

Tensors of one layer share their quantized activations: beside a file's blocks of 32, int8 is made in blocks of 32 too.
"""
from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ipc.errors import ConfigError
from ipc.gguf import GGUFTensor, read_gguf
from ipc.model_config import ModelConfig
from worker.linear.formats import BLOCK, PackedWeight
from worker.linear.pack import pack_bfloat16, pack_float32, pack_gguf, quantize_int4, quantize_int8, unpack
from worker.linear.route import PackedLinear
from worker.models.checkpoint import Found, Slot, check_tensors
from worker.models.flat_model import FlatModel
from worker.models.gguf_loader import gguf_name
from worker.process_memory import discard
from worker.quant.gguf_blocks import FORMATS, dequantize

MODES = ("none", "int8", "int4", "keep")
FLOAT_TYPES = ("F32", "F16", "BF16")
# 4 bits hurt the head more than any other tensor, and tied embeddings with it.
_FINE_NAMES = ("lm_head.weight", "model.embed_tokens.weight")
_CHUNK_ROWS = 4096
_AS_STORED = {"keep": ("Q8_0", "Q4_0", "Q4_1"), "int4": ("Q4_0", "Q4_1"), "int8": ("Q8_0",), "none": ()}


class WeightSource(Protocol):
    """What a compiled model is built from."""

    config: ModelConfig

    def linear(self, names: Sequence[str], pair: int = 0) -> PackedLinear:
        """Checkpoint weights `names`, stacked, with their biases where they have any. pair: two of them, their outputs
        in turn, so many of each; only where one packed weight holds both (PackedLinear.pair)."""

    def vector(self, name: str) -> NDArray[np.float32]:
        """A one-dimensional tensor."""


def pack_floats(weight: NDArray[np.float32], mode: str, name: str, *, wide: bool = True) -> PackedWeight:
    """A float32 weight in this mode."""
    if mode == "int8" or (mode == "int4" and name in _FINE_NAMES):
        return quantize_int8(weight, wide=wide)
    return quantize_int4(weight) if mode == "int4" else pack_float32(weight)


def _bias(name: str) -> str:
    return name.removesuffix("weight") + "bias"


def _stacked(parts: Sequence[NDArray[Any]], pair: int) -> Any:
    """The rows of all parts, or of two in turn, `pair` of each; None of none."""
    if not parts:
        return None
    if not pair:
        return np.concatenate(parts)
    return np.stack([part.reshape(-1, pair, *part.shape[1:]) for part in parts], 1).reshape(-1, *parts[0].shape[1:])


class ModelSource:
    """The parameters of a FlatModel, which must stay loaded until the last call.

    consume: a weight's memory is given back as soon as it is packed, so that no more than one layer is held twice; the
    model is then of no further use.
    """

    def __init__(self, model: FlatModel, mode: str = "none", *, consume: bool = False) -> None:
        if mode not in MODES:
            raise ValueError(f"mode {mode!r} is not known; known: {', '.join(MODES)}")
        self.config, self.mode, self._consume = model.config, mode, consume
        self._slots = model.checkpoint_slots()
        if model.config.tie_word_embeddings:
            self._slots["lm_head.weight"] = self._slots["model.embed_tokens.weight"]

    def linear(self, names: Sequence[str], pair: int = 0) -> PackedLinear:
        targets = [self._slots[name].target for name in names]
        if pair:
            targets = [part for parts in zip(*(target.split(pair) for target in targets)) for part in parts]
        weight = torch.cat(targets) if len(targets) > 1 else targets[0]
        biases = [self.vector(_bias(name)) for name in names if _bias(name) in self._slots]
        packed = PackedLinear([self._pack(weight, names[0])], _stacked(biases, pair), pair)
        if self._consume:
            for name in names:
                target = self._slots[name].target
                discard(target.data_ptr(), target.numel() * target.element_size())
        return packed

    def _pack(self, weight: torch.Tensor, name: str) -> PackedWeight:
        if self.mode in ("none", "keep") and weight.dtype == torch.bfloat16:
            bits = weight.contiguous().view(torch.int16).numpy().view(np.uint16)
            return pack_bfloat16(bits)
        return pack_floats(weight.float().numpy(), self.mode, name)

    def vector(self, name: str) -> NDArray[np.float32]:
        slot: Slot = self._slots[name]
        # A head norm is one row per head in the model, and one row in the checkpoint.
        target = slot.target if slot.target.dim() == len(slot.shape) else slot.target[0]
        return np.ascontiguousarray(target.float().numpy())


class GGUFSource:
    """Tensors of a GGUF file, packed straight from the mapping: peak memory is the packed model."""

    def __init__(self, model: FlatModel, path: str, mode: str = "keep") -> None:
        """model: of the right family and config, on the meta device; it says which tensors there must be.

        Raises ConfigError for a file that does not match.
        """
        if mode not in MODES:
            raise ValueError(f"mode {mode!r} is not known; known: {', '.join(MODES)}")
        self.config, self.mode, self._path = model.config, mode, path
        slots = {gguf_name(name): slot for name, slot in model.checkpoint_slots().items()}
        tied = model.config.tie_word_embeddings
        ignored = {"rope_freqs.weight"} | ({"output.weight"} if tied else set())
        self._tensors = {name: tensor for name, tensor in read_gguf(path).tensors.items() if name not in ignored}
        check_tensors(path, {name: Found(path, tensor.shape) for name, tensor in self._tensors.items()}, slots)
        for name, tensor in self._tensors.items():
            if tensor.ggml_type not in FORMATS:
                raise ConfigError(f"{path}: tensor {name}: expected type {', '.join(FORMATS)}, "
                                  f"found {tensor.ggml_type}")
        if tied:
            self._tensors["output.weight"] = self._tensors["token_embd.weight"]
        self._permuted = model.config.head_dim if model.gguf_permutes_qk else 0
        with open(path, "rb") as handle:
            self._data = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)

    def linear(self, names: Sequence[str], pair: int = 0) -> PackedLinear:
        tensors = [self._tensors[gguf_name(name)] for name in names]
        biases = [self.vector(_bias(name)) for name in names if gguf_name(_bias(name)) in self._tensors]
        if len({tensor.ggml_type for tensor in tensors}) > 1:
            pair = 0
        weights: list[PackedWeight] = []
        wide = not any(self._is_kept(tensor, name) for tensor, name in zip(tensors, names))
        at = 0
        while at < len(tensors):                # neighbours of one type become one weight
            end = at + 1
            while end < len(tensors) and tensors[end].ggml_type == tensors[at].ggml_type:
                end += 1
            weights.append(self._pack(tensors[at:end], names[at], wide, pair))
            at = end
        for tensor in tensors:
            self._forget(tensor)
        return PackedLinear(weights, _stacked(biases, pair), pair)

    def _is_kept(self, tensor: GGUFTensor, name: str) -> bool:
        """Whether the kernels take its blocks as they are."""
        is_fine = self.mode == "int4" and name in _FINE_NAMES
        return tensor.ggml_type in _AS_STORED[self.mode] or (is_fine and tensor.ggml_type == "Q8_0")

    def _pack(self, tensors: Sequence[GGUFTensor], name: str, wide: bool, pair: int) -> PackedWeight:
        kind, num_k = tensors[0].ggml_type, tensors[0].shape[1]
        if self._is_kept(tensors[0], name) and num_k % BLOCK == 0:
            return pack_gguf(_stacked([self._rows(tensor) for tensor in tensors], pair), kind, num_k)
        mode = self.mode if self.mode != "keep" else "none" if kind in FLOAT_TYPES else "int8"
        if kind == "BF16" and mode == "none":
            rows = _stacked([self._rows(tensor) for tensor in tensors], pair)
            return pack_bfloat16(rows.view("<u2").reshape(-1, num_k))
        return pack_floats(_stacked([self._floats(tensor) for tensor in tensors], pair), mode, name, wide=wide)

    def _forget(self, tensor: GGUFTensor) -> None:
        """Its pages of the mapping no longer count as this process's memory; read again, they come back."""
        start = tensor.offset // mmap.PAGESIZE * mmap.PAGESIZE
        if hasattr(mmap, "MADV_DONTNEED"):
            self._data.madvise(mmap.MADV_DONTNEED, start, tensor.offset + tensor.nbytes - start)

    def _rows(self, tensor: GGUFTensor) -> NDArray[np.uint8]:
        """The bytes of each row, in the checkpoint's order (see gguf_loader: rotated heads are stored permuted)."""
        raw = np.frombuffer(self._data, np.uint8, tensor.nbytes, tensor.offset).reshape(tensor.shape[0], -1)
        if self._permuted and (".attn_q." in tensor.name or ".attn_k." in tensor.name):
            half = self._permuted // 2
            raw = raw.reshape(-1, half, 2, raw.shape[1]).transpose(0, 2, 1, 3).reshape(raw.shape)
        return raw

    def _floats(self, tensor: GGUFTensor) -> NDArray[np.float32]:
        out = np.empty(tensor.shape, np.float32)
        rows = self._rows(tensor)
        for start in range(0, len(rows), _CHUNK_ROWS):
            part = np.ascontiguousarray(rows[start:start + _CHUNK_ROWS]).reshape(-1)
            dequantize(part, tensor.ggml_type, out[start:start + _CHUNK_ROWS])
        return out

    def vector(self, name: str) -> NDArray[np.float32]:
        tensor = self._tensors[gguf_name(name)]
        raw = np.frombuffer(self._data, np.uint8, tensor.nbytes, tensor.offset)
        out = np.empty(tensor.shape, np.float32)
        dequantize(np.ascontiguousarray(raw), tensor.ggml_type, out)
        if self._permuted and (".attn_q." in tensor.name or ".attn_k." in tensor.name):
            out = out.reshape(-1, self._permuted // 2, 2).transpose(0, 2, 1).reshape(-1)
        return out


def dequantized(layer: PackedLinear) -> NDArray[np.float32]:
    """The float32 weight that a layer stands for, [num_out, K], its tensors one after the other."""
    rows: NDArray[np.float32] = np.concatenate([unpack(weight) for weight in layer.weights])
    if layer.pair:
        rows = rows.reshape(-1, 2, layer.pair, layer.num_k).swapaxes(0, 1).reshape(rows.shape)
    return rows
