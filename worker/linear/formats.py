"""The packed weight formats, and what each promises.

    kind       bytes per weight   weights are                          activations are
    float32    4                  as given                             float32
    bfloat16   2                  bfloat16, computed in float32        float32
    int8       1.0625             q * scale, blocks of 32, as Q8_0     int8, blocks of 32 along K
    int4       0.5625             (q - 8) * scale, as GGUF Q4_0        int8, blocks of 32 along K
    int4_min   0.625              q * scale + minimum, as GGUF Q4_1    int8, blocks of 32 along K
    int8_wide  1.03125            q * scale, blocks of 64, rotated     int8, blocks of 64 along K, rotated

Layout of every kind: tiles of 32 outputs, each tile's bytes in the order in which its kernel reads them; scales and
minima float16 [tiles, K / block, 32]. Outputs are padded with zero weights to whole tiles.

Rotated: each block of 64 inputs is multiplied by a symmetric orthogonal matrix of entries -1/4, 0 and 1/4 (`ROTATION`),
on both sides, so that products stay what they were. A channel that is much larger than its neighbours, of which these
models have many, is spread over sixteen; the block's scale shrinks, and 64 wide blocks err less than plain ones of 32.
"""
from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

PIECE_BYTES = 32 << 20                          # of the arena: 16 huge pages
TILE = 32
BLOCK = 32
WIDE_BLOCK = 64
FLOAT32, BFLOAT16, INT8, INT4, INT4_MIN, INT8_WIDE = range(6)       # the numbers the kernels know
KIND_NAMES = ("float32", "bfloat16", "int8", "int4", "int4_min", "int8_wide")
TILE_BYTES_PER_K = {FLOAT32: 4 * TILE, BFLOAT16: 2 * TILE, INT8: TILE, INT4: TILE // 2, INT4_MIN: TILE // 2,
                    INT8_WIDE: TILE}


def _hadamard(size: int) -> NDArray[np.float32]:
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


# Mixes the sixteen inputs of a block that are equal modulo four: across vectors of sixteen, and across their quarters.
ROTATION = np.kron(_hadamard(16), np.eye(4, dtype=np.float32)) / np.float32(4)


@dataclass(frozen=True)
class PackedWeight:
    """One weight [num_out, num_k], packed. scales and minima are empty where the kind has none."""
    kind: int
    num_out: int
    num_k: int
    data: NDArray[np.uint8]                  # [tiles, bytes of a tile]
    scales: NDArray[np.float16]              # [tiles, K / block, 32]
    minima: NDArray[np.float16]

    @property
    def num_tiles(self) -> int:
        return self.data.shape[0]

    @property
    def padded_out(self) -> int:
        return self.num_tiles * TILE

    @property
    def tile_bytes(self) -> int:
        return TILE_BYTES_PER_K[self.kind] * self.num_k

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scales.nbytes + self.minima.nbytes

    @property
    def block(self) -> int:
        """Inputs that share a scale."""
        return WIDE_BLOCK if self.kind == INT8_WIDE else BLOCK

    @property
    def is_integer(self) -> bool:
        """Whether the activations must be quantized."""
        return self.kind >= INT8

    @property
    def name(self) -> str:
        return KIND_NAMES[self.kind]


def check_width(num_k: int) -> None:
    """Raises ValueError for a K that no kernel can cut into blocks."""
    if num_k % BLOCK:
        raise ValueError(f"a weight with {num_k} inputs; packed formats need a multiple of {BLOCK}: use torch")


class _Arena:
    """Small arrays side by side in large pieces of memory. The system gives large pieces huge pages (numpy asks it to):
    streaming the weights of a step then misses few address translations, and the hardware's read-ahead is not stopped
    at every 4 KiB. A piece lives as long as any array in it."""

    def __init__(self) -> None:
        self._piece: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._used = 0
        self._lock = threading.Lock()

    def take(self, size: int) -> NDArray[np.uint8]:
        """`size` bytes, at a multiple of 64."""
        with self._lock:
            start = self._used + (-(self._piece.ctypes.data + self._used) % 64)
            if start + size > self._piece.size:
                self._piece, start = np.empty(PIECE_BYTES, np.uint8), 0
                start = -self._piece.ctypes.data % 64
            self._used = start + size
            return self._piece[start:start + size]


_arena = _Arena()


def aligned_empty(shape: tuple[int, ...], dtype: Any, is_lasting: bool = False) -> NDArray[Any]:
    """Uninitialised, at a multiple of 64 bytes: no vector of weights then crosses a cache line. is_lasting: of a
    weight, which is not freed before the others; small ones then share memory (_Arena)."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    if is_lasting and size < PIECE_BYTES // 8:
        return _arena.take(size).view(dtype).reshape(shape)
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start:start + size].view(dtype).reshape(shape)
