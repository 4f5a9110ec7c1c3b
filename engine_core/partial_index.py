"""Finds a block whose first tokens continue a history, though not all of them do.

Besides full blocks by hash, a pool holds much that matches in part: another question after the same system prompt, the
unfilled last block of an answer. The common tokens are reused by copying the block. Indexed by (hash of the block
before, first token); a few blocks per key. Knows no reference counts: BlockManager removes a block when its content is
given up.
"""
from __future__ import annotations

MAX_PER_KEY = 4                                 # newest win

Key = tuple[bytes, bytes]
Entry = tuple[Key, bytes, int]                  # key, tokens, order of arrival


class PartialIndex:
    """Blocks with known leading tokens. Tokens are int32 bytes."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._entry: list[Entry | None] = [None] * (num_blocks + 1)
        self._num_added = 0
        self._blocks: dict[Key, list[int]] = {}

    def add(self, block: int, parent: bytes, tokens: bytes) -> None:
        """The block after `parent` holds `tokens`, at most block_size of them."""
        if self._entry[block] is not None:
            self.remove(block)
        key = (parent, tokens[:4])
        blocks = self._blocks.setdefault(key, [])
        if len(blocks) >= MAX_PER_KEY:
            self._entry[blocks.pop(0)] = None
        blocks.append(block)
        self._num_added += 1
        self._entry[block] = (key, tokens, self._num_added)

    def remove(self, block: int) -> None:
        entry = self._entry[block]
        if entry is not None:
            self._entry[block] = None
            blocks = self._blocks[entry[0]]
            blocks.remove(block)
            if not blocks:
                del self._blocks[entry[0]]

    def clear(self) -> None:
        self._entry = [None] * len(self._entry)
        self._blocks.clear()

    def entries(self) -> list[Entry | None]:
        """What is known of each block, for `in_order`. A copy by reference: cheap, and final."""
        return self._entry.copy()

    def find(self, parent: bytes, tokens: bytes, exclude: set[int]) -> tuple[int, int]:
        """(block, number of its leading tokens that equal `tokens`), (0, 0) when there is none."""
        best = (0, 0)
        for block in self._blocks.get((parent, tokens[:4]), ()):
            entry = self._entry[block]
            if entry is None or block in exclude:
                continue
            count = _common_tokens(entry[1], tokens)
            if count > best[1]:
                best = (block, count)
        return best


def in_order(entries: list[Entry | None]) -> list[tuple[bytes, int, bytes]]:
    """(parent, block, tokens) of all, in an order in which adding them again gives the same index."""
    found = sorted((entry[2], entry[0][0], block, entry[1]) for block, entry in enumerate(entries) if entry is not None)
    return [(parent, block, tokens) for _, parent, block, tokens in found]


def _common_tokens(a: bytes, b: bytes) -> int:
    size = min(len(a), len(b))
    for i in range(0, size, 4):
        if a[i:i + 4] != b[i:i + 4]:
            return i // 4
    return size // 4
