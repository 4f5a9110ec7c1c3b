"""Keys of full blocks: a hash chain, so that one fixed-size key stands for the whole history up to a block's end.

    h[0] = H(root + tokens[0]),   h[i] = H(h[i-1] + tokens[i]),   root = H(epoch, lora, images, salt)

H is blake2b with 128 bits, keyed with a secret of this run: nobody outside can search for two histories with one key.
Knows neither blocks nor requests. Source: automatic prefix caching in vLLM's documentation; RFC 7693 (BLAKE2).
"""
from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence


class BlockHasher:
    """The hash of one run. `block_size` is in tokens; tokens are int32 bytes."""

    def __init__(self, key: bytes, block_size: int) -> None:
        self._base = hashlib.blake2b(digest_size=16, key=key)
        self._bytes = block_size * 4
        self.block_size = block_size

    def root(self, *, epoch: int, salt: str = "", lora: str = "", images: Sequence[bytes] = ()) -> bytes:
        """What the chain starts from: everything besides tokens that changes keys and values.

        Each field is written with its name and length, so no value of one field can imitate another.
        """
        h = self._base.copy()
        for name, value in (("epoch", str(epoch).encode()), ("salt", salt.encode()), ("lora", lora.encode()),
                            *(("image", digest) for digest in images)):
            h.update(struct.pack("<II", len(name), len(value)) + name.encode() + value)
        return h.digest()

    def next(self, parent: bytes, tokens: bytes) -> bytes:
        """The key of one full block after `parent`."""
        h = self._base.copy()
        h.update(parent + tokens)
        return h.digest()

    def extend(self, hashes: list[bytes], root: bytes, tokens: bytes | bytearray | memoryview) -> None:
        """Append the keys of all full blocks of `tokens` that `hashes` does not cover yet."""
        size, copy = self._bytes, self._base.copy
        parent = hashes[-1] if hashes else root
        view = memoryview(tokens)
        for start in range(len(hashes) * size, len(view) - size + 1, size):
            h = copy()
            h.update(parent)
            h.update(view[start:start + size])
            parent = h.digest()
            hashes.append(parent)
        view.release()
