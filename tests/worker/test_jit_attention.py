"""What the common backend suite does not ask of the jit backend: pool layouts, splits, bits, and the write."""
from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from tests.worker.test_attention import poison  # noqa: E402
from worker.attention.base import BatchMeta  # noqa: E402
from worker.attention.jit import JitBackend  # noqa: E402
from worker.attention.jit_layout import tokens_first  # noqa: E402
from worker.attention.reference import ReferenceBackend  # noqa: E402


def make_meta(query_lens: list[int], seq_lens: list[int], table: torch.Tensor, size: int) -> BatchMeta:
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    lengths = np.array(seq_lens, np.int32)
    slots = []
    for r, (t, n) in enumerate(zip(query_lens, seq_lens, strict=True)):
        p = torch.arange(n - t, n)
        slots.append(table[r, p // size].long() * size + p % size if n else torch.full((t,), -1))
    return BatchMeta.of(starts, lengths, table, torch.cat(slots), size)


class Contexts:
    """The same keys and values in pools of both backends; everything else in them is NaN."""

    def __init__(self, lengths: list[int], size: int, kv_heads: int, dim: int,
                 dtype: torch.dtype = torch.float32) -> None:
        self.size, self.jit, self.reference = size, JitBackend(), ReferenceBackend()
        width = -(-max(lengths) // size)
        num_blocks = len(lengths) * width
        g = torch.Generator().manual_seed(len(lengths))
        self.table = (torch.randperm(num_blocks, generator=g) + 1).int().view(len(lengths), width)
        shape = (num_blocks + 2, size, kv_heads, dim)
        self.caches = [backend.allocate(shape, dtype, "cpu") for backend in (self.jit, self.reference)]
        for cache in self.caches:
            poison(cache)
        meta = make_meta(lengths, lengths, self.table, size)
        k, v = (torch.randn((sum(lengths), kv_heads, dim), generator=g) for _ in "kv")
        self.slots = meta.slot_mapping
        self.jit.write(self.caches[0], k, v, meta)
        self.reference.write(self.caches[1], k, v, meta)

    def both(self, q: torch.Tensor, query_lens: list[int], seq_lens: list[int], rows: slice = slice(None),
             window: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        meta = make_meta(query_lens, seq_lens, self.table[rows], self.size)
        return (self.jit.forward(q, self.caches[0], meta, window=window),
                self.reference.forward(q, self.caches[1], meta, window=window))


@pytest.mark.parametrize("size", [1, 4, 16, 17, 48])
@pytest.mark.parametrize("window", [0, 70])
def test_any_block_size_equals_the_reference(size: int, window: int) -> None:
    lengths = [5, 64, 65, 300, 700]
    contexts = Contexts(lengths, size, 2, 24)
    query_lens = [1, 3, 40, 1, 130]
    q = torch.randn((sum(query_lens), 6, 24), generator=torch.Generator().manual_seed(1))
    out, expected = contexts.both(q, query_lens, lengths, window=window)
    torch.testing.assert_close(out, expected, atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("heads, kv_heads, dim", [(16, 8, 128), (32, 1, 64), (9, 3, 64), (4, 4, 80), (2, 1, 6)])
def test_head_shapes_of_real_models(heads: int, kv_heads: int, dim: int) -> None:
    lengths = [1, 16, 333, 1030]
    contexts = Contexts(lengths, 16, kv_heads, dim)
    query_lens = [1, 16, 5, 1]
    q = torch.randn((sum(query_lens), heads, dim), generator=torch.Generator().manual_seed(2))
    out, expected = contexts.both(q, query_lens, lengths)
    torch.testing.assert_close(out, expected, atol=3e-6, rtol=1e-5)


CODES = pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])


@CODES
@pytest.mark.parametrize("size, heads, kv_heads, dim",
                         [(16, 9, 3, 64), (16, 16, 8, 128), (17, 6, 2, 24), (4, 2, 1, 6), (48, 4, 4, 80)])
@pytest.mark.parametrize("window", [0, 70])
def test_quantised_pools_of_any_shape_equal_the_references(size: int, heads: int, kv_heads: int, dim: int, window: int,
                                                           dtype: torch.dtype) -> None:
    lengths = [5, 64, 65, 300, 700]
    contexts = Contexts(lengths, size, kv_heads, dim, dtype)
    query_lens = [1, 3, 40, 1, 130]
    q = torch.randn((sum(query_lens), heads, dim), generator=torch.Generator().manual_seed(1))
    out, expected = contexts.both(q, query_lens, lengths, window=window)
    # int8 is multiplied in integers: queries and weights are rounded to sixteen bits.
    torch.testing.assert_close(out, expected, atol=1.5e-4 if dtype == torch.int8 else 5e-6, rtol=1e-5)
    assert float((out - expected).norm() / expected.norm()) < (5e-5 if dtype == torch.int8 else 2e-6)


@CODES
@pytest.mark.parametrize("size, dim", [(16, 64), (17, 24), (4, 6)])
def test_codes_and_scales_are_the_references_bit_for_bit(size: int, dim: int, dtype: torch.dtype) -> None:
    contexts = Contexts([300], size, 3, dim, dtype)
    extremes = torch.tensor([0.0, 1e-38, -3e38, 1.0, 447.0, -448.0, 2.0**-6, 2.0**-9 * 1.5, 126.5, -0.5])
    k = torch.randn((300, 3, dim), generator=torch.Generator().manual_seed(7)).pow(3)
    k[:10, 0, 1] = extremes
    k[10, 1] = 0.0
    meta = make_meta([300], [300], contexts.table, size)
    contexts.jit.write(contexts.caches[0], k, -k, meta)
    contexts.reference.write(contexts.caches[1], k, -k, meta)
    block, offset = meta.slot_mapping // size, meta.slot_mapping % size
    for ours, other in zip(tokens_first(contexts.caches[0], size, dim), contexts.caches[1], strict=True):
        ours, other = (t.view(torch.uint8) if t.element_size() == 1 else t for t in (ours, other))
        rows = ours[block, offset]
        rows = rows.flatten(-2)[..., :dim] if ours.dim() == 5 else rows
        assert torch.equal(rows, other[block, offset])


@CODES
def test_what_is_not_finite_stays_visible_in_its_token_and_head(dtype: torch.dtype) -> None:
    contexts = Contexts([40], 16, 2, 32, dtype)
    v = torch.ones((1, 2, 32))
    v[0, 1, 3] = float("inf")
    meta = make_meta([1], [40], contexts.table, 16)
    contexts.jit.write(contexts.caches[0], torch.ones((1, 2, 32)), v, meta)
    out = contexts.jit.forward(torch.ones((1, 2, 32)), contexts.caches[0], meta)
    assert out[0, 0].isfinite().all() and out[0, 1].isnan().all()


@CODES
def test_rows_over_codes_have_the_same_bits_alone_in_a_batch_and_in_chunks(dtype: torch.dtype) -> None:
    contexts = Contexts([1000] * 20, 16, 3, 64, dtype)
    q = torch.randn((200, 9, 64), generator=torch.Generator().manual_seed(3))
    together, _ = contexts.both(q[:20], [1] * 20, [1000] * 20)
    for r in (0, 19):
        assert torch.equal(contexts.both(q[r:r + 1], [1], [1000], slice(r, r + 1))[0][0], together[r])
    whole, _ = contexts.both(q, [200], [1000], slice(0, 1))
    parts = torch.cat([contexts.both(q[a:b], [b - a], [800 + b], slice(0, 1))[0]
                       for a, b in ((0, 1), (1, 37), (37, 200))])
    assert torch.equal(parts, whole)


def test_a_row_has_the_same_bits_alone_in_a_batch_in_a_chunk_and_split_over_units() -> None:
    """Alone, 1,000 keys are split over units; in the batch of 40 rows they are not; in a prefill chunk the row is one
    of many in a tile."""
    lengths = [1000] * 40
    contexts = Contexts(lengths, 16, 3, 64)
    q = torch.randn((40, 9, 64), generator=torch.Generator().manual_seed(3))
    together, _ = contexts.both(q, [1] * 40, lengths)
    for r in (0, 17, 39):
        alone, expected = contexts.both(q[r:r + 1], [1], [1000], slice(r, r + 1))
        assert torch.equal(alone[0], together[r])
        torch.testing.assert_close(alone, expected, atol=3e-6, rtol=1e-5)
    chunk = torch.randn((200, 9, 64), generator=torch.Generator().manual_seed(4))
    whole, _ = contexts.both(chunk, [200], [1000], slice(0, 1))
    for i in (0, 1, 100, 199):
        single, _ = contexts.both(chunk[i:i + 1], [1], [801 + i], slice(0, 1))
        assert torch.equal(single[0], whole[i])
    parts = torch.cat([contexts.both(chunk[a:b], [b - a], [800 + b], slice(0, 1))[0] for a, b in ((0, 37), (37, 200))])
    assert torch.equal(parts, whole)


def test_bfloat16_pools_hold_rounded_keys_and_values() -> None:
    lengths = [90, 260]
    contexts = Contexts(lengths, 16, 2, 64, torch.bfloat16)
    q = torch.randn((21, 4, 64), generator=torch.Generator().manual_seed(5))
    out, expected = contexts.both(q, [1, 20], lengths)
    torch.testing.assert_close(out, expected, atol=3e-6, rtol=1e-5)


def test_a_pool_dtype_that_kernels_cannot_read_is_refused() -> None:
    with pytest.raises(ValueError, match="float32, bfloat16, int8 or fp8, not torch.float16"):
        JitBackend().allocate((3, 16, 2, 8), torch.float16, "cpu")


def test_padding_rows_write_to_the_last_slot_only_and_attend_to_nothing() -> None:
    backend = JitBackend()
    cache = backend.allocate((4, 16, 2, 8), torch.float32, "cpu")
    table = torch.zeros((2, 1), dtype=torch.int32)
    meta = make_meta([1, 1], [0, 0], table, 16)
    ones = torch.ones((2, 2, 8))
    backend.write(cache, ones, ones, meta)
    assert cache[0].sum() == cache[0][3, :, :, 15].sum() == 16
    assert cache[1].sum() == cache[1][3, :, 15].sum()
    assert not backend.forward(torch.ones((2, 4, 8)), cache, meta).any()


def test_memory_stops_growing_and_results_of_two_calls_do_not_share_it() -> None:
    contexts = Contexts([700] * 3, 16, 2, 32)
    q = torch.randn((3, 4, 32), generator=torch.Generator().manual_seed(6))
    first, _ = contexts.both(q, [1, 1, 1], [700] * 3)
    kept = first.clone()
    workspace = next(w for w in contexts.jit._workspaces.values() if w.heads == 4)
    addresses = [array.ctypes.data for array in (workspace._tasks, workspace._tokens, workspace._partials)]
    for length in (1, 300, 700):
        contexts.both(q * 2, [1, 1, 1], [length] * 3)
    assert torch.equal(first, kept)
    assert addresses == [array.ctypes.data for array in (workspace._tasks, workspace._tokens, workspace._partials)]
