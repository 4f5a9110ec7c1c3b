"""What a folder of safetensors files offers: headers, read and checked before anything else is.

Knows the format; no model.
"""
from __future__ import annotations

import json
import os
from typing import Any, NamedTuple

import torch

from ipc.errors import ConfigError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
MAX_HEADER_BYTES = 100_000_000        # the limit of the format
MAX_DIMS = 8

LOADABLE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4,
              "U16": 2, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "C64": 8}


class StoredTensor(NamedTuple):
    """Where a tensor lies; `offset` is from the start of the file."""
    file: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_safetensors_header(path: str) -> dict[str, StoredTensor]:
    """Every tensor of one file, checked: inside the file, of the size its shape says, none overlapping, no gaps.

    Raises ConfigError, one line.
    """
    def fail(field: str, expected: object, found: object) -> ConfigError:
        return ConfigError(f"{path}: {field}: expected {expected}, found {found}")

    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            limit = min(size - 8, MAX_HEADER_BYTES)
            if size < 8 or not 2 <= length <= limit:
                raise fail("header length", f"2 to {max(limit, 2)} bytes", f"{length} in a file of {size} bytes")
            raw = file.read(length)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    try:
        header = json.loads(raw, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise fail("header", "a JSON object with unique names", str(error)[:100]) from None
    if not isinstance(header, dict):
        raise fail("header", "a JSON object", type(header).__name__)
    header.pop("__metadata__", None)
    data_start, data_bytes = 8 + length, size - 8 - length
    tensors = {}
    for name, entry in header.items():
        field = f"tensor {name!r}" if not name.isprintable() else f"tensor {name}"
        dtype, shape, (begin, end) = _entry(entry, field, fail)
        if dtype not in ITEM_BYTES:
            raise fail(f"{field} (dtype)", f"one of {', '.join(ITEM_BYTES)}", repr(dtype)[:40])
        nbytes = ITEM_BYTES[dtype]
        for dim in shape:
            nbytes *= dim
        if not 0 <= begin <= end <= data_bytes:
            raise fail(f"{field} (data_offsets)", f"a range inside {data_bytes} bytes of data", [begin, end])
        if end - begin != nbytes:
            raise fail(field, f"{nbytes} bytes for {dtype} {list(shape)}", f"{end - begin}")
        tensors[name] = StoredTensor(path, dtype, shape, data_start + begin, nbytes)
    end = data_start
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
        if tensor.offset != end:
            raise fail(f"tensor {name} (data_offsets)", f"a start at {end - data_start}, after the tensor before it",
                       tensor.offset - data_start)
        end += tensor.nbytes
    if end != size:
        raise fail("data", f"{end - data_start} bytes", size - data_start)
    return tensors


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name occurs twice")
    return result


def _entry(entry: Any, field: str, fail: Any) -> tuple[str, tuple[int, ...], list[int]]:
    def is_ints(value: Any) -> bool:
        return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)

    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        raise fail(field, "an object with dtype, shape, data_offsets", repr(entry)[:80])
    if not is_ints(entry.get("shape")) or len(entry["shape"]) > MAX_DIMS:
        raise fail(f"{field} (shape)", f"at most {MAX_DIMS} whole numbers", repr(entry.get("shape"))[:80])
    if not is_ints(entry.get("data_offsets")) or len(entry["data_offsets"]) != 2:
        raise fail(f"{field} (data_offsets)", "two whole numbers", repr(entry.get("data_offsets"))[:80])
    return entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]


def read_folder(folder: str) -> dict[str, StoredTensor]:
    """All tensors of a folder in Hugging Face layout: one file, or several named by an index."""
    if os.path.isfile(os.path.join(folder, SINGLE_NAME)):
        return read_safetensors_header(os.path.join(folder, SINGLE_NAME))
    index = os.path.join(folder, INDEX_NAME)
    if os.path.isfile(index):
        return _read_shards(folder, index)
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be read: {error.strerror or error}") from error
    pickles = [name for name in names if name.endswith(PICKLE_SUFFIXES)]
    if pickles:
        raise ConfigError(f"{folder}: expected {SINGLE_NAME} or {INDEX_NAME}, found only {pickles[0]}; pickle files "
                          f"can run code and are never loaded: convert the model to safetensors")
    raise ConfigError(f"{folder}: expected {SINGLE_NAME} or {INDEX_NAME}, found no weights")


def _read_shards(folder: str, index: str) -> dict[str, StoredTensor]:
    try:
        with open(index, "rb") as file:
            parsed = json.loads(file.read())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{index}: expected a JSON object, found {str(error)[:100]}") from None
    weight_map = parsed.get("weight_map") if isinstance(parsed, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ConfigError(f"{index}: weight_map: expected an object of tensor to file, found {str(weight_map)[:80]}")
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted(set(weight_map.values())):
        # An index is data from strangers too: it must not name a file elsewhere.
        if os.path.basename(shard) != shard or not shard.endswith(".safetensors"):
            raise ConfigError(f"{index}: weight_map: expected a safetensors file beside it, found {shard!r}")
        for name, tensor in read_safetensors_header(os.path.join(folder, shard)).items():
            if name in tensors:
                raise ConfigError(f"{tensor.file}: tensor {name}: expected once, found also in {tensors[name].file}")
            tensors[name] = tensor
    for name, shard in weight_map.items():
        if name not in tensors or os.path.basename(tensors[name].file) != shard:
            found = os.path.basename(tensors[name].file) if name in tensors else "nothing"
            raise ConfigError(f"{index}: tensor {name}: expected in {shard}, found {found}")
    return tensors
