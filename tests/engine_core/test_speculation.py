"""Drafts in the core: what is planned, what comes back, what is given back. At random: tests/properties."""
from __future__ import annotations

import pytest

from bench.sim_worker import SimRow, SimWorker, expected_outputs, extend_history, next_token
from bench.simulation import VOCAB, Options, pack, simulate_steps
from engine_core.preemption import preempt
from engine_core.scheduler import Step
from ipc.config import CacheConfig, SchedulerConfig
from ipc.errors import ConfigError
from ipc.messages import FINISH_LENGTH, FINISH_STOP, ModelRunnerOutput
from tests.engine_core.tools import Engine, pairs
from tests.ipc.engine_fakes import make_config

PROMPT = [3, 1, 4, 1, 5]


def propose(engine: Engine, *proposals: tuple[int, list[int]]) -> ModelRunnerOutput:
    """The next result, proposing these drafts per row instead of the worker's own."""
    result = engine.result()
    flat = [x for row, tokens in proposals for token in tokens for x in (row, token)]
    result.spec_token_ids = pack(flat)
    return result


def right(prompt: list[int], count: int, skip: int = 0) -> list[int]:
    return expected_outputs(prompt, skip + count, VOCAB)[skip:]


def test_drafts_are_verified_in_one_step_and_the_right_ones_stand():
    engine = Engine(num_speculative_tokens=3, max_num_seqs=4)
    engine.add(1, PROMPT, max_tokens=12)
    engine.plan()
    first, second, third = right(PROMPT, 3)
    engine.commit(propose(engine, (0, [second, third, (third + 1) % VOCAB])))
    assert engine.request(1).spec_token_ids == [second, third, (third + 1) % VOCAB]
    plan = engine.plan()
    assert pairs(plan.spec_token_ids) == [(0, second), (0, third), (0, (third + 1) % VOCAB)]
    assert pairs(plan.counts) == [(0, 4)]
    engine.finish_step()
    assert engine.tokens[1] == right(PROMPT, 4)             # two right drafts and the token after them
    assert (engine.stats.num_draft_tokens, engine.stats.num_accepted_tokens) == (3, 2)
    engine.run()
    assert engine.tokens[1] == right(PROMPT, 12)
    engine.assert_idle()


def test_blocks_behind_rejected_drafts_go_back():
    engine = Engine(num_blocks=8, block_size=4, num_speculative_tokens=3)
    engine.add(1, [7, 8], max_tokens=12)
    engine.plan()
    wrong = (right([7, 8], 2)[1] + 1) % VOCAB
    engine.commit(propose(engine, (0, [wrong] * 3)))
    engine.plan()                                           # computes positions 2 to 5: a second block
    assert len(engine.request(1).blocks) == 2
    engine.finish_step()
    assert len(engine.request(1).blocks) == 1               # 4 tokens are known; the worker agrees, else the next fails
    engine.run()
    assert engine.tokens[1] == right([7, 8], 12)
    engine.assert_idle()


def test_a_trimmed_block_is_the_next_one_taken():
    engine = Engine(num_blocks=8, block_size=4)
    got = engine.blocks.allocate(3)
    assert got is not None
    engine.blocks.trim(got, 1)
    assert len(got) == 1 and engine.blocks.pop_free() in (2, 3) and engine.blocks.num_free == 6


def test_a_row_with_drafts_waits_for_its_result_and_others_do_not():
    engine = Engine(num_speculative_tokens=2, async_scheduling=True)
    engine.add(1, PROMPT, max_tokens=20)
    engine.add(2, [9, 9], max_tokens=20)
    engine.plan()
    draft = right(PROMPT, 3)[1:]
    engine.commit(propose(engine, (0, draft)))
    plan = engine.plan()
    assert pairs(plan.counts) == [(0, 3)]
    ahead = engine.plan()                                   # before the result: only the other row
    assert pairs(ahead.counts) == [(0, 0)] and not ahead.spec_token_ids
    engine.commit(propose(engine))
    engine.commit(propose(engine))
    assert engine.tokens[1] == right(PROMPT, 4) and engine.tokens[2] == right([9, 9], 3)
    engine.run()
    assert engine.tokens[1] == right(PROMPT, 20) and engine.tokens[2] == right([9, 9], 20)


def test_a_proposal_that_a_plan_in_flight_made_stale_is_dropped_and_the_row_waits_once():
    engine = Engine(num_speculative_tokens=2, async_scheduling=True)
    engine.add(1, PROMPT, max_tokens=9)
    engine.plan()
    engine.plan()                                           # computes the token that the proposal would continue
    engine.commit(propose(engine, (0, [1, 2])))
    assert engine.request(1).spec_token_ids == [] and not engine.core.plan()
    engine.commit(propose(engine, (0, [3])))
    assert engine.request(1).spec_token_ids == [3]


@pytest.mark.parametrize("max_tokens", [2, 3, 4])
def test_a_request_ends_inside_its_drafts_at_its_limit(max_tokens):
    engine = Engine(num_speculative_tokens=3)
    engine.add(1, PROMPT, max_tokens=max_tokens)
    engine.plan()
    engine.commit(propose(engine, (0, right(PROMPT, 4)[1:])))
    engine.run()
    assert engine.tokens[1] == right(PROMPT, max_tokens) and engine.ends[1].reason == FINISH_LENGTH
    engine.assert_idle()


def test_a_request_ends_inside_its_drafts_at_a_stop_token():
    engine = Engine(num_speculative_tokens=3)
    tokens = right(PROMPT, 4)
    engine.add(1, PROMPT, max_tokens=9, stop_token_ids=[tokens[2]])
    engine.plan()
    engine.commit(propose(engine, (0, tokens[1:])))
    engine.run()
    assert engine.tokens[1] == tokens[:tokens.index(tokens[2]) + 1]
    assert (engine.ends[1].reason, engine.ends[1].stop_token_id) == (FINISH_STOP, tokens[2])
    engine.assert_idle()


def test_drafts_give_way_when_blocks_or_budget_are_short():
    engine = Engine(num_blocks=2, block_size=4, num_speculative_tokens=3)
    engine.add(1, [1, 2, 3, 4, 5, 6], max_tokens=3)
    engine.plan()
    engine.commit(propose(engine, (0, [7, 7, 7])))
    assert pairs(engine.plan().spec_token_ids) == [(0, 7)]  # two more tokens are allowed: one draft and the one after
    engine.finish_step()
    engine.run()
    assert engine.tokens[1] == right([1, 2, 3, 4, 5, 6], 3)
    tight = Engine(num_speculative_tokens=3, max_num_batched_tokens=8, max_num_seqs=2)
    tight.add(1, PROMPT, max_tokens=9)
    tight.plan()
    tight.commit(propose(tight, (0, [7, 7, 7])))
    tight.add(2, list(range(20)), max_tokens=2)
    assert sum(n for _, n in pairs(tight.plan().counts)) <= 8
    tight.finish_step()
    tight.run()
    assert tight.tokens[1] == right(PROMPT, 9)


def test_a_failed_step_forgets_its_drafts():
    engine = Engine(num_speculative_tokens=3)
    engine.add(1, PROMPT, max_tokens=9)
    engine.plan()
    engine.commit(propose(engine, (0, right(PROMPT, 4)[1:])))
    engine.fail(engine.plan())
    assert engine.request(1).spec_token_ids == []
    engine.run()
    assert engine.tokens[1] == right(PROMPT, 9)
    engine.assert_idle()


@pytest.mark.parametrize("accepted", [[0, 1, 0, 2, 0, 3, 0, 4], [5, 1], [0, VOCAB]])
def test_a_result_with_more_than_was_drafted_is_a_broken_invariant(accepted):
    engine = Engine(num_speculative_tokens=3)
    engine.add(1, PROMPT, max_tokens=9)
    engine.plan()
    engine.commit(propose(engine, (0, [1, 2, 3])))
    engine.plan()
    result = engine.result()
    result.accepted = pack(accepted)
    with pytest.raises(RuntimeError, match=r"returned"):
        engine.core.commit(result)


def test_more_drafts_than_a_block_holds_are_refused():
    with pytest.raises(ConfigError, match="--num-speculative-tokens is 4 and --block-size 4"):
        make_config(cache=CacheConfig(block_size=4), scheduler=SchedulerConfig(num_speculative_tokens=4))


def test_the_simulated_worker_proposes_right_and_wrong_drafts():
    worker, kinds = SimWorker(4, 4, 0, VOCAB, 3), set()
    for seed in range(200):
        row = SimRow(1, [seed % VOCAB], [extend_history(seed, seed % VOCAB)], 0, [1])
        drafts, h = worker._propose(row), row.history[-1]
        good = 0
        for token in drafts:
            good += token == next_token(h, VOCAB)
            h = extend_history(h, token)
        kinds.add((bool(drafts), good == 0, good == len(drafts)))
    assert len(kinds) >= 4


@pytest.mark.parametrize("drafts", [1, 6])
def test_no_wrong_read_with_drafts_under_random_load(drafts):
    done = simulate_steps(2_000, 9_000 + drafts, Options(speculation=drafts, fault_rate=0.03, loss_rate=0.003,
                                                         nan_rate=0.01, restart_rate=0.003))
    assert done.num_accepted_tokens > 200


def test_a_victims_drafts_in_flight_are_not_swapped_out():
    """Which of them are right is not known yet; its newest token is computed for certain."""
    engine = Engine(num_host_blocks=8, preemption_mode="swap", num_speculative_tokens=3, async_scheduling=True)
    engine.add(1, PROMPT, max_tokens=12)
    engine.plan()
    engine.commit(propose(engine, (0, [7, 7, 7])))
    engine.plan()
    request = engine.request(1)
    preempt(engine.scheduler, request, Step())
    assert request.num_swapped_tokens == len(PROMPT) + 1 and len(request.host_slots) == 2
