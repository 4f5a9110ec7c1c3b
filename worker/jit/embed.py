"""Rows of the embedding, decoded from the packed weights: a tied output head then needs no second copy."""
from __future__ import annotations

from numba import types

from worker.jit.tile_layout import BF16_WEIGHTS, BLOCK, F32_WEIGHTS, INT4, INT8, INT8_WIDE, TILE, WIDE_BLOCK
from worker.jit.quantize import rotate_block
from worker.jit.vector import bits_to_f32, device, get_f16, get_f32, get_i64, get_u8, get_u16, set_f32

_f32 = types.float32

KIND, W, SCALES, MINIMA, SIZE, OUT = range(8, 14)


@device
def embed_row(op, token, n):  # type: ignore[no-untyped-def]
    """Row `token` of the packed [V, SIZE] weights -> out[n], float32."""
    kind, size = get_i64(op, KIND), get_i64(op, SIZE)
    out = get_i64(op, OUT) + n * size * 4
    tile, lane = token // TILE, token % TILE
    w = get_i64(op, W)
    if kind == F32_WEIGHTS:
        for k in range(size):
            set_f32(out, k, get_f32(w, (tile * size + k) * TILE + lane))
        return
    if kind == BF16_WEIGHTS:
        for k in range(size):
            set_f32(out, k, bits_to_f32(types.int32(types.uint32(get_u16(w, (tile * size + k) * TILE + lane)) << 16)))
        return
    width = WIDE_BLOCK if kind == INT8_WIDE else BLOCK
    num_blocks = size // width
    within = lane // 16 * 64 + lane % 16 * 4
    for block in range(num_blocks):
        at = (tile * num_blocks + block) * TILE + lane
        scale = get_f16(get_i64(op, SCALES), at)
        if kind == INT8 or kind == INT8_WIDE:
            base = w + (tile * num_blocks + block) * (TILE * width) + within
            for k in range(width):
                value = _f32(types.int32(get_u8(base, k // 4 * 128 + k % 4)) - 128)
                set_f32(out, block * width + k, value * scale)
            if kind == INT8_WIDE:
                rotate_block(out + block * (4 * WIDE_BLOCK))
        else:
            base = w + (tile * num_blocks + block) * (TILE * BLOCK // 2) + within
            low = _f32(0.0) if kind == INT4 else get_f16(get_i64(op, MINIMA), at)
            zero = 8 if kind == INT4 else 0
            for k in range(BLOCK):
                byte = types.int32(get_u8(base, k // 4 % 4 * 128 + k % 4))
                nibble = (byte >> 4 if k >= 16 else byte & 15) - zero
                set_f32(out, block * BLOCK + k, _f32(nibble) * scale + low)
