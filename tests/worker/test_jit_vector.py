"""The vocabulary of the kernels against numpy, and the three forms of the byte product against each other."""
from __future__ import annotations

import numpy as np
import pytest

numba = pytest.importorskip("numba")

from worker.jit import dot, features  # noqa: E402
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


@pytest.mark.parametrize("form", features.DOT_FORMS)
@pytest.mark.parametrize("kind", [dot.INT8, dot.INT8_WIDE, dot.INT4, dot.INT4_MIN])
@pytest.mark.parametrize("rows", [1, 6])
def test_every_form_of_the_byte_product_gives_the_same_bits(form: str, kind: int, rows: int) -> None:
    """AVX2 and generic code run on any machine that has VNNI; extreme bytes would show a saturating instruction."""
    needs = {"vnni512": "avx512vnni", "avx2": "avx2", "generic": ""}[form]
    if needs and needs not in features.cpu_features():
        pytest.skip(f"this processor has no {needs}")
    tiles = [dot.make_int_tile(kind, rows, name) for name in (form, "generic")]
    first, second = tiles
    block = dot.WIDE_BLOCK if kind == dot.INT8_WIDE else dot.BLOCK

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
