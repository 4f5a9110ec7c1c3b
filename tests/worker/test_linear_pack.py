"""Packed formats: what is packed is what comes back, and blocks of a GGUF file keep their exact values."""
from __future__ import annotations

import numpy as np
import pytest
import torch

from worker.linear import formats, pack
from worker.linear.formats import INT4, INT4_MIN, INT8, INT8_WIDE
from worker.quant.gguf_blocks import dequantize, get_format

SHAPES = [(32, 32), (1, 64), (33, 96), (50, 32), (96, 576)]


def random_weight(num_out: int, num_k: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((num_out, num_k)) * 0.05).astype(np.float32)


@pytest.mark.parametrize("shape", SHAPES)
def test_float_formats_come_back_bit_for_bit(shape: tuple[int, int]) -> None:
    weight = random_weight(*shape)
    assert np.array_equal(pack.unpack(pack.pack_float32(weight)), weight)
    rounded = torch.from_numpy(weight).bfloat16()
    packed = pack.pack_bfloat16(rounded.view(torch.int16).numpy().view(np.uint16))
    assert np.array_equal(pack.unpack(packed), rounded.float().numpy())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ggml_type, kind", [("Q8_0", INT8), ("Q4_0", INT4), ("Q4_1", INT4_MIN)])
def test_blocks_of_a_file_keep_their_exact_values(shape: tuple[int, int], ggml_type: str, kind: int) -> None:
    num_out, num_k = shape
    rng = np.random.default_rng(2)
    raw = rng.integers(0, 256, (num_out, num_k // 32, get_format(ggml_type).block_bytes), dtype=np.uint8)
    raw[..., :2] = rng.standard_normal(raw.shape[:2]).astype(np.float16)[..., None].view(np.uint8)
    if ggml_type == "Q4_1":
        raw[..., 2:4] = rng.standard_normal(raw.shape[:2]).astype(np.float16)[..., None].view(np.uint8)
    expected = np.empty(shape, np.float32)
    dequantize(raw.reshape(-1), ggml_type, expected)
    packed = pack.pack_gguf(raw.reshape(num_out, -1), ggml_type, num_k)
    assert packed.kind == kind and np.array_equal(pack.unpack(packed), expected)


def test_a_block_of_q4_0_is_computed_to_the_bit_and_padded_with_zeros() -> None:
    packed = pack.pack_gguf(np.array([[0x00, 0x3C] + [0x80] * 16], np.uint8), "Q4_0", 32)
    assert pack.unpack(packed).tolist() == [[-8.0] * 16 + [0.0] * 16]
    assert packed.padded_out == 32 and not packed.scales[:, :, 1:].any()


def test_own_int8_errs_by_at_most_half_a_step_and_int4_likewise() -> None:
    weight = random_weight(64, 256)
    steps = np.abs(weight.reshape(64, 8, 32)).max(-1) / 127
    error = np.abs(pack.unpack(pack.quantize_int8(weight, wide=False)) - weight).reshape(64, 8, 32).max(-1)
    assert (error <= 0.57 * steps).all()        # half, and what rounding the scale to float16 adds at the ends
    wide, turned = pack.quantize_int8(weight), pack.rotated(weight)
    steps = np.abs(turned.reshape(64, 4, 64)).max(-1) / 127
    error = np.abs(pack.rotated(pack.unpack(wide)) - turned).reshape(64, 4, 64).max(-1)
    assert (error <= 0.57 * steps).all() and wide.kind == INT8_WIDE and wide.nbytes == 64 * 256 * 33 // 32
    blocks = weight.reshape(64, 8, 32)
    steps = (blocks.max(-1) - blocks.min(-1)) / 15
    error = np.abs(pack.unpack(pack.quantize_int4(weight)) - weight).reshape(64, 8, 32).max(-1)
    assert (error <= 0.53 * steps).all()


def test_zero_weights_stay_zero() -> None:
    for quantize in (pack.quantize_int8, pack.quantize_int4):
        assert not pack.unpack(quantize(np.zeros((32, 64), np.float32))).any()


def test_a_width_that_is_no_multiple_of_32_is_refused() -> None:
    with pytest.raises(ValueError, match="a weight with 48 inputs; packed formats need a multiple of 32"):
        pack.quantize_int8(np.zeros((4, 48), np.float32))


def test_lasting_arrays_share_memory_without_overlapping_and_outlive_their_piece(monkeypatch: pytest.MonkeyPatch
                                                                                 ) -> None:
    monkeypatch.setattr(formats, "PIECE_BYTES", 4096)
    monkeypatch.setattr(formats, "_arena", formats._Arena())
    arrays = [formats.aligned_empty((1 + i % 5, 13), np.float32, is_lasting=True) for i in range(60)]
    for i, array in enumerate(arrays):
        array[:] = i
    assert all(array.ctypes.data % 64 == 0 and (array == i).all() for i, array in enumerate(arrays))
    spans = sorted((array.ctypes.data, array.ctypes.data + array.nbytes) for array in arrays)
    gaps = [begin - end for (_, end), (begin, _) in zip(spans, spans[1:])]
    assert min(gaps) >= 0 and sorted(gaps)[len(gaps) // 2] < 64             # most lie side by side
    large = formats.aligned_empty((1024,), np.float32, is_lasting=True)     # not worth a place in a piece
    large[:] = 7
    assert large.ctypes.data % 64 == 0 and (arrays[-1] == 59).all()
