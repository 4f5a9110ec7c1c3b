"""One linear layer, or a slice of its outputs: tiles of 32 outputs over all rows of the step.

A unit of work is some tiles times some rows. At few rows units are sized in bytes (a decode step streams the weights
once); at many rows by tiles, and rows are cut too: into one part a thread, so that a thread's rows stay in its cache
from operation to operation, or more where there are fewer tiles than the threads can share. Where gates
and ups lie in turn (GATE), a unit makes of both what the next layer reads, and neither goes through memory.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from numba import types

from worker.jit.best import ENTRY_BYTES, note_best
from worker.jit.dot import float_tiles, int_tiles
from worker.jit.silu import silu_columns
from worker.jit.tile_layout import (AHEAD, BF16_WEIGHTS, BLOCK, F32_WEIGHTS, INT4, INT4_MIN, INT8, INT8_WIDE, TILE,
                                    UNROLL, WIDE_AHEAD, WIDE_BLOCK)
from worker.jit.vector import add, device, get_i64, load_f32, merged, set_i64, store_f32

KIND, X, LDX, SIDE, LD_SIDE, W, SCALES, MINIMA, NUM_K, NUM_TILES, TILE_BYTES, OUT, LD_OUT, BIAS = range(8, 22)
# TILE_ROWS: most rows of a tile for steps of up to 8, 32, 128 and more rows, eight bits each (worker/linear/table.py).
TILE_ROWS, TILES_PER_UNIT, ROWS_PER_UNIT, TILE_UNITS, MOST, SOON_STEP, NEXT_STEP, SHARE_STEP = range(22, 30)
# BEST: where the largest outputs of a row are noted (best.py), an entry a row and LD_BEST bytes a unit of tiles, of
# outputs below BEST_WIDTH; 0: nowhere.
BEST, BEST_WIDTH, LD_BEST = 30, 38, 39
# GATE: tiles of gates, followed by as many of ups; 0: outputs stay as they are. If it is set, OUT is memory for
# GATED_ROWS rows of such a group, LD_OUT bytes each and THREAD_BYTES of every thread; the others as in silu.py.
GATE, THREAD_BYTES, ACT_SIZE, ACT, ACT_Q, ACT_SIDE, ACT_LD_SIDE = range(31, 38)
GATED_ROWS = 132                            # whole tiles of every kind; gates and ups of so many stay in cache
_UNIT_BYTES = 64 << 10                      # of weights: long enough for the hardware to see a stream
_LONG_UNIT_BYTES = 256 << 10                # where tiles fetch each other: the first of a unit is fetched by itself
UNITS_PER_THREAD = 6
_ROW_STEP = 12                              # whole tiles of every kind
MANY_ROWS = 4 * _ROW_STEP
_PART_ROWS = 96                             # so many rows pay for reading the weights once more, for rows of one's own


def _int_rows(kind: int) -> Callable[..., Any]:
    """A tile over `rows` rows, one of the numbers that _int_tile_rows takes."""
    tiles = int_tiles(kind)
    one, two, three, four, six = (tiles[rows] for rows in (1, 2, 3, 4, 6))

    @device
    def run(rows, x, ldx, side, lds, w, s, mn, blocks, soon, soon_step, soon_scales,  # type: ignore[no-untyped-def]
            out, ldo):
        if rows == 6:
            six(x, ldx, side, lds, w, s, mn, blocks, soon, soon_step, soon_scales, out, ldo)
        elif rows == 4:
            four(x, ldx, side, lds, w, s, mn, blocks, soon, soon_step, soon_scales, out, ldo)
        elif rows == 3:
            three(x, ldx, side, lds, w, s, mn, blocks, soon, soon_step, soon_scales, out, ldo)
        elif rows == 2:
            two(x, ldx, side, lds, w, s, mn, blocks, soon, soon_step, soon_scales, out, ldo)
        else:
            one(x, ldx, side, lds, w, s, mn, blocks, soon, soon_step, soon_scales, out, ldo)
    return cast(Callable[..., Any], run)


def _float_rows(kind: int) -> Callable[..., Any]:
    """A tile over `rows` rows, one of the numbers that _float_tile_rows takes."""
    tiles = float_tiles(kind)
    one, two, four, eight, twelve = (tiles[rows] for rows in (1, 2, 4, 8, 12))

    @device
    def run(rows, x, ldx, w, num_k, soon, soon_step, out, ldo):  # type: ignore[no-untyped-def]
        if rows == 12:
            twelve(x, ldx, w, num_k, soon, soon_step, out, ldo)
        elif rows == 8:
            eight(x, ldx, w, num_k, soon, soon_step, out, ldo)
        elif rows == 4:
            four(x, ldx, w, num_k, soon, soon_step, out, ldo)
        elif rows == 2:
            two(x, ldx, w, num_k, soon, soon_step, out, ldo)
        else:
            one(x, ldx, w, num_k, soon, soon_step, out, ldo)
    return cast(Callable[..., Any], run)


_int8_rows, _int8_wide_rows, _int4_rows, _int4_min_rows = (
    _int_rows(kind) for kind in (INT8, INT8_WIDE, INT4, INT4_MIN))
_f32_rows, _bf16_rows = _float_rows(F32_WEIGHTS), _float_rows(BF16_WEIGHTS)


@device
def matmul_units(op, num_rows, num_threads):  # type: ignore[no-untyped-def]
    """How the operation is cut for this step; returns the number of units and notes the cut in the operation."""
    together = max(1, 2 * get_i64(op, GATE))    # tiles that no unit parts
    groups, group_bytes = get_i64(op, NUM_TILES) // together, get_i64(op, TILE_BYTES) * together
    if num_rows == 0 or groups == 0:
        return 0
    wanted = UNITS_PER_THREAD * num_threads
    row_class = 0 if num_rows <= 8 else 1 if num_rows <= 32 else 2 if num_rows <= 128 else 3
    most = (get_i64(op, TILE_ROWS) >> (8 * row_class)) & 255
    unit_bytes = _UNIT_BYTES if num_rows <= most else _LONG_UNIT_BYTES
    per_unit = max(1, min(unit_bytes // group_bytes, groups // wanted))
    rows = num_rows
    if num_rows >= MANY_ROWS:
        per_unit = 1
        wanted *= together                      # as small units as tiles are
        parts = max(min(num_threads, num_rows // _PART_ROWS), min((wanted + groups - 1) // groups,
                                                                  num_rows // (2 * _ROW_STEP)), 1)
        rows = (num_rows + parts - 1) // parts
        rows = (rows + _ROW_STEP - 1) // _ROW_STEP * _ROW_STEP
    # Bytes that each step of a tile asks for: of the tile itself, and of the next one, which all passes but the first
    # fetch together, or all, in whole lines.
    steps = get_i64(op, NUM_K) // (UNROLL if get_i64(op, KIND) <= BF16_WEIGHTS else _block(op))
    at_once = rows if together == 1 else min(rows, GATED_ROWS)
    passes = (at_once + most - 1) // most
    set_i64(op, SOON_STEP, get_i64(op, TILE_BYTES) // steps)
    set_i64(op, NEXT_STEP, _whole_lines(get_i64(op, TILE_BYTES) // (max(1, passes - 1) * steps)))
    set_i64(op, SHARE_STEP, _whole_lines(get_i64(op, TILE_BYTES) // (passes * steps)) if passes > 1 else 0)
    set_i64(op, MOST, most)
    set_i64(op, TILES_PER_UNIT, per_unit * together)
    set_i64(op, ROWS_PER_UNIT, rows)
    set_i64(op, TILE_UNITS, (groups + per_unit - 1) // per_unit)
    return get_i64(op, TILE_UNITS) * ((num_rows + rows - 1) // rows)


@device
def _block(op):  # type: ignore[no-untyped-def]
    """Inputs that share a scale, of integer weights."""
    return WIDE_BLOCK if get_i64(op, KIND) == INT8_WIDE else BLOCK


@device
def _ahead(op):  # type: ignore[no-untyped-def]
    return types.int64(WIDE_AHEAD if get_i64(op, KIND) == INT8_WIDE else AHEAD)


@device
def _whole_lines(size):  # type: ignore[no-untyped-def]
    return (size + 63) // 64 * 64


@merged
def matmul_unit(op, unit, num_rows, thread):  # type: ignore[no-untyped-def]
    tile_units, per_unit, rows = get_i64(op, TILE_UNITS), get_i64(op, TILES_PER_UNIT), get_i64(op, ROWS_PER_UNIT)
    first_tile, first_row = unit % tile_units * per_unit, unit // tile_units * rows
    last_tile = min(first_tile + per_unit, get_i64(op, NUM_TILES))
    last_row = min(first_row + rows, num_rows)
    gate, ldo = get_i64(op, GATE), get_i64(op, LD_OUT)
    if gate == 0:
        for tile in range(first_tile, last_tile):
            next_tile = tile + 1 if tile + 1 < last_tile else _next_unit(op, last_tile)
            _tile_rows(op, tile, next_tile, tile > first_tile, first_row, last_row,
                       get_i64(op, OUT) + tile * (4 * TILE), ldo)
        if get_i64(op, BEST) != 0:
            first = first_tile * TILE
            note_best(get_i64(op, OUT) + first_row * ldo + 4 * first, ldo, last_row - first_row,
                      min(last_tile * TILE, get_i64(op, BEST_WIDTH)) - first, first,
                      get_i64(op, BEST) + unit % tile_units * get_i64(op, LD_BEST) + first_row * ENTRY_BYTES)
        return
    pairs = get_i64(op, OUT) + thread * get_i64(op, THREAD_BYTES)
    for start in range(first_tile, last_tile, 2 * gate):
        for m in range(first_row, last_row, GATED_ROWS):
            last = min(m + GATED_ROWS, last_row)
            for tile in range(start, start + 2 * gate):
                next_tile = tile                # no more is wanted: these tiles again, with other rows
                if tile + 1 < start + 2 * gate:
                    next_tile = tile + 1 if m == first_row else tile
                elif last == last_row:
                    next_tile = tile + 1 if tile + 1 < last_tile else _next_unit(op, last_tile)
                _tile_rows(op, tile, next_tile, tile > first_tile or m > first_row, m, last,
                           pairs + (tile - start) * (4 * TILE) - m * ldo, ldo)
            silu_columns(m, last - m, pairs, gate * TILE, start // 2 * TILE, get_i64(op, ACT_SIZE), get_i64(op, ACT),
                         get_i64(op, ACT_Q), get_i64(op, ACT_SIDE), get_i64(op, ACT_LD_SIDE))


@device
def _next_unit(op, last_tile):  # type: ignore[no-untyped-def]
    """The first tile of what this thread takes next, probably: what follows."""
    return min(last_tile, get_i64(op, NUM_TILES) - 1)


@device
def _tile_rows(op, tile, next_tile, is_fetched, first_row, last_row, out, ldo):  # type: ignore[no-untyped-def]
    """A tile over rows; out: where that of row 0 would lie."""
    if get_i64(op, KIND) <= BF16_WEIGHTS:
        _float_tile_rows(op, tile, next_tile, is_fetched, first_row, last_row, out, ldo)
    else:
        _int_tile_rows(op, tile, next_tile, is_fetched, first_row, last_row, out, ldo)
    bias = get_i64(op, BIAS)
    if bias != 0:
        at = bias + tile * (4 * TILE)
        for m in range(first_row, last_row):
            to = out + m * ldo
            store_f32(to, add(load_f32(to), load_f32(at)))
            store_f32(to + 64, add(load_f32(to + 64), load_f32(at + 64)))


@device
def _first_fetch(op, w, distance, is_fetched, steps):  # type: ignore[no-untyped-def]
    """What the first pass over a tile asks for; the next tile is `distance` tiles on, 0: there is none. (address, bytes
    each step, bytes each step of the passes after it, bytes of the next tile that are asked for)."""
    own, shared = get_i64(op, SOON_STEP), get_i64(op, SHARE_STEP)
    if not is_fetched or shared == 0:
        return w + _ahead(op) * own, own, get_i64(op, NEXT_STEP), types.int64(0)
    soon, step = _next_fetch(w, distance, types.int64(0), get_i64(op, TILE_BYTES), shared)
    return soon, step, shared, steps * step


@device
def _next_fetch(w, distance, fetched, tile_bytes, step):  # type: ignore[no-untyped-def]
    """(address, bytes each step) of what is missing of the next tile; nothing new once all of it is asked for."""
    if distance > 0 and fetched < tile_bytes:
        return w + distance * tile_bytes + fetched, step
    return w, types.int64(0)


@merged
def _int_tile_rows(op, tile, next_tile, is_fetched, m, last, out, ldo):  # type: ignore[no-untyped-def]
    """The first rows that go over a tile fetch it, unless the tile before did; the others, or all, share the fetching
    of the next one, so that memory has work all the time."""
    kind, blocks = get_i64(op, KIND), get_i64(op, NUM_K) // _block(op)
    x, ldx, side, lds = get_i64(op, X), get_i64(op, LDX), get_i64(op, SIDE), get_i64(op, LD_SIDE)
    tile_bytes, most = get_i64(op, TILE_BYTES), get_i64(op, MOST)
    w = get_i64(op, W) + tile * tile_bytes
    s = get_i64(op, SCALES) + tile * blocks * (2 * TILE)
    mn = get_i64(op, MINIMA) + tile * blocks * (2 * TILE)
    distance = next_tile - tile
    soon, soon_step, next_step, fetched = _first_fetch(op, w, distance, is_fetched, blocks)
    is_own = fetched == 0 and soon > w          # else the next tile's, which may be none
    soon_scales = (_ahead(op) if is_own else distance * blocks) * (2 * TILE)
    while m < last:
        left = last - m
        xm, sm, om = x + m * ldx, side + m * lds, out + m * ldo
        # 5 = 3 + 2, 7 = 4 + 3 and 8 = 4 + 4 rows: no single rows, which cost as much weight decoding as six.
        if most >= 6 and (left == 6 or left > 8):
            rows = 6
        elif most >= 4 and (left == 4 or left > 5):
            rows = 4
        else:
            rows = 3 if left == 3 or left >= 5 else min(left, 2)
        if kind == INT8_WIDE:
            _int8_wide_rows(rows, xm, ldx, sm, lds, w, s, mn, blocks, soon, soon_step, soon_scales, om, ldo)
        elif kind == INT8:
            _int8_rows(rows, xm, ldx, sm, lds, w, s, mn, blocks, soon, soon_step, soon_scales, om, ldo)
        elif kind == INT4:
            _int4_rows(rows, xm, ldx, sm, lds, w, s, mn, blocks, soon, soon_step, soon_scales, om, ldo)
        else:
            _int4_min_rows(rows, xm, ldx, sm, lds, w, s, mn, blocks, soon, soon_step, soon_scales, om, ldo)
        m += rows
        soon, soon_step = _next_fetch(w, distance, fetched, tile_bytes, next_step)
        soon_scales = distance * blocks * (2 * TILE) if soon_step > 0 else types.int64(0)
        fetched += blocks * soon_step


@merged
def _float_tile_rows(op, tile, next_tile, is_fetched, m, last, out, ldo):  # type: ignore[no-untyped-def]
    """As _int_tile_rows."""
    num_k, tile_bytes, most = get_i64(op, NUM_K), get_i64(op, TILE_BYTES), get_i64(op, MOST)
    x, ldx = get_i64(op, X), get_i64(op, LDX)
    w = get_i64(op, W) + tile * tile_bytes
    is_f32, steps = get_i64(op, KIND) == F32_WEIGHTS, num_k // UNROLL
    distance = next_tile - tile
    soon, soon_step, next_step, fetched = _first_fetch(op, w, distance, is_fetched, steps)
    while m < last:
        left = min(last - m, most)
        rows = 12 if left >= 12 else 8 if left >= 8 else 4 if left >= 4 else 2 if left >= 2 else 1
        if is_f32:
            _f32_rows(rows, x + m * ldx, ldx, w, num_k, soon, soon_step, out + m * ldo, ldo)
        else:
            _bf16_rows(rows, x + m * ldx, ldx, w, num_k, soon, soon_step, out + m * ldo, ldo)
        m += rows
        soon, soon_step = _next_fetch(w, distance, fetched, tile_bytes, next_step)
        fetched += steps * soon_step
