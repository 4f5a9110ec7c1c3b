"""Reuse of a block that matches in part: the index, and the copies it leads to."""
from __future__ import annotations

import numpy as np

from engine_core.partial_index import MAX_PER_KEY, PartialIndex, in_order
from bench.simulation import unpack
from tests.engine_core.test_scheduler import new_rows, prompt
from tests.engine_core.tools import Engine, pairs


def tokens(*ids: int) -> bytes:
    return np.array(ids, np.int32).tobytes()


def test_the_longest_common_beginning_is_found():
    index = PartialIndex(8, 4)
    index.add(3, b"p", tokens(1, 2, 3, 4))
    index.add(5, b"p", tokens(1, 2, 9))
    assert index.find(b"p", tokens(1, 2, 3, 7), set()) == (3, 3)
    assert index.find(b"p", tokens(1, 2, 9, 7), set()) == (5, 3)
    assert index.find(b"p", tokens(1, 2), set()) == (3, 2)
    assert index.find(b"p", tokens(1, 2, 3, 7), {3}) == (5, 2)
    assert index.find(b"p", tokens(2, 2), set()) == index.find(b"q", tokens(1, 2), set()) == (0, 0)
    assert index.find(b"p", b"", set()) == (0, 0)


def test_a_block_stands_for_one_content_at_a_time():
    index = PartialIndex(8, 4)
    index.add(3, b"p", tokens(1, 2))
    index.add(3, b"q", tokens(5))
    assert index.find(b"p", tokens(1, 2), set()) == (0, 0) and index.find(b"q", tokens(5, 6), set()) == (3, 1)
    index.remove(3)
    index.remove(3)
    assert in_order(index.entries()) == []


def test_the_newest_few_of_one_beginning_are_kept():
    index = PartialIndex(20, 4)
    for block in range(1, MAX_PER_KEY + 3):
        index.add(block, b"p", tokens(1, block))
    assert [block for _, block, _ in in_order(index.entries())] == list(range(3, MAX_PER_KEY + 3))
    index.clear()
    assert in_order(index.entries()) == [] and index.find(b"p", tokens(1), set()) == (0, 0)


# ---------------------------------------------------------------- in an engine

def test_the_common_part_of_the_next_block_is_copied():
    engine = Engine(partial=True)
    engine.add(1, prompt(10), max_tokens=1)
    engine.run()
    engine.add(2, [*prompt(7), 40, 41], max_tokens=3)
    plan = engine.step()
    assert new_rows(plan) == [(2, 9, 7, 3)] and unpack(plan.new_blocks) == [1, 4, 5]
    assert pairs(plan.copies) == [(2, 4)] and pairs(plan.counts) == [(0, 2)]
    assert engine.admitted[2][0] == 7 and engine.stats.num_copied_tokens == 3
    engine.run()
    alone = Engine()
    alone.add(2, [*prompt(7), 40, 41], max_tokens=3)
    alone.run()
    assert engine.tokens[2] == alone.tokens[2]
    engine.assert_idle()


def test_the_unfilled_last_block_of_an_answer_is_reused():
    engine = Engine(partial=True)
    engine.add(1, prompt(5), max_tokens=3)
    engine.run()
    engine.add(2, prompt(5) + engine.tokens[1][:2] + [1, 1, 1], max_tokens=1)
    plan = engine.step()
    assert new_rows(plan) == [(2, 10, 7, 3)] and pairs(plan.copies) == [(2, 3)]
    engine.assert_idle()


def test_a_block_that_this_step_fills_is_not_copied():
    """Copies are made before the forward pass."""
    engine = Engine(partial=True)
    engine.add(1, prompt(8))
    engine.add(2, [*prompt(6), 40, 41])
    plan = engine.step()
    assert new_rows(plan) == [(1, 8, 0, 2), (2, 8, 4, 2)] and not pairs(plan.copies)
    engine.add(3, [*prompt(6), 30, 31])
    assert pairs(engine.step().copies) and engine.request(3).num_cached_tokens == 6
    engine.run()
    engine.assert_idle()


def test_a_copy_of_a_failed_step_is_made_again():
    engine = Engine(partial=True)
    engine.add(1, prompt(10), max_tokens=1)
    engine.run()
    engine.add(2, [*prompt(7), 40, 41], max_tokens=3)
    engine.plan()
    engine.fail()
    assert int(engine.rows.computed[0]) == 4 and engine.request(2).blocks == [1]
    engine.run()
    alone = Engine()
    alone.add(2, [*prompt(7), 40, 41], max_tokens=3)
    alone.run()
    assert engine.tokens[2] == alone.tokens[2]
    engine.assert_idle()


def test_nothing_is_copied_after_the_block_was_handed_out_again():
    engine = Engine(num_blocks=4, partial=True)
    engine.add(1, prompt(6), max_tokens=1)
    engine.run()
    engine.add(2, prompt(15, 20), max_tokens=1)
    engine.run()
    engine.add(3, prompt(6), max_tokens=1)
    assert not pairs(engine.step().copies)


def test_salts_do_not_share_parts_of_blocks():
    engine = Engine(partial=True)
    engine.add(1, prompt(4), salt="a", max_tokens=1)
    engine.run()
    engine.add(2, [*prompt(3), 40], salt="b", max_tokens=1)
    assert not pairs(engine.step().copies)
    engine.add(3, [*prompt(3), 40], salt="a", max_tokens=1)
    assert pairs(engine.step().copies)
