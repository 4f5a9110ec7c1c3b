"""Read the header of a GGUF file (versions 2 and 3): metadata, and where each tensor lies.

Knows the container only: not what a key means, not how a block is decoded (worker/quant). A GGUF file comes from
strangers, so every count, length and offset is compared with the bytes that are really there before it is used.

    magic | version | tensor count | key count | keys and values | tensor infos | padding | tensor data
                                                                                          ^ data_start
"""
from __future__ import annotations

import mmap
import os
import struct
from typing import Any, NamedTuple

from ipc.errors import ConfigError

MAX_ELEMENTS = 1 << 24     # of all metadata arrays together; the largest vocabularies have 2**18 tokens
MAX_NAME_BYTES = 1024
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 20
MAX_ALIGNMENT = 1 << 20


class GGMLType(NamedTuple):
    """A storage type: `block_bytes` bytes hold `block_size` consecutive elements of a row."""
    name: str
    block_size: int
    block_bytes: int


# Also the types we cannot decode: their tensors must be sized to be named in an error.
GGML_TYPES = {number: GGMLType(*entry) for number, entry in {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}.items()}

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_MIN_TENSOR_INFO = 8 + 4 + 8 + 4 + 8        # name length, dimension count, one dimension, type, offset


class GGUFTensor(NamedTuple):
    """Where a tensor lies. `shape` is in torch order (the file has it reversed); `offset` is from the file's start."""
    name: str
    shape: tuple[int, ...]
    ggml_type: str
    offset: int
    nbytes: int


class GGUFFile(NamedTuple):
    """A checked header. Every tensor's `offset + nbytes` is inside the file, and no two overlap."""
    path: str
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    data_start: int

    def read_f32(self, name: str) -> list[float]:
        """The values of a small F32 tensor that configures the model (such as `rope_freqs.weight`)."""
        tensor = self.tensors[name]
        if tensor.ggml_type != "F32":
            raise ConfigError(f"{self.path}: tensor {name}: expected type F32, found {tensor.ggml_type}")
        with open(self.path, "rb") as file:
            file.seek(tensor.offset)
            data = file.read(tensor.nbytes)
        if len(data) != tensor.nbytes:
            raise ConfigError(f"{self.path}: tensor {name}: expected {tensor.nbytes} bytes, found {len(data)}")
        return list(struct.unpack(f"<{tensor.nbytes // 4}f", data))


def read_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Read and check the header; tensor data is not touched.

    Raises ConfigError, one line that names file, field, expected and found.
    """
    path = os.fspath(path)
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 24:
                raise ConfigError(f"{path}: header: expected at least 24 bytes, found {size}; not a GGUF file")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data, size).read()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error


class _Reader:
    """A cursor over the mapped file. Every step forward first checks that the bytes exist."""

    def __init__(self, path: str, data: mmap.mmap, size: int) -> None:
        self.path, self.data, self.size, self.pos = path, data, size, 0
        self.elements_left = MAX_ELEMENTS

    def fail(self, field: str, expected: object, found: object) -> ConfigError:
        return ConfigError(f"{self.path}: {field}: expected {expected}, found {found}")

    def need(self, count: int, field: str) -> None:
        if count > self.size - self.pos:
            left = self.size - self.pos
            raise self.fail(field, f"{count} bytes at offset {self.pos}", f"{left} before the file ends")

    def scalar(self, code: str, field: str) -> Any:
        width = struct.calcsize("<" + code)
        self.need(width, field)
        value = struct.unpack_from("<" + code, self.data, self.pos)[0]
        self.pos += width
        return value

    def count(self, field: str, limit: int, element_bytes: int) -> int:
        """A 64-bit element count that the rest of the file can really hold."""
        count: int = self.scalar("Q", field)
        if count > limit:
            raise self.fail(field, f"at most {limit}", count)
        self.need(count * element_bytes, field)
        return count

    def string(self, field: str) -> str:
        length: int = self.scalar("Q", field)
        self.need(length, field)
        raw = self.data[self.pos:self.pos + length]
        self.pos += length
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self.fail(field, "UTF-8 text", raw[:40]) from None

    def name(self, field: str) -> str:
        """A string that later errors may quote, so a short one on one line."""
        name = self.string(field)
        if not name.isprintable() or not 0 < len(name) <= MAX_NAME_BYTES:
            raise self.fail(field, f"1 to {MAX_NAME_BYTES} printable characters", repr(name[:40]))
        return name

    def array_count(self, field: str, element_bytes: int) -> int:
        count = self.count(field, self.elements_left, element_bytes)
        self.elements_left -= count
        return count

    def strings(self, field: str) -> list[str]:
        """The loop that decides how long a start takes (two arrays of 10**5 strings): only locals inside it."""
        count = self.array_count(field, 8)
        data, pos, size = self.data, self.pos, self.size
        values: list[str] = []
        unpack = struct.Struct("<Q").unpack_from
        append = values.append
        try:
            for _ in range(count):
                end = pos + 8 + unpack(data, pos)[0]
                if end > size:
                    raise self.fail(f"{field}[{len(values)}]", f"{end - pos - 8} bytes", f"{max(0, size - pos - 8)}")
                append(data[pos + 8:end].decode())
                pos = end
        except struct.error:
            raise self.fail(f"{field}[{len(values)}]", f"{count} strings", "the end of the file") from None
        except UnicodeDecodeError:
            raise self.fail(f"{field}[{len(values)}]", "UTF-8 text", "other bytes") from None
        self.pos = pos
        return values

    def value(self, field: str) -> Any:
        kind = self.scalar("I", f"{field} (type)")
        if kind == _STRING:
            return self.string(field)
        if kind == _ARRAY:
            return self.array(field)
        if kind not in _SCALARS:
            raise self.fail(f"{field} (type)", f"a value type in {sorted([*_SCALARS, _STRING, _ARRAY])}", kind)
        if kind == _BOOL:
            return self.boolean(self.scalar("B", field), field)
        return self.scalar(_SCALARS[kind], field)

    def array(self, field: str) -> list[Any]:
        kind = self.scalar("I", f"{field} (element type)")
        if kind == _STRING:
            return self.strings(field)
        if kind not in _SCALARS:
            raise self.fail(f"{field} (element type)", f"one of {sorted([*_SCALARS, _STRING])}", kind)
        code = "B" if kind == _BOOL else _SCALARS[kind]
        width = struct.calcsize("<" + code)
        count = self.array_count(field, width)
        values = list(struct.unpack_from(f"<{count}{code}", self.data, self.pos))
        self.pos += count * width
        return [self.boolean(value, field) for value in values] if kind == _BOOL else values

    def boolean(self, value: int, field: str) -> bool:
        if value > 1:
            raise self.fail(field, "a bool (0 or 1)", value)
        return bool(value)

    def read(self) -> GGUFFile:
        magic = self.data[:4]
        if magic != b"GGUF":
            raise self.fail("magic", "b'GGUF'", repr(magic))
        self.pos = 4
        version: int = self.scalar("I", "version")
        if version not in (2, 3):
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in (2, 3)
            raise self.fail("version", "2 or 3, little-endian", "a big-endian file" if swapped else version)
        num_tensors = self.count("tensor count", MAX_TENSORS, _MIN_TENSOR_INFO)
        num_keys = self.count("metadata key count", MAX_KEYS, 8 + 4 + 1)
        metadata: dict[str, Any] = {}
        for index in range(num_keys):
            key = self.name(f"metadata key {index}")
            if key in metadata:
                raise self.fail(f"metadata key {index}", "a new name", f"{key!r} again")
            metadata[key] = self.value(key)
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self.fail("general.alignment", f"a power of two from 8 to {MAX_ALIGNMENT}", alignment)
        infos = [self.tensor_info(index) for index in range(num_tensors)]
        data_start = -(-self.pos // alignment) * alignment
        tensors = {info.name: info._replace(offset=data_start + info.offset) for info in infos}
        if len(tensors) != len(infos):
            raise self.fail("tensor names", f"{len(infos)} different ones", len(tensors))
        self.check_layout(tensors, data_start, alignment)
        return GGUFFile(self.path, version, metadata, tensors, data_start)

    def tensor_info(self, index: int) -> GGUFTensor:
        name = self.name(f"name of tensor {index}")
        field = f"tensor {name}"
        num_dims = self.scalar("I", f"{field} (dimension count)")
        if not 1 <= num_dims <= 4:
            raise self.fail(f"{field} (dimension count)", "1 to 4", num_dims)
        dims = [self.scalar("Q", f"{field} (dimension {axis})") for axis in range(num_dims)]
        type_number = self.scalar("I", f"{field} (type)")
        if type_number not in GGML_TYPES:
            raise self.fail(f"{field} (type)", "a known GGML type", type_number)
        kind = GGML_TYPES[type_number]
        num_elements = 1
        for dim in dims:
            num_elements *= dim
        if num_elements < 1 or dims[0] % kind.block_size:
            raise self.fail(f"{field} (shape)", f"rows of a multiple of {kind.block_size} elements ({kind.name})", dims)
        nbytes = num_elements // kind.block_size * kind.block_bytes
        offset = self.scalar("Q", f"{field} (offset)")
        return GGUFTensor(name, tuple(reversed(dims)), kind.name, offset, nbytes)

    def check_layout(self, tensors: dict[str, GGUFTensor], data_start: int, alignment: int) -> None:
        """In file order: aligned, inside the file, and none inside another."""
        end = data_start
        for tensor in sorted(tensors.values(), key=lambda t: t.offset):
            field = f"tensor {tensor.name}"
            if (tensor.offset - data_start) % alignment:
                raise self.fail(f"{field} (offset)", f"a multiple of {alignment}", tensor.offset - data_start)
            if tensor.offset < end:
                raise self.fail(f"{field} (offset)", f"at least {end - data_start}", tensor.offset - data_start)
            end = tensor.offset + tensor.nbytes
            if end > self.size:
                raise self.fail(field, f"{tensor.nbytes} bytes at offset {tensor.offset}",
                                f"{max(0, self.size - tensor.offset)} before the file ends; the download is incomplete")
