"""Published fp8 checkpoints: e4m3 codes, and beside each matrix its scales under one of two names.

    NAME.weight              F8_E4M3 [out, K]
    NAME.weight_scale_inv    [ceil(out / bn), ceil(K / bk)]     block by block (DeepSeek-AI 2024)
    NAME.weight_scale        the same, or [out, 1], or one number (compressed-tensors)

Either name is what a code is multiplied by. Where the device computes with e4m3, matrices stay as they are; elsewhere
they are widened while they are read. Scales of activations are not used: products are of narrow weights only. Knows
names and shapes; the reading is parallel_read.py's.
"""
from __future__ import annotations

from collections.abc import Mapping

from ipc.errors import ConfigError
from worker.models.checkpoint import Slot
from worker.models.parallel_read import Scales, read_bytes
from worker.models.safetensors_header import LOADABLE, StoredTensor
from worker.quant.weights import FP8, FP8_BLOCK, FP8_PER_BLOCK

SCALE_SUFFIXES = (".weight_scale_inv", ".weight_scale")
IGNORED_SUFFIXES = (".input_scale", ".activation_scale", ".k_scale", ".v_scale")
CODES = "F8_E4M3"


def split_scales(tensors: dict[str, StoredTensor]) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor]]:
    """(weights and all else, scales by the name of their weight). Raises ConfigError for codes without scales, and for
    scales without codes."""
    scales = {name.removesuffix(suffix) + ".weight": tensor for name, tensor in tensors.items()
              for suffix in SCALE_SUFFIXES if name.endswith(suffix)}
    rest = {name: tensor for name, tensor in tensors.items() if not name.endswith(SCALE_SUFFIXES + IGNORED_SUFFIXES)}
    for name, tensor in rest.items():
        if tensor.dtype == CODES and name not in scales:
            raise ConfigError(f"{tensor.file}: tensor {name}: expected its scale beside it "
                              f"({name}_scale_inv or {name}_scale), found nothing")
    for name, tensor in scales.items():
        found = rest[name].dtype if name in rest else "nothing"
        if found != CODES:
            raise ConfigError(f"{tensor.file}: the scale of {name}: expected {CODES} weights, found {found}")
    return rest, scales


def kind_to_keep(tensors: Mapping[str, StoredTensor], slots: Mapping[str, Slot], block: list[int]
                 ) -> tuple[str | None, str]:
    """(kind of narrow weights, "") if all matrices of the layers can stay as they are, else (None, why not)."""
    if block not in ([], [FP8_BLOCK, FP8_BLOCK]):
        return None, f"scales cover blocks of {block[0]} x {block[1]}, products take {FP8_BLOCK} x {FP8_BLOCK}"
    for name, slot in slots.items():
        if not name.startswith("model.layers.") or len(slot.shape) != 2 or name.endswith(".mlp.gate.weight"):
            continue
        if name not in tensors or tensors[name].dtype != CODES:
            return None, f"{name} is not {CODES}"
        is_followed = name.endswith(("q_proj.weight", "k_proj.weight", "gate_proj.weight"))     # in one matrix
        if block and is_followed and slot.shape[0] % FP8_BLOCK:
            return None, f"{name} has {slot.shape[0]} outputs, which is no multiple of {FP8_BLOCK}"
    return (FP8_PER_BLOCK if block else FP8), ""


def read_scales(name: str, stored: StoredTensor, shape: tuple[int, ...], block: list[int]) -> Scales:
    """Those of the weight `name`, whose shape is [out, K]; one for each output or block. Raises ConfigError."""
    num_out, num_k = shape
    if stored.dtype not in LOADABLE:
        raise ConfigError(f"{stored.file}: the scale of {name}: expected dtype {', '.join(LOADABLE)}, "
                          f"found {stored.dtype}")
    values = read_bytes(stored.file, stored.offset, stored.nbytes).view(LOADABLE[stored.dtype]).float()
    if block:
        group_n, group_k = block
        expected: tuple[int, ...] = (-(-num_out // group_n), -(-num_k // group_k))
        if stored.shape != expected:
            raise ConfigError(f"{stored.file}: the scale of {name}: expected shape {list(expected)}, "
                              f"found {list(stored.shape)}")
        return Scales(values.view(expected), group_n, group_k)
    if values.numel() not in (1, num_out):
        raise ConfigError(f"{stored.file}: the scale of {name}: expected 1 or {num_out} numbers, found "
                          f"{list(stored.shape)}")
    return Scales(values.view(-1, 1).expand(num_out, 1).contiguous(), 1, num_k)
