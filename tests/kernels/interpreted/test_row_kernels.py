"""The kernels that handle one row, head or token at a time, against their torch references."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ipc.counter_rng import uniform
from ipc.model_config import ModelConfig
from tests.kernels.interpreted.tools import BF16, FP8, INT8, make_batch, make_cache
from worker.attention.registry import get_backend
from worker.kernels.add_rms_norm import add_rms_norm, add_rms_norm_reference
from worker.kernels.argmax import argmax, argmax_reference
from worker.kernels.embedding import embedding, embedding_reference
from worker.kernels.kv_write import kv_write
from worker.kernels.philox import philox_uniform, philox_uniform_reference
from worker.kernels.qkv_rope_kv_write import qkv_rope_kv_write, qkv_rope_kv_write_reference
from worker.kernels.silu_mul import silu_mul, silu_mul_reference
from worker.kv_pool import write_kv
from worker.kv_quant import dequantize, quantize
from worker.models.layers import HeadNorm, RMSNorm, RotaryTables
from worker.models.ops import TORCH_OPS
from worker.sampling.sampler import arg_max

DTYPES = [torch.float32, torch.float16, BF16]
POOLS = [torch.float32, BF16, INT8, FP8]


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """float32 to its rounding; narrow dtypes to one step of theirs."""
    limits = {torch.float32: (1e-6, 1e-5), torch.float16: (1e-3, 1e-3), BF16: (8e-3, 8e-3)}
    atol, rtol = limits[expected.dtype]
    torch.testing.assert_close(actual, expected, atol=atol, rtol=rtol)


def bytes_of(cache: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    return [tensor.view(torch.uint8) for tensor in cache]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 48, 576])
def test_add_rms_norm_updates_the_stream_and_norms_what_it_holds(dtype: torch.dtype, size: int) -> None:
    residual, delta, weight = (
        randn(3, size, dtype=dtype),
        randn(3, 2 * size, dtype=dtype)[:, :size],
        randn(size, dtype=dtype),
    )
    ours, theirs = residual.clone(), residual.clone()
    close(add_rms_norm(ours, delta, weight, 1e-5), add_rms_norm_reference(theirs, delta, weight, 1e-5))
    assert torch.equal(ours, theirs)
    close(add_rms_norm(ours, None, weight, 1e-5), F.rms_norm(ours, (size,), weight, 1e-5))
    assert torch.equal(ours, theirs)


def test_add_rms_norm_equals_the_models_own() -> None:
    norm = RMSNorm(32, 1e-6, dtype=torch.float32, device="cpu")
    norm.weight.copy_(randn(32))
    residual, delta = randn(4, 32, seed=1), randn(4, 32, seed=2)
    expected, stream = TORCH_OPS.add_norm(norm, residual.clone(), delta)
    ours = residual.clone()
    close(add_rms_norm(ours, delta, norm.weight, 1e-6), expected)
    assert torch.equal(ours, stream)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 100, 1500])
def test_silu_mul(dtype: torch.dtype, size: int) -> None:
    both = 4 * randn(3, 2 * size, dtype=dtype)
    close(silu_mul(both), silu_mul_reference(both))


def test_silu_of_large_values_does_not_overflow() -> None:
    both = torch.tensor([[-1e4, 1e4, 2.0, 3.0]])
    assert silu_mul(both).tolist() == [[0.0, 3e4]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding_gives_zeros_for_ids_outside_the_table(dtype: torch.dtype) -> None:
    table, ids = randn(7, 1100, dtype=dtype), torch.tensor([3, 0, 6, -1, 7])
    assert torch.equal(embedding(ids, table), embedding_reference(ids, table))
    assert torch.equal(embedding(ids.int(), table)[:3], table[[3, 0, 6]]) and not embedding(ids, table)[3:].any()


@pytest.mark.parametrize("size", [1, 5, 4096, 9000])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_argmax_takes_the_first_of_equals(size: int, dtype: torch.dtype) -> None:
    logits = randn(4, size).mul(3).round().to(dtype)
    assert torch.equal(argmax(logits), argmax_reference(logits))
    assert argmax(logits).tolist() == arg_max(logits.float())[0].tolist()


def test_argmax_reports_rows_whose_largest_is_not_finite() -> None:
    logits = torch.zeros((5, 6000))
    logits[0, 5000], logits[1, 3], logits[2, 4] = 1.0, float("nan"), float("inf")
    logits[3], logits[4, 7] = float("-inf"), float("-inf")
    assert argmax(logits).tolist() == [5000, -1, -1, -1, 0]


@pytest.mark.parametrize("lanes", [1, 3, 4, 300])
def test_noise_equals_the_cpus_bit_for_bit(lanes: int) -> None:
    seeds = np.array([0, 1, 2**64 - 1, 0x123456789ABCDEF0, 2**63], np.uint64)
    child, index = np.array([0, -1, 7, 2**31 - 1, 3], np.int32), np.array([0, 2**40 + 5, 1, 2**62, 12], np.int64)
    columns = torch.from_numpy(seeds.view(np.int64)), torch.from_numpy(child), torch.from_numpy(index)
    noise = philox_uniform(*columns, lanes)
    assert np.array_equal(noise.numpy(), uniform(seeds, child, index, lanes))
    assert torch.equal(noise, philox_uniform_reference(*columns, lanes))


@pytest.mark.parametrize("pool", [INT8, FP8])
@pytest.mark.parametrize("lost", [float("nan"), float("inf"), float("-inf")])
def test_a_head_with_a_value_that_is_no_number_is_none_as_a_whole_when_it_is_read(
        pool: torch.dtype, lost: float) -> None:
    """A maximum passes over NaN on a GPU: the head got the scale of its other values, and NaN the lowest code."""
    cache, (k, v, qkv) = make_cache(3, 16, 2, 16, pool), (randn(2, 2, 16), randn(2, 2, 16), randn(2, 6, 16))
    slots, tables = torch.tensor([16, 17]), torch.ones(2, 1, 16)
    for write in (lambda: kv_write(cache, k, v, slots),
                  lambda: qkv_rope_kv_write(qkv, tables, tables, cache, slots, num_heads=2)):
        k[0, 1, 3] = v[0, 0, 9] = qkv[0, 2, 5] = qkv[0, 5, 0] = lost
        write()
        read = [dequantize(cache[at][1, :2], cache[2 + at][1, :2]) for at in (0, 1)]
        assert sorted(int(part.isnan().all(-1).sum()) for part in read) == [1, 1]
        assert all(bool(part[1].isfinite().all()) for part in read)


@pytest.mark.parametrize("pool", POOLS)
def test_kv_write_fills_the_slots_and_nothing_else(pool: torch.dtype) -> None:
    """Padding goes to the last slot, also when it is NaN."""
    slots = torch.tensor([5, -1, 33, 16, -1])
    k, v = randn(5, 3, 48), randn(5, 3, 48, seed=1)
    k[1] = v[4] = float("nan")
    ours, theirs = make_cache(4, 16, 3, 48, pool), make_cache(4, 16, 3, 48, pool)
    kv_write(ours, k, v, slots)
    write_kv(theirs, k, v, slots)
    for a, b in zip(bytes_of(ours), bytes_of(theirs), strict=True):
        assert torch.equal(a.flatten(0, 1)[:-1], b.flatten(0, 1)[:-1])


@pytest.mark.parametrize("heads, kv_heads, dim", [(4, 2, 16), (3, 1, 48)])
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("has_norm", [True, False])
def test_fused_rotation_and_write_equal_the_steps_one_by_one(
    has_norm: bool, pool: torch.dtype, heads: int, kv_heads: int, dim: int
) -> None:
    qkv = randn(4, heads + 2 * kv_heads, dim)
    qkv[3] = float("nan")  # a padding row
    slots, angles = torch.tensor([17, 3, 40, -1]), 100 * randn(4, 1, dim // 2)
    cos = torch.cat([angles.cos()] * 2, -1)
    sin = torch.cat([-angles.sin(), angles.sin()], -1)
    weight = randn(heads + kv_heads, dim) if has_norm else None
    ours, theirs = make_cache(4, 16, kv_heads, dim, pool), make_cache(4, 16, kv_heads, dim, pool)
    q = qkv_rope_kv_write(qkv, cos, sin, ours, slots, num_heads=heads, norm_weight=weight)
    expected = qkv_rope_kv_write_reference(qkv, cos, sin, theirs, slots, num_heads=heads, norm_weight=weight)
    close(q[:3], expected[:3])
    for side in range(2):
        a, b = ours[side].view(-1, kv_heads, dim), theirs[side].view(-1, kv_heads, dim)
        if pool in (INT8, FP8):
            a, b = (
                dequantize(x[slots[:3]], c[side + 2].view(-1, kv_heads)[slots[:3]]) for x, c in ((a, ours), (b, theirs))
            )
            torch.testing.assert_close(a, b, atol=0.05, rtol=0.07)  # one code, where a rounding differs
        else:
            close(a[slots[:3]], b[slots[:3]])
    untouched = [s for s in range(63) if s not in (17, 3, 40)]
    fresh = make_cache(4, 16, kv_heads, dim, pool)
    for a, b in zip(bytes_of(ours), bytes_of(fresh), strict=True):
        assert torch.equal(a.flatten(0, 1)[untouched], b.flatten(0, 1)[untouched])


def test_the_fused_pass_equals_the_models_own_and_attends() -> None:
    config = ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        rope_scaling=None,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        attention_bias=False,
        qk_norm=True,
        eos_token_ids=[1],
        bos_token_id=None,
        dtype="float32",
    )
    positions = torch.tensor([0, 3000, 7])
    cos, sin = RotaryTables(config, "cpu")(positions, torch.float32)
    norm = HeadNorm(6, 16, 1e-6, dtype=torch.float32, device="cpu")
    norm.weight.copy_(randn(6, 16))
    qkv, backend = randn(3, 8, 16), get_backend("triton")
    (meta, ours), (_, theirs) = (make_batch([1] * 3, [9, 20, 8]) for _ in range(2))
    meta.slot_mapping = torch.tensor(
        [int(meta.block_table[r, (n - 1) // 16]) * 16 + (n - 1) % 16 for r, n in enumerate([9, 20, 8])]
    )
    expected = TORCH_OPS.rotate_and_write(qkv, norm, (cos, sin), 4, 2, theirs, meta, backend)
    q = backend.ops.rotate_and_write(qkv, norm, (cos, sin), 4, 2, ours, meta, backend)
    close(q, expected)
    close(ours[0].nan_to_num(), theirs[0].nan_to_num())
    close(backend.forward(q, ours, meta), backend.forward(expected, theirs, meta))


@pytest.mark.parametrize("pool, step", [(INT8, 0.5 / 127), (FP8, 0.5 / 14)])
def test_quantisation_error_is_at_most_half_a_code(pool: torch.dtype, step: float) -> None:
    """e4m3 has three bits of mantissa: half a step is at most 16 of the largest value's 448."""
    x = randn(50, 3, 64) * 1e3
    codes, scale = quantize(x, pool)
    error = (dequantize(codes, scale) - x).abs() / x.abs().amax(-1, keepdim=True)
    assert error.max() < step * 1.02
    zeros, scale = quantize(torch.zeros(1, 1, 8), pool)
    assert torch.equal(dequantize(zeros, scale), torch.zeros(1, 1, 8))
