"""The pool: exact block ids, the order of the free queue, and that a refused call changes nothing."""
from __future__ import annotations

import copy

import pytest

from engine_core.block_manager import BlockManager, HostPool


def state(blocks: BlockManager) -> tuple:
    return (list(blocks.ref_count), list(blocks.block_hash), list(blocks.free_queue), dict(blocks.cached),
            blocks.num_evicted)


def take(blocks: BlockManager, count: int, adopt: tuple[int, ...] = ()) -> list[int]:
    got = blocks.allocate(count, adopt)
    assert got is not None
    return got


def test_a_new_pool_hands_out_blocks_in_order_and_never_the_null_block():
    blocks = BlockManager(4, 2)
    assert take(blocks, 3) == [1, 2, 3]
    assert list(blocks.free_queue) == [4] and blocks.ref_count == [0, 1, 1, 1, 0]
    assert take(blocks, 1) == [4] and blocks.num_free == 0


@pytest.mark.parametrize("num_blocks, block_size", [(0, 4), (4, 0)])
def test_a_pool_without_blocks_or_tokens_is_refused(num_blocks, block_size):
    with pytest.raises(ValueError, match=f"got {num_blocks} of {block_size}"):
        BlockManager(num_blocks, block_size)


@pytest.mark.parametrize("num_tokens, count", [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_blocks_for_rounds_up(num_tokens, count):
    assert BlockManager(4, 4).blocks_for(num_tokens) == count


def test_blocks_are_freed_tail_first():
    """So a request's last blocks are evicted before its prefix."""
    blocks = BlockManager(5, 2)
    blocks.free(take(blocks, 3))
    assert list(blocks.free_queue) == [4, 5, 3, 2, 1]


def test_a_shared_block_is_free_when_its_last_owner_leaves():
    blocks = BlockManager(3, 2)
    (one,) = take(blocks, 1)
    assert take(blocks, 0, (one,)) == [] and blocks.ref_count[one] == 2
    blocks.free([one])
    assert blocks.num_free == 2
    blocks.free([one])
    assert list(blocks.free_queue) == [2, 3, 1]


def test_freeing_too_often_is_a_broken_invariant():
    blocks = BlockManager(2, 2)
    with pytest.raises(RuntimeError, match="block 1 freed more often"):
        blocks.free([1])


def test_an_allocation_that_does_not_fit_changes_nothing():
    blocks = BlockManager(3, 2)
    blocks.publish(take(blocks, 1)[0], b"a")
    blocks.free([1])
    before = state(blocks)
    assert blocks.allocate(4) is None
    assert blocks.allocate(3, [1]) is None      # block 1 is free: adopting it costs one of the three
    assert state(blocks) == before


def test_adopting_a_cached_free_block_costs_a_slot():
    blocks = BlockManager(3, 2)
    blocks.publish(take(blocks, 1)[0], b"a")
    blocks.free([1])
    assert take(blocks, 2, (1,)) == [2, 3] and blocks.num_free == 0


def test_adopting_a_block_in_use_costs_nothing():
    blocks = BlockManager(3, 2)
    blocks.publish(take(blocks, 1)[0], b"a")
    assert take(blocks, 2, (1,)) == [2, 3] and blocks.ref_count == [0, 2, 1, 1]


def test_an_adopted_block_is_never_handed_out_as_a_fresh_one():
    blocks = BlockManager(2, 2)
    blocks.publish(take(blocks, 1)[0], b"a")
    blocks.publish(take(blocks, 1)[0], b"b")
    blocks.free([1, 2])                         # queue: 2, 1
    assert take(blocks, 1, (2,)) == [1]
    assert blocks.cached == {b"b": 2}


def test_a_freed_block_is_found_until_it_is_handed_out_again():
    blocks = BlockManager(2, 2)
    (one,) = take(blocks, 1)
    assert blocks.publish(one, b"a")
    blocks.free([one])
    assert blocks.find_cached_prefix([b"a"], 0, 1) == [1] and blocks.num_evicted == 0
    assert take(blocks, 2) == [2, 1]            # least recently freed first
    assert blocks.find_cached_prefix([b"a"], 0, 1) == [] and blocks.num_evicted == 1
    assert blocks.block_hash == [None, None, None]


def test_a_prefix_ends_at_the_first_block_that_is_missing():
    blocks = BlockManager(4, 2)
    for block, h in zip(take(blocks, 3), (b"a", b"b", b"d")):
        blocks.publish(block, h)
    hashes = [b"a", b"b", b"c", b"d"]
    assert blocks.find_cached_prefix(hashes, 0, 4) == [1, 2]
    assert blocks.find_cached_prefix(hashes, 0, 1) == [1]
    assert blocks.find_cached_prefix(hashes, 3, 4) == [3]
    assert blocks.find_cached_prefix(hashes, 2, 4) == []


def test_the_first_writer_of_a_hash_wins():
    blocks = BlockManager(3, 2)
    one, two = take(blocks, 2)
    assert blocks.publish(one, b"a") and not blocks.publish(two, b"a")
    assert not blocks.publish(one, b"z")        # it already stands for something
    assert blocks.cached == {b"a": one} and blocks.block_hash[two] is None


def test_nothing_is_published_or_found_without_prefix_caching():
    blocks = BlockManager(3, 2, enable_prefix_caching=False)
    (one,) = take(blocks, 1)
    assert not blocks.publish(one, b"a")
    assert blocks.find_cached_prefix([b"a"], 0, 1) == []


def test_unpublish_forgets_what_a_block_holds_and_keeps_its_references():
    blocks = BlockManager(3, 2)
    (one,) = take(blocks, 1)
    blocks.publish(one, b"a")
    blocks.unpublish(one)
    blocks.unpublish(one)
    assert blocks.cached == {} and blocks.ref_count[one] == 1


def test_trim_gives_back_the_tail_and_forgets_it():
    blocks = BlockManager(4, 2)
    table = take(blocks, 3)
    for block in table:
        blocks.publish(block, bytes([block]))
    take(blocks, 0, (2,))                       # block 2 is shared: others still know what it holds
    blocks.trim(table, 1)
    assert table == [1] and list(blocks.free_queue) == [3, 4]    # before any block that holds something
    assert blocks.cached == {b"\1": 1, b"\2": 2} and blocks.ref_count == [0, 1, 1, 0, 0]


def test_forget_empties_the_map_and_keeps_the_references():
    blocks = BlockManager(3, 2)
    blocks.publish(take(blocks, 1)[0], b"a")
    blocks.forget()
    assert blocks.cached == {} and blocks.block_hash == [None] * 4 and blocks.ref_count[1] == 1


def test_check_invariants_accepts_what_is_true():
    blocks = BlockManager(4, 2)
    a = take(blocks, 2)
    blocks.publish(a[0], b"a")
    b = [a[0], *take(blocks, 1, (a[0],))]
    blocks.check_invariants([a, b])


def damage_count(blocks: BlockManager) -> None:
    blocks.ref_count[1] = 2


def damage_queue(blocks: BlockManager) -> None:
    del blocks.free_queue[4]


def damage_map(blocks: BlockManager) -> None:
    blocks.cached[b"x"] = 2


@pytest.mark.parametrize("damage, owners, text", [
    (damage_count, [[1, 2]], "reference counts"), (damage_queue, [[1, 2]], "free queue"),
    (damage_map, [[1, 2]], "cache map"), (None, [[1, 2, 2]], "twice"), (None, [[1, 2, 0]], "null block"),
    (None, [[1]], "reference counts")])
def test_check_invariants_names_what_is_broken(damage, owners, text):
    blocks = BlockManager(4, 2)
    blocks.publish(take(blocks, 2)[0], b"a")
    if damage is not None:
        damage(blocks)
    with pytest.raises(RuntimeError, match=text):
        blocks.check_invariants(owners)


def test_host_slots_are_taken_all_or_none():
    host = HostPool(3)
    assert host.take(2) == [0, 1]
    before = copy.deepcopy(vars(host))
    assert host.take(2) is None and vars(host) == before
    assert host.take(1) == [2] and host.take(0) == []


def test_a_returned_host_slot_is_reusable_only_from_the_next_plan_on():
    """Within one plan it may still be read: swap-in gathers after swap-out scatters."""
    host = HostPool(1)
    slots = host.take(1)
    assert slots == [0]
    host.give_back(slots)
    assert host.take(1) is None and host.num_free == 0
    host.next_plan()
    assert host.take(1) == [0]
    host.check_invariants([[0]])


def test_host_slots_that_are_lost_or_doubled_are_named():
    host = HostPool(2)
    host.take(1)
    with pytest.raises(RuntimeError, match="0 held, 1 free, 0 returned of 2"):
        host.check_invariants([])
    with pytest.raises(RuntimeError, match="host slots"):
        host.check_invariants([[0], [0]])
