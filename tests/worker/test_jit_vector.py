"""The vocabulary of the kernels against numpy, and the three forms of the byte product against each other."""
from __future__ import annotations

import numpy as np
import pytest

numba = pytest.importorskip("numba")

from worker.jit import attend_codes, attend_tiles, dot, features  # noqa: E402
from worker.jit import tile_layout as layout  # noqa: E402
from worker.jit import vector as v  # noqa: E402


def test_exp_is_within_two_units_in_the_last_place() -> None:
    @numba.njit
    def run(x, out, count):  # type: ignore[no-untyped-def]
        for i in range(0, count * 4, 64):
            v.store_f32(out + i, v.exp(v.load_f32(x + i)))
    x = np.linspace(-87.0, 80.0, 1 << 16, dtype=np.float32)
    out = np.empty_like(x)
    run(x.ctypes.data, out.ctypes.data, len(x))
    exact = np.exp(x.astype(np.float64))
    assert np.max(np.abs(out - exact) / np.spacing(exact.astype(np.float32))) < 2.0
    special = np.array([-np.inf, -100, -87.5, np.nan, 0, 0, 0, 0] * 2, np.float32)
    result = np.empty_like(special)
    run(special.ctypes.data, result.ctypes.data, 16)
    assert result.tolist() == [0, 0, 0, 0, 1, 1, 1, 1] * 2


def test_bfloat16_is_rounded_to_nearest_even_and_keeps_nan() -> None:
    torch = pytest.importorskip("torch")

    @numba.njit
    def run(x, out, back, count):  # type: ignore[no-untyped-def]
        for i in range(0, count, 16):
            v.store_bf16(out + 2 * i, v.load_f32(x + 4 * i))
            v.store_f32(back + 4 * i, v.load_bf16(out + 2 * i))
    x = np.random.default_rng(0).standard_normal(4096).astype(np.float32)
    x[:4] = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF], np.uint32).view(np.float32)
    out, back = np.empty(4096, np.uint16), np.empty(4096, np.float32)
    run(x.ctypes.data, out.ctypes.data, back.ctypes.data, 4096)
    expected = torch.from_numpy(x).bfloat16()
    assert np.array_equal(out, expected.view(torch.int16).numpy().view(np.uint16))
    assert np.array_equal(back, expected.float().numpy())
    x[0] = np.nan
    run(x.ctypes.data, out.ctypes.data, back.ctypes.data, 16)
    assert np.isnan(back[0])


def test_half_precision_is_read_exactly_with_and_without_an_instruction_for_it() -> None:
    """Without one, LLVM called a function that is not there, and the process ended."""
    widened = v.make(v.f32x16, (numba.types.intp,), lambda b, address: v.from_f16(
        b, v.read(b, address, v.ir.VectorType(v.I16, v.LANES), 2)))

    @numba.njit
    def run(bits, out, scalars):  # type: ignore[no-untyped-def]
        for i in range(0, 1 << 16, 16):
            v.store_f32(out + 4 * i, widened(bits + 2 * i))
        for i in range(1 << 16):
            v.set_f32(scalars, i, v.get_f16(bits, i))
    bits = np.arange(1 << 16, dtype=np.uint16)
    out, scalars = np.empty(1 << 16, np.float32), np.empty(1 << 16, np.float32)
    run(bits.ctypes.data, out.ctypes.data, scalars.ctypes.data)
    expected = bits.view(np.float16).astype(np.float32)
    for found in (out, scalars):
        assert np.array_equal(found, expected, equal_nan=True)
        assert np.array_equal(np.signbit(found), np.signbit(expected))


@pytest.mark.parametrize("form", features.DOT_FORMS)
@pytest.mark.parametrize("kind", [layout.INT8, layout.INT8_WIDE, layout.INT4, layout.INT4_MIN])
@pytest.mark.parametrize("rows", [1, 3, 4, 6])
def test_every_form_of_the_byte_product_gives_the_same_bits(form: str, kind: int, rows: int) -> None:
    """AVX2 and generic code run on any machine that has VNNI; extreme bytes would show a saturating instruction."""
    needs = {"vnni512": "avx512vnni", "avx2": "avx2", "generic": ""}[form]
    if needs and needs not in features.cpu_features():
        pytest.skip(f"this processor has no {needs}")
    tiles = [dot.make_int_tile(kind, rows, name) for name in (form, "generic")]
    first, second = tiles
    block = layout.WIDE_BLOCK if kind == layout.INT8_WIDE else layout.BLOCK

    @numba.njit
    def run(x, side, w, s, m, out, other):  # type: ignore[no-untyped-def]
        first(x, 2 * block, side, 32, w, s, m, 2, w, 1024, 0, out, 128)
        second(x, 2 * block, side, 32, w, s, m, 2, w, 1024, 0, other, 128)
    rng = np.random.default_rng(1)
    x = rng.choice(np.array([-127, -1, 0, 5, 127], np.int8), (rows, 2 * block))
    side = rng.standard_normal((rows, 8)).astype(np.float32)
    side[:, 2:6] = 0
    w = rng.choice(np.array([0, 1, 128, 254, 255], np.uint8), (2, 32 * block))
    halves = rng.standard_normal((2, 2, 32)).astype(np.float16)
    out, other = np.zeros((rows, 32), np.float32), np.zeros((rows, 32), np.float32)
    run(x.ctypes.data, side.ctypes.data, w.ctypes.data, halves[0].ctypes.data, halves[1].ctypes.data, out.ctypes.data,
        other.ctypes.data)
    assert np.array_equal(out, other) and np.abs(out).max() > 0


@pytest.mark.parametrize("rows", [1, 8, 12])
@pytest.mark.parametrize("kind", [layout.F32_WEIGHTS, layout.BF16_WEIGHTS])
def test_tiles_of_floats_have_the_same_bits_however_registers_are_used(kind: int, rows: int) -> None:
    many, few = (dot.make_float_tile(kind, rows, has_many) for has_many in (True, False))

    @numba.njit
    def run(x, w, out, other):  # type: ignore[no-untyped-def]
        many(x, 4 * 36, w, 36, w, 0, out, 128)
        few(x, 4 * 36, w, 36, w, 0, other, 128)
    rng = np.random.default_rng(1)
    x = rng.standard_normal((rows, 36)).astype(np.float32)
    w = rng.standard_normal((36, 32)).astype(np.float32)
    if kind == layout.BF16_WEIGHTS:
        w = np.ascontiguousarray(w.view(np.uint16).reshape(36, 32, 2)[..., 1])
    out, other = np.zeros((rows, 32), np.float32), np.zeros((rows, 32), np.float32)
    run(x.ctypes.data, w.ctypes.data, out.ctypes.data, other.ctypes.data)
    assert np.array_equal(out, other)
    exact = x.astype(np.float64) @ ((w.astype(np.uint32) << 16).view(np.float32) if w.dtype == np.uint16 else w)
    assert np.allclose(out, exact, atol=1e-5)


def _groups(keys: np.ndarray, values: np.ndarray, counts: list[int]) -> np.ndarray:
    groups = np.zeros((4, attend_tiles.GROUP_FIELDS), np.int64)
    groups[:, attend_tiles.GROUP_K] = [key.ctypes.data for key in keys]
    groups[:, attend_tiles.GROUP_V] = [value.ctypes.data for value in values]
    groups[:, attend_tiles.GROUP_COUNT] = counts
    return groups


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("form", features.DOT_FORMS)
def test_attention_over_codes_is_exact_in_every_form(form: str, rows: int) -> None:
    """Queries times keys, weights times values, of codes at the ends of their ranges, against int64."""
    needs = {"vnni512": "avx512vnni", "avx2": "avx2", "generic": ""}[form]
    if needs and needs not in features.cpu_features():
        pytest.skip(f"this processor has no {needs}")
    dim, store_query, store_weights = 64, attend_codes.QUERY_STORES[form], attend_codes.WEIGHT_STORES[form]
    scores, values = attend_codes.make_scores(rows, form), attend_codes.make_values(rows, 4, form)

    @numba.njit
    def run(codes, q, weights, p, groups, out, acc):  # type: ignore[no-untyped-def]
        for m in range(rows):
            for i in range(0, dim, 16):
                code = v.load_i32(codes + 4 * (m * dim + i))
                high = v.shift_right(v.add_i32(code, v.splat_i32(numba.int32(128))), v.splat_i32(numba.int32(8)))
                low = v.sub_i32(code, v.shift_left(high, v.splat_i32(numba.int32(8))))
                store_query(q + m * 4 * dim, dim, i, code, high, low)
                store_weights(p + m * 256, i, v.load_i32(weights + 4 * (m * 64 + i)))
        scores(q, 4 * dim, dim, dim // 4, groups, 64, 1, out, 256)
        values(p, 256, groups, 0, dim, 1, acc, 256)
    rng = np.random.default_rng(2)
    codes = rng.choice(np.array([-32639, -128, 127, 128, 0, 32639], np.int32), (rows, dim))
    weights = rng.choice(np.array([0, 1, 255, 256, 32768, 65535], np.int32), (rows, 64))
    keys = rng.choice(np.array([-127, -1, 0, 127], np.int8), (4, dim // 4, 16, 4))
    held = rng.choice(np.array([-127, -1, 0, 127], np.int8), (4, 16, dim))
    counts = [16, 16, 0, 3]
    weights[:, 32:48] = weights[:, 51:] = 0         # as for keys that do not exist
    q, p = np.zeros((rows, 4 * dim), np.uint8), np.zeros((rows, 256), np.uint8)
    side = q[:, 2 * dim:].view(np.float32)
    side[:, 0] = 2.0 ** -20
    starts = q[:, 2 * dim:].view(np.int32)
    high = (codes + 128) >> 8
    starts[:, 1], starts[:, 2] = -128 * high.sum(1), -128 * (codes - 256 * high).sum(1)
    p[:, 128:132].view(np.float32)[:] = 2.0 ** -20
    groups = _groups(keys, held, counts)
    out, acc = np.zeros((rows, 64), np.float32), np.zeros((rows, dim), np.float32)
    run(codes.ctypes.data, q.ctypes.data, weights.ctypes.data, p.ctypes.data, groups.ctypes.data, out.ctypes.data,
        acc.ctypes.data)
    flat = keys.transpose(0, 2, 1, 3).reshape(64, dim).astype(np.int64)
    assert np.array_equal(out, ((codes.astype(np.int64) @ flat.T).astype(np.float32) * np.float32(2.0 ** -20)))
    totals = weights.astype(np.int64) @ held.reshape(64, dim).astype(np.int64)
    assert np.array_equal(acc, totals.astype(np.float32) * np.float32(2.0 ** -20))
