"""The worker's rows: exact small cases, and every plan of a random engine against a plain reference."""
from __future__ import annotations

import numpy as np
import pytest

from ipc.messages import KeptRow, NewRow, SchedulerOutput, WorkerReady
from ipc.sampling_params import SamplingParams
from bench.simulation import Options, pack, unpack
from tests.worker.mirror import mirror
from worker.kept_rows import with_kept_rows
from worker.request_state import RequestState


def plan_of(*requests: tuple[int, list[int], list[int]], num_rows: int | None = None, **columns) -> SchedulerOutput:
    """A plan whose new rows are (request id, tokens, blocks), nothing computed."""
    new = [NewRow(i, len(tokens), len(tokens), 0, len(blocks),
                  SamplingParams(seed=i, min_tokens=i % 2, stop_token_ids=[i]))
           for i, tokens, blocks in requests]
    return SchedulerOutput(1, len(new) if num_rows is None else num_rows, new=new,
                           new_tokens=pack([t for _, tokens, _ in requests for t in tokens]),
                           new_blocks=pack([b for _, _, blocks in requests for b in blocks]),
                           **{name: value if name == "reset" else pack(value) for name, value in columns.items()})


def state_of(*requests: tuple[int, list[int], list[int]]) -> RequestState:
    state = RequestState(4, 16, 2)
    state.apply(plan_of(*requests))
    return state


THREE = ((1, [10, 11, 12], [5, 6]), (2, [20], [7]), (3, [30, 31], [8]))


def test_new_rows_take_their_part_of_the_packed_columns():
    state = state_of(*THREE)
    assert state.n == 3 and state.request_id[:3].tolist() == [1, 2, 3]
    assert [state.tokens[i, :n].tolist() for i, n in enumerate((3, 1, 2))] == [[10, 11, 12], [20], [30, 31]]
    assert state.block_table[:3, :3].tolist() == [[5, 6, 0], [7, 0, 0], [8, 0, 0]]
    assert state.known[:3].tolist() == [3, 1, 2] and state.num_blocks[:3].tolist() == [2, 1, 1]
    assert state.floor[:3].tolist() == [4, 1, 3] and state.num_with_floor == 2


def test_a_move_copies_the_whole_row():
    state = state_of(*THREE)
    state.computed[2] = 1
    state.apply(plan_of(num_rows=2, moves=[0, 2]))
    assert state.request_id[:2].tolist() == [3, 2] and state.tokens[0, :2].tolist() == [30, 31]
    assert state.block_table[0].tolist() == [8] + [0] * (state.width - 1)    # nothing left of the one that was here
    assert (state.computed[0], state.known[0], state.seed[0], state.stop_ids[0]) == (1, 2, 3, [3])
    assert not state.block_table[2].any() and state.num_with_floor == 1


def test_moves_come_before_new_rows_and_these_before_extensions():
    state = state_of(*THREE)
    state.apply(plan_of((4, [40, 41], [9]), num_rows=3, moves=[0, 2], extend=[2, 3], counts=[2, 2]))
    assert state.request_id[:3].tolist() == [3, 2, 4] and state.block_table[2, :2].tolist() == [9, 3]


def test_a_row_may_be_extended_by_several_blocks_in_order():
    state = state_of(*THREE)
    state.apply(plan_of(num_rows=3, extend=[1, 2, 1, 3, 0, 4], counts=[1, 4]))
    assert state.block_table[1, :3].tolist() == [7, 2, 3] and state.block_table[0, :3].tolist() == [5, 6, 4]


def test_decode_rows_are_extended_by_one_block_each():
    state = state_of(*THREE)
    state.apply(plan_of(num_rows=3, extend=[2, 3, 0, 4]))
    assert state.num_blocks[:3].tolist() == [3, 1, 2]
    assert state.block_table[2, 1] == 3 and state.block_table[0, 2] == 4


def test_advance_counts_tokens_that_adopted_blocks_hold():
    state = state_of(*THREE)
    state.apply(plan_of(num_rows=3, advance=[0, 2]))
    assert state.computed[:3].tolist() == [2, 0, 0]


def test_a_reset_drops_all_rows_and_leaves_nothing_of_them_in_the_tables():
    """A table is padded with the null block: an over-read must not show another request's keys and values."""
    state = state_of(*THREE)
    state.apply(plan_of((9, [1], [2]), reset=True))
    assert state.n == 1 and state.num_with_floor == 1
    assert state.block_table[0].tolist() == [2] + [0] * (state.width - 1) and not state.block_table[1:].any()


def test_rows_that_differ_from_the_plan_are_a_broken_invariant():
    with pytest.raises(RuntimeError, match="step 1: 3 rows here, 2 in the plan"):
        state_of(*THREE).apply(plan_of(num_rows=2))


def test_stop_tokens_are_masked_below_min_tokens_only():
    state = RequestState(4, 16, 2)
    params = [SamplingParams(min_tokens=2, stop_token_ids=[5], seed=1),
              SamplingParams(min_tokens=2, ignore_eos=True, seed=1),
              SamplingParams(seed=1, stop_token_ids=[5])]
    new = [NewRow(i, 1, 1, 0, 1, p) for i, p in enumerate(params)]
    state.apply(SchedulerOutput(1, 3, new=new, new_tokens=pack([1, 1, 1]), new_blocks=pack([1, 2, 3])))

    def masked() -> list[tuple[int, int]]:
        index, ids = state.masked_tokens(np.arange(3), 0, [7])
        return list(zip(index.tolist(), ids.tolist()))
    assert masked() == [(0, 5), (0, 7)]         # the first token: the second may be the last
    state.known += 1
    assert masked() == []


def test_the_longest_request_fits_its_row():
    state = RequestState(1, 6, 4)
    state.apply(plan_of((1, [1] * 6, [1, 2])))
    state.tokens[0, 6] = 9                      # the token after the last has a place too
    assert state.tokens[0].tolist() == [1] * 6 + [9]


@pytest.mark.parametrize("seed", range(12))
def test_rows_equal_a_plain_reference_under_random_plans(seed):
    assert mirror(seed, Options(num_requests=25, fault_rate=0.03, loss_rate=0.01)).state is not None


def test_what_a_new_core_is_told_equals_a_plain_reference():
    options = Options(num_requests=25, restart_rate=0.05, reset_rate=0.03, fault_rate=0.02)
    assert sum(mirror(seed, options).num_kept_rows for seed in range(40, 52)) > 50


def test_a_row_of_values_that_are_not_finite_takes_those_who_share_its_blocks_with_it():
    state = RequestState(3, 40, 2)
    state.apply(plan_of((1, [1] * 7, [1, 2, 3, 4]), (2, [1] * 7, [1, 2, 5, 6]), (3, [2] * 7, [7, 8, 9, 10])))
    state.computed[:3] = 6, 6, 5
    state.is_reusable[0] = False
    ready = WorkerReady(10, 0, 40, 50, [], "float32", "")
    kept = with_kept_rows(ready, state, is_sound=True)
    assert kept.kept == [KeptRow(3, 5)] and unpack(kept.kept_blocks) == [7, 8, 9]
    state.block_table[1, 0] = 11                # its own first block, then a shared one
    kept = with_kept_rows(ready, state, is_sound=True)
    assert kept.kept == [KeptRow(2, 2), KeptRow(3, 5)] and unpack(kept.kept_tokens) == [1] * 2 + [2] * 5
    assert with_kept_rows(ready, state, is_sound=False) is ready


def test_rows_with_options_are_counted_until_they_leave():
    state = RequestState(4, 16, 2)
    new = [NewRow(i, 1, 1, 0, 1, p) for i, p in enumerate([SamplingParams(logprobs=1, seed=1), SamplingParams(seed=1),
                                                           SamplingParams(presence_penalty=1.0, seed=1)])]
    state.apply(SchedulerOutput(1, 3, new=new, new_tokens=pack([1, 1, 1]), new_blocks=pack([1, 2, 3])))
    assert state.num_with_options == 2
    state.apply(SchedulerOutput(2, 2, moves=pack([0, 2])))
    assert state.num_with_options == 1 and [row for row, _ in state.options_of(np.arange(2))] == [0]
    state.clear()
    assert state.num_with_options == 0


def test_a_row_without_a_seed_has_seed_zero():
    state = RequestState(1, 16, 2)
    state.apply(SchedulerOutput(1, 1, new=[NewRow(1, 1, 1, 0, 1, SamplingParams())], new_tokens=pack([1]),
                                new_blocks=pack([1])))
    assert state.seed[0] == 0
