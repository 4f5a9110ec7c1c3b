"""Sixteen lanes under a condition: masks by bits, largest of a chunk, copies of the lanes that pass a limit, 2**x.

Built from vector.py's blocks, for kernels that read rows of logits in chunks of CHUNK. Does not know what the numbers
mean.
"""
from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from worker.jit import features
from worker.jit.vector import (I8, I16, I32, I64, LANES, VF, VI, add, call, constant, device, f32x16, i32x16, make,
                               max_lanes, maximum, mul, muladd, nearest, offset, prefetch, read, splat, sub, write,
                               zero_unless_above)

CHUNK = 256
AHEAD = 8192                                    # bytes; what is fetched while a chunk is read
_ADDRESS, _F32 = types.intp, types.float32
_BITS, _V4, _V8 = ir.VectorType(ir.IntType(1), LANES), ir.VectorType(I64, 4), ir.VectorType(I32, 8)
_MINUS_INF, _NAN = float("-inf"), float("nan")


def _load_where(builder: Any, address: Any, bits: Any) -> Any:
    mask = builder.bitcast(read(builder, bits, I16, 2), _BITS)
    return builder.select(mask, read(builder, address, VF, 4), constant(VF, _MINUS_INF))


def _copy_lanes(builder: Any, address: Any, value: Any, mask: Any) -> Any:
    lanes = builder.bitcast(value, VI)          # of floats, LLVM 20 can only compress where the processor does
    if "avx512f" not in features.cpu_features() and "avx2" in features.cpu_features():
        return _copy_by_table(builder, address, lanes, mask)
    name = "llvm.experimental.vector.compress.v16i32"
    write(builder, address, call(builder, name, VI, [lanes, mask, ir.Constant(VI, None)]), 4)
    return builder.zext(call(builder, "llvm.ctpop.i16", I16, [builder.bitcast(mask, I16)]), I64)


# Row m: the numbers of the bits of m that are 1, then zeros.
_PLACES = np.array([(*(bit for bit in range(8) if m >> bit & 1), *(8 - m.bit_count()) * (0,)) for m in range(256)],
                   np.uint8)


def _copy_by_table(builder: Any, address: Any, lanes: Any, mask: Any) -> Any:
    """Eight lanes at a time, by a permutation that a table has for every byte of the mask."""
    kind, bits, count = ir.ArrayType(I64, 256), builder.bitcast(mask, I16), constant(I64, 0)
    numbers = ir.Constant(kind, [int(row) for row in _PLACES.view("<u8")[:, 0]])
    table = cgutils.global_constant(builder, "places_of_bits", numbers)
    for half in range(2):
        byte = builder.zext(builder.trunc(builder.lshr(bits, I16(8 * half)), I8), I64)
        places = builder.load(builder.gep(table, [I64(0), byte]))
        order = builder.zext(builder.bitcast(places, ir.VectorType(I8, 8)), _V8)
        part = builder.shuffle_vector(lanes, lanes, ir.Constant(_V8, list(range(8 * half, 8 * half + 8))))
        write(builder, offset(builder, address, builder.shl(count, I64(2))),
              call(builder, "llvm.x86.avx2.permd", _V8, [part, order]), 4)
        count = builder.add(count, call(builder, "llvm.ctpop.i64", I64, [byte]))
    return count


def _copy_at_least(builder: Any, address: Any, value: Any, x: Any, limit: Any) -> Any:
    return _copy_lanes(builder, address, value, builder.fcmp_ordered(">=", x, limit))


def _copy_non_zero(builder: Any, address: Any, value: Any, x: Any) -> Any:
    return _copy_lanes(builder, address, value, builder.icmp_signed("!=", x, constant(VI, 0)))


def _largest(builder: Any, vectors: list[Any]) -> Any:
    """Lane by lane; NaN in a lane where any is NaN."""
    found = [builder.fcmp_unordered("uno", x, y) for x, y in zip(vectors[::2], vectors[1::2])]
    while len(vectors) > 1:
        vectors = [builder.select(builder.fcmp_ordered(">", x, y), x, y) for x, y in zip(vectors[::2], vectors[1::2])]
    while len(found) > 1:
        found = [builder.or_(x, y) for x, y in zip(found[::2], found[1::2])]
    return builder.select(found[0], constant(VF, _NAN), vectors[0])


def _prefetch_chunk(builder: Any, address: Any) -> None:
    """The hardware's prefetcher stops at the end of a page, and where chunks are left out."""
    for line in range(CHUNK * 4 // 64):
        prefetch(builder, offset(builder, address, 64 * line))


def _lanes_of_chunk(builder: Any, address: Any) -> Any:
    _prefetch_chunk(builder, offset(builder, address, AHEAD))
    return _largest(builder, [read(builder, offset(builder, address, 64 * i), VF, 4) for i in range(CHUNK // LANES)])


def _lanes_of_masked_chunk(builder: Any, address: Any, bits: Any) -> Any:
    return _largest(builder, [_load_where(builder, offset(builder, address, 64 * i), offset(builder, bits, 2 * i))
                              for i in range(CHUNK // LANES)])


def _lanes_of_words(builder: Any, x: Any, bits: Any, words: Any, ahead: Any) -> Any:
    vectors = []
    for i in range(CHUNK // 32):
        word = builder.sext(read(builder, offset(builder, words, 4 * i), I32, 4), I64)
        later = builder.sext(read(builder, offset(builder, ahead, 4 * i), I32, 4), I64)
        for half in range(2):
            prefetch(builder, offset(builder, builder.add(x, builder.shl(later, I64(7))), 64 * half))
            address = offset(builder, builder.add(x, builder.shl(word, I64(7))), 64 * half)
            vectors.append(_load_where(builder, address, offset(
                builder, builder.add(bits, builder.shl(word, I64(2))), 2 * half)))
    return _largest(builder, vectors)


prefetch_chunk = make(types.void, (_ADDRESS,), _prefetch_chunk)
# The chunk's largest per lane; a lane in which any is NaN is NaN.
lanes_of_chunk = make(f32x16, (_ADDRESS,), _lanes_of_chunk)
# The same where the bits of the second address (8 words) are 1; others count as -inf.
lanes_of_masked_chunk = make(f32x16, (_ADDRESS, _ADDRESS), _lanes_of_masked_chunk)
# lanes_of_words(x, bits, words, ahead): the same for the 32 logits each of the eight words of a mask at `bits` whose
# numbers are at `words`; fetches those whose numbers are at `ahead`.
lanes_of_words = make(f32x16, (_ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS), _lanes_of_words)
# Lanes whose bit (of the 16 at the second address) is 0 are -inf.
load_where = make(f32x16, (_ADDRESS, _ADDRESS), _load_where)
# copy_at_least(address, value, x, limit): write the lanes of value where x >= limit side by side; their number. The
# room of sixteen is overwritten.
copy_at_least = make(types.int64, (_ADDRESS, f32x16, f32x16, f32x16), _copy_at_least)
# The same where the lanes of x, int32, are not 0.
copy_non_zero = make(types.int64, (_ADDRESS, i32x16, i32x16), _copy_non_zero)
zero_below = make(f32x16, (f32x16, f32x16, f32x16), lambda b, value, x, limit: b.select(
    b.fcmp_ordered(">=", x, limit), value, constant(VF, 0.0)))
minus_inf_from = make(f32x16, (f32x16, f32x16), lambda b, x, end: b.select(
    b.fcmp_ordered("<", x, end), x, constant(VF, _MINUS_INF)))
minus_inf_above = make(f32x16, (f32x16, f32x16), lambda b, x, end: b.select(
    b.fcmp_ordered("<=", x, end), x, constant(VF, _MINUS_INF)))
inf_below = make(f32x16, (f32x16, f32x16), lambda b, x, limit: b.select(
    b.fcmp_ordered(">=", x, limit), x, constant(VF, float("inf"))))
ones_above = make(i32x16, (f32x16, f32x16), lambda b, x, limit: b.zext(b.fcmp_ordered(">", x, limit), VI))
# pick_above(x, y, a, b), int32: a where x > y, else b; pick_equal: where x == y.
pick_above = make(i32x16, (f32x16, f32x16, i32x16, i32x16), lambda b, x, y, one, other: b.select(
    b.fcmp_ordered(">", x, y), one, other))
pick_equal = make(i32x16, (f32x16, f32x16, i32x16, i32x16), lambda b, x, y, one, other: b.select(
    b.fcmp_ordered("==", x, y), one, other))
# mark_nan(marks, x): -1 where x is NaN, else as it was.
mark_nan = make(i32x16, (i32x16, f32x16), lambda b, marks, x: b.select(
    b.fcmp_unordered("uno", x, x), constant(VI, -1), marks))
min_lanes_i32 = make(types.int32, (i32x16,), lambda b, x: call(b, "llvm.vector.reduce.smin.v16i32", I32, [x]))
# No bit of the 256 at an address is 1.
is_zero_256 = make(types.boolean, (_ADDRESS,), lambda b, address: b.icmp_unsigned(
    "==", call(b, "llvm.vector.reduce.or.v4i64", I64, [read(b, address, _V4, 4)]), I64(0)))
# Every one is.
is_full_256 = make(types.boolean, (_ADDRESS,), lambda b, address: b.icmp_unsigned(
    "==", call(b, "llvm.vector.reduce.and.v4i64", I64, [read(b, address, _V4, 4)]), I64(-1)))
_has_nan = make(types.boolean, (f32x16,), lambda b, x: b.icmp_unsigned(
    "!=", b.bitcast(b.fcmp_unordered("uno", x, x), I16), I16(0)))
_shift_exponent = make(f32x16, (f32x16, f32x16), lambda b, y, rounded: b.bitcast(b.add(b.bitcast(y, VI), b.shl(
    b.bitcast(rounded, VI), constant(VI, 23))), VF))
_scale_by_2_to = make(f32x16, (f32x16, f32x16), lambda b, y, n: call(
    b, "llvm.x86.avx512.mask.scalef.ps.512", VF, [y, n, constant(VF, 0.0), I16(-1), I32(4)]))


@device
def largest_lane(lanes):  # type: ignore[no-untyped-def]
    """NaN if any is."""
    return _F32(_NAN) if _has_nan(lanes) else max_lanes(lanes)


@device
def _exp2_near_0(r):  # type: ignore[no-untyped-def]
    """2**r on [-0.5, 0.5], within 2.5e-7 of it; the polynomial of least maximum relative error."""
    y = splat(_F32(0.00015403530393381606))
    y = muladd(y, r, splat(_F32(0.0013333558146428443)))
    y = muladd(y, r, splat(_F32(0.009618129107628477)))
    y = muladd(y, r, splat(_F32(0.05550410866482158)))
    y = muladd(y, r, splat(_F32(0.2402265069591007)))
    y = muladd(y, r, splat(_F32(0.6931471805599453)))
    return muladd(y, r, splat(_F32(1.0)))


@device
def exp2_generic(t):  # type: ignore[no-untyped-def]
    """2**t for t <= 0; 0 below 2**-126 and for NaN. Adding 1.5 * 2**23 rounds to the nearest integer and leaves it in
    the low bits, which are then added to the exponent's."""
    low, rounder = splat(_F32(-126.0)), splat(_F32(12582912.0))
    clamped = maximum(t, low)
    rounded = add(clamped, rounder)
    return zero_unless_above(_shift_exponent(_exp2_near_0(sub(clamped, sub(rounded, rounder))), rounded), t, low)


@device
def exp2_avx512(t):  # type: ignore[no-untyped-def]
    """The same with the instruction that scales by powers of two; 0 below 2**-149."""
    t = maximum(t, splat(_F32(-150.0)))
    n = nearest(t)
    return _scale_by_2_to(_exp2_near_0(sub(t, n)), n)


exp2_below_0 = exp2_avx512 if "avx512f" in features.cpu_features() else exp2_generic

# 2**(k/32) for k = 0 .. 31 as bits, less k in units of 2**-5 where the exponent counts whole ones.
_ROOTS = [int(np.float32(2.0 ** (k / 32)).view(np.int32)) - (k << 18) for k in range(32)]
_ROUNDER = 12582912.0 / 32                      # 1.5 * 2**23 / 32: adding it rounds to a multiple of 1 / 32


def _root(builder: Any, rounded: Any) -> Any:
    """2**n for the multiple n of 1 / 32 to which `rounded`, n + _ROUNDER, was rounded; n from -127, which gives 0."""
    bits = builder.bitcast(rounded, VI)
    low, high = (ir.Constant(VI, _ROOTS[begin:begin + LANES]) for begin in (0, LANES))
    root = call(builder, "llvm.x86.avx512.vpermi2var.d.512", VI, [low, bits, high])
    return builder.bitcast(builder.add(root, builder.shl(bits, constant(VI, 18))), VF)


_root_of = make(f32x16, (f32x16,), _root)


@device
def least_difference(scale):  # type: ignore[no-untyped-def]
    """What weight takes as `least`."""
    return _F32(-127.0) / scale


@device
def weight_avx512(x, top, scale, least):  # type: ignore[no-untyped-def]
    """2**((x - top) * scale) for x <= top, within 2e-7 of it; 0 where the exponent is below -127, as for -inf.

    The exponent is n + r, n a multiple of 1 / 32: a table has 2**n, and a parabola 2**r. Two operations less than
    exp2_avx512, and no slow one.
    """
    rounder = splat(_F32(_ROUNDER))
    difference = maximum(sub(x, top), least)
    rounded = muladd(difference, scale, rounder)
    r = muladd(difference, scale, sub(rounder, rounded))
    root = _root_of(rounded)
    slope = muladd(splat(_F32(0.24022699)), r, splat(_F32(0.69315732)))
    return muladd(slope, mul(r, root), root)


@device
def weight_generic(x, top, scale, least):  # type: ignore[no-untyped-def]
    """The same for every processor."""
    return exp2_generic(mul(sub(x, top), scale))


weight_of = weight_avx512 if "avx512f" in features.cpu_features() else weight_generic
