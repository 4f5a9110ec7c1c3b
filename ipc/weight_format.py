"""How a checkpoint's weights are stored when not as plain numbers: reads `quantization_config` of a config.json.

Knows the methods' names and settings; no tensors. Everything but 8-bit floats is refused by name.
"""
from __future__ import annotations

from typing import Any

from ipc.errors import ConfigError

SUPPORTED = "fp8, compressed-tensors of 8-bit floats, and GGUF files"
FLOAT_FORMATS = ("float-quantized", "naive-quantized")


def read_fp8_block(raw: dict[str, Any], where: str) -> list[int] | None:
    """None: plain weights. Else they are e4m3 codes, and a scale covers [outputs, inputs] of them; [] is one scale for
    each output or for a whole tensor, which the file shows. `raw` is config.json, `where` names it in errors.

    Raises ConfigError.
    """
    found = raw.get("quantization_config") or raw.get("compression_config")
    if found is None:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else found
    if method == "fp8":
        if found.get("fmt", "e4m3") != "e4m3":
            raise _refuse(where, f"quantization_config.fmt is {found['fmt']!r}; only e4m3 is")
        return _block(found.get("weight_block_size"), where)
    if method == "compressed-tensors":
        return _compressed(found, where)
    raise _refuse(where, f"weights stored by {method!r} (quantization_config.quant_method) are not")


def _refuse(where: str, what: str) -> ConfigError:
    return ConfigError(f"{where}: {what} supported; supported are {SUPPORTED}; use one of these or the unquantised "
                       "model")


def _block(found: Any, where: str) -> list[int]:
    if found is None:
        return []
    if not isinstance(found, list) or len(found) != 2 or any(type(size) is not int or size < 1 for size in found):
        raise ConfigError(f"{where}: quantization_config: weight_block_size: expected two whole numbers, found "
                          f"{repr(found)[:80]}")
    return found


def _compressed(found: dict[str, Any], where: str) -> list[int]:
    """All groups must say the same of their weights; what they say of activations concerns no weight-only product."""
    if found.get("format", FLOAT_FORMATS[0]) not in FLOAT_FORMATS:
        raise _refuse(where, f"compressed-tensors of format {found['format']!r} are not")
    groups = found.get("config_groups")
    if not isinstance(groups, dict) or not groups or not all(isinstance(group, dict) for group in groups.values()):
        raise ConfigError(f"{where}: quantization_config: config_groups: expected an object of groups, found "
                          f"{repr(groups)[:80]}")
    blocks = []
    for group in groups.values():
        weights = group.get("weights") or {}
        kind = weights.get("num_bits"), weights.get("type"), weights.get("symmetric", True)
        if kind != (8, "float", True):
            raise _refuse(where, f"compressed-tensors of {kind[0]} bits, type {kind[1]!r}"
                                 f"{'' if kind[2] else ', asymmetric,'} are not")
        strategy = weights.get("strategy", "tensor")
        if strategy not in ("tensor", "channel", "block"):
            raise _refuse(where, f"compressed-tensors with scales by {strategy!r} are not")
        blocks.append(_block(weights.get("block_structure") if strategy == "block" else None, where))
    if any(block != blocks[0] for block in blocks):
        raise _refuse(where, "compressed-tensors with blocks of several sizes are not")
    return blocks[0]
