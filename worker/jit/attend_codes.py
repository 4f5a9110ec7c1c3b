"""The two products of attention over int8 pools, in integers: queries times keys, weights times values.

Queries and weights have sixteen bits, as two bytes, so that what counts is the rounding of the pool's own eight:

    q = scale * (256 high + low)         both signed; |q| <= 32639 * scale
    w = scale * (256 high + low)         both unsigned; scale of a row and 64 keys

A sum over four dimensions, or over four keys, is one instruction (dot.py), and sums are exact, so no result depends on
their order or on the number of rows. Codes are numbers whatever they hold: a key without weight may be read. Knows
addresses, not requests (attend.py).
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir
from numba import types
from numba.core import cgutils

from worker.jit import attend_codes_avx2, features
from worker.jit.attend_softmax import CHUNK, keep_weights, raw_weights
from worker.jit.attend_tiles import GROUP_COUNT, GROUP_FIELDS, GROUP_K, GROUP_NEXT_K, GROUP_NEXT_V, GROUP_V
from worker.jit.dot import dot4
from worker.jit.kv_codes import largest_bits, load_some
from worker.jit.vector import (F32, I8, I32, I64, LANES, VF, VI, add_i32, bits_to_f32, constant, device, get_f32,
                               keep_order, magnitude, make, max_lanes_i32, maximum_i32, mul, nearest, offset, prefetch,
                               read, select_above_0, set_f32, set_i32, shift_left, shift_right, splat, splat_i32,
                               spread, store_bytes, sub_i32, sum_lanes_i32, to_i32, write)

_f32, _i32 = types.float32, types.int32
_INFINITY_BITS = 0x7F800000
_LARGEST_QUERY, _LARGEST_WEIGHT = 32639.0, 65535.0      # so that the high byte of a query is at most 127
_SMALLEST = 1e-33                           # below, a reciprocal overflows; such weights are none
# A query in a tile: high bytes and low bytes, D' each, then its scale and what the sums of either begin with.
_SCALE, _START_HIGH, _START_LOW = 0, 4, 8
# A row's weights of 64 keys: high bytes, low bytes, scale.
_LOW, _WEIGHT_SCALE = CHUNK, 2 * CHUNK


@device
def _store_query_bytes(target, padded_dim, i, code, high, low):  # type: ignore[no-untyped-def]
    store_bytes(target + i, high)
    store_bytes(target + padded_dim + i, low)


@device
def _store_query_shorts(target, padded_dim, i, code, high, low):  # type: ignore[no-untyped-def]
    attend_codes_avx2.store_query(target + 2 * i, code)


@device
def _store_weight_bytes(at, first, code):  # type: ignore[no-untyped-def]
    store_bytes(at + first, shift_right(code, splat_i32(_i32(8))))
    store_bytes(at + first + _LOW, code)


@device
def _store_weight_shorts(at, first, code):  # type: ignore[no-untyped-def]
    attend_codes_avx2.store_weights(at + 2 * first, code)


# By form: store(target, padded_dim, i, code, high, low) sixteen codes of a query from dimension i on, and
# store(at, i, code) those of the weights of keys i and following.
QUERY_STORES = {"vnni512": _store_query_bytes, "avx2": _store_query_shorts, "generic": _store_query_bytes}
WEIGHT_STORES = {"vnni512": _store_weight_bytes, "avx2": _store_weight_shorts, "generic": _store_weight_bytes}
_store_query, _store_weights = QUERY_STORES[features.dot_form()], WEIGHT_STORES[features.dot_form()]


@device
def quantize_query(x, dim, padded_dim, target):  # type: ignore[no-untyped-def]
    """x float32 [dim] -> a query of a tile. A NaN or an infinity makes the scale NaN."""
    bits, inverse, scale = largest_bits(x, dim), _f32(0.0), _f32(0.0)
    if bits >= _INFINITY_BITS:
        scale = _f32(float("nan"))
    elif bits_to_f32(bits) > _f32(_SMALLEST):
        scale, inverse = bits_to_f32(bits) / _f32(_LARGEST_QUERY), _f32(_LARGEST_QUERY) / bits_to_f32(bits)
    sum_high, sum_low, factor = splat_i32(_i32(0)), splat_i32(_i32(0)), splat(inverse)
    for i in range(0, padded_dim, 16):
        code = splat_i32(_i32(0))
        if bits < _INFINITY_BITS:
            code = to_i32(nearest(mul(load_some(x + 4 * i, dim - i), factor)))
        high = shift_right(add_i32(code, splat_i32(_i32(128))), splat_i32(_i32(8)))
        low = sub_i32(code, shift_left(high, splat_i32(_i32(8))))
        _store_query(target, padded_dim, i, code, high, low)
        sum_high, sum_low = add_i32(sum_high, high), add_i32(sum_low, low)
    side = target + 2 * padded_dim
    set_f32(side + _SCALE, 0, scale)
    set_i32(side + _START_HIGH, 0, _i32(-128) * sum_lanes_i32(sum_high))
    set_i32(side + _START_LOW, 0, _i32(-128) * sum_lanes_i32(sum_low))


@device
def weigh_codes(rows, scores, states, ld, factors, bases, keeps):  # type: ignore[no-untyped-def]
    """As attend_softmax.weigh, with weights as codes. A key without weight has the code 0 whatever its factor is."""
    w0, w1, w2, w3 = factors
    for m in range(rows):
        at, state = scores + m * (CHUNK * 4), states + m * ld
        s0, s1, s2, s3 = raw_weights(at, splat(get_f32(bases, m)))
        keep_weights(state, ld, get_f32(keeps, m), s0, s1, s2, s3)
        p0, p1 = select_above_0(s0, mul(s0, w0)), select_above_0(s1, mul(s1, w1))
        p2, p3 = select_above_0(s2, mul(s2, w2)), select_above_0(s3, mul(s3, w3))
        tops = maximum_i32(maximum_i32(magnitude(p0), magnitude(p1)), maximum_i32(magnitude(p2), magnitude(p3)))
        top = bits_to_f32(max_lanes_i32(tops))
        inverse = _f32(_LARGEST_WEIGHT) / top if top > _f32(_SMALLEST) else _f32(0.0)
        factor = splat(inverse)
        _store_weights(at, 0, to_i32(nearest(mul(p0, factor))))
        _store_weights(at, 16, to_i32(nearest(mul(p1, factor))))
        _store_weights(at, 32, to_i32(nearest(mul(p2, factor))))
        _store_weights(at, 48, to_i32(nearest(mul(p3, factor))))
        set_f32(at + _WEIGHT_SCALE, 0, top / _f32(_LARGEST_WEIGHT))


def _spread_quad(b: Any, address: Any) -> Any:
    return spread(b, read(b, address, I32), VI)


def _joined(b: Any, high: Any, low: Any, scale: Any) -> Any:
    """(256 high + low) * scale as float32."""
    total = b.add(b.shl(high, constant(VI, 8)), low)
    return b.fmul(b.sitofp(total, VF), scale)


def make_scores(rows: int, form: str) -> Any:
    """scores(q, ld_q, padded_dim, num_quads, groups, ld_k, fetches, out, ld_out): rows of queries times four groups of
    16 keys, each num_quads vectors ld_k bytes apart, of four dimensions of sixteen keys -> out [rows, 64], which still
    want the scales of their keys. fetches: whether to ask for what is read next."""
    if form == "avx2":
        return attend_codes_avx2.make_scores(rows, _SCALE)

    def generate(b: Any, q: Any, ld_q: Any, padded_dim: Any, num_quads: Any, groups: Any, ld_k: Any, fetches: Any,
                 out: Any, ld_out: Any) -> None:
        q_rows = [b.add(q, b.mul(ld_q, constant(I64, m))) for m in range(rows)]
        sides = [b.add(row, b.mul(padded_dim, constant(I64, 2))) for row in q_rows]
        cells = [[[cgutils.alloca_once(b, VI) for _ in range(4)] for _ in range(2)] for _ in range(rows)]
        for m in range(rows):
            for half, start in zip(cells[m], (_START_HIGH, _START_LOW)):
                for cell in half:
                    b.store(_spread_quad(b, offset(b, sides[m], start)), cell)
        here, soon = ([read(b, offset(b, groups, 8 * (GROUP_FIELDS * g + field)), I64, 8) for g in range(4)]
                      for field in (GROUP_K, GROUP_NEXT_K))
        with cgutils.for_range(b, num_quads, intp=I64) as loop:
            at_k, at_q = b.mul(loop.index, ld_k), b.mul(loop.index, constant(I64, 4))
            keys = [b.xor(read(b, b.add(group, at_k), VI), constant(VI, -0x7F7F7F80)) for group in here]
            line = b.mul(loop.index, constant(I64, 64))
            with b.if_then(b.icmp_signed("!=", fetches, I64(0))):
                for group in soon:
                    prefetch(b, b.add(group, line), 2)
            for m in range(rows):
                for half, start in zip(cells[m], (q_rows[m], b.add(q_rows[m], padded_dim))):
                    quad = _spread_quad(b, b.add(start, at_q))
                    for key, cell in zip(keys, half):
                        b.store(dot4(b, form, b.load(cell), key, quad), cell)
        for m in range(rows):
            scale = spread(b, read(b, offset(b, sides[m], _SCALE), F32, 4), VF)
            for g in range(4):
                value = _joined(b, b.load(cells[m][0][g]), b.load(cells[m][1][g]), scale)
                write(b, offset(b, b.add(out, b.mul(ld_out, constant(I64, m))), 64 * g), value, 4)
    return make(types.void, (types.intp,) * 9, generate)


def make_values(rows: int, vectors: int, form: str) -> Any:
    """values(p, ld_p, groups, column, ld_v, fetches, acc, ld_acc): acc[row] += sum over the keys of four groups of
    weight times value, for 64 dimensions (vectors 4) or 16 (1) from byte `column` of a value on. fetches: as above."""
    if form == "avx2":
        return attend_codes_avx2.make_values(rows, vectors, _WEIGHT_SCALE)

    def generate(b: Any, p: Any, ld_p: Any, groups: Any, column: Any, ld_v: Any, fetches: Any, acc: Any,
                 ld_acc: Any) -> None:
        p_rows = [b.add(p, b.mul(ld_p, constant(I64, m))) for m in range(rows)]
        cells = [[[cgutils.alloca_once(b, VI) for _ in range(vectors)] for _ in range(2)] for _ in range(rows)]
        for row in cells:
            for half in row:
                for cell in half:
                    b.store(constant(VI, 0), cell)
        soon = [read(b, offset(b, groups, 8 * (GROUP_FIELDS * g + GROUP_NEXT_V)), I64, 8) for g in range(4)]
        with cgutils.for_range(b, I64(4), intp=I64) as outer:
            group = b.add(groups, b.mul(outer.index, constant(I64, 8 * GROUP_FIELDS)))
            v = b.add(read(b, offset(b, group, 8 * GROUP_V), I64, 8), column)
            with b.if_then(b.icmp_signed(">", read(b, offset(b, group, 8 * GROUP_COUNT), I64, 8), I64(0))):
                with cgutils.for_range(b, I64(4), intp=I64) as inner:
                    keep_order(b)               # loads of four rounds at once would not find registers
                    first = b.mul(inner.index, b.mul(ld_v, constant(I64, 4)))
                    lines = [b.add(first, b.mul(ld_v, constant(I64, key))) for key in range(4)]
                    parts = _interleaved(b, [b.add(v, line) for line in lines], vectors)
                    with b.if_then(b.icmp_signed("!=", fetches, I64(0))):
                        number = b.add(b.mul(outer.index, constant(I64, 4)), inner.index)
                        line = b.add(b.mul(column, constant(I64, LANES)),
                                     b.mul(number, constant(I64, LANES * vectors)))
                        for group in soon:      # memory serves four streams faster than one
                            prefetch(b, b.add(group, line), 2)
                    at_p = b.add(b.mul(outer.index, constant(I64, LANES)), b.mul(inner.index, constant(I64, 4)))
                    for m in range(rows):
                        for number, half in enumerate(cells[m]):
                            quad = _spread_quad(b, offset(b, b.add(p_rows[m], at_p), _LOW * number))
                            for part, cell in zip(parts, half):
                                b.store(dot4(b, form, b.load(cell), quad, part), cell)
        for m in range(rows):
            scale = spread(b, read(b, offset(b, p_rows[m], _WEIGHT_SCALE), F32, 4), VF)
            sums = _in_order(b, [_joined(b, b.load(high), b.load(low), scale) for high, low in zip(*cells[m])])
            for i, value in enumerate(sums):
                at = offset(b, b.add(acc, b.mul(ld_acc, constant(I64, m))), 64 * i)
                write(b, at, b.fadd(read(b, at, VF, 4), value), 4)
    return make(types.void, (types.intp,) * 8, generate)


def _interleaved(b: Any, keys: list[Any], vectors: int) -> list[Any]:
    """Values of four keys -> vectors of sixteen dimensions, the four keys' bytes of each side by side. With four
    vectors the i-th holds the i-th four dimensions of each sixteen: quarters of a register need not be exchanged."""
    kind = ir.VectorType(I8, LANES * vectors)
    rows = [read(b, key, kind) for key in keys]

    def shuffled(x: Any, y: Any, indices: list[int]) -> Any:
        return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, len(indices)), indices))

    if vectors == 1:
        first, second = (shuffled(rows[i], rows[i + 1], [j + LANES * side for j in range(LANES) for side in range(2)])
                         for i in (0, 2))
        order = [2 * j + 2 * LANES * side + byte for j in range(LANES) for side in range(2) for byte in range(2)]
        return [b.bitcast(shuffled(first, second, order), VI)]
    size = LANES * vectors

    def unpacked(x: Any, y: Any, width: int, upper: int) -> Any:
        """Of each quarter's lower or upper half, `width` bytes of x and of y in turn."""
        indices = [16 * quarter + 8 * upper + width * at + byte + size * side for quarter in range(4)
                   for at in range(8 // width) for side in range(2) for byte in range(width)]
        return shuffled(x, y, indices)

    pairs = [[unpacked(rows[i], rows[i + 1], 1, upper) for upper in range(2)] for i in (0, 2)]
    return [b.bitcast(unpacked(pairs[0][half], pairs[1][half], 2, upper), VI)
            for half in range(2) for upper in range(2)]


def _in_order(b: Any, vectors: list[Any]) -> list[Any]:
    """What _interleaved did to the order of dimensions, undone: quarters j of vectors i -> quarters i of vectors j."""
    if len(vectors) == 1:
        return vectors

    def shuffled(x: Any, y: Any, quarters: list[int]) -> Any:
        return b.shuffle_vector(x, y, ir.Constant(VI, [4 * quarter + i for quarter in quarters for i in range(4)]))

    low, high = shuffled(vectors[0], vectors[1], [0, 4, 1, 5]), shuffled(vectors[0], vectors[1], [2, 6, 3, 7])
    low2, high2 = shuffled(vectors[2], vectors[3], [0, 4, 1, 5]), shuffled(vectors[2], vectors[3], [2, 6, 3, 7])
    return [shuffled(low, low2, [0, 1, 4, 5]), shuffled(low, low2, [2, 3, 6, 7]),
            shuffled(high, high2, [0, 1, 4, 5]), shuffled(high, high2, [2, 3, 6, 7])]


Function = Callable[..., Any]


def _scores_rows() -> Function:
    one, two, three = (make_scores(rows, features.dot_form()) for rows in (1, 2, 3))

    @device
    def run(rows, q, padded_dim, dim, groups, ld_k, out):  # type: ignore[no-untyped-def]
        m, ld_q, num_quads, ldo = 0, 4 * padded_dim, (dim + 3) // 4, CHUNK * 4
        while m < rows:
            n, fetches = min(3, rows - m), types.int64(m == 0)
            at, to = q + m * ld_q, out + m * ldo
            if n == 3:
                three(at, ld_q, padded_dim, num_quads, groups, ld_k, fetches, to, ldo)
            elif n == 2:
                two(at, ld_q, padded_dim, num_quads, groups, ld_k, fetches, to, ldo)
            else:
                one(at, ld_q, padded_dim, num_quads, groups, ld_k, fetches, to, ldo)
            m += n
    return cast(Function, run)


def _values_rows() -> Function:
    one, two, three = (make_values(rows, 4, features.dot_form()) for rows in (1, 2, 3))
    narrow = make_values(1, 1, features.dot_form())

    @device
    def run(rows, p, groups, dim, acc, ld_acc):  # type: ignore[no-untyped-def]
        ldp, column = CHUNK * 4, 0
        while column < dim:
            wide, m = dim - column >= 64, 0
            while m < rows:
                n, fetches = min(3, rows - m) if wide else 1, types.int64(m == 0)
                at, to = p + m * ldp, acc + m * ld_acc + column * 4
                if not wide:
                    narrow(at, ldp, groups, column, dim, fetches, to, ld_acc)
                elif n == 3:
                    three(at, ldp, groups, column, dim, fetches, to, ld_acc)
                elif n == 2:
                    two(at, ldp, groups, column, dim, fetches, to, ld_acc)
                else:
                    one(at, ldp, groups, column, dim, fetches, to, ld_acc)
                m += n
            column += 64 if wide else 16
    return cast(Function, run)


code_scores_rows, code_values_rows = _scores_rows(), _values_rows()
