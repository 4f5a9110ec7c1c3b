"""The vocabulary of the kernels: raw addresses, vectors of sixteen lanes.

A kernel sees memory as integers: base + byte offset. That keeps its signature plain (one compiled form for every model)
and lets one list of operations point at any tensor. Vectors are first-class values of 16 float32 or 16 int32; LLVM maps
them to one AVX-512 register, two of AVX2 or four of NEON, so a kernel is written once.

Every float operation here is exactly one IEEE operation in the order written (no fast-math): a row's result then does
not depend on which kernel variant or which batch computed it.
"""
from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import config
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model

from worker.jit import features

LANES = 16
config.CACHE_DIR = str(features.cache_folder())  # type: ignore[attr-defined]
config.CACHE_LOCATOR_CLASSES = "worker.jit.cache.SharedCacheLocator"  # type: ignore[attr-defined]

# A function that kernels call; compiled as part of its caller, which is the one that is cached.
device = njit(nogil=True, error_model="numpy")
# The same without a call, for the body of a loop over few vectors: a call loads their constants again.
inlined = njit(nogil=True, error_model="numpy", forceinline=True)
# The same with one caller, compiled as lines of it: a function that contains kernels takes seconds, each time anew.
merged = njit(nogil=True, error_model="numpy", inline="always")
# A function that Python calls: compiled once per machine.
entry = njit(nogil=True, error_model="numpy", cache=features.is_cache_writable())

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F32, HALF = ir.FloatType(), ir.HalfType()
VF, VI = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)


class Vector(types.Type):
    """Sixteen float32 or int32 lanes."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name)


class F32x16Type(Vector):
    def __init__(self) -> None:
        super().__init__("f32x16")


class I32x16Type(Vector):
    def __init__(self) -> None:
        super().__init__("i32x16")


f32x16, i32x16 = F32x16Type(), I32x16Type()
_ADDRESS, _F32, _I32 = types.intp, types.float32, types.int32


@register_model(F32x16Type)
class _F32x16Model(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, VF)


@register_model(I32x16Type)
class _I32x16Model(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, VI)


# ------------------------------------------------------------------ building blocks for code generators


def pointer(builder: Any, address: Any, kind: Any) -> Any:
    """An address as a pointer to `kind`."""
    return builder.inttoptr(address, kind.as_pointer())


def read(builder: Any, address: Any, kind: Any, align: int = 1) -> Any:
    return builder.load(pointer(builder, address, kind), align=align)


def write(builder: Any, address: Any, value: Any, align: int = 1) -> None:
    builder.store(value, pointer(builder, address, value.type), align=align)


def offset(builder: Any, address: Any, by: Any) -> Any:
    return builder.add(address, by if not isinstance(by, int) else ir.Constant(I64, by))


def spread(builder: Any, value: Any, kind: Any) -> Any:
    """A scalar in every lane."""
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(I32, 0))
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined),
                                  ir.Constant(ir.VectorType(I32, kind.count), [0] * kind.count))


def call(builder: Any, name: str, kind: Any, args: Sequence[Any]) -> Any:
    """An LLVM intrinsic by its full name."""
    function = builder.module.declare_intrinsic(name, (), ir.FunctionType(kind, [arg.type for arg in args]))
    return builder.call(function, args)


def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return call(builder, "llvm.fma.v16f32", VF, [a, b, c])


def prefetch(builder: Any, address: Any, near: int = 3) -> None:
    """Ask for a cache line; any address is harmless. near: 3 for the first level of cache, 2 for the second."""
    byte = I8.as_pointer()
    function = builder.module.declare_intrinsic("llvm.prefetch", [byte], ir.FunctionType(
        ir.VoidType(), [byte, I32, I32, I32]))
    builder.call(function, [builder.inttoptr(address, byte), I32(0), I32(near), I32(1)])


def keep_order(builder: Any) -> None:
    """What touches memory stays on its side of this point; costs nothing by itself."""
    builder.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], side_effect=True)


def constant(kind: Any, value: Any) -> Any:
    return ir.Constant(kind, [value] * kind.count) if isinstance(kind, ir.VectorType) else ir.Constant(kind, value)


def read_bf16(builder: Any, address: Any) -> Any:
    """Sixteen bfloat16 as float32: the upper halves."""
    halves = read(builder, address, ir.VectorType(I16, LANES), 2)
    wide = builder.shl(builder.zext(halves, VI), constant(VI, 16))
    return builder.bitcast(wide, VF)


def from_f16(builder: Any, bits: Any) -> Any:
    """The bits of half precision numbers, int16 or a vector of it, as float32. Without an instruction for it LLVM would
    call a function that is not there."""
    def of(scalar: Any) -> Any:
        return ir.VectorType(scalar, bits.type.count) if isinstance(bits.type, ir.VectorType) else scalar

    if features.cpu_features() & {"f16c", "neon"}:
        return builder.fpext(builder.bitcast(bits, of(HALF)), of(F32))
    name = f"from_f16_{getattr(bits.type, 'count', 1)}"
    function = builder.module.globals.get(name)
    if function is None:                        # one for all places, which LLVM would take minutes over
        function = ir.Function(builder.module, ir.FunctionType(of(F32), [bits.type]), name)
        function.linkage = "linkonce_odr"
        function.attributes.add("noinline")
        _emit_from_f16(ir.IRBuilder(function.append_basic_block()), function.args[0], of(I32), of(F32))
    return builder.call(function, [bits])


def _emit_from_f16(builder: Any, bits: Any, whole: Any, single: Any) -> None:
    """The bits move to where float32 has exponent and mantissa, and the product with 2^112 changes the exponent's bias,
    of subnormal numbers too."""
    wide = builder.zext(bits, whole)
    size = builder.shl(builder.and_(wide, constant(whole, 0x7FFF)), constant(whole, 13))
    value = builder.bitcast(builder.fmul(builder.bitcast(size, single), constant(single, 2.0 ** 112)), whole)
    endless = builder.or_(size, constant(whole, 0x7F800000))        # infinity and NaN
    value = builder.select(builder.icmp_unsigned(">=", size, constant(whole, 31 << 23)), endless, value)
    sign = builder.shl(builder.and_(wide, constant(whole, 0x8000)), constant(whole, 16))
    builder.ret(builder.bitcast(builder.or_(value, sign), single))


def read_e4m3(builder: Any, address: Any) -> Any:
    """Sixteen float8 (e4m3) as float32, times 2^-8: their bits, moved to where half precision has sign, exponent and
    mantissa, are that number, subnormal ones too."""
    shorts = ir.VectorType(I16, LANES)
    wide = builder.zext(read(builder, address, ir.VectorType(I8, LANES)), shorts)
    magnitude = builder.shl(builder.and_(wide, constant(shorts, 0x7F)), constant(shorts, 7))
    sign = builder.shl(builder.and_(wide, constant(shorts, 0x80)), constant(shorts, 8))
    return from_f16(builder, builder.or_(magnitude, sign))


def make(result: Any, params: Sequence[Any], generate: Callable[..., Any]) -> Any:
    """An operation that numba code can call. generate(builder, *values) emits it."""
    def typed(context: Any, *args: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            value = generate(builder, *args)
            return context.get_dummy_value() if result is types.void else value
        return result(*params), codegen
    # numba reads the number of parameters off the signature.
    kind = inspect.Parameter.POSITIONAL_ONLY
    names = ["context", *(f"a{i}" for i in range(len(params)))]
    typed.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])  # type: ignore[attr-defined]
    return intrinsic(typed)


# ------------------------------------------------------------------ scalars in memory, addressed by (base, index)


def _indexed(kind: Any, size: int) -> tuple[Any, Any]:
    def load(builder: Any, base: Any, index: Any) -> Any:
        return read(builder, builder.add(base, builder.mul(index, constant(I64, size))), kind, size)

    def store(builder: Any, base: Any, index: Any, value: Any) -> None:
        write(builder, builder.add(base, builder.mul(index, constant(I64, size))), value, size)
    return load, store


get_i64 = make(types.int64, (_ADDRESS, _ADDRESS), _indexed(I64, 8)[0])
set_i64 = make(types.void, (_ADDRESS, _ADDRESS, types.int64), _indexed(I64, 8)[1])
get_i32 = make(types.int32, (_ADDRESS, _ADDRESS), _indexed(I32, 4)[0])
set_i32 = make(types.void, (_ADDRESS, _ADDRESS, types.int32), _indexed(I32, 4)[1])
get_f32 = make(types.float32, (_ADDRESS, _ADDRESS), _indexed(F32, 4)[0])
set_f32 = make(types.void, (_ADDRESS, _ADDRESS, types.float32), _indexed(F32, 4)[1])
get_u16 = make(types.uint16, (_ADDRESS, _ADDRESS), _indexed(I16, 2)[0])
set_u16 = make(types.void, (_ADDRESS, _ADDRESS, types.uint16), _indexed(I16, 2)[1])
get_u8 = make(types.uint8, (_ADDRESS, _ADDRESS), _indexed(I8, 1)[0])
set_u8 = make(types.void, (_ADDRESS, _ADDRESS, types.uint8), _indexed(I8, 1)[1])
get_f16 = make(types.float32, (_ADDRESS, _ADDRESS), lambda b, base, index: from_f16(
    b, _indexed(I16, 2)[0](b, base, index)))
bits_to_f32 = make(types.float32, (types.int32,), lambda b, bits: b.bitcast(bits, F32))
f32_to_bits = make(types.int32, (types.float32,), lambda b, value: b.bitcast(value, I32))

# ------------------------------------------------------------------ vectors

load_f32 = make(f32x16, (_ADDRESS,), lambda b, address: read(b, address, VF, 4))
store_f32 = make(types.void, (_ADDRESS, f32x16), lambda b, address, value: write(b, address, value, 4))
load_i32 = make(i32x16, (_ADDRESS,), lambda b, address: read(b, address, VI, 4))
store_i32 = make(types.void, (_ADDRESS, i32x16), lambda b, address, value: write(b, address, value, 4))
load_bf16 = make(f32x16, (_ADDRESS,), read_bf16)
prefetch_line = make(types.void, (_ADDRESS,), prefetch)
# Lanes as bytes, the low eight bits of each.
store_bytes = make(types.void, (_ADDRESS, i32x16),
                   lambda b, address, value: write(b, address, b.trunc(value, ir.VectorType(I8, LANES))))
lane_i32 = make(types.int32, (i32x16, types.int64), lambda b, value, index: b.extract_element(value, index))
with_lane = make(f32x16, (f32x16, types.int64, _F32), lambda b, value, index, x: b.insert_element(value, x, index))
splat = make(f32x16, (_F32,), lambda b, value: spread(b, value, VF))
splat_i32 = make(i32x16, (_I32,), lambda b, value: spread(b, value, VI))
lane_numbers = make(i32x16, (), lambda b: ir.Constant(VI, list(range(LANES))))

add = make(f32x16, (f32x16, f32x16), lambda b, x, y: b.fadd(x, y))
sub = make(f32x16, (f32x16, f32x16), lambda b, x, y: b.fsub(x, y))
mul = make(f32x16, (f32x16, f32x16), lambda b, x, y: b.fmul(x, y))
div = make(f32x16, (f32x16, f32x16), lambda b, x, y: b.fdiv(x, y))
muladd = make(f32x16, (f32x16, f32x16, f32x16), fma)
maximum = make(f32x16, (f32x16, f32x16), lambda b, x, y: b.select(b.fcmp_ordered(">", x, y), x, y))
minimum = make(f32x16, (f32x16, f32x16), lambda b, x, y: b.select(b.fcmp_ordered("<", x, y), x, y))
select_above_0 = make(f32x16, (f32x16, f32x16), lambda b, x, value: b.select(
    b.fcmp_ordered(">", x, constant(VF, 0.0)), value, constant(VF, 0.0)))
zero_unless_above = make(f32x16, (f32x16, f32x16, f32x16), lambda b, value, x, low: b.select(
    b.fcmp_ordered(">", x, low), value, constant(VF, 0.0)))
# Magnitudes as integers, which order like the floats and put infinity and NaN on top.
magnitude = make(i32x16, (f32x16,), lambda b, x: b.and_(b.bitcast(x, VI), constant(VI, 0x7FFFFFFF)))
nearest = make(f32x16, (f32x16,), lambda b, x: call(b, "llvm.rint.v16f32", VF, [x]))
floor = make(f32x16, (f32x16,), lambda b, x: call(b, "llvm.floor.v16f32", VF, [x]))
to_i32 = make(i32x16, (f32x16,), lambda b, x: b.fptosi(x, VI))
add_i32 = make(i32x16, (i32x16, i32x16), lambda b, x, y: b.add(x, y))
sub_i32 = make(i32x16, (i32x16, i32x16), lambda b, x, y: b.sub(x, y))
shift_left = make(i32x16, (i32x16, i32x16), lambda b, x, y: b.shl(x, y))
shift_right = make(i32x16, (i32x16, i32x16), lambda b, x, y: b.ashr(x, y))    # the sign stays
as_f32 = make(f32x16, (i32x16,), lambda b, x: b.bitcast(x, VF))
# value where low <= lane <= high, other elsewhere
keep_between = make(f32x16, (f32x16, i32x16, i32x16, i32x16, f32x16), lambda b, value, lane, low, high, other: b.select(
    b.and_(b.icmp_signed(">=", lane, low), b.icmp_signed("<=", lane, high)), value, other))


def _tree(combine: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Halves onto each other until one lane is left: a fixed order, whatever the registers are."""
    def generate(builder: Any, value: Any) -> Any:
        width = LANES
        while width > 1:
            width //= 2
            kind = ir.VectorType(I32, width)
            low = builder.shuffle_vector(value, value, ir.Constant(kind, list(range(width))))
            high = builder.shuffle_vector(value, value, ir.Constant(kind, list(range(width, 2 * width))))
            value = combine(builder, low, high)
        return builder.extract_element(value, ir.Constant(I32, 0))
    return generate


def transposed_tree(builder: Any, vectors: Sequence[Any], combine: Callable[[Any, Any], Any]) -> Any:
    """Sixteen vectors -> one: lane n is the n-th vector's lanes, combined as a tree."""
    width = LANES
    while len(vectors) > 1:
        starts = range(0, 2 * LANES, width)
        halves = [ir.Constant(VI, [start + begin + i for start in starts for i in range(width // 2)])
                  for begin in (0, width // 2)]
        vectors = [combine(*(builder.shuffle_vector(x, y, half) for half in halves))
                   for x, y in zip(vectors[::2], vectors[1::2])]
        width //= 2
    return vectors[0]


sum_lanes = make(types.float32, (f32x16,), _tree(lambda b, x, y: b.fadd(x, y)))
sum_lanes_i32 = make(types.int32, (i32x16,), _tree(lambda b, x, y: b.add(x, y)))
maximum_i32 = make(i32x16, (i32x16, i32x16), lambda b, x, y: b.select(b.icmp_signed(">", x, y), x, y))
max_lanes_i32 = make(types.int32, (i32x16,), _tree(lambda b, x, y: b.select(b.icmp_signed(">", x, y), x, y)))
max_lanes = make(types.float32, (f32x16,), _tree(lambda b, x, y: b.select(b.fcmp_ordered(">", x, y), x, y)))
min_lanes = make(types.float32, (f32x16,), _tree(lambda b, x, y: b.select(b.fcmp_ordered("<", x, y), x, y)))


def _emit_bf16(builder: Any, address: Any, value: Any) -> None:
    """Round to nearest even; NaN stays NaN."""
    bits = builder.bitcast(value, VI)
    odd = builder.and_(builder.lshr(bits, constant(VI, 16)), constant(VI, 1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, constant(VI, 0x7FFF))), constant(VI, 16))
    is_nan = builder.fcmp_unordered("uno", value, value)
    half = builder.trunc(builder.select(is_nan, constant(VI, 0x7FC0), rounded), ir.VectorType(I16, LANES))
    write(builder, address, half, 2)


store_bf16 = make(types.void, (_ADDRESS, f32x16), _emit_bf16)


def _emit_scattered_bytes(builder: Any, address: Any, stride: Any, value: Any) -> None:
    """The low byte of every lane, `stride` bytes apart."""
    for lane in range(LANES):
        byte = builder.trunc(builder.extract_element(value, ir.Constant(I32, lane)), I8)
        write(builder, builder.add(address, builder.mul(stride, constant(I64, lane))), byte)


scatter_bytes = make(types.void, (_ADDRESS, _ADDRESS, i32x16), _emit_scattered_bytes)


def _emit_scattered_quads(builder: Any, address: Any, stride: Any, value: Any) -> None:
    """The low bytes of the lanes, four side by side, those four `stride` bytes apart."""
    quads = builder.bitcast(builder.trunc(value, ir.VectorType(I8, LANES)), ir.VectorType(I32, 4))
    for at in range(4):
        write(builder, builder.add(address, builder.mul(stride, constant(I64, at))),
              builder.extract_element(quads, ir.Constant(I32, at)))


scatter_quads = make(types.void, (_ADDRESS, _ADDRESS, i32x16), _emit_scattered_quads)


def _emit_e4m3(builder: Any, value: Any) -> Any:
    """Codes of float8 (e4m3), rounded to nearest even. value: at most 448 in magnitude, no NaN.

    From 2^-6 on the exponent changes its bias from 127 to 7 and the mantissa keeps three bits; below, a code counts
    steps of 2^-9, and eight of them are 2^-6.
    """
    bits = builder.bitcast(value, VI)
    size = builder.and_(bits, constant(VI, 0x7FFFFFFF))
    odd = builder.and_(builder.lshr(size, constant(VI, 20)), constant(VI, 1))
    normal = builder.lshr(builder.add(size, builder.add(odd, constant(VI, 0x7FFFF))), constant(VI, 20))
    normal = builder.sub(normal, constant(VI, (127 - 7) << 3))
    steps = builder.fmul(builder.bitcast(size, VF), constant(VF, 512.0))
    small = builder.fptosi(call(builder, "llvm.rint.v16f32", VF, [steps]), VI)
    is_small = builder.icmp_signed("<", size, constant(VI, (127 - 6) << 23))
    sign = builder.and_(builder.lshr(bits, constant(VI, 24)), constant(VI, 0x80))
    return builder.or_(builder.select(is_small, small, normal), sign)


e4m3_codes = make(i32x16, (f32x16,), _emit_e4m3)


@device
def exp(x):  # type: ignore[no-untyped-def]
    """e^x, within 2 units in the last place; 0 for NaN, -inf and anything below -87.3; as e^88 above 88.

    x = n ln 2 + r with |r| <= ln 2 / 2; e^r by a polynomial of degree 6 (Taylor's, economised), 2^n by exponent bits.
    """
    low = splat(types.float32(-87.33))
    given = x
    x = minimum(maximum(x, low), splat(types.float32(88.0)))
    n = nearest(mul(x, splat(types.float32(1.4426950408889634))))
    r = muladd(n, splat(types.float32(-0.693359375)), x)
    r = muladd(n, splat(types.float32(2.12194440e-4)), r)
    y = splat(types.float32(1.9875691500e-4))
    y = muladd(y, r, splat(types.float32(1.3981999507e-3)))
    y = muladd(y, r, splat(types.float32(8.3334519073e-3)))
    y = muladd(y, r, splat(types.float32(4.1665795894e-2)))
    y = muladd(y, r, splat(types.float32(1.6666665459e-1)))
    y = muladd(y, r, splat(types.float32(5.0000001201e-1)))
    y = muladd(y, mul(r, r), add(r, splat(types.float32(1.0))))
    y = mul(y, as_f32(shift_left(add_i32(to_i32(n), splat_i32(types.int32(127))), splat_i32(types.int32(23)))))
    return zero_unless_above(y, given, low)
