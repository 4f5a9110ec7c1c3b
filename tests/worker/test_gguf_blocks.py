"""GGUF block formats, against the `gguf` package's own decoder: equal bit for bit."""
from __future__ import annotations

import numpy as np
import pytest

from ipc.errors import ConfigError
from ipc.gguf import GGML_TYPES
from worker.quant.gguf_blocks import FORMATS, dequantize

# Where each block holds its float16 scales.
SCALE_OFFSETS = {"Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2],
                 "Q6_K": [208]}
CAN_QUANTIZE = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]


def decode(raw: np.ndarray, name: str) -> np.ndarray:
    out = np.full(raw.size // FORMATS[name].block_bytes * FORMATS[name].block_size, np.nan, np.float32)
    dequantize(raw, name, out)
    return out


def reference(raw: np.ndarray, name: str) -> np.ndarray:
    gguf = pytest.importorskip("gguf")
    quants = pytest.importorskip("gguf.quants")
    return quants.dequantize(raw, gguf.GGMLQuantizationType[name]).reshape(-1)


@pytest.mark.parametrize("name", sorted(SCALE_OFFSETS))
def test_random_blocks_decode_exactly_as_the_reference(name: str) -> None:
    rng = np.random.default_rng(7)
    blocks = rng.integers(0, 256, (300, FORMATS[name].block_bytes), dtype=np.uint8)
    for offset in SCALE_OFFSETS[name]:
        blocks[:, offset:offset + 2] = rng.normal(0, 0.3, 300).astype("<f2")[:, None].view(np.uint8)
    raw = blocks.reshape(-1)
    assert decode(raw, name).tobytes() == reference(raw, name).tobytes()


@pytest.mark.parametrize("name", CAN_QUANTIZE)
def test_quantised_data_decodes_exactly_as_the_reference(name: str) -> None:
    gguf = pytest.importorskip("gguf")
    quants = pytest.importorskip("gguf.quants")
    data = np.random.default_rng(11).normal(0, 1, (8, 512)).astype(np.float32)
    raw = quants.quantize(data, gguf.GGMLQuantizationType[name]).view(np.uint8).reshape(-1)
    found = decode(raw, name)
    assert found.tobytes() == reference(raw, name).tobytes()
    assert np.abs(found - data.reshape(-1)).max() < 0.5


def test_a_q4_1_block_decodes_by_hand() -> None:
    """d = 0.5, m = -1: low nibbles of the 16 bytes are elements 0-15, high ones 16-31."""
    packed = np.arange(16, dtype=np.uint8) | (np.arange(15, -1, -1, dtype=np.uint8) << 4)
    raw = np.concatenate((np.array([0.5, -1], "<f2").view(np.uint8), packed))
    expected = np.concatenate((np.arange(16), np.arange(15, -1, -1))) * 0.5 - 1
    assert decode(raw, "Q4_1").tolist() == expected.tolist()


def test_formats_have_the_sizes_of_the_container() -> None:
    sizes = {kind.name: (kind.block_size, kind.block_bytes) for kind in GGML_TYPES.values()}
    assert {name: (kind.block_size, kind.block_bytes) for name, kind in FORMATS.items()} == {
        name: sizes[name] for name in FORMATS}


def test_infinite_scales_decode_without_a_warning() -> None:
    raw = np.zeros(34, np.uint8)
    raw[:2] = np.array([np.inf], "<f2").view(np.uint8)
    assert np.isnan(decode(raw, "Q8_0")).all()


def test_unknown_types_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="IQ4_XS is not supported; supported: F32, F16"):
        dequantize(np.zeros(136, np.uint8), "IQ4_XS", np.zeros(256, np.float32))


def test_a_wrong_byte_count_is_refused() -> None:
    with pytest.raises(ValueError, match="33 bytes do not encode 32 elements"):
        dequantize(np.zeros(33, np.uint8), "Q8_0", np.zeros(32, np.float32))
