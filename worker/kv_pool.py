"""The KV pool of one worker: its size, its tensors, writing into it, and moving blocks in, out and within it.

Owns memory; does not know which request holds which block (the engine core does) nor how attention reads it.

    block:   0      1 ... num_blocks       num_blocks + 1
            null    handed out by the      scratch: the pool's last slot takes
                    engine core            the writes of padding rows
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ipc.capacity import flag_size, size_text
from ipc.errors import ConfigError
from worker.attention.base import AttentionBackend, resolve_slots
from worker.kv_quant import SCALE_DTYPE, is_quantized, quantize

RESERVED_BLOCKS = 2  # null and scratch
_MIB = 1 << 20
SWAP_SAMPLE_BLOCKS, SWAP_SAMPLE_BYTES = 8, 8 * _MIB  # moved at once when the cost of swapping is measured
SWAP_SAMPLES, SWAP_SAMPLE_LIMIT_NS = 7, 20_000_000
# Control group files, version 2 and version 1.
_LIMIT_AND_USAGE = (
    ("memory.max", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)


# ------------------------------------------------------------------ tensors

# A layer's blocks of this size and more lie on huge pages: addresses are then looked up less often, and what the last
# page of a pool wastes is little beside such a model.
LARGE_BLOCK_BYTES = 16 << 10


def allocate_pools(shape: tuple[int, ...], dtype: torch.dtype, device: str, count: int = 2) -> tuple[Tensor, ...]:
    """`count` zeroed tensors. On a CPU a page costs memory only once it is written, so a large idle pool is free."""
    if torch.device(device).type == "cpu":
        return tuple(_lazy_zeros(shape, dtype) for _ in range(count))
    stored = torch.uint8 if dtype == torch.float8_e4m3fn else dtype     # whose zero is a zero byte
    return tuple(torch.zeros(shape, dtype=stored, device=device).view(dtype) for _ in range(count))


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Pages of its own, which the kernel zeroes at first touch and takes back with the tensor. An allocator would write
    zeros over memory that it has handed out before, all at once: after a sleep, that is any."""
    size = int(np.prod(shape)) * dtype.itemsize
    try:
        pages = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:   # as the allocators of numpy and torch say it
        raise MemoryError(f"a part of the KV pool of {size} bytes: {error}") from None
    if size // max(1, shape[0]) >= LARGE_BLOCK_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):      # a system without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.from_numpy(np.frombuffer(pages, np.uint8, size)).view(dtype).view(shape)


def allocate_kv(shape: tuple[int, int, int, int], dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    """A layer's zeroed keys and values [B, S, Hkv, D]; for int8 and float8 also their scales [B, S, Hkv] bfloat16."""
    pools = allocate_pools(shape, dtype, device)
    return pools + allocate_pools(shape[:3], SCALE_DTYPE, device) if is_quantized(dtype) else pools


def write_kv(cache: tuple[Tensor, ...], k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    """Scatter this step's keys and values into the pool, in place.

    k, v [N, Hkv, D] any float dtype; cache as allocate_kv gives it; slot_mapping [N] int64.
    Rows with slot -1 are padding and land in the pool's last slot. Source: Kwon et al. 2023 (PagedAttention).
    """
    scatter_kv(cache, k, v, resolve_slots(slot_mapping, cache[0].shape[0] * cache[0].shape[1]))


def scatter_kv(cache: tuple[Tensor, ...], k: Tensor, v: Tensor, slots: Tensor) -> None:
    """write_kv with slots that are already resolved (all >= 0): one index_copy per tensor."""
    for at, rows in enumerate((k, v)):
        if len(cache) > 2:
            rows, scales = quantize(rows, cache[at].dtype)
            _scatter(cache[2 + at], slots, scales)
        _scatter(cache[at], slots, rows.to(cache[at].dtype))


def _scatter(pool: Tensor, slots: Tensor, rows: Tensor) -> None:
    """pool [B, S, ...], rows [N, ...]. float8 moves as bytes: torch has no index_copy of it."""
    if rows.dtype == torch.float8_e4m3fn:
        pool, rows = pool.view(torch.uint8), rows.view(torch.uint8)
    pool.view(-1, *pool.shape[2:]).index_copy_(0, slots, rows)


class KVPool:
    """The per-layer caches. `num_blocks` counts the blocks the engine core hands out, ids 1 .. num_blocks."""

    def __init__(
        self,
        backend: AttentionBackend,
        num_blocks: int,
        block_size: int,
        kv_spec: tuple[int, int, int],
        dtype: torch.dtype,
        device: str = "cpu",
    ) -> None:
        num_layers, num_kv_heads, head_dim = kv_spec
        if num_blocks < 1:
            raise ConfigError(f"the KV pool has {num_blocks} blocks, needs at least 1; raise --kv-cache-memory")
        self.num_blocks, self.block_size, self.device = num_blocks, block_size, torch.device(device)
        shape = (num_blocks + RESERVED_BLOCKS, block_size, num_kv_heads, head_dim)
        self.caches = [backend.allocate(shape, dtype, device) for _ in range(num_layers)]
        # Every tensor of every layer as rows of raw words, one row a block: what swaps and copies move.
        self.block_words = [_as_block_words(tensor) for cache in self.caches for tensor in cache]

    @property
    def scratch_block(self) -> int:
        """The block that padding writes go to."""
        return self.num_blocks + 1


class HostPool:
    """Host memory for swapped-out blocks: `num_host_blocks` slots, numbered by the engine core.

    Bounded by construction. The tensors are made at the first swap, so an engine that never swaps pays nothing;
    pinned on CUDA.
    """

    def __init__(self, pool: KVPool, num_host_blocks: int) -> None:
        self.num_host_blocks = num_host_blocks
        self._pool = pool
        self._words: list[Tensor] | None = None

    @property
    def block_words(self) -> list[Tensor]:
        """One [num_host_blocks, words] tensor for each tensor of the pool, in the same order."""
        if self._words is None:
            shapes = [((self.num_host_blocks, *t.shape[1:]), t.dtype) for t in self._pool.block_words]
            if self._pool.device.type == "cuda":
                self._words = shared_pages(shapes, pin_memory=True)
            else:
                self._words = [_lazy_zeros(shape, dtype) for shape, dtype in shapes]
        return self._words


def shared_pages(shapes: list[tuple[tuple[int, ...], torch.dtype]], *, pin_memory: bool) -> list[Tensor]:
    """Tensors in one allocation, whose contents are not set: torch rounds each pinned one up to a power of two, which
    for many of them is a third more memory than asked for."""
    sizes = [-(-int(np.prod(shape)) * dtype.itemsize // 512) * 512 for shape, dtype in shapes]
    pages, begin, made = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pin_memory), 0, []
    for (shape, dtype), size in zip(shapes, sizes):
        made.append(pages[begin:begin + int(np.prod(shape)) * dtype.itemsize].view(dtype).view(shape))
        begin += size
    return made


def _as_block_words(tensor: Tensor) -> Tensor:
    """[B, ...] -> [B, words], the same memory; 8-byte words where a block's size allows (fewer, larger moves)."""
    flat = tensor.view(tensor.shape[0], -1)
    return flat.view(torch.int64 if flat.shape[1] * flat.element_size() % 8 == 0 else torch.uint8)


# ------------------------------------------------------------------ the block operations of a plan


def apply_block_ops(
    pool: KVPool,
    host: HostPool,
    *,
    swap_out: np.ndarray | None = None,
    swap_in: np.ndarray | None = None,
    copies: np.ndarray | None = None,
) -> None:
    """Do one plan's block moves, in place: swap_out (block, host slot), swap_in (host slot, block), copies (source
    block, target block); int32 [n, 2] each.

    Everything is read before anything is written, across all three kinds: a block may be swapped out and overwritten
    by a copy or a swap-in in the same plan, a host slot emptied and refilled. Layers are done one after another, so
    the temporary memory is one layer tensor's share of the moved blocks.
    Raises RuntimeError, before anything moves, for an id out of range or a target written twice.
    """
    out_blocks, out_slots = _pairs(swap_out)
    in_slots, in_blocks = _pairs(swap_in)
    copy_sources, copy_targets = _pairs(copies)
    sources = np.concatenate([out_blocks, copy_sources])
    targets = np.concatenate([in_blocks, copy_targets])
    check_block_ops(pool, host, sources, targets, out_slots, in_slots)
    if len(sources) + len(targets) == 0:
        return
    num_out, device = len(out_blocks), pool.device
    source_index, target_index = torch.from_numpy(sources).to(device), torch.from_numpy(targets).to(device)
    out_index, in_index = torch.from_numpy(out_slots), torch.from_numpy(in_slots)
    host_words = host.block_words if num_out + len(in_slots) else [None] * len(pool.block_words)
    for words, host_tensor in zip(pool.block_words, host_words, strict=True):
        gathered = words.index_select(0, source_index)
        incoming = [gathered[num_out:]]
        if host_tensor is not None:
            incoming.insert(0, host_tensor.index_select(0, in_index).to(device))
            host_tensor.index_copy_(0, out_index, gathered[:num_out].cpu())
        words.index_copy_(0, target_index, torch.cat(incoming))


def check_block_ops(pool: KVPool, host: HostPool, sources: np.ndarray, targets: np.ndarray, out_slots: np.ndarray,
                    in_slots: np.ndarray) -> None:
    """Blocks that are read and written, host slots that are written and read. Raises RuntimeError for an id out of
    range or a target written twice."""
    _check_ids("block", np.concatenate([sources, targets]), 1, pool.num_blocks)
    _check_ids("host slot", np.concatenate([out_slots, in_slots]), 0, host.num_host_blocks - 1)
    _check_written_once("block", targets)
    _check_written_once("host slot", out_slots)


MoveBlocks = Callable[..., None]                # called with swap_out, swap_in, copies: int [n, 2]


def plain_mover(pool: KVPool, host: HostPool) -> MoveBlocks:
    """apply_block_ops on these two."""
    return functools.partial(apply_block_ops, pool, host)


def measure_block_swap_ns(
    pool: KVPool, num_host_blocks: int, mover: Callable[[KVPool, HostPool], MoveBlocks] = plain_mover
) -> int:
    """Time to copy one block out to host memory and back; 0 without host blocks. The engine core weighs it against
    computing the block again.

    `mover`: what moves blocks while serving. Moves a few at once, as a preempted request does, so each bears its share
    of the fixed cost. Uses a small host pool of its own: the real one stays unallocated until the first swap. Contents
    of the pool survive. Takes at most a few times SWAP_SAMPLE_LIMIT_NS, whatever the model.
    """
    block_bytes = sum(t.shape[1] * t.element_size() for t in pool.block_words)
    count = min(SWAP_SAMPLE_BLOCKS, max(1, SWAP_SAMPLE_BYTES // block_bytes), pool.num_blocks, num_host_blocks)
    if count < 1:
        return 0
    move = mover(pool, HostPool(pool, count))
    blocks, slots, nothing = np.arange(1, count + 1), np.arange(count), np.empty((0, 2), np.int64)
    out, back = np.stack([blocks, slots], axis=1), np.stack([slots, blocks], axis=1)

    def round_trip() -> int:
        begin = time.monotonic_ns()
        move(swap_out=out, swap_in=nothing, copies=nothing)
        move(swap_out=nothing, swap_in=back, copies=nothing)
        if pool.device.type == "cuda":
            torch.cuda.synchronize(pool.device)
        return time.monotonic_ns() - begin

    round_trip()  # first touch of the memory, first call of the kernels
    samples = [round_trip()]
    while len(samples) < SWAP_SAMPLES and sum(samples) < SWAP_SAMPLE_LIMIT_NS:
        samples.append(round_trip())
    return int(np.median(samples)) // count


def _pairs(pairs: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    if pairs is None:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    columns = np.asarray(pairs, dtype=np.int64).reshape(-1, 2)
    return columns[:, 0].copy(), columns[:, 1].copy()


def _check_ids(what: str, ids: np.ndarray, low: int, high: int) -> None:
    wrong = ids[(ids < low) | (ids > high)]
    if len(wrong):
        raise RuntimeError(f"plan moves {what} {int(wrong[0])}; this worker has {what}s {low} to {high}")


def _check_written_once(what: str, targets: np.ndarray) -> None:
    if len(np.unique(targets)) != len(targets):
        raise RuntimeError(f"plan writes a {what} twice; the result would depend on the order")


# ------------------------------------------------------------------ how many blocks


def kv_bytes_per_block(
    backend: AttentionBackend, kv_spec: tuple[int, int, int], block_size: int, dtype: torch.dtype
) -> int:
    """Bytes of one block over all layers, in this backend's layout: padding and scales included."""
    num_layers, num_kv_heads, head_dim = kv_spec
    cache = backend.allocate((1, block_size, num_kv_heads, head_dim), dtype, "cpu")
    return num_layers * sum(tensor.numel() * tensor.element_size() for tensor in cache)


def num_blocks_for_memory(memory_bytes: int, bytes_per_block: int) -> int:
    """Usable blocks that fit beside the null and the scratch block; never negative."""
    return max(0, memory_bytes // bytes_per_block - RESERVED_BLOCKS)


def cpu_num_blocks(
    bytes_per_block: int,
    *,
    kv_cache_memory: int | None = None,
    share: float = 0.25,
    max_useful_blocks: int | None = None,
) -> tuple[int, str]:
    """(usable blocks, one line that says why) for a CPU worker, called when its weights are loaded.

    kv_cache_memory names the bytes; without it the pool takes `share` of the memory that is free now, at most
    max_useful_blocks (what every seat could hold at full context, say).
    Raises ConfigError when not even one block fits.
    """
    if kv_cache_memory is not None:
        memory, why = kv_cache_memory, f"--kv-cache-memory {kv_cache_memory / _MIB:.0f} MiB"
    else:
        free, source = free_memory()
        memory, why = int(free * share), f"{share:.0%} of {free / _MIB:.0f} MiB free ({source})"
    num_blocks = num_blocks_for_memory(memory, bytes_per_block)
    if num_blocks < 1:
        needed = (1 + RESERVED_BLOCKS) * bytes_per_block
        raise ConfigError(
            f"KV pool: {why} holds no block; the smallest pool needs {needed / _MIB:.1f} MiB; "
            "raise --kv-cache-memory or free memory"
        )
    if kv_cache_memory is None and max_useful_blocks is not None and num_blocks > max_useful_blocks:
        num_blocks, why = max_useful_blocks, f"{why}, capped at what all seats can use"
    return num_blocks, f"{num_blocks} blocks of {bytes_per_block / 1024:.0f} KiB: {why}"


def check_host_memory(kv_cache_memory: int) -> None:
    """A pool in host memory takes it as it is used: one that is too large would end the process only then. Raises
    ConfigError with what fits."""
    free, source = free_memory()
    if kv_cache_memory > free:
        raise ConfigError(f"--kv-cache-memory is {size_text(kv_cache_memory)}, and {size_text(free)} are free "
                          f"({source}); the most that fits: --kv-cache-memory {flag_size(free * 9 // 10)}")


def free_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> tuple[int, str]:
    """(bytes this process may still use, where the number comes from): the smallest of what the host has and what each
    control group above us leaves. A container's limit is invisible in the host's own figures."""
    candidates = [(_host_memory(proc), "host")]
    for folder in _cgroup_folders(proc, cgroups):
        for limit_file, usage_file in _LIMIT_AND_USAGE:
            limit, usage = _read_int(folder / limit_file), _read_int(folder / usage_file)
            if limit is not None and usage is not None:
                stat = _fields(folder / "memory.stat")
                reclaimable = stat.get("total_inactive_file", stat.get("inactive_file", 0))
                candidates.append((max(0, limit - usage + reclaimable), "control group limit"))
    return min(candidates)


def _host_memory(proc: Path) -> int:
    available = _fields(proc / "meminfo").get("MemAvailable:")
    if available is not None:
        return available * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2  # no such file: assume half is free


def _cgroup_folders(proc: Path, cgroups: Path) -> list[Path]:
    """Our memory control group and those above it, for versions 1 and 2; inside a container only the root may exist."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    folders = {cgroups, cgroups / "memory"}
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = cgroups / "memory" if controllers else cgroups
        group = root / path.lstrip("/")
        folders.update(p for p in (group, *group.parents) if p.is_relative_to(root))
    return sorted(folders)


def _read_int(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max": no limit


def _fields(path: Path) -> dict[str, int]:
    try:
        rows = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdigit()}


def profile_num_blocks(
    run_largest_step: Callable[[], object], bytes_per_block: int, *, device: str = "cuda", utilization: float = 0.9,
    dummy_bytes: int = 0,
) -> tuple[int, str]:
    """(usable blocks, why) for a CUDA worker whose weights are loaded.

    run_largest_step executes the largest batch the scheduler may build, against a dummy pool of `dummy_bytes` that
    nobody needs afterwards, and returns when it is queued. The pool gets what `utilization` of the device leaves after
    the peak of that step and whatever others hold, so that no later step can run out of memory.
    Raises ConfigError when nothing is left.
    """
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    with torch.inference_mode():
        run_largest_step()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - dummy_bytes
    free, total = torch.cuda.mem_get_info(device)
    others = max(0, total - free - torch.cuda.memory_reserved(device))  # other processes, the context, libraries
    torch.cuda.empty_cache()
    left = int(total * utilization) - peak - others
    why = (
        f"{utilization:.0%} of {total / _MIB:.0f} MiB, less {peak / _MIB:.0f} MiB for weights and the largest step "
        f"and {others / _MIB:.0f} MiB held by others"
    )
    num_blocks = num_blocks_for_memory(max(0, left), bytes_per_block)
    if num_blocks < 1:
        raise ConfigError(
            f"KV pool: {why} leaves no room for a block of {bytes_per_block} bytes; raise "
            "--gpu-memory-utilization, lower --max-num-batched-tokens or take a smaller model"
        )
    return num_blocks, f"{num_blocks} blocks of {bytes_per_block / 1024:.0f} KiB: {why}"
