"""From float weights or GGUF blocks to packed weights, and back (`unpack`, for tests and accuracy figures).

Blocks of a file are only reordered, never requantized: the scales stay the file's float16 and the integers its own.
"""
from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from worker.linear.formats import (BFLOAT16, BLOCK, FLOAT32, INT4, INT4_MIN, INT8, INT8_WIDE, ROTATION, TILE,
                                   WIDE_BLOCK, PackedWeight, aligned_empty, check_width)

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
_CHUNK_ROWS = 1024                           # quantized at a time: what is in between stays small
_NO_HALVES = np.empty((0, 0, TILE), np.float16)
# Integer kinds that hold blocks of a file as they are: type -> (kind, bytes of a block, where its integers begin).
GGUF_KINDS = {"Q8_0": (INT8, 34, 2), "Q4_0": (INT4, 18, 2), "Q4_1": (INT4_MIN, 20, 4)}


def pack_float32(weight: Floats) -> PackedWeight:
    """[num_out, K] -> tiles [K, 32]."""
    return _pack_floats(FLOAT32, weight)


def pack_bfloat16(bits: NDArray[np.uint16]) -> PackedWeight:
    """The same from bfloat16, given as its sixteen bits."""
    return _pack_floats(BFLOAT16, bits)


def _pack_floats(kind: int, weight: NDArray[np.generic]) -> PackedWeight:
    num_out, num_k = weight.shape
    check_width(num_k)
    tiles = -(-num_out // TILE)
    data = aligned_empty((tiles, num_k, TILE), weight.dtype, is_lasting=True)
    whole = num_out // TILE
    data[:whole] = weight[:whole * TILE].reshape(whole, TILE, num_k).transpose(0, 2, 1)
    if whole < tiles:
        data[whole] = 0
        data[whole, :, :num_out - whole * TILE] = weight[whole * TILE:].T
    return PackedWeight(kind, num_out, num_k, data.view(np.uint8).reshape(tiles, -1), _NO_HALVES, _NO_HALVES)


def quantize_int8(weight: Floats, *, wide: bool = True) -> PackedWeight:
    """Scale max|w| / 127 rounded to float16, over blocks of 64 inputs, rotated, where `wide` is set and K a multiple of
    64; else over blocks of 32, the format and error of GGUF's Q8_0."""
    num_out, num_k = weight.shape
    check_width(num_k)
    wide = wide and num_k % WIDE_BLOCK == 0
    block = WIDE_BLOCK if wide else BLOCK
    q = np.empty((num_out, num_k // block, block), np.int8)
    scales = np.empty(q.shape[:2], np.float16)
    for start in range(0, num_out, _CHUNK_ROWS):
        rows = slice(start, start + _CHUNK_ROWS)
        part = rotated(weight[rows]) if wide else weight[rows]
        blocks = part.reshape(-1, *q.shape[1:])
        scales[rows] = np.abs(blocks).max(-1) / np.float32(127)
        q[rows] = np.rint(blocks * _inverse(scales[rows])[..., None]).clip(-127, 127)
    return _tiles(INT8_WIDE if wide else INT8, num_out, num_k, q.view(np.uint8), scales, None)


def rotated(rows: Floats) -> Floats:
    """Each block of 64 of every row times ROTATION, which undoes itself; [N, K] with K a multiple of 64."""
    result: Floats = (rows.reshape(-1, WIDE_BLOCK) @ ROTATION).reshape(rows.shape)
    return result


def quantize_int4(weight: Floats) -> PackedWeight:
    """Blocks of 32 along K, 16 levels from the block's minimum to its maximum: the format of GGUF's Q4_1."""
    num_out, num_k = weight.shape
    check_width(num_k)
    blocks = weight.reshape(num_out, -1, BLOCK)
    minima = blocks.min(-1).astype(np.float16)
    scales = ((blocks.max(-1) - minima.astype(np.float32)) / np.float32(15)).astype(np.float16)
    levels = (blocks - minima.astype(np.float32)[..., None]) * _inverse(scales)[..., None]
    q = np.rint(levels).clip(0, 15).astype(np.uint8)
    return _tiles(INT4_MIN, num_out, num_k, q[..., :16] | (q[..., 16:] << 4), scales, minima)


def _inverse(scales: NDArray[np.float16]) -> Floats:
    wide = scales.astype(np.float32)
    return np.divide(np.float32(1), wide, out=np.zeros_like(wide), where=wide != 0)


def pack_gguf(raw: Bytes, ggml_type: str, num_k: int) -> PackedWeight:
    """Rows of blocks [num_out, bytes of a row] of a type in GGUF_KINDS."""
    kind, block_bytes, start = GGUF_KINDS[ggml_type]
    blocks = raw.reshape(raw.shape[0], num_k // BLOCK, block_bytes)
    scales = _half_column(blocks, 0)
    return _tiles(kind, raw.shape[0], num_k, blocks[..., start:], scales,
                  _half_column(blocks, 2) if kind == INT4_MIN else None)


def _half_column(blocks: Bytes, start: int) -> NDArray[np.float16]:
    return np.ascontiguousarray(blocks[..., start:start + 2]).view("<f2")[..., 0]


def _tiles(kind: int, num_out: int, num_k: int, q: Bytes, scales: NDArray[np.float16],
           minima: NDArray[np.float16] | None) -> PackedWeight:
    """q [num_out, K / block, bytes of a block]. A tile's block is [quad, vector of 16 outputs, output, 4 k]: one load
    of 64 bytes is four k of sixteen outputs. int8 is stored plus 128: the dot instruction wants one side unsigned, and
    the other is then the broadcast one."""
    num_blocks, quads = q.shape[1], q.shape[2] // 4
    tiles = -(-num_out // TILE)
    data = aligned_empty((tiles, num_blocks, quads, 2, 16, 4), np.uint8, is_lasting=True)
    whole = num_out // TILE
    for first, last in ((0, whole), (whole, tiles)):
        if first == last:
            continue
        part = q[first * TILE:last * TILE]
        if first == whole:
            part = np.concatenate((part, np.zeros((tiles * TILE - num_out, *q.shape[1:]), np.uint8)))
        data[first:last] = part.reshape(last - first, 2, 16, num_blocks, quads, 4).transpose(0, 3, 4, 1, 2, 5)
    if kind in (INT8, INT8_WIDE):
        np.bitwise_xor(data, 128, out=data)
    return PackedWeight(kind, num_out, num_k, data.reshape(tiles, -1), _half_tiles(scales, tiles),
                        _NO_HALVES if minima is None else _half_tiles(minima, tiles))


def _half_tiles(column: NDArray[np.float16], tiles: int) -> NDArray[np.float16]:
    """[num_out, blocks] -> [tiles, blocks, 32], padded with zeros."""
    result: NDArray[np.float16] = aligned_empty((tiles, column.shape[1], TILE), np.float16, is_lasting=True)
    padded = np.zeros((tiles * TILE, column.shape[1]), np.float16)
    padded[:len(column)] = column
    result[:] = padded.reshape(tiles, TILE, -1).transpose(0, 2, 1)
    return result


def unpack(weight: PackedWeight) -> Floats:
    """The float32 weight [num_out, K] that the packed one stands for."""
    tiles, num_k = weight.num_tiles, weight.num_k
    if weight.kind in (FLOAT32, BFLOAT16):
        values = weight.data.view(np.float32 if weight.kind == FLOAT32 else np.uint16).reshape(tiles, num_k, TILE)
        if weight.kind == BFLOAT16:
            values = (values.astype(np.uint32) << 16).view(np.float32)
        return np.ascontiguousarray(values.transpose(0, 2, 1).reshape(-1, num_k)[:weight.num_out])
    num_blocks, is_int8 = num_k // weight.block, weight.kind in (INT8, INT8_WIDE)
    quads = weight.block // (4 if is_int8 else 8)
    q = weight.data.reshape(tiles, num_blocks, quads, 2, 16, 4).transpose(0, 3, 4, 1, 2, 5)
    q = np.ascontiguousarray(q).reshape(tiles * TILE, num_blocks, 4 * quads)
    if is_int8:
        numbers = (q ^ 128).view(np.int8).astype(np.float32)
    else:
        numbers = np.concatenate((q & 15, q >> 4), -1).astype(np.float32) - (8 if weight.kind == INT4 else 0)
    values = numbers * _rows(weight.scales)[..., None]
    if weight.kind == INT4_MIN:
        values += _rows(weight.minima)[..., None]
    rows = values.reshape(-1, num_k)[:weight.num_out].astype(np.float32)
    return rotated(rows) if weight.kind == INT8_WIDE else rows


def _rows(halves: NDArray[np.float16]) -> Floats:
    return halves.transpose(0, 2, 1).reshape(-1, halves.shape[1]).astype(np.float32)
