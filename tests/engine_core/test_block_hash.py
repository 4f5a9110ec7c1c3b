"""Keys of blocks: the chain, and that no field of the root can imitate another."""
from __future__ import annotations

import hashlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine_core.block_hash import BlockHasher

KEY = b"k" * 32


def tokens(*ids: int) -> bytes:
    return np.array(ids, np.int32).tobytes()


def chain(hasher: BlockHasher, root: bytes, data: bytes) -> list[bytes]:
    hashes: list[bytes] = []
    hasher.extend(hashes, root, data)
    return hashes


def test_the_chain_is_keyed_blake2b_over_parent_and_tokens():
    hasher = BlockHasher(KEY, 2)
    root = hasher.root(epoch=0)
    first = hashlib.blake2b(root + tokens(1, 2), digest_size=16, key=KEY).digest()
    second = hashlib.blake2b(first + tokens(3, 4), digest_size=16, key=KEY).digest()
    assert chain(hasher, root, tokens(1, 2, 3, 4, 5)) == [first, second]        # token 5 is no full block


def test_extending_in_pieces_equals_extending_at_once():
    hasher = BlockHasher(KEY, 4)
    root = hasher.root(epoch=0)
    data = bytearray(tokens(*range(23)))
    whole, pieces = chain(hasher, root, data), []
    for stop in range(0, len(data) + 1, 4):
        hasher.extend(pieces, root, data[:stop])
    assert pieces == whole and len(whole) == 5


def test_extending_leaves_the_buffer_free_to_grow():
    data = bytearray(tokens(1, 2))
    chain(BlockHasher(KEY, 2), b"", data)
    data += tokens(3)                           # a view still held would raise BufferError
    assert len(data) == 12


def test_a_block_stands_for_its_whole_history():
    hasher = BlockHasher(KEY, 2)
    root = hasher.root(epoch=0)
    a, b = chain(hasher, root, tokens(1, 2, 5, 6)), chain(hasher, root, tokens(1, 3, 5, 6))
    assert a[0] != b[0] and a[1] != b[1]


def test_another_key_gives_other_hashes():
    one, other = BlockHasher(KEY, 2), BlockHasher(b"x" * 32, 2)
    assert one.root(epoch=0) != other.root(epoch=0)
    assert chain(one, b"r" * 16, tokens(1, 2)) != chain(other, b"r" * 16, tokens(1, 2))


def test_a_new_epoch_gives_a_new_root():
    hasher = BlockHasher(KEY, 2)
    assert hasher.root(epoch=0) != hasher.root(epoch=1)


def test_a_salt_cannot_imitate_a_lora_key():
    """A flat tuple of fields let tenant ("t", "L") equal tenant ("t",) with adapter "L"."""
    hasher = BlockHasher(KEY, 2)
    roots = [hasher.root(epoch=1, salt="tL"), hasher.root(epoch=1, salt="t", lora="L"), hasher.root(epoch=1, lora="tL"),
             hasher.root(epoch=1, salt="t", images=[b"L"]), hasher.root(epoch=1, images=[b"t", b"L"]),
             hasher.root(epoch=1, images=[b"tL"]), hasher.root(epoch=11, salt="tL")]
    assert len(set(roots)) == len(roots)


FIELDS = st.tuples(st.integers(0, 300), st.text(max_size=6), st.text(max_size=6),
                   st.lists(st.binary(max_size=6), max_size=2))


@given(FIELDS, FIELDS)
def test_different_fields_never_share_a_root(one, other):
    hasher = BlockHasher(KEY, 2)
    roots = [hasher.root(epoch=e, salt=s, lora=x, images=i) for e, s, x, i in (one, other)]
    assert (roots[0] == roots[1]) == (one == other)
