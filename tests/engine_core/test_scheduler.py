"""What a step computes, with exact plans: chunks, sharing, blocks, preemption by both ways, aborts in every status.

Blocks hold 4 tokens. A plan's columns are compared as (row, value) pairs.
"""
from __future__ import annotations

import pytest

from engine_core.request import RequestStatus
from ipc.messages import FINISH_ABORT, FINISH_ERROR, FINISH_LENGTH, Abort, SchedulerOutput
from bench.simulation import unpack
from tests.engine_core.tools import Engine, pairs


def new_rows(plan: SchedulerOutput) -> list[tuple[int, int, int, int]]:
    """(request, tokens, computed, blocks) of each new row."""
    return [(new.request_id, new.num_tokens, new.num_computed_tokens, new.num_blocks) for new in plan.new]


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + i) % 50 for i in range(length)]


def free_queue(engine: Engine) -> list[int]:
    return list(engine.blocks.free_queue)


# ---------------------------------------------------------------- chunks and budget

def test_a_long_prompt_is_computed_in_chunks_of_the_budget():
    engine = Engine(max_num_batched_tokens=8)
    engine.add(1, prompt(20))
    first = engine.step()
    assert new_rows(first) == [(1, 20, 0, 2)] and unpack(first.new_blocks) == [1, 2]
    assert unpack(first.new_tokens) == prompt(20) and pairs(first.counts) == [(0, 8)]
    second = engine.step()
    assert pairs(second.counts) == [(0, 8)] and pairs(second.extend) == [(0, 3), (0, 4)] and not second.new
    third = engine.step()
    assert pairs(third.counts) == [(0, 4)] and pairs(third.extend) == [(0, 5)] and len(engine.tokens[1]) == 1
    fourth = engine.step()
    assert pairs(fourth.counts) == [] and pairs(fourth.extend) == [(0, 6)]       # a decode is the default
    assert [plan.num_rows for plan in (first, second, third, fourth)] == [1, 1, 1, 1]


def test_decodes_come_first_and_a_prefill_gets_what_is_left():
    engine = Engine(max_num_batched_tokens=8)
    engine.add(1, prompt(3))
    engine.step()
    engine.add(2, prompt(20, 5))
    assert pairs(engine.step().counts) == [(1, 7)]
    assert pairs(engine.step().counts) == [(1, 7)]
    assert pairs(engine.step().counts) == [(1, 6)]


def test_the_threshold_bounds_one_chunk_so_that_others_share_the_step():
    engine = Engine(max_num_batched_tokens=8, long_prefill_token_threshold=3)
    engine.add(1, prompt(9))
    engine.add(2, prompt(9, 20))
    engine.add(3, prompt(9, 35))
    assert pairs(engine.step().counts) == [(0, 3), (1, 3), (2, 2)]
    assert pairs(engine.step().counts) == [(0, 3), (1, 3), (2, 2)]


def test_a_chunk_of_one_token_that_ends_no_prompt_is_named_in_the_plan():
    """The worker takes a plan without counts for decodes, all of which sample; the core died of the token it had not
    planned."""
    engine = Engine(max_num_batched_tokens=2)
    engine.add(1, prompt(2))
    engine.step()
    engine.add(2, prompt(3, 20))
    assert pairs(engine.step().counts) == [(1, 1)]
    assert pairs(engine.step().counts) == [(1, 1)]
    assert pairs(engine.step().counts) == []    # the last token of the prompt: it samples like a decode
    assert len(engine.tokens[2]) == 1


def test_without_chunks_a_prompt_waits_for_a_step_that_holds_it():
    engine = Engine(max_num_batched_tokens=8, enable_chunked_prefill=False)
    engine.add(1, prompt(3), max_tokens=2)
    engine.add(2, prompt(8, 10))
    first = engine.step()
    assert new_rows(first) == [(1, 3, 0, 1)]    # 5 tokens of the budget are left, 8 are needed
    engine.step()
    assert engine.ends[1].reason == FINISH_LENGTH
    assert new_rows(engine.step()) == [(2, 8, 0, 2)]
    engine.run()
    engine.assert_idle()


def test_a_step_never_has_more_rows_than_seats():
    engine = Engine(max_num_seqs=2)
    for request_id in (1, 2, 3):
        engine.add(request_id, prompt(2, request_id), max_tokens=1 + request_id)
    assert [new[0] for new in new_rows(engine.step())] == [1, 2]
    engine.step()
    third = engine.step()                       # 1 has ended
    assert new_rows(third) == [(3, 2, 0, 1)] and pairs(third.moves) == [(0, 1)]


def test_seats_are_never_more_than_tokens_of_a_step():
    assert Engine(max_num_seqs=50, max_num_batched_tokens=4).rows.seats == 4


def test_the_last_row_takes_the_place_of_one_that_ended():
    engine = Engine()
    for request_id, count in ((1, 2), (2, 5), (3, 5)):
        engine.add(request_id, prompt(2, request_id), max_tokens=count)
    engine.step()
    engine.step()
    assert pairs(engine.step().moves) == [(0, 2)]
    assert [engine.request(i).row for i in (3, 2)] == [0, 1]


# ---------------------------------------------------------------- the prefix cache

def test_the_newest_token_is_always_computed():
    """A prompt of two full blocks, all of it cached: one block is adopted, the last token must be computed."""
    engine = Engine()
    engine.add(1, prompt(8), max_tokens=1)
    engine.run()
    engine.add(2, prompt(8), max_tokens=1)
    plan = engine.step()
    assert new_rows(plan) == [(2, 8, 4, 2)] and pairs(plan.counts) == [(0, 4)]
    engine.add(3, prompt(9), max_tokens=1)
    assert new_rows(engine.step()) == [(3, 9, 8, 3)]
    assert engine.tokens[1] == engine.tokens[2]


def test_requests_of_one_step_share_a_prefix():
    """Every layer writes all keys and values of a step before any attention reads them."""
    engine = Engine()
    engine.add(1, prompt(12))
    engine.add(2, prompt(12))
    plan = engine.step()
    assert new_rows(plan) == [(1, 12, 0, 3), (2, 12, 8, 3)]
    assert unpack(plan.new_blocks) == [1, 2, 3, 1, 2, 4] and pairs(plan.counts) == [(0, 12), (1, 4)]
    assert engine.blocks.ref_count[1:5] == [2, 2, 1, 1]
    engine.run()
    assert engine.tokens[1] == engine.tokens[2]
    engine.assert_idle()


def test_a_burst_computes_a_shared_prefix_once_also_over_several_chunks():
    """Rows in mid-prompt look the cache up again at each chunk, so two requests compute a shared prompt in turns."""
    engine = Engine(max_num_batched_tokens=8, long_prefill_token_threshold=4)
    engine.add(1, prompt(17))
    engine.add(2, prompt(17))
    first = engine.step()
    assert new_rows(first) == [(1, 17, 0, 1), (2, 17, 4, 2)] and unpack(first.new_blocks) == [1, 1, 2]
    second = engine.step()
    assert pairs(second.advance) == [(0, 4), (1, 4)] and pairs(second.counts) == [(0, 4), (1, 4)]
    assert pairs(second.extend) == [(0, 2), (0, 3), (1, 3), (1, 4)]
    third = engine.step()
    assert pairs(third.advance) == [(0, 4)] and pairs(third.extend) == [(0, 4), (0, 5), (1, 6)]
    assert engine.stats.num_computed_tokens == 16 + 2 and engine.stats.num_adopted_tokens == 12
    engine.run()
    assert engine.tokens[1] == engine.tokens[2]


def test_blocks_filled_by_decodes_are_found_by_others():
    engine = Engine()
    engine.add(1, prompt(3), max_tokens=6)
    engine.run()
    engine.add(2, prompt(3) + engine.tokens[1] + [1])
    assert new_rows(engine.step()) == [(2, 10, 8, 3)]


def test_a_finished_request_frees_its_tail_first():
    engine = Engine(num_blocks=6)
    engine.add(1, prompt(10), max_tokens=1)
    engine.run()
    assert free_queue(engine) == [4, 5, 6, 3, 2, 1]


def test_hit_statistics_count_once_at_admission():
    """Waiting requests that are tried in vain step after step once inflated the statistics."""
    engine = Engine(max_num_seqs=4, num_blocks=5)
    engine.add(1, prompt(12), max_tokens=6)
    engine.step()
    engine.add(2, prompt(12, 30), max_tokens=2)
    for _ in range(5):
        assert not engine.step().new
        assert engine.stats.num_queried_tokens == 12
    engine.run()
    assert (engine.stats.num_queried_tokens, engine.stats.num_hit_tokens) == (24, 0)
    assert engine.stats.hit_rate == 0.0


def test_hit_rate_is_the_share_of_first_admissions():
    engine = Engine()
    engine.add(1, prompt(12), max_tokens=1)
    engine.run()
    engine.add(2, prompt(12), max_tokens=1)
    engine.run()
    assert (engine.stats.num_queried_tokens, engine.stats.num_hit_tokens) == (24, 8)
    assert engine.stats.hit_rate == 8 / 24 and engine.admitted[2] == (8, 1) and engine.ends[2].num_cached_tokens == 8


def test_salts_do_not_share_blocks():
    engine = Engine()
    for request_id, salt in ((1, "a"), (2, "b"), (3, "a"), (4, "")):
        engine.add(request_id, prompt(9), salt=salt, max_tokens=1)
        engine.run()
    assert [engine.admitted[i][0] for i in (1, 2, 3, 4)] == [0, 0, 8, 0]


def test_nothing_is_shared_without_prefix_caching():
    engine = Engine(caching=False)
    engine.add(1, prompt(12))
    engine.add(2, prompt(12))
    assert new_rows(engine.step()) == [(1, 12, 0, 3), (2, 12, 0, 3)]


def test_nothing_computed_before_a_reset_is_found_after_it():
    """Resetting while a request runs: its blocks must not return to the cache when it ends."""
    engine = Engine()
    engine.add(1, prompt(12), max_tokens=8)
    engine.step()
    engine.scheduler.reset_prefix_cache()
    engine.add(2, prompt(13), max_tokens=2)
    assert new_rows(engine.step()) == [(2, 13, 0, 4)]
    engine.run()
    engine.add(3, prompt(12) + engine.tokens[1], max_tokens=1)
    assert engine.step().new[0].num_computed_tokens == 12       # what 2 computed since, and nothing of 1
    engine.run()
    engine.assert_idle()


def test_a_request_that_waited_through_a_reset_adopts_nothing_computed_from_old_blocks():
    engine = Engine(long_prefill_token_threshold=4)
    engine.add(1, prompt(17), max_tokens=8)
    engine.step()
    engine.step()
    engine.add(2, prompt(17), max_tokens=2)
    engine.scheduler.reset_prefix_cache()
    for _ in range(5):
        assert not pairs(engine.step().advance)
    assert engine.stats.num_adopted_tokens == 0 and engine.stats.num_hit_tokens == 0


# ---------------------------------------------------------------- pool pressure

def full_pool(**options) -> Engine:
    """Two requests that need a third block each in step 3, in a pool of four."""
    engine = Engine(num_blocks=4, **options)
    engine.add(1, prompt(7))
    engine.add(2, prompt(7, 20))
    plan = engine.step()
    assert unpack(plan.new_blocks) == [1, 2, 3, 4]
    engine.step()
    return engine


def test_a_full_pool_preempts_the_last_request():
    engine = full_pool()
    plan = engine.step()
    assert pairs(plan.moves) == [(1, 1)] and plan.num_rows == 1
    assert pairs(plan.extend) == [(0, 4)]       # freed tail first: block 4 was the first in the queue
    victim = engine.request(2)
    assert (victim.status, victim.num_preemptions, victim.num_recomputed_tokens) == (RequestStatus.PREEMPTED, 1, 8)
    assert free_queue(engine) == [3]


def test_a_preempted_request_returns_with_what_the_cache_still_has():
    engine = full_pool()
    engine.step()
    engine.step()                               # 1 ends with its fourth token
    assert engine.ends[1].reason == FINISH_LENGTH and free_queue(engine) == [3, 4, 2, 1]
    plan = engine.step()
    assert new_rows(plan) == [(2, 9, 4, 3)] and unpack(plan.new_blocks) == [3, 4, 2] and pairs(plan.counts) == [(0, 5)]
    assert unpack(plan.new_tokens)[:7] == prompt(7, 20) and unpack(plan.new_tokens)[7:] == engine.tokens[2][:2]
    assert engine.stats.num_resumed_hit_tokens == 4 and engine.stats.num_hit_tokens == 0
    engine.run()
    assert engine.ends[2].num_preemptions == 1
    engine.assert_idle()


def test_nobody_is_admitted_in_a_step_that_preempts():
    engine = full_pool()
    engine.add(3, [1], max_tokens=1)            # one block would be enough, and one is free
    plan = engine.step()
    assert free_queue(engine) == [3] and not plan.new
    assert not engine.step().new                # and nobody overtakes the victim, which comes first and does not fit
    engine.run()
    assert list(engine.admitted) == [1, 2, 3]


def test_a_victim_computes_nothing_in_the_step_that_preempts_it():
    engine = full_pool()
    plan = engine.step()
    assert len(engine.worker.rows) == plan.num_rows == 1 and engine.worker.rows[0].request_id == 1
    assert len(engine.tokens[2]) == 2


def test_the_victim_is_the_last_in_policy_order():
    engine = Engine(num_blocks=4, policy="priority")
    engine.add(1, prompt(7), priority=5)
    engine.add(2, prompt(7, 20), priority=0)
    engine.step()
    engine.step()
    engine.step()
    assert engine.request(1).status == RequestStatus.PREEMPTED and engine.request(2).row == 0


def test_a_row_asks_those_behind_it_before_it_gives_up_itself():
    engine = Engine(num_blocks=6)
    for request_id in (1, 2, 3):
        engine.add(request_id, prompt(7, 10 * request_id), max_tokens=9)
    engine.step()
    engine.step()
    engine.step()                               # 1 and 2 need a block each: 3 gives back two
    assert [engine.request(i).status for i in (1, 2, 3)] == [RequestStatus.RUNNING, RequestStatus.RUNNING,
                                                             RequestStatus.PREEMPTED]
    engine.run()
    engine.assert_idle()


def test_swap_copies_the_victims_blocks_to_the_host_and_back():
    engine = full_pool(num_host_blocks=4, preemption_mode="swap")
    plan = engine.step()
    assert pairs(plan.swap_out) == [(3, 0), (4, 1)] and pairs(plan.extend) == [(0, 4)]
    assert engine.request(2).num_swapped_tokens == 8 and engine.stats.num_swapped_out_blocks == 2
    engine.step()
    back = engine.step()
    assert new_rows(back) == [(2, 9, 8, 3)] and unpack(back.new_blocks) == [3, 4, 2]
    assert pairs(back.swap_in) == [(1, 4)]      # block 3 is still cached: adopted, not copied
    assert pairs(back.counts) == [] and engine.request(2).num_recomputed_tokens == 0
    engine.run()
    engine.assert_idle()


def test_swap_falls_back_to_recompute_when_the_host_pool_is_full():
    engine = full_pool(num_host_blocks=1, preemption_mode="swap")
    plan = engine.step()
    assert not pairs(plan.swap_out) and engine.request(2).num_recomputed_tokens == 8
    engine.run()
    engine.assert_idle()


@pytest.mark.parametrize("options", [dict(), dict(num_host_blocks=8, preemption_mode="swap")])
@pytest.mark.parametrize("is_async", [False, True])
def test_preempted_requests_give_the_tokens_they_give_alone(options, is_async):
    engine = Engine(num_blocks=6, async_scheduling=is_async, **options)
    alone = Engine()
    for request_id in range(1, 6):
        engine.add(request_id, prompt(5 + request_id, request_id), max_tokens=9)
        alone.add(request_id, prompt(5 + request_id, request_id), max_tokens=9)
        alone.run()
    engine.run()
    assert engine.stats.num_preemptions > 0 and engine.tokens == alone.tokens
    engine.assert_idle()


def test_the_newest_token_in_flight_of_a_preempted_request_is_accepted():
    engine = Engine(num_blocks=4, async_scheduling=True)
    engine.add(1, prompt(7), max_tokens=6)
    engine.add(2, prompt(7, 20), max_tokens=6)
    engine.plan()
    engine.plan()
    engine.finish_step()
    plan = engine.plan()                        # preempts 2, whose second token is in flight
    assert pairs(plan.moves) == [(1, 1)] and engine.request(2).num_in_flight == 1 and len(engine.tokens[2]) == 1
    engine.finish_step()
    assert engine.request(2).num_in_flight == 0 and len(engine.tokens[2]) == 2
    assert engine.request(2).num_known_tokens == 9
    engine.run()
    engine.assert_idle()


def test_a_request_with_tokens_in_flight_is_not_admitted_again_before_they_are_known():
    engine = Engine(num_blocks=4, async_scheduling=True)
    engine.add(1, prompt(7), max_tokens=3)      # its last token is in flight when 2 is preempted
    engine.add(2, prompt(7, 20), max_tokens=6)
    engine.plan()
    engine.plan()
    engine.finish_step()
    engine.plan()
    assert engine.request(2).num_in_flight == 1
    engine.core.handle(0, Abort([1]))           # all blocks are free now, and 2 still waits for its token
    assert not engine.core.can_plan()
    engine.finish_step()
    plan = engine.plan()
    assert new_rows(plan)[0][:2] == (2, 9)
    engine.run()
    engine.assert_idle()


def test_a_row_whose_last_token_is_in_flight_computes_nothing_more():
    engine = Engine(async_scheduling=True)
    engine.add(1, prompt(3), max_tokens=1)
    engine.add(2, prompt(3, 9), max_tokens=3)
    engine.plan()
    second = engine.plan()
    assert pairs(second.counts) == [(0, 0)] and second.num_rows == 2
    engine.run()
    assert engine.stats.num_wasted_tokens == 0


def test_a_victim_of_this_step_does_not_return_in_it():
    """It made room for an urgent request and fitted again at once: one plan copied its blocks out and back in, and read
    host slots that were not written yet."""
    engine = Engine(num_blocks=7, num_host_blocks=8, preemption_mode="swap", policy="priority", max_num_seqs=2,
                    long_prefill_token_threshold=4)
    engine.add(1, prompt(10), priority=5, max_tokens=8)
    for _ in range(3):
        engine.step()
    engine.add(2, prompt(20, 20), priority=0)
    plan = engine.step()
    assert [new.request_id for new in plan.new] == [2] and pairs(plan.swap_out) and not pairs(plan.swap_in)
    engine.run()
    alone = Engine()
    alone.add(1, prompt(10), max_tokens=8)
    alone.run()
    assert engine.tokens[1] == alone.tokens[1]
    engine.assert_idle()


# ---------------------------------------------------------------- admission control

def error_of(engine: Engine, request_id: int) -> str:
    engine.take()
    end = engine.ends[request_id]
    assert end.reason == FINISH_ERROR and not engine.core.requests
    return end.message


def test_a_prompt_that_can_never_fit_is_refused_with_the_numbers():
    engine = Engine(num_blocks=2)
    engine.add(1, prompt(9))
    assert "the prompt has 9 tokens and the whole cache holds 8" in error_of(engine, 1)
    engine.add(2, prompt(8), max_tokens=3)
    engine.run()
    assert len(engine.tokens[2]) == 1           # the ninth token needs no slot, a tenth would
    engine.assert_idle()


def test_a_prompt_as_long_as_the_context_is_refused():
    engine = Engine(max_model_len=10)
    engine.add(1, prompt(10))
    assert "the prompt has 10 tokens and max_model_len is 10" in error_of(engine, 1)
    engine.add(2, prompt(9), max_tokens=5)
    engine.run()
    assert len(engine.tokens[2]) == 1


def test_an_empty_prompt_is_refused():
    engine = Engine()
    engine.add(1, [])
    assert "empty" in error_of(engine, 1)


def test_without_chunks_a_prompt_above_the_budget_is_refused():
    engine = Engine(max_num_batched_tokens=8, enable_chunked_prefill=False)
    engine.add(1, prompt(9))
    message = error_of(engine, 1)
    assert "9 tokens" in message and "8" in message and "chunked prefill is off" in message


@pytest.mark.parametrize("max_tokens", [None, 100])
def test_max_tokens_is_clamped_to_the_pool_and_said(max_tokens):
    engine = Engine(num_blocks=2)
    engine.add(1, prompt(5), max_tokens=max_tokens)
    engine.run()
    assert engine.admitted[1] == (0, 4) and len(engine.tokens[1]) == 4 and engine.ends[1].reason == FINISH_LENGTH
    engine.assert_idle()


def test_choices_of_one_prompt_share_its_blocks_and_end_apart():
    engine = Engine()
    for choice in range(3):
        engine.add(10 + choice, prompt(9), choice=choice, max_tokens=2 + choice)
    plan = engine.step()
    assert [(new.request_id, new.choice, new.num_computed_tokens)
            for new in plan.new] == [(10, 0, 0), (11, 1, 8), (12, 2, 8)]
    engine.run()
    assert [len(engine.tokens[i]) for i in (10, 11, 12)] == [2, 3, 4]
    engine.assert_idle()


# ---------------------------------------------------------------- aborts

def abort(engine: Engine, request_id: int) -> None:
    engine.core.handle(0, Abort([request_id]))
    engine.take()
    assert engine.ends[request_id].reason == FINISH_ABORT
    engine.check()


def test_abort_of_a_waiting_request_that_was_never_scheduled():
    engine = Engine()
    engine.add(1, prompt(9))
    abort(engine, 1)
    assert not engine.core.can_plan()
    engine.assert_idle()


def test_abort_in_mid_prompt_frees_every_block_and_keeps_the_computed_ones_findable():
    engine = Engine(max_num_batched_tokens=8)
    engine.add(1, prompt(20))
    engine.step()
    abort(engine, 1)
    engine.assert_idle()
    engine.add(2, prompt(20), max_tokens=1)
    assert new_rows(engine.step()) == [(2, 20, 8, 4)]


@pytest.mark.parametrize("is_async", [False, True])
def test_abort_with_plans_in_flight_drops_their_tokens(is_async):
    engine = Engine(async_scheduling=is_async)
    engine.add(1, prompt(3), max_tokens=9)
    engine.add(2, prompt(3, 9), max_tokens=3)
    plans = [engine.plan() for _ in range(2 if is_async else 1)]
    abort(engine, 1)
    engine.run()
    assert engine.tokens[1] == [] and len(engine.tokens[2]) == 3
    assert engine.stats.num_wasted_tokens == len(plans)
    engine.assert_idle()


@pytest.mark.parametrize("mode", [dict(), dict(num_host_blocks=4, preemption_mode="swap")])
def test_abort_of_a_preempted_request_gives_back_its_host_slots(mode):
    engine = full_pool(**mode)
    engine.step()
    assert engine.request(2).status == RequestStatus.PREEMPTED
    abort(engine, 2)
    engine.run()
    engine.assert_idle()


def test_abort_of_a_preempted_request_with_a_token_in_flight():
    engine = Engine(num_blocks=4, async_scheduling=True)
    engine.add(1, prompt(7), max_tokens=6)
    engine.add(2, prompt(7, 20), max_tokens=6)
    engine.plan()
    engine.plan()
    engine.finish_step()
    engine.plan()
    assert engine.request(2).num_in_flight == 1
    abort(engine, 2)
    engine.run()
    assert len(engine.tokens[2]) == 1 and len(engine.tokens[1]) == 6
    engine.assert_idle()


def test_abort_of_a_finished_or_unknown_request_is_ignored():
    engine = Engine()
    engine.add(1, prompt(3), max_tokens=1)
    engine.run()
    engine.core.handle(0, Abort([1, 999]))
    engine.take()
    assert engine.ends[1].reason == FINISH_LENGTH and list(engine.ends) == [1]


def test_on_finish_is_called_before_the_blocks_are_freed():
    engine = Engine()
    seen = []
    engine.scheduler.on_finish = lambda request: seen.append((request.request_id, list(request.blocks)))
    engine.add(1, prompt(5), max_tokens=1)
    engine.run()
    assert seen == [(1, [1, 2])]


def test_blocks_that_decodes_fill_extend_the_hash_chain_one_by_one():
    """Else each one hashes the whole request again."""
    engine = Engine()
    engine.add(1, prompt(3), max_tokens=12)
    for _ in range(11):
        engine.step()
        request = engine.request(1)
        engine.scheduler.settle()
        full = int(engine.rows.computed[0]) // 4
        assert len(request.hashes) == full == request.num_published
        assert len(request.tokens) >= full * 16


def test_adoption_in_mid_prompt_holds_back_only_what_later_rows_need():
    """Three blocks are free: one for the decode, one for each chunk after the block it adopts."""
    engine = Engine(num_blocks=6, long_prefill_token_threshold=4)
    engine.add(1, prompt(4, 30), max_tokens=5)
    engine.add(2, prompt(13), max_tokens=1)
    engine.add(3, prompt(13), max_tokens=1)
    engine.step()
    plan = engine.step()
    assert pairs(plan.advance) == [(1, 4), (2, 4)] and len(pairs(plan.extend)) == 1 + 2 + 2
    engine.run()
    assert engine.tokens[2] == engine.tokens[3]
    engine.assert_idle()


def test_a_request_whose_prefix_others_hold_needs_only_the_rest_of_its_blocks():
    """Two blocks are free, the request has five, four of them are in use by the one before."""
    engine = Engine(num_blocks=6)
    engine.add(1, prompt(16), max_tokens=2)
    engine.step()
    engine.add(2, prompt(16) + [1], max_tokens=1)
    assert new_rows(engine.step()) == [(2, 17, 16, 5)]
    engine.run()
    engine.assert_idle()


def test_rows_that_compute_nothing_cost_no_budget():
    """Three requests whose last tokens are in flight, and a prompt that takes a whole step."""
    engine = Engine(async_scheduling=True, max_num_batched_tokens=8, num_blocks=32)
    for request_id in (1, 2, 3):
        engine.add(request_id, [request_id], max_tokens=1)
    engine.add(4, prompt(16), max_tokens=1)
    assert pairs(engine.plan().counts) == [(3, 5)]
    ahead = engine.plan()
    assert dict(pairs(ahead.counts)) == {0: 0, 1: 0, 2: 0, 3: 8}
    engine.run()
    engine.assert_idle()


def test_a_waiting_request_knows_how_much_of_it_is_cached():
    engine = Engine(max_num_seqs=1)
    engine.add(1, prompt(8), max_tokens=1)
    engine.run()
    engine.add(2, prompt(9))
    engine.add(3, prompt(8))                    # its last token must be computed
    assert [engine.scheduler.cached_tokens(engine.request(i)) for i in (2, 3)] == [8, 4]


def test_a_request_that_needs_its_whole_prompt_has_another_chain_after_each_preemption():
    """Else it finds its own blocks, and log-probabilities of their positions are never told."""
    engine = Engine()
    engine.add(1, prompt(9), prompt_logprobs=0)
    engine.add(2, prompt(9))
    engine.step()
    whole, usual = engine.request(1), engine.request(2)
    roots = whole.root, usual.root
    engine.scheduler.give_back(whole)
    engine.scheduler.give_back(usual)
    assert whole.root != roots[0] and usual.root == roots[1]
    assert engine.scheduler.cached_tokens(whole) == 0 and engine.scheduler.cached_tokens(usual) == 8
