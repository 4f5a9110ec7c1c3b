"""Reference-counted blocks, an LRU queue of the free ones, and the map from block hash to block.

    block 0      null block: pads block tables, never handed out
    1 .. N       free (in the queue, perhaps still findable by hash) or referenced by requests

A freed block keeps its contents and its hash; it is evicted from the cache only when it is handed out again. Every call
either does all it says or changes nothing. Knows no scheduling order and no clock.
Source: Kwon et al. 2023 (PagedAttention); vLLM's automatic prefix caching.
"""
from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from engine_core.partial_index import PartialIndex


class BlockManager:
    """The pool of `num_blocks` usable blocks of `block_size` tokens."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True,
                 enable_partial_reuse: bool = False) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs at least one block of one token, got {num_blocks} of {block_size}")
        self.num_blocks, self.block_size = num_blocks, block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.ref_count = [0] * (num_blocks + 1)
        self.block_hash: list[bytes | None] = [None] * (num_blocks + 1)
        self.free_queue: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks + 1))  # front: evicted first
        self.cached: dict[bytes, int] = {}
        self.partial = PartialIndex(num_blocks, block_size) if enable_partial_reuse and enable_prefix_caching else None
        self.version = 0                        # changes with every change of what can be found
        self.num_evicted = 0                    # blocks whose cached content was given up
        self.unclaimed: set[int] = set()        # free ones that still hold what a former core had computed

    @property
    def num_free(self) -> int:
        return len(self.free_queue)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # ------------------------------------------------------------ lookup

    def find_cached_prefix(self, hashes: Sequence[bytes], start: int, stop: int) -> list[int]:
        """Blocks of the longest cached run hashes[start:k], k <= stop. Changes nothing."""
        found: list[int] = []
        if self.enable_prefix_caching:
            get = self.cached.get
            for i in range(start, stop):
                block = get(hashes[i])
                if block is None:
                    break
                found.append(block)
        return found

    # ------------------------------------------------------------ taking and giving back

    def allocate(self, count: int, adopt: Sequence[int] = ()) -> list[int] | None:
        """Adopt these cached blocks and take `count` fresh ones; returns the fresh ones in order.

        None, changing nothing, when the pool is too small. An adopted block that is free leaves the queue, so it costs
        a free block like a fresh one.
        """
        ref_count, free_queue = self.ref_count, self.free_queue
        reclaimed = 0
        for block in adopt:
            if ref_count[block] == 0:
                reclaimed += 1
        if count > len(free_queue) - reclaimed:
            return None
        for block in adopt:
            if ref_count[block] == 0:
                del free_queue[block]
            ref_count[block] += 1
        return [self.pop_free() for _ in range(count)]

    def pop_free(self) -> int:
        """The least recently freed block, evicted from the cache. The caller has checked num_free."""
        block, _ = self.free_queue.popitem(last=False)
        if self.block_hash[block] is not None:
            self.num_evicted += 1
        self.unpublish(block)
        if self.unclaimed:
            self.unclaimed.discard(block)
        self.ref_count[block] = 1
        return block

    def free(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each of a request's blocks. Queued tail first: its last blocks are evicted before its
        prefix, the part most likely to be shared."""
        ref_count, free_queue = self.ref_count, self.free_queue
        for block in reversed(blocks):
            count = ref_count[block] - 1
            if count < 0:
                raise RuntimeError(f"block {block} freed more often than referenced")
            ref_count[block] = count
            if count == 0:
                free_queue[block] = None

    def trim(self, blocks: list[int], keep: int) -> None:
        """Give back blocks[keep:] (rejected drafts, undone steps), in place. What they hold is not found again, so they
        are the first to be handed out."""
        for block in blocks[keep:]:
            if self.ref_count[block] == 1:
                self.unpublish(block)
        self.free(blocks[keep:])
        for block in blocks[keep:]:
            if self.ref_count[block] == 0:
                self.free_queue.move_to_end(block, last=False)
        del blocks[keep:]

    # ------------------------------------------------------------ the cache map

    def publish(self, block: int, h: bytes, parent: bytes = b"", tokens: bytes = b"") -> bool:
        """Make a full block findable. First writer wins: a block with the same content stays private. True if done.

        `parent` (hash of the block before) and `tokens` (int32) let it also be found by a part of its tokens.
        """
        if not self.enable_prefix_caching or self.block_hash[block] is not None or h in self.cached:
            return False
        self.block_hash[block] = h
        self.cached[h] = block
        self.version += 1
        if self.partial is not None and tokens:
            self.partial.add(block, parent, tokens)
        return True

    def unpublish(self, block: int) -> None:
        """Forget what a block holds. Its references stay."""
        h = self.block_hash[block]
        if h is not None:
            if self.cached.get(h) == block:
                del self.cached[h]
            self.block_hash[block] = None
            self.version += 1
        if self.partial is not None:
            self.partial.remove(block)

    def forget(self) -> None:
        """Forget what every block holds (new weights, lost pool). References stay."""
        self.cached.clear()
        self.block_hash = [None] * (self.num_blocks + 1)
        self.unclaimed.clear()
        self.version += 1
        if self.partial is not None:
            self.partial.clear()

    # ------------------------------------------------------------ checking

    def check_invariants(self, owners: Iterable[Sequence[int]]) -> None:
        """Raises RuntimeError unless counts, queue and map agree with the block tables in `owners`."""
        counts = [0] * (self.num_blocks + 1)
        for blocks in owners:
            if len(set(blocks)) != len(blocks):
                raise RuntimeError(f"a block table names a block twice: {blocks}")
            for block in blocks:
                counts[block] += 1
        if counts[0] or counts != self.ref_count:
            wrong = [(b, counts[b], self.ref_count[b]) for b in range(len(counts)) if counts[b] != self.ref_count[b]]
            raise RuntimeError(f"reference counts (block, owners, count): {wrong[:5]}, null block owned {counts[0]} "
                               "times")
        free = {b for b in range(1, self.num_blocks + 1) if counts[b] == 0}
        if free != set(self.free_queue):
            raise RuntimeError(f"free queue differs from unreferenced blocks: {free ^ set(self.free_queue)}")
        for h, block in self.cached.items():
            if self.block_hash[block] != h:
                raise RuntimeError(f"cache map names block {block} for a hash it does not hold")


class HostPool:
    """Slots of host memory for swapped-out blocks, numbered here. A slot given back is reusable from the next plan on:
    within one plan it may still be read."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._returned: list[int] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """None, changing nothing, when there are not as many."""
        if count > len(self._free):
            return None
        return [self._free.pop() for _ in range(count)]

    def give_back(self, slots: Sequence[int]) -> None:
        self._returned += slots

    def next_plan(self) -> None:
        self._free += self._returned
        self._returned.clear()

    def check_invariants(self, owners: Iterable[Sequence[int]]) -> None:
        held = [slot for slots in owners for slot in slots]
        if sorted(held + self._free + self._returned) != list(range(self.num_slots)):
            raise RuntimeError(f"host slots: {len(held)} held, {len(self._free)} free, {len(self._returned)} returned "
                               f"of {self.num_slots}")
