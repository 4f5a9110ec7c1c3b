"""One linear layer, or a slice of its outputs: tiles of 32 outputs over all rows of the step.

A unit of work is some tiles times some rows. At few rows units are sized in bytes (a decode step streams the weights
once); at many rows by tiles, and rows are cut too when there are fewer tiles than the threads can share.
"""
from __future__ import annotations

from worker.jit.dot import BF16_WEIGHTS, F32_WEIGHTS, INT4, INT4_MIN, INT8, TILE, float_tiles, int_tiles
from worker.jit.vector import add, device, get_i64, load_f32, set_i64, store_f32

KIND, X, LDX, SIDE, LD_SIDE, W, SCALES, MINIMA, NUM_K, NUM_TILES, TILE_BYTES, OUT, LD_OUT, BIAS = range(8, 22)
# TILE_ROWS: most rows of a tile for steps of up to 8, 32, 128 and more rows, eight bits each (worker/linear/table.py).
TILE_ROWS, TILES_PER_UNIT, ROWS_PER_UNIT, ROW_UNITS, MOST = range(22, 27)
_UNIT_BYTES = 64 << 10                      # of weights: long enough for the hardware to see a stream
_UNITS_PER_THREAD = 6
_ROW_STEP = 12                              # whole tiles of every kind

_i8, _i4, _i4m = int_tiles(INT8), int_tiles(INT4), int_tiles(INT4_MIN)
_f, _b = float_tiles(F32_WEIGHTS), float_tiles(BF16_WEIGHTS)
_i8_1, _i8_2, _i8_3, _i8_4, _i8_6 = _i8[1], _i8[2], _i8[3], _i8[4], _i8[6]
_i4_1, _i4_2, _i4_3, _i4_4, _i4_6 = _i4[1], _i4[2], _i4[3], _i4[4], _i4[6]
_i4m_1, _i4m_2, _i4m_3, _i4m_4, _i4m_6 = _i4m[1], _i4m[2], _i4m[3], _i4m[4], _i4m[6]
_f_1, _f_2, _f_4, _f_8, _f_12 = _f[1], _f[2], _f[4], _f[8], _f[12]
_b_1, _b_2, _b_4, _b_8, _b_12 = _b[1], _b[2], _b[4], _b[8], _b[12]


@device
def matmul_units(op, num_rows, num_threads):  # type: ignore[no-untyped-def]
    """How the operation is cut for this step; returns the number of units and notes the cut in the operation."""
    tiles = get_i64(op, NUM_TILES)
    if num_rows == 0 or tiles == 0:
        return 0
    wanted = _UNITS_PER_THREAD * num_threads
    per_unit = max(1, min(_UNIT_BYTES // get_i64(op, TILE_BYTES), tiles // wanted))
    rows = num_rows
    if num_rows >= 4 * _ROW_STEP:
        per_unit = 1
        if tiles < wanted:
            parts = min((wanted + tiles - 1) // tiles, num_rows // (2 * _ROW_STEP))
            rows = (num_rows + parts - 1) // parts
            rows = (rows + _ROW_STEP - 1) // _ROW_STEP * _ROW_STEP
    row_units = (num_rows + rows - 1) // rows
    row_class = 0 if num_rows <= 8 else 1 if num_rows <= 32 else 2 if num_rows <= 128 else 3
    set_i64(op, MOST, (get_i64(op, TILE_ROWS) >> (8 * row_class)) & 255)
    set_i64(op, TILES_PER_UNIT, per_unit)
    set_i64(op, ROWS_PER_UNIT, rows)
    set_i64(op, ROW_UNITS, row_units)
    return (tiles + per_unit - 1) // per_unit * row_units


@device
def matmul_unit(op, unit, num_rows):  # type: ignore[no-untyped-def]
    row_units, per_unit, rows = get_i64(op, ROW_UNITS), get_i64(op, TILES_PER_UNIT), get_i64(op, ROWS_PER_UNIT)
    first_tile, first_row = unit // row_units * per_unit, unit % row_units * rows
    last_tile = min(first_tile + per_unit, get_i64(op, NUM_TILES))
    last_row = min(first_row + rows, num_rows)
    bias = get_i64(op, BIAS)
    for tile in range(first_tile, last_tile):
        if get_i64(op, KIND) <= BF16_WEIGHTS:
            _float_tile_rows(op, tile, first_row, last_row)
        else:
            _int_tile_rows(op, tile, first_row, last_row)
        if bias != 0:
            at = bias + tile * (4 * TILE)
            for m in range(first_row, last_row):
                out = get_i64(op, OUT) + m * get_i64(op, LD_OUT) + tile * (4 * TILE)
                store_f32(out, add(load_f32(out), load_f32(at)))
                store_f32(out + 64, add(load_f32(out + 64), load_f32(at + 64)))


@device
def _int_tile_rows(op, tile, m, last):  # type: ignore[no-untyped-def]
    kind, num_blocks = get_i64(op, KIND), get_i64(op, NUM_K) // 32
    x, ldx, side, lds = get_i64(op, X), get_i64(op, LDX), get_i64(op, SIDE), get_i64(op, LD_SIDE)
    w = get_i64(op, W) + tile * get_i64(op, TILE_BYTES)
    s = get_i64(op, SCALES) + tile * num_blocks * (2 * TILE)
    mn = get_i64(op, MINIMA) + tile * num_blocks * (2 * TILE)
    out, ldo = get_i64(op, OUT) + tile * (4 * TILE), get_i64(op, LD_OUT)
    most = get_i64(op, MOST)
    while m < last:
        left = last - m
        xm, sm, om = x + m * ldx, side + m * lds, out + m * ldo
        # 5 = 3 + 2, 7 = 4 + 3 and 8 = 4 + 4 rows: no single rows, which cost as much weight decoding as six.
        if most >= 6 and (left == 6 or left > 8):
            step = 6
        elif most >= 4 and (left == 4 or left > 5):
            step = 4
        else:
            step = 3 if left == 3 or left >= 5 else min(left, 2)
        if kind == INT8:
            if step == 6:
                _i8_6(xm, ldx, sm, lds, w, s, mn, num_blocks, om, ldo)
            elif step == 4:
                _i8_4(xm, ldx, sm, lds, w, s, mn, num_blocks, om, ldo)
            elif step == 3:
                _i8_3(xm, ldx, sm, lds, w, s, mn, num_blocks, om, ldo)
            elif step == 2:
                _i8_2(xm, ldx, sm, lds, w, s, mn, num_blocks, om, ldo)
            else:
                _i8_1(xm, ldx, sm, lds, w, s, mn, num_blocks, om, ldo)
        elif kind == INT4:
            if step == 6:
                _i4_6(xm, ldx, sm, lds, w, s, mn, num_blocks, om, ldo)
            elif step == 4:
                _i4_4(xm, ldx, sm, lds, w, s, mn, num_blocks, om, ldo)
            elif step == 3:
                _i4_3(xm, ldx, sm, lds, w, s, mn, num_blocks, om, ldo)
            elif step == 2:
                _i4_2(xm, ldx, sm, lds, w, s, mn, num_blocks, om, ldo)
            else:
                _i4_1(xm, ldx, sm, lds, w, s, mn, num_blocks, om, ldo)
        else:
            if step == 6:
                _i4m_6(xm, ldx, sm, lds, w, s, mn, num_blocks, om, ldo)
            elif step == 4:
                _i4m_4(xm, ldx, sm, lds, w, s, mn, num_blocks, om, ldo)
            elif step == 3:
                _i4m_3(xm, ldx, sm, lds, w, s, mn, num_blocks, om, ldo)
            elif step == 2:
                _i4m_2(xm, ldx, sm, lds, w, s, mn, num_blocks, om, ldo)
            else:
                _i4m_1(xm, ldx, sm, lds, w, s, mn, num_blocks, om, ldo)
        m += step


@device
def _float_tile_rows(op, tile, m, last):  # type: ignore[no-untyped-def]
    num_k = get_i64(op, NUM_K)
    x, ldx = get_i64(op, X), get_i64(op, LDX)
    w = get_i64(op, W) + tile * get_i64(op, TILE_BYTES)
    out, ldo = get_i64(op, OUT) + tile * (4 * TILE), get_i64(op, LD_OUT)
    is_f32, most = get_i64(op, KIND) == F32_WEIGHTS, get_i64(op, MOST)
    while m < last:
        left = min(last - m, most)
        xm, om = x + m * ldx, out + m * ldo
        step = 12 if left >= 12 else 8 if left >= 8 else 4 if left >= 4 else 2 if left >= 2 else 1
        if is_f32:
            if step == 12:
                _f_12(xm, ldx, w, num_k, om, ldo)
            elif step == 8:
                _f_8(xm, ldx, w, num_k, om, ldo)
            elif step == 4:
                _f_4(xm, ldx, w, num_k, om, ldo)
            elif step == 2:
                _f_2(xm, ldx, w, num_k, om, ldo)
            else:
                _f_1(xm, ldx, w, num_k, om, ldo)
        elif step == 12:
            _b_12(xm, ldx, w, num_k, om, ldo)
        elif step == 8:
            _b_8(xm, ldx, w, num_k, om, ldo)
        elif step == 4:
            _b_4(xm, ldx, w, num_k, om, ldo)
        elif step == 2:
            _b_2(xm, ldx, w, num_k, om, ldo)
        else:
            _b_1(xm, ldx, w, num_k, om, ldo)
        m += step
