"""The kernels of linear layers against plain torch, at every number of rows that takes another path."""
from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from worker.linear import pack  # noqa: E402
from worker.linear.formats import ROTATION, PackedWeight  # noqa: E402
from worker.linear.route import PackedLinear, describe, quantize_activations, torch_linear  # noqa: E402

ROWS = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 31, 60, 130]
KINDS = ["float32", "bfloat16", "int8", "int8_wide", "int4", "int4_min"]


def make(kind: str, num_out: int, num_k: int, seed: int = 0) -> PackedWeight:
    rng = np.random.default_rng(seed)
    weight = (rng.standard_normal((num_out, num_k)) * 0.05).astype(np.float32)
    if kind == "float32":
        return pack.pack_float32(weight)
    if kind == "bfloat16":
        return pack.pack_bfloat16(torch.from_numpy(weight).bfloat16().view(torch.int16).numpy().view(np.uint16))
    if kind == "int4":
        raw = rng.integers(0, 256, (num_out, num_k // 32, 18), dtype=np.uint8)
        raw[..., :2] = (rng.random(raw.shape[:2]) * 0.01).astype(np.float16)[..., None].view(np.uint8)
        return pack.pack_gguf(raw.reshape(num_out, -1), "Q4_0", num_k)
    return pack.quantize_int4(weight) if kind == "int4_min" else pack.quantize_int8(weight, wide=kind == "int8_wide")


def inputs(rows: int, num_k: int, seed: int = 1) -> torch.Tensor:
    return torch.randn((rows, num_k), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_out, num_k", [(64, 64), (50, 96), (1, 32), (33, 32), (200, 576), (40, 1088)])
def test_kernel_equals_plain_torch_and_rows_do_not_depend_on_the_batch(kind: str, num_out: int, num_k: int) -> None:
    bias = np.random.default_rng(3).standard_normal(num_out).astype(np.float32)
    layer = PackedLinear([make(kind, num_out, num_k)], bias)
    x = inputs(max(ROWS), num_k)
    alone = torch.cat([layer(x[n:n + 1]) for n in range(len(x))])
    for rows in ROWS:
        out = layer(x[:rows])
        expected = torch_linear(layer, x[:rows])
        assert out.shape == expected.shape == (rows, num_out)
        assert float((out - expected).norm()) <= 2e-6 * float(expected.norm())
        assert torch.equal(out, alone[:rows])   # bit for bit, whichever tile kernel computed the row


@pytest.mark.parametrize("kind", ["int8", "int8_wide", "int4", "int4_min"])
def test_the_error_of_integer_routes_is_that_of_rounding_the_activations(kind: str) -> None:
    layer = PackedLinear([make(kind, 64, 512)])
    x = inputs(16, 512)
    exact = x.double() @ torch.from_numpy(pack.unpack(layer.weights[0])).double().T
    assert float((layer(x).double() - exact).norm() / exact.norm()) < 0.008


def test_weights_of_different_kinds_stand_side_by_side() -> None:
    """q, k and v of a file may be of different types, and of widths that are no whole tiles."""
    parts = [make("int4_min", 40, 64, 4), make("int8", 33, 64, 5), make("float32", 7, 64, 6)]
    layer = PackedLinear(parts)
    x = inputs(9, 64)
    expected = torch.cat([torch_linear(PackedLinear([part]), x) for part in parts], 1)
    torch.testing.assert_close(layer(x), expected, atol=1e-5, rtol=1e-5)
    assert layer.num_out == 80 and layer.name == "int4_min+int8+float32"
    assert describe([layer]).count("MiB") == 3


def test_quantized_activations_are_those_of_the_reference_formula() -> None:
    x = torch.tensor([[1.0, -127.0] + [0.0] * 30, [0.0] * 32])
    q, scale = quantize_activations(x)
    assert q[0, :2].tolist() == [1.0, -127.0] and scale.tolist() == [[1.0], [0.0]] and not q[1].any()


def test_a_rotated_block_spreads_its_outlier_and_errs_less_for_it() -> None:
    x = inputs(40, 128)
    x[:, 5] = 60.0
    q, scale = quantize_activations(x, 64)
    rotated = (q.view(40, 2, 64) * scale[..., None]).view_as(x)
    assert torch.equal(torch.from_numpy(ROTATION @ ROTATION), torch.eye(64))
    assert ((rotated[:, :64] - x[:, :64] @ torch.from_numpy(ROTATION)).abs() <= 0.51 * scale[:, :1]).all()
    q, scale = quantize_activations(x)
    plain = (q.view(40, 4, 32) * scale[..., None]).view_as(x)
    error = torch.from_numpy(pack.rotated(rotated.numpy())) - x
    assert float(error[:, :32].norm()) < 0.6 * float((plain - x)[:, :32].norm())


def test_weights_whose_activations_differ_are_refused_in_one_layer() -> None:
    with pytest.raises(ValueError, match=r"scales over \[32, 64\] inputs cannot share a linear layer"):
        PackedLinear([make("int8_wide", 32, 64), make("int4", 32, 64)])
    assert PackedLinear([make("int8_wide", 32, 64), make("float32", 32, 64)]).block == 64


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_bad_activation_spoils_its_own_row_and_no_other(kind: str, poison: float) -> None:
    layer = PackedLinear([make(kind, 64, 192)])
    x = inputs(7, 192)
    clean = layer(x)
    x[3, 40] = poison
    out = layer(x)
    assert not torch.isfinite(out[3]).any()
    assert torch.equal(out[[0, 1, 2, 4, 5, 6]], clean[[0, 1, 2, 4, 5, 6]])


@pytest.mark.parametrize("kind", ["int8", "int8_wide"])
def test_tiny_and_huge_activations_keep_their_scale(kind: str) -> None:
    layer = PackedLinear([make(kind, 32, 64)])
    x = inputs(3, 64) * torch.tensor([[1e-20], [1e20], [0.0]])
    expected = torch_linear(layer, x)
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=0.0)


def test_a_wrong_width_is_refused_with_both_widths() -> None:
    layer = PackedLinear([make("int8", 32, 64)])
    with pytest.raises(ValueError, match=r"x is \[2, 32\]; this layer takes \[rows, 64\]"):
        layer(inputs(2, 32))
    with pytest.raises(ValueError, match=r"weights of \[32, 64\] inputs cannot share a linear layer"):
        PackedLinear([make("int8", 32, 64), make("int8", 32, 32)])


def test_without_numba_the_same_numbers_come_from_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    from worker.jit import features
    layer = PackedLinear([make("int4_min", 64, 96)])
    x = inputs(5, 96)
    kernel = layer(x)
    monkeypatch.setattr(features, "missing", lambda: "not installed")
    torch.testing.assert_close(layer(x), kernel, atol=1e-5, rtol=1e-5)
