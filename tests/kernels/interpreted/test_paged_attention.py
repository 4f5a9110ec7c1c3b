"""Paged attention against plain torch, in every mode and over pools whose unread slots are NaN."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kernels.interpreted.tools import BF16, FP8, INT8, make_batch
from tests.worker.test_attention import BATCHES, build, plain_attention
from worker.attention import triton_paged
from worker.attention.base import BatchMeta
from worker.attention.registry import get_backend
from worker.attention.triton_paged import NO_SPLIT, SPLIT_SHORT_REQUESTS, SPLIT_TILES, LaunchPlan, TritonBackend
from worker.kernels import chip, configs
from worker.kernels.chip import Chip
from worker.kernels.combine_splits import combine_splits_reference
from worker.kernels.configs import TileConfig
from worker.kernels.paged_attention import paged_attention_reference
from worker.kv_pool import write_kv
from worker.kv_quant import dequantize

FLOAT32 = {"atol": 3e-6, "rtol": 1e-5}
HALF = {"atol": 1e-2, "rtol": 1e-2}


def random_q(num_tokens: int, heads: int, dim: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn((num_tokens, heads, dim), generator=torch.Generator().manual_seed(1)).to(dtype)


def use_tiles(monkeypatch: pytest.MonkeyPatch, block_m: int, block_n: int, processors: int = 8) -> TritonBackend:
    """A backend with small tiles, which reaches splits and tile boundaries with few keys."""
    monkeypatch.setattr(triton_paged, "attention_config", lambda *_: TileConfig(block_m, block_n, 4, 1))
    monkeypatch.setattr(configs, "MIN_TILES_PER_SPLIT", 1)
    monkeypatch.setattr(configs, "SPLIT_KEYS", 2 * block_n)
    monkeypatch.setitem(chip._known, torch.device("cpu"), Chip(90, processors))
    return TritonBackend()


def the_plan(meta: object) -> LaunchPlan:
    (plan,) = (value for value in meta.cache.values() if isinstance(value, LaunchPlan))  # type: ignore[attr-defined]
    return plan


@pytest.mark.parametrize(
    "batch, window", [(name, (0, 20)[i % 2]) for i, name in enumerate(BATCHES) if "long" not in name]
)
def test_the_backend_passes_the_suite_of_all_backends(batch: str, window: int) -> None:
    """The batches of tests/worker/test_attention.py, written through the backend itself."""
    query_lens, seq_lens = BATCHES[batch]
    backend = get_backend("triton")
    meta, cache, keys, values = build(query_lens, seq_lens, num_kv_heads=2, dim=8, backend=backend)
    q = random_q(sum(query_lens), 6, 8)
    expected = plain_attention(q, meta, keys, values, 8**-0.5, window)
    torch.testing.assert_close(backend.forward(q, cache, meta, window=window).double(), expected, **FLOAT32)


@pytest.mark.parametrize(
    "heads, kv_heads, dim", [(1, 1, 64), (4, 1, 16), (9, 3, 64), (3, 3, 80), (7, 1, 96), (2, 1, 256)]
)
def test_head_shapes_of_mixed_batches_and_an_explicit_scale(heads: int, kv_heads: int, dim: int) -> None:
    meta, cache = make_batch([1, 9, 1], [17, 30, 32], kv_heads=kv_heads, dim=dim)
    q = random_q(11, heads, dim)
    out = get_backend("triton").forward(q, cache, meta, scale=0.3)
    torch.testing.assert_close(out, paged_attention_reference(q, cache, meta, scale=0.3), **FLOAT32)


@pytest.mark.parametrize("pool, window", [(torch.float32, 0), (FP8, 0), (FP8, 20)])
@pytest.mark.parametrize("block_size, block_n", [(16, 32), (48, 32), (64, 64), (64, 16), (80, 16)])
def test_block_sizes_below_at_and_above_the_key_tile(
    block_size: int, block_n: int, pool: torch.dtype, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """float8's scales are read a tile ahead; those before the window are NaN."""
    backend = use_tiles(monkeypatch, 16, block_n, processors=1)
    meta, cache = make_batch([1, 6, 1], [block_size, block_size + 1, block_size - 1], kv_heads=1, block_size=block_size,
                             dtype=pool, window=window)
    q = random_q(8, 4, 16, BF16 if pool == FP8 else torch.float32)
    plain = [dequantize(p, s).nan_to_num() for p, s in zip(cache[:2], cache[2:], strict=True)] if pool == FP8 else cache
    expected = paged_attention_reference(q.float(), tuple(plain), meta, window=window)
    out = backend.forward(q, cache, meta, window=window).float()
    torch.testing.assert_close(out, expected, **(HALF if pool == FP8 else FLOAT32))


@pytest.mark.parametrize("window", [0, 5, 33])
@pytest.mark.parametrize(
    "lens, split",
    [
        (([1, 1, 1], [70, 0, 16]), SPLIT_TILES),
        (([9], [60]), SPLIT_TILES),
        (([1, 21, 2, 1], [70, 21, 17, 0]), SPLIT_SHORT_REQUESTS),
    ],
)
def test_split_contexts_equal_unsplit_ones(
    lens: tuple[list[int], list[int]], split: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with freed blocks behind the window, and splits in which a row sees no key."""
    backend = use_tiles(monkeypatch, 16, 16, processors=4 if split == SPLIT_SHORT_REQUESTS else 16)
    meta, cache = make_batch(*lens, window=window)
    q = random_q(sum(lens[0]), 4, 16)
    out = backend.forward(q, cache, meta, window=window)
    assert the_plan(meta).kind == split and the_plan(meta).num_splits > 1
    expected = paged_attention_reference(q, tuple(x.nan_to_num() for x in cache), meta, window=window)
    torch.testing.assert_close(out, expected, **FLOAT32)


@pytest.mark.parametrize("processors", [1, 8])
def test_softcap_and_sinks(processors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = use_tiles(monkeypatch, 16, 16, processors)
    meta, cache = make_batch([1, 5, 1], [50, 31, 0], kv_heads=1)
    q, sinks = 4 * random_q(7, 4, 16), torch.tensor([0.5, -1.0, 3.0, 20.0])
    for options in ({"softcap": 2.0}, {"sinks": sinks}, {"softcap": 5.0, "sinks": sinks, "window": 9}):
        out = backend.forward(q, cache, meta, **options)
        torch.testing.assert_close(out, paged_attention_reference(q, cache, meta, **options), **FLOAT32)
        meta.cache.clear()


@pytest.mark.parametrize(
    "dtype, pool",
    [
        (BF16, BF16),
        (torch.float16, torch.float16),
        (BF16, FP8),
        (BF16, INT8),
        (torch.float32, BF16),
        (torch.float32, INT8),
        (torch.float32, FP8),
    ],
)
def test_pools_of_every_dtype_equal_their_dequantised_values(
    dtype: torch.dtype, pool: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = use_tiles(monkeypatch, 16, 16, processors=8)
    meta, cache = make_batch([1, 4, 1], [33, 40, 0], kv_heads=1, dim=64, dtype=pool)
    q = random_q(6, 3, 64, dtype)
    out = backend.forward(q, cache, meta)
    assert out.dtype == dtype and the_plan(meta).kind == SPLIT_TILES
    expected = paged_attention_reference(q, cache, meta)
    torch.testing.assert_close(out, expected, **(FLOAT32 if dtype == torch.float32 else HALF))


@pytest.mark.parametrize("dim, pool", [(64, BF16), (128, BF16), (256, BF16), (128, INT8), (128, FP8)])
def test_the_tiles_of_a_hopper_gpu(dim: int, pool: torch.dtype) -> None:
    """Decodes, drafts and a chunk with the table's own shapes; a step with drafts only has smaller tiles."""
    for query_lens, seq_lens in (([1, 1], [70, 9]), ([5, 3], [60, 3]), ([1, 40], [70, 45])):
        meta, cache = make_batch(query_lens, seq_lens, kv_heads=1, dim=dim, dtype=pool)
        q = random_q(sum(query_lens), 4, dim, BF16)
        out = get_backend("triton").forward(q, cache, meta)
        torch.testing.assert_close(out, paged_attention_reference(q, cache, meta), **HALF)


def test_narrow_pools_stay_close_to_exact_attention() -> None:
    """int8 and e4m3 with a scale per token and head: mean error of a unit-variance context."""
    for pool, limit in ((INT8, 0.004), (FP8, 0.012)):
        meta, exact = make_batch([1] * 3, [40, 50, 60], dim=64)
        meta, cache = make_batch([1] * 3, [40, 50, 60], dim=64, dtype=pool)
        q = random_q(3, 4, 64)
        error = get_backend("triton").forward(q, cache, meta) - paged_attention_reference(q, exact, meta)
        assert error.abs().mean() < limit


def test_an_empty_batch_gives_an_empty_result() -> None:
    meta, cache = make_batch([0], [0])
    assert get_backend("triton").forward(random_q(0, 4, 16), cache, meta).shape == (0, 4, 16)


def test_strided_queries_of_a_fused_projection_are_read_in_place() -> None:
    meta, cache = make_batch([1, 3], [20, 9])
    qkv = random_q(4, 8, 16)
    out = get_backend("triton").forward(qkv[:, :4], cache, meta)
    torch.testing.assert_close(out, paged_attention_reference(qkv[:, :4], cache, meta), **FLOAT32)


def test_more_requests_than_are_compared_at_once() -> None:
    """The search for a tile's request walks 128 starts at a time."""
    meta, cache = make_batch([1] * 129 + [2], [0] * 127 + [1, 3, 5], kv_heads=1)
    q = random_q(131, 1, 16)
    out = get_backend("triton").forward(q, cache, meta)
    torch.testing.assert_close(out, paged_attention_reference(q, cache, meta), **FLOAT32)


@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    requests=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 50), st.booleans()), min_size=1, max_size=4),
    window=st.sampled_from([0, 0, 7, 40]),
    processors=st.sampled_from([1, 4, 16]),
    group=st.sampled_from([1, 3, 4]),
    kv_heads=st.sampled_from([1, 2]),
)
def test_random_ragged_batches(
    requests: list[tuple[int, int, bool]],
    window: int,
    processors: int,
    group: int,
    kv_heads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = use_tiles(monkeypatch, 16, 16, processors)
    query_lens = [1 if is_padding else t for t, _, is_padding in requests]
    seq_lens = [0 if is_padding else t + past for t, past, is_padding in requests]
    meta, cache = make_batch(query_lens, seq_lens, kv_heads=kv_heads, window=window)
    q = random_q(sum(query_lens), group * kv_heads, 16)
    out = backend.forward(q, cache, meta, window=window)
    expected = paged_attention_reference(q, tuple(x.nan_to_num() for x in cache), meta, window=window)
    torch.testing.assert_close(out, expected, **FLOAT32)


# Each block size, head dim, option and several group sizes with one KV head, and with each other as they come.
SHAPES = [  # block size, head dim, group, KV heads, window, softcap, has sinks, dtype
    (16, 64, 1, 1, 0, 0.0, False, BF16),
    (32, 80, 16, 1, 0, 3.0, False, torch.float32),
    (64, 96, 5, 2, 20, 0.0, True, BF16),
    (128, 128, 8, 1, 0, 0.0, True, torch.float32),
    (32, 192, 7, 1, 33, 4.0, True, torch.float16),
    (64, 256, 2, 2, 0, 0.0, False, torch.float32),
    (128, 64, 16, 1, 50, 0.0, False, BF16),
    (16, 256, 12, 1, 7, 2.0, True, torch.float32),
]


def check_shape(query_lens: list[int], seq_lens: list[int], block_size: int, dim: int, group: int, kv_heads: int,
                window: int, softcap: float, has_sinks: bool, dtype: torch.dtype, backend: TritonBackend) -> None:
    """The mixed batch against the reference; what no query may see is NaN."""
    meta, cache = make_batch(query_lens, seq_lens, block_size=block_size, kv_heads=kv_heads, dim=dim, dtype=dtype,
                             window=window)
    q = 2 * random_q(sum(query_lens), group * kv_heads, dim, dtype)
    sinks = random_q(1, 1, group * kv_heads)[0, 0] if has_sinks else None
    options = {"window": window, "softcap": softcap, "sinks": sinks}
    out = backend.forward(q, cache, meta, **options)
    expected = paged_attention_reference(q, tuple(x.float().nan_to_num() for x in cache), meta, **options)
    limits = FLOAT32 if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}
    torch.testing.assert_close(out, expected, **limits)


@pytest.mark.parametrize("shape", SHAPES)
def test_mixed_batches_of_every_shape_a_model_may_have(shape: tuple[object, ...]) -> None:
    """With the tiles that a GPU takes: decodes on both sides of a block's end, a chunk behind a context, padding."""
    block_size = int(shape[0])  # type: ignore[call-overload]
    lengths = [block_size, block_size + 1, 2 * block_size - 1, 0, 1]
    check_shape([1, 1, 9, 1, 1], lengths, *shape, get_backend("triton"))  # type: ignore[arg-type]


@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    requests=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 70)), min_size=1, max_size=3),
    shape=st.tuples(st.sampled_from([16, 32, 64, 128]), st.sampled_from([64, 80, 96, 128, 256]), st.integers(1, 16),
                    st.sampled_from([1, 1, 2]), st.sampled_from([0, 5, 40]), st.sampled_from([0.0, 3.0]),
                    st.booleans()),
    processors=st.sampled_from([1, 8]),
)
def test_random_shapes_of_random_batches(
    requests: list[tuple[int, int]], shape: tuple[int, int, int, int, int, float, bool], processors: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With small tiles, so that contexts are split."""
    backend = use_tiles(monkeypatch, 16, 16, processors)
    check_shape([t for t, _ in requests], [t + past for t, past in requests], *shape, torch.float32, backend)


def test_a_step_is_planned_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    original = triton_paged.plan_launch
    monkeypatch.setattr(triton_paged, "plan_launch", lambda *args: calls.append(args) or original(*args))
    meta, cache = make_batch([1, 1], [5, 9])
    backend, q = get_backend("triton"), random_q(2, 4, 16)
    first = backend.forward(q, cache, meta)
    kept = first.clone()
    backend.forward(2 * q, cache, meta)
    assert len(calls) == 1 and torch.equal(first, kept)


def test_contexts_are_split_until_the_chip_is_full() -> None:
    def plan(query_lens: list[int], seq_lens: list[int]) -> LaunchPlan:
        meta, _ = make_batch(query_lens, [min(n, 64) for n in seq_lens])
        meta.max_seq_len, meta.seq_lens_cpu = max(seq_lens), np.array(seq_lens, np.int32)
        tile = configs.attention_config(max(query_lens), 4, 128, 2, 2, 90)
        return triton_paged.plan_launch(meta, sum(query_lens), 4, 8, 128, tile, 132)

    many = plan([1] * 64, [8192] * 64)
    assert (many.kind, many.num_splits, many.part_rows) == (SPLIT_TILES, 8, 4)
    assert plan([1] * 256, [300] * 256).kind == plan([4096], [4096]).kind == NO_SPLIT
    one = plan([1], [32768])
    assert (one.kind, one.num_splits) == (SPLIT_TILES, 32)
    mixed = plan([300] * 10 + [1], [300] * 10 + [32768])
    assert (mixed.kind, mixed.num_splits, mixed.num_parts, mixed.max_split_queries) == (SPLIT_SHORT_REQUESTS, 16, 11, 4)
    assert plan([1], [100]).kind == NO_SPLIT


def test_warming_up_launches_every_variant_and_leaves_the_pool_alone() -> None:
    _, cache = make_batch([1], [20])
    before = [tensor.view(torch.uint8).clone() for tensor in cache]
    assert get_backend("triton").warm_up(cache, num_heads=4, dtype=torch.float32, block_size=16) >= 2
    assert all(torch.equal(a, b.view(torch.uint8)) for a, b in zip(before, cache, strict=True))


def test_too_many_query_heads_per_kv_head_are_refused_by_number() -> None:
    meta, cache = make_batch([1], [5], kv_heads=1)
    with pytest.raises(ValueError, match="one KV head serves 130 query heads; .* at most 32"):
        get_backend("triton").forward(random_q(1, 130, 16), cache, meta)


def test_combining_parts_equals_the_formula() -> None:
    g = torch.Generator().manual_seed(0)
    scores, values = torch.randn((2, 12), generator=g), torch.randn((12, 4), generator=g)
    parts = torch.stack([torch.softmax(s, -1) @ v for s, v in zip(scores.split(4, 1), values.split(4), strict=True)])
    lse = torch.stack([s.logsumexp(-1) for s in scores.split(4, 1)]) * 1.4426950408889634
    torch.testing.assert_close(combine_splits_reference(parts, lse), torch.softmax(scores, -1) @ values)


def write_values(
    meta: BatchMeta, cache: tuple[torch.Tensor, ...], lengths: list[int], k: torch.Tensor, v: torch.Tensor
) -> None:
    """k, v [tokens of all requests, Hkv, D] in the place of what the batch's pool holds."""
    positions = [(r, torch.arange(length)) for r, length in enumerate(lengths)]
    slots = torch.cat([meta.block_table[r, p // 16].long() * 16 + p % 16 for r, p in positions])
    write_kv(cache, k, v, slots)


def error_of_rows(out: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest, relative to the largest element of its row."""
    return float(((out.float() - expected).abs().amax(-1) / expected.abs().amax(-1)).max())


@pytest.mark.parametrize("query_lens", [[1, 1], [3, 5]])
@pytest.mark.parametrize(
    "dtype, q_size, smallest, largest",
    [(BF16, 1e6, -28, 36), (BF16, 1e-25, -28, 36), (BF16, 1.0, -28, -10), (torch.float16, 1.0, -6, 4)],
)
def test_float8_takes_queries_and_values_of_every_size(
    query_lens: list[int], dtype: torch.dtype, q_size: float, smallest: int, largest: int,
    monkeypatch: pytest.MonkeyPatch
) -> None:
    """float16 ends at 65504 and 6e-8; scales reach from 2**-100 to 1e36 / 448. Heads of zeros have the smallest scale
    and weigh as much as others, and a sink has no scale at all."""
    lengths, generator = [70, 41], torch.Generator().manual_seed(5)
    meta, cache = make_batch(query_lens, lengths, dtype=FP8)
    sizes = 10.0 ** torch.randint(smallest, largest + 1, (sum(lengths), 2, 1), generator=generator)
    k, v = torch.randn((2, sum(lengths), 2, 16), generator=generator).clamp(-3, 3).unbind(0)
    sizes[3::7] = 0.0
    sizes[:16] = sizes[70:86] = 0.0  # whole tiles, before others
    sizes[1] = sizes[71] = 10.0**smallest
    write_values(meta, cache, lengths, k / q_size, sizes * v)
    q = (q_size * torch.randn((sum(query_lens), 4, 16), generator=generator)).to(dtype)
    backend = use_tiles(monkeypatch, 16, 16)
    for splits in (1, 8):
        monkeypatch.setitem(chip._known, torch.device("cpu"), Chip(90, splits))
        for sinks in (None, torch.tensor([-20.0, 0.5, 3.0, 15.0])):
            meta.cache.clear()
            expected = paged_attention_reference(q.float(), cache, meta, sinks=sinks)
            assert error_of_rows(backend.forward(q, cache, meta, sinks=sinks), expected) < 2e-2


@pytest.mark.parametrize("splits", [1, 8])
def test_what_is_not_finite_spoils_only_what_reads_it(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A NaN key, an infinite value, an infinite query and a NaN query, each of one head, in a float8 pool."""
    lengths = [40, 20, 33, 33]
    meta, cache = make_batch([1, 1, 2, 2], lengths, dtype=FP8)
    k, v = torch.randn((2, sum(lengths), 2, 16), generator=torch.Generator().manual_seed(3)).unbind(0)
    q = random_q(6, 4, 16, BF16)
    write_values(meta, cache, lengths, k, v)
    expected = paged_attention_reference(q.float(), cache, meta)
    k[3, 0, 7], v[45, 1, 2] = float("nan"), float("inf")
    q[3, 1, 4], q[4, 2, 0] = float("inf"), float("nan")
    write_values(meta, cache, lengths, k, v)
    out = use_tiles(monkeypatch, 16, 16, splits).forward(q, cache, meta).float()
    spoilt = torch.zeros((6, 4), dtype=torch.bool)
    for row, head in ((0, 0), (0, 1), (1, 2), (1, 3), (3, 1), (4, 2)):
        spoilt[row, head] = True
    assert torch.equal(out.isnan().all(-1), spoilt) and torch.equal(out.isnan().any(-1), spoilt)
    torch.testing.assert_close(out[~spoilt], expected[~spoilt], **HALF)
