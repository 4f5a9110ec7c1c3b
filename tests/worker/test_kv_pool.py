"""The KV pool: writing, moving blocks with all reads before all writes, and its size."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from ipc.errors import ConfigError
from worker import kv_pool
from worker.attention.base import BatchMeta
from worker.attention.registry import get_backend
from worker.kv_pool import HostPool, KVPool, allocate_pools, apply_block_ops
from worker.process_memory import release_memory


def make_pool(
    num_blocks: int = 12, num_host_blocks: int = 6, dtype: torch.dtype = torch.float32
) -> tuple[KVPool, HostPool]:
    pool = KVPool(get_backend("reference"), num_blocks, 4, (3, 2, 8), dtype)
    g = torch.Generator().manual_seed(0)
    for cache in pool.caches:
        for tensor in cache:
            tensor.copy_((40 if tensor.dtype == torch.int8 else 1) * torch.randn(tensor.shape, generator=g))
    host = HostPool(pool, num_host_blocks)
    for words, source in zip(host.block_words, pool.block_words, strict=True):
        words.copy_(torch.randint(0, 1 << 30, words.shape, generator=g).to(source.dtype))
    return pool, host


def pairs(*rows: tuple[int, int]) -> np.ndarray:
    return np.array(rows, np.int32).reshape(-1, 2)


def snapshot(pool: KVPool, host: HostPool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return [t.clone() for t in pool.block_words], [t.clone() for t in host.block_words]


def check(pool: KVPool, host: HostPool, before: tuple[list[torch.Tensor], list[torch.Tensor]], swap_out: np.ndarray,
          swap_in: np.ndarray, copies: np.ndarray) -> None:
    """Every target holds what its source held before the plan; everything else is untouched."""
    for now, host_now, old, host_old in zip(pool.block_words, host.block_words, *before, strict=True):
        expected, host_expected = old.clone(), host_old.clone()
        for block, slot in swap_out:
            host_expected[slot] = old[block]
        for slot, block in swap_in:
            expected[block] = host_old[slot]
        for source, target in copies:
            expected[target] = old[source]
        assert torch.equal(now, expected) and torch.equal(host_now, host_expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("swap_out, swap_in, copies", [
    (pairs((1, 0), (5, 3)), pairs(), pairs()),
    (pairs(), pairs((2, 7)), pairs()),
    (pairs(), pairs(), pairs((1, 2), (2, 3), (3, 1))),               # a cycle of copies
    (pairs((4, 1)), pairs((0, 4)), pairs()),                         # a swapped-out block is refilled
    (pairs((4, 1)), pairs((1, 6)), pairs()),                         # a host slot is emptied and refilled
    (pairs((4, 1)), pairs((1, 4)), pairs()),                         # block and host slot change places
    (pairs((4, 1)), pairs((2, 5)), pairs((5, 4))),                   # a copy's source is a swap-in target
    (pairs((1, 0), (2, 1), (3, 2)), pairs((0, 3), (2, 1)), pairs((1, 2), (3, 9), (3, 10))),
])
def test_all_reads_of_a_plan_happen_before_its_writes(
    swap_out: np.ndarray, swap_in: np.ndarray, copies: np.ndarray, dtype: torch.dtype
) -> None:
    pool, host = make_pool(dtype=dtype)
    before = snapshot(pool, host)
    apply_block_ops(pool, host, swap_out=swap_out, swap_in=swap_in, copies=copies)
    check(pool, host, before, swap_out, swap_in, copies)


def test_random_plans_equal_a_plain_model() -> None:
    rng = np.random.default_rng(1)
    pool, host = make_pool()
    for _ in range(60):
        before = snapshot(pool, host)
        targets = rng.permutation(np.arange(1, 13))
        swap_out = np.stack([rng.integers(1, 13, 3), rng.permutation(6)[:3]], 1).astype(np.int32)
        swap_in = np.stack([rng.integers(0, 6, 3), targets[:3]], 1).astype(np.int32)
        copies = np.stack([rng.integers(1, 13, 4), targets[3:7]], 1).astype(np.int32)
        apply_block_ops(pool, host, swap_out=swap_out, swap_in=swap_in, copies=copies)
        check(pool, host, before, swap_out, swap_in, copies)


def test_swap_out_and_back_restores_a_block_in_every_layer() -> None:
    pool, host = make_pool()
    saved = [t[3].clone() for cache in pool.caches for t in cache]
    apply_block_ops(pool, host, swap_out=pairs((3, 5)))
    for cache in pool.caches:
        for tensor in cache:
            tensor[3] = float("nan")
    apply_block_ops(pool, host, swap_in=pairs((5, 8)))
    assert all(torch.equal(t[8], old) for t, old in zip((t for c in pool.caches for t in c), saved, strict=True))


@pytest.mark.parametrize("ops, message", [
    ({"swap_out": pairs((0, 1))}, "block 0; this worker has blocks 1 to 12"),
    ({"copies": pairs((1, 13))}, "block 13; this worker has blocks 1 to 12"),
    ({"swap_in": pairs((6, 1))}, "host slot 6; this worker has host slots 0 to 5"),
    ({"swap_in": pairs((1, 2)), "copies": pairs((3, 2))}, "writes a block twice"),
    ({"swap_out": pairs((1, 2), (3, 2))}, "writes a host slot twice"),
])
def test_a_broken_plan_moves_nothing(ops: dict[str, np.ndarray], message: str) -> None:
    pool, host = make_pool()
    before = snapshot(pool, host)
    with pytest.raises(RuntimeError, match=message):
        apply_block_ops(pool, host, **ops)
    check(pool, host, before, pairs(), pairs(), pairs())


def test_a_worker_without_swaps_allocates_no_host_memory() -> None:
    pool, _ = make_pool()
    host = HostPool(pool, 0)
    apply_block_ops(pool, host, copies=pairs((1, 2)))
    apply_block_ops(pool, host)
    assert host._words is None


def test_padding_rows_are_written_to_the_last_slot_only() -> None:
    pool, _ = make_pool()
    k_cache, v_cache = pool.caches[0]
    before = k_cache.clone(), v_cache.clone()
    k = torch.randn((4, 2, 8), generator=torch.Generator().manual_seed(3))
    k[1], k[3] = float("nan"), float("nan")
    kv_pool.write_kv((k_cache, v_cache), k, k * 2, torch.tensor([9, -1, 6, -1]))
    for cache, old, factor in ((k_cache, before[0], 1), (v_cache, before[1], 2)):
        flat, expected = cache.view(-1, 2, 8), old.view(-1, 2, 8).clone()
        expected[9], expected[6] = k[0] * factor, k[2] * factor
        assert torch.equal(flat[:-1], expected[:-1]) and flat[-1].isnan().all()
    assert pool.scratch_block == k_cache.shape[0] - 1 == 13


def test_pools_start_at_zero_and_aligned() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for tensor in kv_pool.allocate_pools((5, 4, 3, 10), dtype, "cpu"):
            assert tensor.shape == (5, 4, 3, 10) and tensor.dtype == dtype
            assert not tensor.any() and tensor.data_ptr() % 64 == 0


def test_an_idle_pool_uses_no_memory() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    if not Path("/proc/self/statm").exists():
        pytest.skip("no /proc here")
    before = resident()
    pools = kv_pool.allocate_pools((4096, 16, 4, 64), torch.float32, "cpu")  # 64 MiB each
    pools[0][1] = 1.0
    assert resident() - before < 32 << 20


def test_bytes_per_block_of_a_known_model() -> None:
    """36 layers of 8 KV heads of 128: 144 KiB a token in bfloat16; codes have two bytes of scale beside 128."""
    backend, spec = get_backend("reference"), (36, 8, 128)
    assert kv_pool.kv_bytes_per_block(backend, spec, 1, torch.bfloat16) == 147_456
    assert kv_pool.kv_bytes_per_block(backend, spec, 16, torch.bfloat16) == 147_456 * 16
    for dtype in (torch.int8, torch.float8_e4m3fn):
        assert kv_pool.kv_bytes_per_block(backend, spec, 16, dtype) == 36 * 16 * 2 * 8 * (128 + 2)
        assert 1.95 < 147_456 * 16 / kv_pool.kv_bytes_per_block(backend, spec, 16, dtype) < 2


def test_bytes_per_block_count_what_a_pool_allocates() -> None:
    """In the jit backend's layout too, which pads tokens and dimensions to sixteen."""
    for name in ("reference", "jit"):
        for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn):
            pool = KVPool(get_backend(name), 5, 4, (3, 2, 24), dtype)
            allocated = sum(t.numel() * t.element_size() for cache in pool.caches for t in cache)
            assert allocated == (5 + kv_pool.RESERVED_BLOCKS) * kv_pool.kv_bytes_per_block(
                get_backend(name), (3, 2, 24), 4, dtype)
            assert sum(t.shape[1] * t.element_size() for t in pool.block_words) * 7 == allocated


@pytest.mark.parametrize("name", ["reference", "cpu", "jit"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_quantised_block_reads_the_same_after_a_copy_and_after_a_round_trip_to_the_host(
    name: str, dtype: torch.dtype
) -> None:
    """Its scales move with it."""
    backend = get_backend(name)
    pool = KVPool(backend, 6, 4, (2, 2, 16), dtype)
    host = HostPool(pool, 3)
    g = torch.Generator().manual_seed(4)
    k, v, q = (scale * torch.randn((4, heads, 16), generator=g) for scale, heads in ((3, 2), (0.1, 2), (1, 4)))

    def meta(block: int) -> BatchMeta:
        return BatchMeta.of(np.array([0, 4], np.int32), np.array([4], np.int32),
                            torch.tensor([[block]], dtype=torch.int32), 4 * block + torch.arange(4), 4)

    for cache in pool.caches:
        backend.write(cache, k, v, meta(1))
    expected = backend.forward(q, pool.caches[0], meta(1))
    assert expected.abs().max() > 0.05
    apply_block_ops(pool, host, swap_out=pairs((1, 2)), copies=pairs((1, 4)))
    apply_block_ops(pool, host, swap_in=pairs((2, 5)))
    for cache in pool.caches:
        assert torch.equal(backend.forward(q, cache, meta(4)), expected)
        assert torch.equal(backend.forward(q, cache, meta(5)), expected)


def test_memory_is_divided_after_the_null_and_the_scratch_block() -> None:
    assert [kv_pool.num_blocks_for_memory(m, 100) for m in (0, 250, 299, 300, 1099, 1100)] == [0, 0, 0, 1, 8, 9]


def test_named_memory_gives_that_many_blocks_and_says_so() -> None:
    assert kv_pool.cpu_num_blocks(1 << 20, kv_cache_memory=10 << 20) == (
        8, "8 blocks of 1024 KiB: --kv-cache-memory 10 MiB")


def test_memory_too_small_for_a_block_is_refused_with_the_need() -> None:
    with pytest.raises(ConfigError, match="holds no block; the smallest pool needs 3.0 MiB; raise --kv-cache-memory"):
        kv_pool.cpu_num_blocks(1 << 20, kv_cache_memory=2 << 20)


def test_more_memory_than_is_free_is_refused_with_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 GiB were accepted on a machine with 20: the pool takes its memory as it is used."""
    monkeypatch.setattr(kv_pool, "free_memory", lambda: (400 << 20, "host"))
    kv_pool.check_host_memory(400 << 20)
    with pytest.raises(ConfigError, match=r"is 401 MiB, and 400 MiB are free \(host\); .* --kv-cache-memory 360MiB"):
        kv_pool.check_host_memory(401 << 20)


def test_a_share_of_free_memory_is_taken_up_to_what_is_useful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_pool, "free_memory", lambda: (400 << 20, "host"))
    assert kv_pool.cpu_num_blocks(1 << 20, share=0.25) == (98, "98 blocks of 1024 KiB: 25% of 400 MiB free (host)")
    assert kv_pool.cpu_num_blocks(1 << 20, share=0.25, max_useful_blocks=50)[0] == 50


def fake_host(tmp_path: Path, cgroup_lines: str) -> tuple[Path, Path]:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    groups.mkdir()
    (proc / "meminfo").write_text("MemTotal: 9000000 kB\nMemAvailable:    8000 kB\n")
    (proc / "self" / "cgroup").write_text(cgroup_lines)
    return proc, groups


def test_free_memory_respects_the_limit_of_a_parent_group_version_2(tmp_path: Path) -> None:
    proc, groups = fake_host(tmp_path, "0::/a/b\n")
    (groups / "a" / "b").mkdir(parents=True)
    (groups / "a" / "b" / "memory.max").write_text("max\n")
    (groups / "a" / "b" / "memory.current").write_text("5\n")
    (groups / "a" / "memory.max").write_text("1000000\n")
    (groups / "a" / "memory.current").write_text("700000\n")
    (groups / "a" / "memory.stat").write_text("anon 1\ninactive_file 100000\n")
    assert kv_pool.free_memory(proc, groups) == (400_000, "control group limit")


def test_free_memory_respects_a_limit_of_version_1(tmp_path: Path) -> None:
    proc, groups = fake_host(tmp_path, "5:cpu:/x\n4:memory:/x\n0::/\n")
    (groups / "memory" / "x").mkdir(parents=True)
    (groups / "memory" / "x" / "memory.limit_in_bytes").write_text("2000\n")
    (groups / "memory" / "x" / "memory.usage_in_bytes").write_text("500\n")
    assert kv_pool.free_memory(proc, groups) == (1500, "control group limit")


def test_free_memory_without_limits_is_the_hosts(tmp_path: Path) -> None:
    assert kv_pool.free_memory(*fake_host(tmp_path, "0::/\n")) == (8000 * 1024, "host")
    assert kv_pool.free_memory()[0] > 0


class FakeCuda:
    """The memory figures of a device of 1,000 MiB on which others hold 50 and torch has 300 reserved."""

    def __init__(self, peak: int) -> None:
        self.peak = peak

    def empty_cache(self) -> None: ...
    def reset_peak_memory_stats(self, device: str) -> None: ...
    def synchronize(self, device: str) -> None: ...

    def max_memory_allocated(self, device: str) -> int:
        return self.peak

    def memory_reserved(self, device: str) -> int:
        return 300 << 20

    def mem_get_info(self, device: str) -> tuple[int, int]:
        return 650 << 20, 1000 << 20


def test_the_profiling_run_leaves_room_for_the_largest_step_and_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_pool.torch, "cuda", FakeCuda(peak=250 << 20))
    ran: list[bool] = []
    num_blocks, why = kv_pool.profile_num_blocks(lambda: ran.append(True), 1 << 20, utilization=0.9)
    monkeypatch.setattr(kv_pool.torch, "cuda", FakeCuda(peak=280 << 20))       # of which 30 are the step's own pool
    assert (num_blocks, why) == kv_pool.profile_num_blocks(lambda: None, 1 << 20, dummy_bytes=30 << 20)
    assert ran == [True] and num_blocks == 900 - 250 - 50 - 2
    assert why.endswith("90% of 1000 MiB, less 250 MiB for weights and the largest step and 50 MiB held by others")


def test_a_device_without_room_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_pool.torch, "cuda", FakeCuda(peak=849 << 20))
    with pytest.raises(ConfigError, match="leaves no room for a block .* --gpu-memory-utilization"):
        kv_pool.profile_num_blocks(lambda: None, 1 << 20)


def test_tensors_in_one_allocation_lie_apart_and_aligned() -> None:
    shapes = [((3, 5), torch.int64), ((3, 7), torch.uint8), ((0, 4), torch.int64), ((2, 2), torch.int64)]
    made = kv_pool.shared_pages(shapes, pin_memory=False)
    for value, tensor in enumerate(made):
        tensor.fill_(value)
    assert [(tuple(t.shape), t.dtype) for t in made] == shapes
    assert all((tensor == value).all() for value, tensor in enumerate(made))
    assert len({tensor.untyped_storage().data_ptr() for tensor in made}) == 1
    assert all(tensor.storage_offset() * tensor.itemsize % 512 == 0 for tensor in made)


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 blocks, needs at least 1"):
        make_pool(num_blocks=0)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_an_idle_pool_is_free_also_where_memory_was_used_before() -> None:
    """As after a sleep: an allocator that reuses memory must write zeros over it, which makes it resident."""
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    np.ones(31 << 20, np.uint8)                 # from now on glibc takes smaller ones from its heap
    *used, pin = [np.ones(9 << 20, np.uint8) for _ in range(17)]     # the last one keeps the others' pages in the heap
    del used
    release_memory()
    before = resident()
    pools = allocate_pools((128, 16, 4, 256), torch.float32, "cpu", count=16)
    assert resident() - before < 16 << 20 and all(pool.numel() * 4 == 8 << 20 for pool in pools)
    assert float(pools[0].sum()) == 0.0 and pin[0] == 1


def test_pools_of_large_blocks_ask_for_huge_pages() -> None:
    """The kernel's list of mappings has the flag "hg" for those that did."""
    smaps = Path("/proc/self/smaps")
    if not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists() or not smaps.exists():
        pytest.skip("no huge pages here")

    def asks(pool: torch.Tensor) -> bool:
        mappings = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) .*?^VmFlags: (.*?)$", smaps.read_text(), re.M | re.S)
        return any("hg" in flags.split() for start, end, flags in mappings
                   if int(start, 16) <= pool.data_ptr() < int(end, 16))

    large = allocate_pools((256, kv_pool.LARGE_BLOCK_BYTES), torch.int8, "cpu")
    small = allocate_pools((256, kv_pool.LARGE_BLOCK_BYTES // 2), torch.int8, "cpu")
    assert all(map(asks, large)) and not any(map(asks, small))


def test_more_than_there_is_is_a_memory_error_with_the_size() -> None:
    with pytest.raises(MemoryError, match="a part of the KV pool of [0-9]+ bytes"):
        allocate_pools((1 << 40, 1 << 10, 1, 64), torch.float32, "cpu")
