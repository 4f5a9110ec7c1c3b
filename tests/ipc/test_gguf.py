"""The GGUF header reader: what it gives, and that no lying file gets past it."""
from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from ipc.errors import ConfigError
from ipc.gguf import GGUFTensor, read_gguf


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str, kind: int, payload: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + payload


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def info(name: str = "w", dims: tuple[int, ...] = (4, 2), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + u32(len(dims)) + b"".join(u64(dim) for dim in dims) + u32(kind) + u64(offset)


def build(pairs: list[bytes] | None = None, infos: list[bytes] | None = None, data: bytes = b"", *,
          magic: bytes = b"GGUF", version: int = 3, num_pairs: int | None = None, num_infos: int | None = None,
          alignment: int = 32) -> bytes:
    pairs, infos = pairs or [], infos or []
    head = magic + u32(version) + u64(len(infos) if num_infos is None else num_infos)
    head += u64(len(pairs) if num_pairs is None else num_pairs) + b"".join(pairs) + b"".join(infos)
    return head + bytes(-len(head) % alignment) + data


def read(tmp_path: Path, content: bytes) -> Any:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    return read_gguf(path)


def test_metadata_of_every_type_is_read(tmp_path: Path) -> None:
    pairs = [
        pair("u8", 0, b"\xff"), pair("i8", 1, b"\xff"), pair("u16", 2, b"\xff\xff"), pair("i16", 3, b"\xff\xff"),
        pair("u32", 4, u32(7)), pair("i32", 5, struct.pack("<i", -7)), pair("f32", 6, struct.pack("<f", 0.5)),
        pair("yes", 7, b"\x01"), pair("no", 7, b"\x00"), pair("s", 8, text("grüße")), pair("u64", 10, u64(1 << 60)),
        pair("i64", 11, struct.pack("<q", -5)), pair("f64", 12, struct.pack("<d", 0.1)),
        pair("ints", 9, u32(5) + u64(3) + struct.pack("<3i", 1, -2, 3)),
        pair("bools", 9, u32(7) + u64(2) + b"\x01\x00"),
        pair("words", 9, u32(8) + u64(3) + text("a") + text("") + text("Ġb")),
    ]
    for version in (2, 3):
        assert read(tmp_path, build(pairs, version=version)).metadata == {
            "u8": 255, "i8": -1, "u16": 65535, "i16": -1, "u32": 7, "i32": -7, "f32": 0.5, "yes": True, "no": False,
            "s": "grüße", "u64": 1 << 60, "i64": -5, "f64": 0.1, "ints": [1, -2, 3], "bools": [True, False],
            "words": ["a", "", "Ġb"]}


def test_tensors_are_given_in_torch_order_with_absolute_offsets(tmp_path: Path) -> None:
    content = build(infos=[info("a", (4, 2)), info("b", (64,), 8, 32)], data=bytes(32 + 68))
    file = read(tmp_path, content)
    assert file.data_start == len(content) - 100
    assert file.tensors == {"a": GGUFTensor("a", (2, 4), "F32", file.data_start, 32),
                            "b": GGUFTensor("b", (64,), "Q8_0", file.data_start + 32, 68)}


def test_alignment_comes_from_the_metadata(tmp_path: Path) -> None:
    pairs = [pair("general.alignment", 4, u32(64))]
    file = read(tmp_path, build(pairs, [info("a", (1,)), info("b", (1,), 0, 64)], bytes(68), alignment=64))
    assert file.data_start % 64 == 0
    assert file.tensors["b"].offset == file.data_start + 64


def test_small_tensors_are_read_as_numbers(tmp_path: Path) -> None:
    data = struct.pack("<3f", 1, 2.5, -3) + bytes(24)
    file = read(tmp_path, build(infos=[info("f", (3,)), info("h", (2,), 1, 32)], data=data))
    assert file.read_f32("f") == [1.0, 2.5, -3.0]
    with pytest.raises(ConfigError, match="tensor h: expected type F32, found F16"):
        file.read_f32("h")


STRINGS = u32(8)
BAD_FILES = {
    "empty": (b"", "at least 24 bytes, found 0"),
    "short": (b"GGUF\x03", "at least 24 bytes, found 5"),
    "another-format": (b"PK\x03\x04" + bytes(40), "magic: expected b'GGUF'"),
    "version-1": (build(version=1), "version: expected 2 or 3, little-endian, found 1"),
    "big-endian": (build(version=3 << 24), "found a big-endian file"),
    "tensor-count-over-limit": (build(num_infos=1 << 63), f"tensor count: expected at most {1 << 20}, found {1 << 63}"),
    "tensor-count-over-file": (build(num_infos=1000), "tensor count: expected 32000 bytes"),
    "key-count": (build(num_pairs=(1 << 64) - 1), "metadata key count: expected at most 65536"),
    "key-length": (build([u64(1 << 62) + b"x" * 40]), "metadata key 0: expected 4611686018427387904 bytes"),
    "key-cut": (build([text("general.name")[:-3]], num_pairs=1), "metadata key 0: expected 1 to 1024 printable"),
    "key-unprintable": (build([pair("a\nb", 4, u32(1)), bytes(20)], num_pairs=1), "printable characters, found 'a"),
    "key-twice": (build([pair("a", 4, u32(1))] * 2), "metadata key 1: expected a new name, found 'a' again"),
    "string-length": (build([pair("name", 8, u64(1 << 40))]), "name: expected 1099511627776 bytes"),
    "string-not-text": (build([pair("name", 8, text(b"\xff\xfe"))]), "name: expected UTF-8 text"),
    "value-type": (build([pair("name", 13, bytes(8))]), "name (type): expected a value type in"),
    "bool": (build([pair("flag", 7, b"\x02")]), "flag: expected a bool (0 or 1), found 2"),
    "array-of-arrays": (build([pair("list", 9, u32(9) + u64(1) + bytes(30))]), "list (element type): expected one of"),
    "array-count-limit": (build([pair("list", 9, u32(4) + u64(1 << 61))]), f"list: expected at most {1 << 24}"),
    "array-count-file": (build([pair("list", 9, u32(4) + u64(1 << 20))]), "list: expected 4194304 bytes"),
    "strings-count": (build([pair("list", 9, STRINGS + u64(1 << 20) + bytes(64))]), "list: expected 8388608 bytes"),
    "strings-length": (build([pair("list", 9, STRINGS + u64(2) + text("a") + u64(1 << 50))]),
                       "list[1]: expected 11258999"),
    "strings-not-text": (build([pair("list", 9, STRINGS + u64(2) + text("a") + text(b"\xff"))]),
                         "list[1]: expected UTF-8"),
    "alignment-zero": (build([pair("general.alignment", 4, u32(0))]), "general.alignment: expected a power of two"),
    "alignment-odd": (build([pair("general.alignment", 4, u32(48))]), "general.alignment: expected a power of two"),
    "alignment-text": (build([pair("general.alignment", 8, text("32"))]), "general.alignment: expected a power of two"),
    "no-dimensions": (build(infos=[info(dims=()) + bytes(8)]), "tensor w (dimension count): expected 1 to 4, found 0"),
    "many-dimensions": (build(infos=[info(dims=(1,) * 5)]), "tensor w (dimension count): expected 1 to 4, found 5"),
    "zero-dimension": (build(infos=[info(dims=(4, 0))]), "tensor w (shape): expected rows of"),
    "huge-dimensions": (build(infos=[info(dims=(1 << 63, 1 << 63))]), "before the file ends"),
    "unknown-type": (build(infos=[info(kind=99)]), "tensor w (type): expected a known GGML type, found 99"),
    "ragged-row": (build(infos=[info(dims=(33, 2), kind=8)]), "a multiple of 32 elements (Q8_0), found [33, 2]"),
    "unaligned-offset": (build(infos=[info(offset=4)], data=bytes(64)), "tensor w (offset): expected a multiple of 32"),
    "offset-past-end": (build(infos=[info(offset=1 << 62)], data=bytes(64)), "found 0 before the file ends"),
    "cut-data": (build(infos=[info()], data=bytes(31)), "tensor w: expected 32 bytes at offset 96, found 31 before"),
    "overlap": (build(infos=[info("a", (16,)), info("b", (4,), 0, 32)], data=bytes(96)),
                "tensor b (offset): expected at least 64, found 32"),
    "name-twice": (build(infos=[info(), info(offset=32)], data=bytes(64)), "tensor names: expected 2 different ones"),
    "name-empty": (build(infos=[info("") + bytes(8)], data=bytes(64)), "name of tensor 0: expected 1 to 1024"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_lying_file_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    content, message = BAD_FILES[name]
    with pytest.raises(ConfigError) as error:
        read(tmp_path, content)
    assert message in str(error.value)
    assert str(error.value).startswith(str(tmp_path / "m.gguf")) and "\n" not in str(error.value)


def test_every_cut_of_a_valid_file_is_refused(tmp_path: Path) -> None:
    pairs = [pair("name", 8, text("tiny")), pair("words", 9, STRINGS + u64(2) + text("a") + text("bc")),
             pair("ints", 9, u32(5) + u64(3) + bytes(12)), pair("f", 6, bytes(4))]
    content = build(pairs, [info("a", (4, 2)), info("b", (64,), 8, 32)], bytes(100))
    read(tmp_path, content)
    for length in range(len(content)):
        with pytest.raises(ConfigError):
            read(tmp_path, content[:length])


def test_a_header_with_any_byte_changed_never_raises_anything_else(tmp_path: Path) -> None:
    pairs = [pair("name", 8, text("tiny")), pair("words", 9, STRINGS + u64(2) + text("a") + text("bc")),
             pair("general.alignment", 4, u32(32))]
    content = build(pairs, [info("a", (4, 2)), info("b", (64,), 8, 32)], bytes(100))
    accepted = 0
    for position in range(len(content) - 100):
        for value in (0, 1, 127, 255):
            try:
                read(tmp_path, content[:position] + bytes([value]) + content[position + 1:])
                accepted += 1
            except ConfigError:
                pass
    assert 0 < accepted < 4 * (len(content) - 100)


def test_the_element_limit_holds_for_all_arrays_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many small arrays would otherwise take a thousand times the file's size in memory."""
    monkeypatch.setattr("ipc.gguf.MAX_ELEMENTS", 100)
    arrays = [pair(f"list{index}", 9, u32(0) + u64(60) + bytes(60)) for index in range(2)]
    read(tmp_path, build(arrays[:1]))
    with pytest.raises(ConfigError, match="list1: expected at most 40, found 60"):
        read(tmp_path, build(arrays))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent.gguf: cannot be read: No such file"):
        read_gguf(tmp_path / "absent.gguf")


def test_the_header_equals_what_the_gguf_package_reads(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    numpy = pytest.importorskip("numpy")
    path = tmp_path / "w.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_token_list([f"t{index}" for index in range(500)])
    for index in range(4):
        writer.add_tensor(f"t{index}", numpy.arange(6 + index, dtype=numpy.float32).reshape(-1, 1))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file, reader = read_gguf(path), gguf.GGUFReader(path)
    assert file.metadata["llama.block_count"] == 2 and file.metadata["tokenizer.ggml.tokens"][499] == "t499"
    assert {tensor.name: (tensor.data_offset, tensor.n_bytes, [int(dim) for dim in reversed(tensor.shape)])
            for tensor in reader.tensors} == {
        name: (tensor.offset, tensor.nbytes, list(tensor.shape)) for name, tensor in file.tensors.items()}
