"""Decode GGUF tensor blocks to float32, vectorised over blocks.

A block is a row of bytes: scales first or last, then packed integers. The order of float operations is that of the
format's reference (`d * q + m`, each step rounded to float32), so the values are equal bit for bit, not just close.
Callers decode a few thousand blocks at a time: the temporaries then stay in the cache.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ipc.errors import ConfigError

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
_SHIFT_2 = np.array([0, 2, 4, 6], np.uint8)[:, None]
_SHIFT_4 = np.array([0, 4], np.uint8)[:, None]
_SHIFT_BITS = np.arange(8, dtype=np.uint8)[:, None]


def _scale(blocks: Bytes, start: int) -> Floats:
    """The float16 at `start` of each block, as a column [n, 1]."""
    return np.ascontiguousarray(blocks[:, start:start + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: Bytes, group: int) -> NDArray[np.uint8]:
    """Split bytes: of every `group` bytes first all low halves, then all high ones. [n, b] -> [n, 2 b]."""
    num_blocks, width = packed.shape
    halves = packed.reshape(num_blocks, width // group, 1, group) >> _SHIFT_4
    halves &= 15
    return halves.reshape(num_blocks, 2 * width)


def _fifth_bits(packed: Bytes) -> NDArray[np.uint8]:
    """[n, 4] bytes -> [n, 32]: bit i of the little-endian word belongs to element i, moved to bit 4."""
    return np.unpackbits(packed, axis=1, bitorder="little") << np.uint8(4)


def _plain(dtype: str) -> Callable[[Bytes, Floats], None]:
    def decode(blocks: Bytes, out: Floats) -> None:
        out[:] = blocks.view(dtype)
    return decode


def _bf16(blocks: Bytes, out: Floats) -> None:
    """The upper half of a float32."""
    np.left_shift(blocks.view("<u2"), 16, out=out.view(np.uint32), dtype=np.uint32)


def _q8_0(blocks: Bytes, out: Floats) -> None:
    np.multiply(blocks[:, 2:].view(np.int8), _scale(blocks, 0), out=out)


def _q4_0(blocks: Bytes, out: Floats) -> None:
    np.multiply(_nibbles(blocks[:, 2:], 16).view(np.int8) - np.int8(8), _scale(blocks, 0), out=out)


def _q4_1(blocks: Bytes, out: Floats) -> None:
    np.multiply(_nibbles(blocks[:, 4:], 16), _scale(blocks, 0), out=out)
    out += _scale(blocks, 2)


def _q5_0(blocks: Bytes, out: Floats) -> None:
    q = _nibbles(blocks[:, 6:], 16) | _fifth_bits(blocks[:, 2:6])
    np.multiply(q.view(np.int8) - np.int8(16), _scale(blocks, 0), out=out)


def _q5_1(blocks: Bytes, out: Floats) -> None:
    q = _nibbles(blocks[:, 8:], 16) | _fifth_bits(blocks[:, 4:8])
    np.multiply(q, _scale(blocks, 0), out=out)
    out += _scale(blocks, 2)


def _k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scale and minimum of the 8 groups of 32, [n, 8, 1] each, from 12 bytes of packed 6-bit numbers:

        bytes 0-3   two high bits of scale 4-7 | scale 0-3
        bytes 4-7   two high bits of min 4-7   | min 0-3
        bytes 8-11  low nibble of min 4-7      | low nibble of scale 4-7
    """
    low_scale, low_min, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate((low_scale & 63, (rest & 15) | ((low_scale >> 2) & 48)), axis=1)
    minima = np.concatenate((low_min & 63, (rest >> 4) | ((low_min >> 2) & 48)), axis=1)
    return (_scale(blocks, 0) * scales)[:, :, None], (_scale(blocks, 2) * minima)[:, :, None]


def _q4_k(blocks: Bytes, out: Floats) -> None:
    scales, minima = _k_scales(blocks)
    groups = out.reshape(-1, 8, 32)
    np.multiply(_nibbles(blocks[:, 16:], 32).reshape(-1, 8, 32), scales, out=groups)
    groups -= minima


def _q5_k(blocks: Bytes, out: Floats) -> None:
    scales, minima = _k_scales(blocks)
    high = (blocks[:, None, 16:48] >> _SHIFT_BITS) & np.uint8(1)
    q = _nibbles(blocks[:, 48:], 32).reshape(-1, 8, 32) | (high << np.uint8(4))
    groups = out.reshape(-1, 8, 32)
    np.multiply(q, scales, out=groups)
    groups -= minima


def _q6_k(blocks: Bytes, out: Floats) -> None:
    low = _nibbles(blocks[:, :128], 64).reshape(-1, 2, 4, 32)
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> _SHIFT_2) & np.uint8(3)
    q = (low | (high << np.uint8(4))).view(np.int8) - np.int8(32)
    scales = _scale(blocks, 208) * blocks[:, 192:208].view(np.int8)
    np.multiply(q.reshape(-1, 16, 16), scales[:, :, None], out=out.reshape(-1, 16, 16))


class BlockFormat:
    """One storage type: `block_size` elements in `block_bytes` bytes, and how to decode rows of such blocks."""

    def __init__(self, block_size: int, block_bytes: int, decode: Callable[[Bytes, Floats], None]) -> None:
        self.block_size, self.block_bytes, self.decode = block_size, block_bytes, decode


FORMATS: dict[str, BlockFormat] = {
    "F32": BlockFormat(1, 4, _plain("<f4")), "F16": BlockFormat(1, 2, _plain("<f2")), "BF16": BlockFormat(1, 2, _bf16),
    "Q8_0": BlockFormat(32, 34, _q8_0), "Q4_0": BlockFormat(32, 18, _q4_0), "Q4_1": BlockFormat(32, 20, _q4_1),
    "Q5_0": BlockFormat(32, 22, _q5_0), "Q5_1": BlockFormat(32, 24, _q5_1), "Q4_K": BlockFormat(256, 144, _q4_k),
    "Q5_K": BlockFormat(256, 176, _q5_k), "Q6_K": BlockFormat(256, 210, _q6_k),
}


def get_format(ggml_type: str) -> BlockFormat:
    """Raises ConfigError that lists the types we decode."""
    if ggml_type not in FORMATS:
        raise ConfigError(f"storage type {ggml_type} is not supported; supported: {', '.join(FORMATS)}")
    return FORMATS[ggml_type]


def dequantize(raw: NDArray[Any], ggml_type: str, out: Floats) -> None:
    """raw: the tensor's bytes, uint8, contiguous; out: float32, contiguous, as many elements as the bytes encode.

    Scales come from the file and may be infinite or NaN; the result then is too, silently.
    """
    kind = get_format(ggml_type)
    num_blocks = out.size // kind.block_size
    if num_blocks * kind.block_bytes != raw.size or num_blocks * kind.block_size != out.size:
        raise ValueError(f"{ggml_type}: {raw.size} bytes do not encode {out.size} elements")
    with np.errstate(all="ignore"):
        kind.decode(raw.reshape(num_blocks, kind.block_bytes), out.reshape(num_blocks, kind.block_size))
