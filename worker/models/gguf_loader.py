"""Fill a model from a GGUF file: decode the blocks, undo the converter's row order, copy into the fused parameters.

Decoding is numpy on chunks of about a megabyte, in threads (numpy and torch release the GIL), with torch's own pool
reduced to one thread meanwhile: many small parallel copies spend their time waiting for each other. Peak memory is the
model plus one chunk per thread.
"""
from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ipc.errors import ConfigError
from ipc.gguf import GGUFTensor, read_gguf
from worker.models.checkpoint import Found, Progress, Slot, check_tensors
from worker.models.flat_model import FlatModel
from worker.models.layers import SparseMLP
from worker.quant.gguf_blocks import FORMATS, dequantize

CHUNK_ELEMENTS = 1 << 18
MAX_THREADS = 8
GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
}


def gguf_name(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` -> `blk.3.ffn_up.weight`."""
    stem, kind = name.rsplit(".", 1)
    if stem in GGUF_NAMES:
        return f"{GGUF_NAMES[stem]}.{kind}"
    _, _, index, part = stem.split(".", 3)
    return f"blk.{index}.{GGUF_NAMES[part]}.{kind}"


def gguf_slots(model: FlatModel) -> dict[str, Slot]:
    """The model's slots by their GGUF names. All experts of a layer are one tensor of each kind, [X, out, K]."""
    slots = {gguf_name(name): slot for name, slot in model.checkpoint_slots().items() if ".mlp.experts." not in name}
    for index, layer in enumerate(model.layers):
        if isinstance(mlp := layer.mlp, SparseMLP):
            for part, target in (("gate", mlp.gate_up[:, :mlp.size]), ("up", mlp.gate_up[:, mlp.size:]),
                                 ("down", mlp.down)):
                slots[f"blk.{index}.ffn_{part}_exps.weight"] = Slot(tuple(target.shape), target)
    return slots


class Chunk(NamedTuple):
    """Some rows of a tensor. `head_dim` is not 0 where the rows of each head are in the converter's order."""
    ggml_type: str
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    target: Tensor
    head_dim: int


def load_gguf(model: FlatModel, path: str, progress: Progress) -> None:
    """Decode every tensor into its slot. Raises ConfigError before the first one."""
    file = read_gguf(path)
    slots = gguf_slots(model)
    # The divisors are part of the config already; a tied head is the embedding.
    ignored = {"rope_freqs.weight"} | ({"output.weight"} if model.config.tie_word_embeddings else set())
    tensors = {name: tensor for name, tensor in file.tensors.items() if name not in ignored}
    check_tensors(path, {name: Found(path, tensor.shape) for name, tensor in tensors.items()}, slots)
    for name, tensor in tensors.items():
        if tensor.ggml_type not in FORMATS:
            raise ConfigError(f"{path}: tensor {name}: expected type {', '.join(FORMATS)}, found {tensor.ggml_type}")
    permuted = model.config.head_dim if model.gguf_permutes_qk else 0
    chunks = (chunk for name, tensor in tensors.items() for chunk in _chunks(
        tensor, slots[name], permuted if ".attn_q." in name or ".attn_k." in name else 0))
    total, done = sum(tensor.nbytes for tensor in tensors.values()), 0
    with open(path, "rb") as handle:
        data = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
    pool_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(min(MAX_THREADS, len(os.sched_getaffinity(0)))) as pool:
            for nbytes in pool.map(lambda chunk: _fill(data, chunk), chunks):
                done += nbytes
                # Once per percent: a large model has tens of thousands of chunks.
                if done == total or done * 100 // total != (done - nbytes) * 100 // total:
                    progress(done / total)
    finally:
        torch.set_num_threads(pool_threads)


def _chunks(tensor: GGUFTensor, slot: Slot, head_dim: int) -> Iterator[Chunk]:
    """Whole rows, whole heads where rows must be reordered; a vector is one chunk, experts come one by one."""
    if len(tensor.shape) == 3:
        nbytes = tensor.nbytes // tensor.shape[0]
        for index, target in enumerate(slot.target):
            one = tensor._replace(shape=tensor.shape[1:], offset=tensor.offset + index * nbytes, nbytes=nbytes)
            yield from _chunks(one, Slot(one.shape, target), head_dim)
        return
    if len(tensor.shape) == 1:
        yield Chunk(tensor.ggml_type, tensor.offset, tensor.nbytes, tensor.shape, slot.target, head_dim)
        return
    num_rows, width = tensor.shape
    row_bytes, unit = tensor.nbytes // num_rows, head_dim or 1
    step = max(1, CHUNK_ELEMENTS // (width * unit)) * unit
    for start in range(0, num_rows, step):
        rows = min(step, num_rows - start)
        yield Chunk(tensor.ggml_type, tensor.offset + start * row_bytes, rows * row_bytes, (rows, width),
                    slot.target[start:start + rows], head_dim)


def _fill(data: mmap.mmap, chunk: Chunk) -> int:
    """In a pool thread: decode one chunk into its place. Returns its bytes in the file.

    Rotation pairs dimension i with i + D/2, llama.cpp's rotation neighbours: its converter stores the rows of a head as
    0, D/2, 1, D/2 + 1, ...; they go back here.
    """
    raw = np.frombuffer(data, np.uint8, chunk.nbytes, chunk.offset)
    target = chunk.target
    in_place = (target.device.type == "cpu" and target.dtype == torch.float32 and target.is_contiguous()
                and tuple(target.shape) == chunk.shape and not chunk.head_dim)
    out: NDArray[np.float32] = target.numpy() if in_place else np.empty(chunk.shape, np.float32)
    dequantize(raw, chunk.ggml_type, out)
    if not in_place:
        source = torch.from_numpy(out)
        if chunk.head_dim:
            source = source.view(-1, chunk.head_dim // 2, 2, *chunk.shape[1:]).transpose(1, 2).reshape(chunk.shape)
        target.copy_(source)
    return chunk.nbytes
