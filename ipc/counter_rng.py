"""Noise as a pure function of (seed, child, output index): Philox4x32-10, a counter-based generator.

There is no state to save, move or restore, so a request draws the same noise alone, in any batch, after preemption, on
every rank and after a restart. Does not know what the noise is used for.

How the inputs are laid out (a kernel that does the same equals this file bit for bit):

    key       k0 = seed & 0xffffffff          k1 = seed >> 32
    counter   c0 = output_index & 0xffffffff  c1 = output_index >> 32
              c2 = child                      c3 = lane // 4
    result    word lane % 4 of the output block, as (2 * (word >> 9) + 1) * 2**-24

The float has 24 significant bits, so it is exact in float32 and lies in [2**-24, 1 - 2**-24]: never 0, never 1.
Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

ROUNDS = 10
# Multipliers of words 0 and 2, and the Weyl sequence that the two key words follow.
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_WEYL = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)
_MASK = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def philox4x32(counter: NDArray[np.uint32], key: NDArray[np.uint32], rounds: int = ROUNDS) -> NDArray[np.uint32]:
    """counter [n, 4], key [n, 2] -> output words [n, 4], all uint32."""
    even = counter[:, 0::2].T.astype(np.uint64)  # words 0 and 2, [2, n]
    odd = counter[:, 1::2].T.astype(np.uint64)  # words 1 and 3
    keys = key.T.astype(np.uint64)
    for i in range(rounds):
        if i:
            keys = (keys + _WEYL) & _MASK
        product = even * _MULTIPLIERS
        even, odd = (product >> _SHIFT)[::-1] ^ odd ^ keys, (product & _MASK)[::-1]
    out = np.empty(counter.shape, dtype=np.uint32)
    out[:, 0::2], out[:, 1::2] = even.T, odd.T
    return out


def uniform(seeds: ArrayLike, children: ArrayLike, output_index: ArrayLike, lanes: int = 1) -> NDArray[np.float32]:
    """float32 [R, lanes] in (0, 1). seeds uint64 [R], children int32 [R], output_index int64 [R].

    Row r depends on nothing but its own three numbers; lane j of it does not depend on `lanes`.
    """
    seed = np.asarray(seeds, dtype=np.uint64)
    index = np.asarray(output_index, dtype=np.int64).astype(np.uint64)
    child = np.asarray(children, dtype=np.int64).astype(np.uint64) & _MASK
    blocks = -(-lanes // 4)
    counter = np.empty((len(seed), blocks, 4), dtype=np.uint32)
    counter[..., 0] = (index & _MASK)[:, None]
    counter[..., 1] = (index >> _SHIFT)[:, None]
    counter[..., 2] = child[:, None]
    counter[..., 3] = np.arange(blocks, dtype=np.uint32)
    key = np.stack([seed & _MASK, seed >> _SHIFT], axis=1).astype(np.uint32)
    words = philox4x32(counter.reshape(-1, 4), np.repeat(key, blocks, axis=0)).reshape(len(seed), blocks * 4)
    odd = (words[:, :lanes] >> np.uint32(9)) * np.uint32(2) + np.uint32(1)
    return odd.astype(np.float32) * np.float32(2.0**-24)
