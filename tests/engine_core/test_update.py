"""Entering results: columns when nothing moved, row by row when something did, and results that do not fit a plan."""
from __future__ import annotations

import numpy as np
import pytest

from engine_core.preemption import preempt
from engine_core.rows import PlanRecord
from engine_core.scheduler import Step
from engine_core.update import _end_bad
from ipc.errors import FAULT, INVALID
from ipc.messages import EMPTY, FINISH_ABORT, FINISH_ERROR, FINISH_STOP, Abort, ModelRunnerOutput, RowFailure
from bench.simulation import pack, unpack
from tests.engine_core.tools import Engine, pairs


def two_decodes(**options) -> Engine:
    engine = Engine(**options)
    engine.add(1, [1, 2, 3], max_tokens=20)
    engine.add(2, [9, 9, 9], max_tokens=20)
    engine.step()
    return engine


def test_a_plain_decode_advances_every_column_by_one():
    engine = two_decodes()
    rows = engine.rows
    assert (rows.computed[:2].tolist(), rows.known[:2].tolist()) == ([3, 3], [4, 4])
    engine.step()
    assert (rows.computed[:2].tolist(), rows.planned[:2].tolist()) == ([4, 4], [4, 4])
    assert (rows.known[:2].tolist(), rows.length[:2].tolist()) == ([5, 5], [5, 5])


def test_a_promise_is_not_a_commitment():
    engine = two_decodes()
    engine.plan()
    rows = engine.rows
    assert (rows.computed[:2].tolist(), rows.planned[:2].tolist()) == ([3, 3], [4, 4])
    assert (rows.known[:2].tolist(), rows.length[:2].tolist()) == ([4, 4], [5, 5])


def test_tokens_of_rows_that_moved_reach_their_requests():
    """Row 0 leaves while a plan is in flight; the plan's row 1 is row 0 by the time its result arrives."""
    engine = two_decodes()
    engine.plan()
    engine.core.handle(0, Abort([1]))
    result = engine.result()
    engine.commit(result)
    assert engine.tokens[2][-1] == unpack(result.tokens)[1] and len(engine.tokens[2]) == 2
    assert engine.tokens[1] == engine.tokens[1][:1] and engine.ends[1].reason == FINISH_ABORT
    assert engine.stats.num_wasted_tokens == 1
    assert engine.request(2).row == 0 and int(engine.rows.known[0]) == 5


def test_a_newcomer_in_a_row_does_not_get_the_token_of_the_one_before():
    engine = two_decodes(async_scheduling=True)
    engine.plan()
    engine.core.handle(0, Abort([2]))
    engine.add(3, [4, 4, 4, 4], max_tokens=3)
    engine.plan()                               # 3 takes row 1
    engine.finish_step()
    assert engine.tokens[3] == []
    engine.run()
    alone = Engine()
    alone.add(3, [4, 4, 4, 4], max_tokens=3)
    alone.run()
    assert engine.tokens[3] == alone.tokens[3]
    engine.assert_idle()


def test_a_chunk_that_ends_before_the_prompt_does_brings_no_token():
    engine = Engine(max_num_batched_tokens=4)
    engine.add(1, [1] * 6)
    engine.plan()
    result = engine.result()
    assert unpack(result.tokens) == [-1]
    engine.commit(result)
    assert engine.tokens[1] == [] and int(engine.rows.computed[0]) == 4


@pytest.mark.parametrize("tokens", [[1], [1, 2, 3], [1, 50], [-1, 2]])
def test_a_result_that_does_not_fit_its_plan_is_a_broken_invariant(tokens):
    """Too few rows, too many, an id outside the vocabulary, no token where one is due."""
    engine = two_decodes()
    engine.plan()
    with pytest.raises(RuntimeError, match="step 2"):
        engine.core.commit(ModelRunnerOutput(2, pack(tokens)))


def test_a_token_for_a_row_that_samples_nothing_is_a_broken_invariant():
    engine = Engine(max_num_batched_tokens=4)
    engine.add(1, [1] * 6)
    engine.plan()
    with pytest.raises(RuntimeError, match="differ from rows that sample"):
        engine.core.commit(ModelRunnerOutput(1, pack([3])))


def test_statistics_count_what_was_computed_and_what_was_given():
    engine = two_decodes()
    engine.step()
    stats = engine.stats
    assert (stats.num_steps, stats.num_computed_tokens, stats.num_sampled_tokens, stats.num_finished) == (2, 8, 4, 0)
    engine.run()
    assert (stats.num_sampled_tokens, stats.num_finished, stats.num_wasted_tokens) == (40, 2, 0)


# ---------------------------------------------------------------- values that are not finite

def bad_result(engine: Engine, *bad: int) -> ModelRunnerOutput:
    """The worker's answer with these rows reported as not finite."""
    result = engine.result()
    tokens = [-1 if row in bad else token for row, token in enumerate(unpack(result.tokens))]
    return ModelRunnerOutput(result.step, pack(tokens), pack(bad) if bad else EMPTY)


def test_a_bad_row_ends_its_request_with_an_error_and_nobody_elses():
    engine = two_decodes()
    engine.plan()
    engine.commit(bad_result(engine, 0))
    end = engine.ends[1]
    assert (end.reason, end.error_code) == (FINISH_ERROR, FAULT) and "not finite" in end.message
    assert len(engine.tokens[1]) == 1 and len(engine.tokens[2]) == 2
    engine.run()
    assert len(engine.tokens[2]) == 20
    engine.assert_idle()


def test_nothing_a_bad_request_computed_is_found_again():
    engine = Engine()
    engine.add(1, [5] * 8, max_tokens=9)
    engine.step()
    assert len(engine.blocks.cached) == 2
    engine.plan()
    engine.commit(bad_result(engine, 0))
    assert engine.blocks.cached == {}
    engine.add(2, [5] * 9, max_tokens=1)
    assert engine.step().new[0].num_computed_tokens == 0
    engine.assert_idle()


def test_a_request_that_adopted_a_bad_block_computes_it_again():
    engine = Engine()
    engine.add(1, [5] * 8, max_tokens=9)
    engine.step()
    engine.add(2, [5] * 11, max_tokens=5)
    engine.plan()
    assert engine.request(2).blocks[:2] == engine.request(1).blocks[:2]
    engine.commit(bad_result(engine, 0))
    plan = engine.step()
    assert [(new.request_id, new.num_computed_tokens) for new in plan.new] == [(2, 0)]
    engine.run()
    alone = Engine()
    alone.add(2, [5] * 11, max_tokens=5)
    alone.run()
    assert engine.tokens[2] == alone.tokens[2]
    engine.assert_idle()


def test_an_adopter_that_has_decoded_since_computes_all_of_it_again_in_chunks():
    """Its hashes once ended where its prompt did, and a lookup in mid-prompt ran past them."""
    engine = Engine(long_prefill_token_threshold=4)
    engine.add(1, [5] * 8, max_tokens=20)
    engine.add(2, [5] * 8 + [6], max_tokens=16)
    for _ in range(9):
        engine.step()
    assert len(engine.tokens[2]) >= 5
    engine.plan()
    engine.commit(bad_result(engine, engine.request(1).row))
    assert engine.ends[1].reason == FINISH_ERROR and engine.request(2).row < 0
    engine.run()
    alone = Engine()
    alone.add(2, [5] * 8 + [6], max_tokens=16)
    alone.run()
    assert engine.tokens[2] == alone.tokens[2]
    engine.assert_idle()


def test_an_adopter_whose_step_is_in_flight_does_not_share_the_error():
    """Plan 2 adopts a block that plan 1 turns out to have filled with NaN. What plan 2 returns for the adopter was
    computed from it: it is dropped, token or error, and the adopter computes everything again."""
    for second in ([-1, -1], [-1, 11]):
        engine = Engine(async_scheduling=True)
        engine.add(1, [5] * 4, max_tokens=9)
        engine.plan()
        engine.add(2, [5] * 6, max_tokens=5)
        assert engine.plan().new[0].num_computed_tokens == 4
        engine.commit(bad_result(engine, 0))
        assert engine.ends[1].reason == FINISH_ERROR and engine.request(2).num_in_flight == 0
        engine.in_flight.popleft()
        engine.worker.rows.clear()
        bad = [row for row, token in enumerate(second) if token < 0]
        engine.commit(ModelRunnerOutput(2, pack(second), pack(bad)))
        assert engine.tokens[2] == [] and 2 not in engine.ends
        assert engine.request(2).num_known_tokens == 6


def test_a_bad_row_of_a_preempted_request_leaves_nothing_in_the_cache():
    """Its blocks went back to the free queue, still findable, before the result arrived."""
    engine = Engine(num_blocks=4, async_scheduling=True)
    engine.add(1, [1, 2, 3, 4, 5, 6, 7], max_tokens=6)
    engine.add(2, [9] * 7, max_tokens=6)
    engine.plan()
    engine.plan()
    engine.finish_step()
    engine.plan()                               # preempts 2, whose second token is in flight
    assert engine.request(2).num_in_flight == 1
    block = engine.blocks.cached[engine.request(2).hashes[0]]
    engine.commit(bad_result(engine, 1))
    assert engine.ends[2].reason == FINISH_ERROR
    assert engine.blocks.block_hash[block] is None
    engine.run()
    engine.assert_idle()


def test_a_bad_row_of_a_request_that_ended_is_dropped():
    engine = two_decodes()
    engine.plan()
    engine.core.handle(0, Abort([1]))
    engine.commit(bad_result(engine, 0))
    assert engine.ends[1].reason == FINISH_ABORT and len(engine.tokens[2]) == 2
    assert pairs(engine.step().moves) == [(0, 1)]


def test_a_bad_request_that_began_with_a_cached_prefix_takes_back_its_own_blocks_only():
    engine = Engine()
    engine.add(1, list(range(8)), max_tokens=1)
    engine.run()
    shared = set(engine.blocks.cached.values())
    engine.add(2, list(range(8)) + [40, 41, 42, 43, 44], max_tokens=5)
    engine.plan()
    assert len(engine.blocks.cached) == len(shared) + 1     # the third block is published with the plan that fills it
    engine.commit(bad_result(engine, 0))
    assert set(engine.blocks.cached.values()) == shared
    engine.assert_idle()


def test_a_row_that_cannot_go_on_ends_with_its_own_error():
    engine = two_decodes()
    engine.plan()
    result = engine.result()
    result.tokens = pack([-1, unpack(result.tokens)[1]])
    result.failed = [RowFailure(0, INVALID, "no token is left")]
    engine.commit(result)
    end = engine.ends[1]
    assert (end.reason, end.error_code, end.message) == (FINISH_ERROR, INVALID, "no token is left")
    assert 2 not in engine.ends and len(engine.tokens[2]) == 2


def test_a_bad_token_that_fills_a_block_publishes_nothing_when_its_request_leaves():
    engine = Engine()
    engine.add(1, [1, 2, 3], max_tokens=9)
    engine.step()
    engine.plan()                               # computes the block's last position
    engine.commit(bad_result(engine, 0))
    assert engine.ends[1].reason == FINISH_ERROR and not engine.blocks.cached


def test_blocks_of_a_bad_request_that_another_has_in_host_memory_are_not_brought_back():
    engine = Engine(num_host_blocks=8, preemption_mode="swap")
    engine.add(1, list(range(9)), max_tokens=9)
    engine.add(2, list(range(9)), max_tokens=9)
    engine.step()
    request = engine.request(2)
    preempt(engine.scheduler, request, Step())
    assert request.host_slots
    engine.scheduler.rows.moves.clear()
    _end_bad(engine.scheduler, PlanRecord(9, 1, None, None, 1), np.array([0]))
    assert not request.host_slots and request.num_swapped_tokens == 0


def test_a_row_that_its_grammar_ended_stops():
    engine = two_decodes()
    engine.plan()
    result = engine.result()
    result.ended_rows = pack([1])
    engine.commit(result)
    assert engine.ends[2].reason == FINISH_STOP and 1 not in engine.ends and len(engine.tokens[2]) == 2
