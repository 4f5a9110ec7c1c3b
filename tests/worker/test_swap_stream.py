"""Block moves on the side stream do what apply_block_ops does. Without a device the copies are plain."""
from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.attention.reference import ReferenceBackend
from worker.kv_pool import HostPool, KVPool, apply_block_ops
from worker.swap_stream import SwapStream

BLOCKS, SLOTS = 12, 10


def make() -> tuple[KVPool, HostPool]:
    pool = KVPool(ReferenceBackend(), BLOCKS, 2, (2, 1, 4), torch.float32)
    generator = torch.Generator().manual_seed(0)
    host = HostPool(pool, SLOTS)
    for words in (*pool.block_words, *host.block_words):
        words.copy_(torch.randint(0, 1 << 40, words.shape, generator=generator))
    return pool, host


def pairs(values: list[tuple[int, int]]) -> np.ndarray:
    return np.array(values, np.int32).reshape(-1, 2)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_moves_equal_the_plain_ones(data):
    """Blocks read and overwritten in the same plan, slots emptied and refilled, runs of neighbouring slots."""
    blocks, slots = st.integers(1, BLOCKS), st.integers(0, SLOTS - 1)
    targets = data.draw(st.permutations(range(1, BLOCKS + 1)))
    num_in, num_copies = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 5))
    out_slots = data.draw(st.lists(slots, unique=True, max_size=6))
    moves = dict(swap_out=pairs([(data.draw(blocks), slot) for slot in out_slots]),
                 swap_in=pairs([(data.draw(slots), block) for block in targets[:num_in]]),
                 copies=pairs([(data.draw(blocks), block) for block in targets[num_in:num_in + num_copies]]))
    (ours, our_host), (theirs, their_host) = make(), make()
    SwapStream(ours, our_host).apply(**moves)
    apply_block_ops(theirs, their_host, **moves)
    for a, b in zip((*ours.block_words, *our_host.block_words), (*theirs.block_words, *their_host.block_words)):
        assert torch.equal(a, b)


def test_what_cannot_be_is_refused_before_anything_moves():
    pool, host = make()
    before = [words.clone() for words in pool.block_words]
    nothing = pairs([])
    twice = pairs([(1, 2), (3, 2)])
    for wrong in (dict(swap_out=pairs([(13, 0)])), dict(swap_in=pairs([(10, 1)])), dict(copies=twice)):
        with pytest.raises(RuntimeError, match="plan (moves|writes)"):
            SwapStream(pool, host).apply(**{"swap_out": nothing, "swap_in": nothing, "copies": nothing, **wrong})
    assert all(torch.equal(a, b) for a, b in zip(before, pool.block_words))
