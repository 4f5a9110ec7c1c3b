"""Fill a model from a folder of safetensors files.

Each tensor is read straight into its fused parameter by several threads, converted on the way, on the device if that is
where the model is (parallel_read.py). Of fp8 checkpoints see fp8_checkpoint.py.
"""
from __future__ import annotations

import logging

import torch

from ipc.errors import ConfigError
from worker.models.checkpoint import Found, Progress, Slot, check_tensors
from worker.models.flat_model import FlatModel
from worker.models.fp8_checkpoint import CODES, kind_to_keep, read_scales, split_scales
from worker.models.parallel_read import ParallelReader, Piece
from worker.models.safetensors_header import LOADABLE, StoredTensor, read_folder

logger = logging.getLogger("worker")

SCALE = ".weight_scale"                         # of a narrow weight's slot


def read_tensors(model: FlatModel, folder: str) -> dict[str, StoredTensor]:
    """Those of the folder that the model may need. Raises ConfigError."""
    # A tied head is the embedding; old checkpoints carry the rotary frequencies, ours follow from the config.
    ignored = "lm_head.weight" if model.config.tie_word_embeddings else None
    return {name: tensor for name, tensor in read_folder(folder).items()
            if not (ignored and name.startswith(ignored)) and not name.endswith("rotary_emb.inv_freq")}


def kind_in_file(model: FlatModel, folder: str) -> str | None:
    """The kind of narrow weights that the model can take from the file as they are; None: none. `model` may be without
    memory. Raises ConfigError."""
    if model.config.fp8_block is None:
        return None
    kind, reason = kind_to_keep(split_scales(read_tensors(model, folder))[0], model.checkpoint_slots(),
                                model.config.fp8_block)
    if kind is None:
        logger.info("fp8 weights are widened: %s", reason)
    return kind


def load_safetensors(model: FlatModel, folder: str, progress: Progress) -> None:
    """Read every tensor into its slot, in file order. Raises ConfigError before the first copy."""
    tensors, scales = read_tensors(model, folder), dict[str, StoredTensor]()
    if model.config.fp8_block is not None:
        tensors, scales = split_scales(tensors)
    slots = model.checkpoint_slots()
    check_tensors(folder, {name: Found(tensor.file, tensor.shape) for name, tensor in tensors.items()},
                  {name: slot for name, slot in slots.items() if not name.endswith(SCALE)})
    known = {**LOADABLE, CODES: torch.float8_e4m3fn} if scales else LOADABLE
    for name, tensor in tensors.items():
        if tensor.dtype not in known:
            raise ConfigError(f"{tensor.file}: tensor {name}: expected dtype {', '.join(known)}, "
                              f"found {tensor.dtype}")
    pieces = [_piece(name, tensor, scales.get(name), slots, known[tensor.dtype], model.config.fp8_block or [])
              for name, tensor in tensors.items()]
    pieces.sort(key=lambda piece: (piece.file, piece.offset))
    ParallelReader(model.embed_tokens.device).read(pieces, progress)


def _piece(name: str, tensor: StoredTensor, scale: StoredTensor | None, slots: dict[str, Slot], dtype: torch.dtype,
           block: list[int]) -> Piece:
    """What is to be read; scales are read here, beside codes that stay or to widen them."""
    target = slots[name].target
    scales = None if scale is None else read_scales(name, scale, tensor.shape, block)
    kept = slots.get(name.removesuffix(".weight") + SCALE)
    if scales is not None and kept is not None:
        kept.target.copy_(scales.values)
        scales = None
    elif scales is not None:
        scales = scales._replace(values=scales.values.to(target.device))
    return Piece(tensor.file, tensor.offset, tensor.nbytes, dtype, tensor.shape, target, scales)
