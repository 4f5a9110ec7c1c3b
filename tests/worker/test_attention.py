"""Attention backends against plain attention, and their registry. A new backend adds its name to BACKEND_NAMES."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from worker.attention import cpu as cpu_module
from worker.attention.base import AttentionBackend, BatchMeta
from worker.attention.registry import BACKENDS, get_backend, resolve_backend
from worker.kv_quant import LARGEST_CODE, dequantize, quantize

BACKEND_NAMES = ["reference", "cpu", "jit"]
S = 16

# name -> (query lengths, sequence lengths); a sequence length of 0 is a padding row.
BATCHES = {
    "one token": ([1], [1]),
    "one decode": ([1], [37]),
    "block boundaries": ([1] * 6, [15, 16, 17, 31, 32, 33]),
    "one long context among short ones": ([1] * 9, [600, 3, 5, 9, 2, 20, 11, 1, 7]),
    "decodes and padding": ([1] * 5, [40, 0, 12, 0, 0]),
    "only padding": ([1, 1], [0, 0]),
    "whole prompt": ([33], [33]),
    "chunk behind a context": ([20], [75]),
    "long chunk in pieces": ([300], [350]),
    "mixed": ([1, 17, 1, 4, 130, 1, 1], [50, 17, 0, 90, 200, 333, 1]),
    "drafts to verify": ([5, 1, 3, 4], [64, 20, 3, 100]),
    "a row without tokens": ([1, 0, 2], [9, 30, 18]),
}


def poison(cache: tuple[torch.Tensor, ...]) -> None:
    """NaN everywhere; int8 codes have none, their scales do."""
    for tensor in cache:
        tensor.fill_(77 if tensor.dtype == torch.int8 else float("nan"))


def build(
    query_lens: list[int], seq_lens: list[int], num_kv_heads: int, dim: int, seed: int = 0,
    dtype: torch.dtype = torch.float32, backend: AttentionBackend | None = None,
) -> tuple[BatchMeta, tuple[torch.Tensor, ...], list[torch.Tensor], list[torch.Tensor]]:
    """A batch whose contexts were written through the backend; everything that must not be read is NaN."""
    g = torch.Generator().manual_seed(seed)
    counts = [-(-n // S) for n in seq_lens]
    order = torch.randperm(sum(counts), generator=g) + 1
    table = torch.zeros((len(seq_lens), max(1, *counts) + 1), dtype=torch.int32)
    begin = 0
    for r, count in enumerate(counts):
        table[r, :count] = order[begin : begin + count].int()
        begin += count
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    lengths = np.array(seq_lens, np.int32)
    backend = backend or get_backend("reference")
    cache = backend.allocate((sum(counts) + 2, S, num_kv_heads, dim), dtype, "cpu")
    poison(cache)
    keys = [torch.randn((n, num_kv_heads, dim), generator=g) for n in seq_lens]
    values = [torch.randn((n, num_kv_heads, dim), generator=g) for n in seq_lens]

    def slots(r: int, first: int, last: int) -> torch.Tensor:
        p = torch.arange(first, last)
        return table[r, p // S].long() * S + p % S

    def meta_for(slot_mapping: torch.Tensor) -> BatchMeta:
        return BatchMeta.of(starts, lengths, table, slot_mapping, S)

    def rows(tensors: list[torch.Tensor], past: bool) -> torch.Tensor:
        parts = []
        for n, t, x in zip(seq_lens, query_lens, tensors, strict=True):
            pad = torch.full((t, num_kv_heads, dim), float("nan")) if n == 0 and not past else x[:0]
            parts += [x[: n - t] if past else x[n - t :], pad] if n else [pad]
        return torch.cat(parts)

    past = torch.cat([slots(r, 0, max(0, n - t)) for r, (n, t) in enumerate(zip(seq_lens, query_lens, strict=True))])
    now = torch.cat([slots(r, n - t, n) if n else torch.full((t,), -1) for r, (n, t) in
                     enumerate(zip(seq_lens, query_lens, strict=True))])
    backend.write(cache, rows(keys, True), rows(values, True), meta_for(past))
    meta = meta_for(now)
    backend.write(cache, rows(keys, False), rows(values, False), meta)
    return meta, cache, keys, values


def plain_attention(
    q: torch.Tensor, meta: BatchMeta, keys: list[torch.Tensor], values: list[torch.Tensor], scale: float, window: int
) -> torch.Tensor:
    """Query by query, head by head, in float64."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    group = q.shape[1] // keys[0].shape[1]
    for r in range(meta.num_reqs):
        begin, end = (int(x) for x in meta.query_start_loc_cpu[r : r + 2])
        n = int(meta.seq_lens_cpu[r])
        for i in range(begin, end if n else begin):
            last = n - (end - i) + 1
            first = max(0, last - window) if window else 0
            for h in range(q.shape[1]):
                k, v = keys[r][first:last, h // group].double(), values[r][first:last, h // group].double()
                out[i, h] = torch.softmax(k @ q[i, h].double() * scale, 0) @ v
    return out


@pytest.mark.parametrize("name", BACKEND_NAMES)
@pytest.mark.parametrize("window", [0, 1, 20])
@pytest.mark.parametrize("batch", BATCHES)
def test_backend_equals_plain_attention_whatever_unread_slots_hold(name: str, window: int, batch: str) -> None:
    """Null block, scratch, tails of blocks and padding rows are NaN in the pool."""
    query_lens, seq_lens = BATCHES[batch]
    backend = get_backend(name)
    meta, cache, keys, values = build(query_lens, seq_lens, num_kv_heads=2, dim=8, backend=backend)
    q = torch.randn((sum(query_lens), 6, 8), generator=torch.Generator().manual_seed(1))
    out = backend.forward(q, cache, meta, window=window)
    expected = plain_attention(q, meta, keys, values, 8**-0.5, window)
    assert out.dtype == torch.float32 and out.shape == q.shape
    torch.testing.assert_close(out.double(), expected, atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("name", BACKEND_NAMES)
@pytest.mark.parametrize("heads, kv_heads, dim", [(1, 1, 4), (4, 1, 16), (9, 3, 64), (3, 3, 32)])
def test_head_shapes_and_an_explicit_scale(name: str, heads: int, kv_heads: int, dim: int) -> None:
    query_lens, seq_lens = BATCHES["mixed"]
    backend = get_backend(name)
    meta, cache, keys, values = build(query_lens, seq_lens, kv_heads, dim, seed=2, backend=backend)
    q = torch.randn((sum(query_lens), heads, dim), generator=torch.Generator().manual_seed(3))
    out = backend.forward(q, cache, meta, scale=0.3)
    torch.testing.assert_close(out.double(), plain_attention(q, meta, keys, values, 0.3, 0), atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [0, 50])
def test_the_fused_path_of_the_cpu_backend_equals_the_reference(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_module, "FUSED_SCORES", 0)
    meta, cache, _, _ = build([1, 200, 40, 6], [90, 310, 40, 70], 3, 64, seed=4)
    q = torch.randn((247, 9, 64), generator=torch.Generator().manual_seed(5))
    expected = get_backend("reference").forward(q, cache, meta, window=window)
    out = get_backend("cpu").forward(q, cache, meta, window=window)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)
    plan = cpu_module.plan_step(meta, 9, 3, 64, window)
    assert all(bucket.fused == (bucket.t > 1) for bucket in plan.buckets)


@pytest.mark.parametrize("name", BACKEND_NAMES)
def test_bf16_pools_and_queries_are_computed_in_float32(name: str) -> None:
    backend = get_backend(name)
    meta, cache, keys, values = build(*BATCHES["mixed"], 2, 8, dtype=torch.bfloat16, backend=backend)
    keys, values = [k.bfloat16().float() for k in keys], [v.bfloat16().float() for v in values]
    q = torch.randn((155, 4, 8), generator=torch.Generator().manual_seed(6)).bfloat16()
    out = backend.forward(q, cache, meta)
    assert out.dtype == torch.bfloat16
    expected = plain_attention(q.float(), meta, keys, values, 8**-0.5, 0)
    torch.testing.assert_close(out, expected.bfloat16(), atol=1e-2, rtol=1e-2)
    exact = backend.forward(q.float(), cache, meta)
    torch.testing.assert_close(exact.double(), expected, atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("name", BACKEND_NAMES)
@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("dtype", LARGEST_CODE, ids=["int8", "fp8"])
def test_quantised_pools_give_the_attention_of_what_their_codes_stand_for(
    name: str, window: int, batch: str, dtype: torch.dtype
) -> None:
    """Scales of unread slots are NaN, and do not leak."""
    query_lens, seq_lens = BATCHES[batch]
    backend = get_backend(name)
    meta, cache, keys, values = build(query_lens, seq_lens, 2, 8, dtype=dtype, backend=backend)
    keys, values = ([dequantize(*quantize(x, dtype)) for x in part] for part in (keys, values))
    q = torch.randn((sum(query_lens), 6, 8), generator=torch.Generator().manual_seed(1))
    out = backend.forward(q, cache, meta, window=window)
    expected = plain_attention(q, meta, keys, values, 8**-0.5, window)
    rounds = name == "jit" and dtype == torch.int8      # queries and weights, to sixteen bits
    torch.testing.assert_close(out.double(), expected, atol=1e-4 if rounds else 3e-6, rtol=1e-5)


def test_the_fused_path_of_the_cpu_backend_applies_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_module, "FUSED_SCORES", 0)
    meta, cache, _, _ = build([1, 200, 40], [90, 310, 40], 3, 64, dtype=torch.int8)
    q = torch.randn((241, 9, 64), generator=torch.Generator().manual_seed(5))
    expected = get_backend("reference").forward(q, cache, meta)
    torch.testing.assert_close(get_backend("cpu").forward(q, cache, meta), expected, atol=3e-6, rtol=1e-5)


def test_random_batches_of_the_cpu_backend_equal_the_reference() -> None:
    rng = np.random.default_rng(7)
    cpu, reference = get_backend("cpu"), get_backend("reference")
    for trial in range(40):
        num_reqs = int(rng.integers(1, 20))
        query_lens = rng.choice([1, 1, 1, 2, 9, 70, 129, 257], num_reqs).tolist()
        seq_lens = [0 if rng.random() < 0.1 and t == 1 else t + int(rng.integers(0, 200)) for t in query_lens]
        window = int(rng.choice([0, 0, 33]))
        meta, cache, _, _ = build(query_lens, seq_lens, 2, 16, seed=trial)
        q = torch.randn((sum(query_lens), 4, 16), generator=torch.Generator().manual_seed(trial))
        expected = reference.forward(q, cache, meta, window=window)
        torch.testing.assert_close(cpu.forward(q, cache, meta, window=window), expected, atol=3e-6, rtol=1e-5)


def test_outputs_of_two_layers_do_not_share_memory() -> None:
    cpu = get_backend("cpu")
    for batch in ("one decode", "mixed"):
        meta, cache, _, _ = build(*BATCHES[batch], 2, 8)
        q = torch.randn((sum(BATCHES[batch][0]), 4, 8), generator=torch.Generator().manual_seed(8))
        first = cpu.forward(q, cache, meta)
        kept = first.clone()
        cpu.forward(q * 2, cache, meta)
        assert torch.equal(first, kept)


def test_a_step_is_planned_once_for_all_layers_and_the_workspace_stops_growing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    original = cpu_module.plan_step
    monkeypatch.setattr(cpu_module, "plan_step", lambda *args: calls.append(1) or original(*args))
    cpu = cpu_module.CpuBackend()
    meta, cache, _, _ = build(*BATCHES["mixed"], 2, 8)
    q = torch.randn((155, 4, 8), generator=torch.Generator().manual_seed(9))
    cpu.forward(q, cache, meta)
    addresses = {name: t.data_ptr() for name, t in cpu._workspace.items()}
    for _ in range(5):
        cpu.forward(q, cache, meta)
    meta.cache.clear()
    cpu.forward(q, cache, meta)
    assert len(calls) == 2
    assert {name: t.data_ptr() for name, t in cpu._workspace.items()} == addresses


def test_one_long_context_does_not_pad_the_short_ones() -> None:
    t, length = np.ones(20, np.int64), np.array([5000] + [100] * 19)
    groups = cpu_module.group_pieces(t, length, max_tokens=1 << 20)
    assert [g.tolist() for g in groups] == [[0], list(range(1, 20))]


def test_a_bucket_holds_at_most_max_tokens_keys_unless_one_piece_has_more() -> None:
    t, length = np.ones(10, np.int64), np.full(10, 300)
    assert [len(g) for g in cpu_module.group_pieces(t, length, max_tokens=900)] == [3, 3, 3, 1]
    assert [len(g) for g in cpu_module.group_pieces(t, length, max_tokens=10)] == [1] * 10


def test_auto_names_a_backend_and_the_reason() -> None:
    assert resolve_backend("auto", "cpu") == ("cpu", BACKENDS["cpu"].auto_reason)
    assert resolve_backend("reference", "cpu") == ("reference", "asked for by name")
    assert get_backend("auto", "cpu").name == "cpu"


def test_an_unknown_backend_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown attention backend 'flash'; known: auto, cpu, jit, reference"):
        resolve_backend("flash", "cpu")


def test_a_backend_is_refused_on_a_device_it_cannot_run() -> None:
    with pytest.raises(ValueError, match="'cpu' runs on device cpu, not on cuda:0; use auto"):
        resolve_backend("cpu", "cuda:0")


@pytest.mark.parametrize("name", BACKEND_NAMES)
def test_every_backend_has_the_protocol(name: str) -> None:
    assert isinstance(get_backend(name), AttentionBackend) and get_backend(name).name == name
