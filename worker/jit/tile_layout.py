"""Numbers that tile kernels share with what packs for them and calls them."""
from __future__ import annotations

TILE = 32                                   # outputs of one tile: two vectors
BLOCK, WIDE_BLOCK = 32, 64                  # k per scale
UNROLL = 4                                  # k of one step over floats; K is a multiple of BLOCK
# Blocks, or steps over floats, that weights are asked for before they are wanted, when a tile is read for the first
# time: the hardware loses their streams at the ends of tiles and pages. While more rows go over it, it is the next tile
# that is asked for (worker/jit/matmul.py).
AHEAD, WIDE_AHEAD = 8, 4
# Columns of the activations' side table, one row of [4, K / block] per activation row (worker/jit/quantize.py):
# scale, -128 * sum, -8 * sum (int32 bits), scale * sum.
SIDE_SCALE, SIDE_INT8, SIDE_INT4, SIDE_MIN, SIDE_COLUMNS = 0, 1, 2, 3, 4
# Packed formats; the numbers are those of worker/linear/formats.py.
F32_WEIGHTS, BF16_WEIGHTS, INT8, INT4, INT4_MIN, INT8_WIDE = 0, 1, 2, 3, 4, 5
