"""Batches: the picture of worker/batch.py as a test, and every plan of a random engine against a plain reference."""
from __future__ import annotations

import numpy as np
import pytest

from ipc.messages import SchedulerOutput
from bench.simulation import Options, pack
from tests.worker.mirror import MirrorWorker, mirror
from tests.worker.test_request_state import plan_of
from worker.batch import Batch, BatchBuilder
from worker.request_state import RequestState


def builder_of(*requests: tuple[int, list[int], list[int]], computed: tuple[int, ...], size: int = 4) -> BatchBuilder:
    state = RequestState(8, 64, size)
    state.apply(plan_of(*requests))
    state.computed[:len(computed)] = computed
    return BatchBuilder(state, 32)


def build(builder: BatchBuilder, **columns) -> Batch:
    batch = builder.build(SchedulerOutput(1, builder.state.n, **{name: pack(value) for name, value in columns.items()}))
    assert batch is not None
    return batch


def test_chunks_decodes_and_new_rows_lie_flat():
    """The picture at the top of worker/batch.py."""
    builder = builder_of((1, list(range(20)), [1, 2, 3, 4, 5]), (2, list(range(42)), list(range(10, 21))),
                         (3, list(range(10)), [6, 7, 8]), (4, [40, 41, 42, 43], [9]), computed=(6, 41, 9, 0))
    batch = build(builder, counts=[0, 3, 3, 4])
    assert batch.input_ids.tolist() == [6, 7, 8, 41, 9, 40, 41, 42, 43]
    assert batch.positions.tolist() == [6, 7, 8, 41, 9, 0, 1, 2, 3]
    assert batch.meta.query_start_loc.tolist() == [0, 3, 4, 5, 9] and batch.meta.seq_lens.tolist() == [9, 42, 10, 4]
    assert batch.meta.slot_mapping.tolist() == [2 * 4 + 2, 2 * 4 + 3, 3 * 4, 20 * 4 + 1, 8 * 4 + 1, 36, 37, 38, 39]
    assert batch.logits_index is not None and batch.logits_index.tolist() == [3, 4, 8]     # row 0 is in mid-prompt
    assert batch.sample_rows.tolist() == [1, 2, 3]
    assert batch.last is not None and batch.last.rows.tolist() == [3, 4, 8] and batch.last.meta.decode_only
    assert batch.last.meta.seq_lens.tolist() == [42, 10, 4] and batch.last.meta.query_start_loc.tolist() == [0, 1, 2, 3]
    assert batch.last.meta.slot_mapping.tolist() == [20 * 4 + 1, 8 * 4 + 1, 39]
    assert batch.last.meta.block_table.tolist() == batch.meta.block_table[1:].tolist()
    assert batch.meta.block_table.shape == (4, 11) and batch.meta.block_table[3].tolist() == [9] + [0] * 10
    assert (batch.meta.max_query_len, batch.meta.max_seq_len, batch.meta.decode_only) == (4, 42, False)
    assert builder.advance(batch, np.array([7, 8, 9], np.int32))[0].tolist() == [-1, 7, 8, 9]
    assert builder.state.computed[:4].tolist() == [9, 42, 10, 4] and builder.state.known[:4].tolist() == [20, 43, 11, 5]


def test_a_decode_step_reads_the_newest_token_of_each_row():
    builder = builder_of((1, [5, 6, 7, 8], [3]), (2, [9], [2]), computed=(3, 0))
    batch = build(builder)
    assert batch.input_ids.tolist() == [8, 9] and batch.positions.tolist() == [3, 0] and batch.logits_index is None
    assert batch.meta.slot_mapping.tolist() == [15, 8] and batch.meta.decode_only and batch.counts is None
    assert builder.advance(batch, np.array([1, 2], np.int32))[0].tolist() == [1, 2]
    builder.state.apply(SchedulerOutput(2, 2, extend=pack([0, 4])))
    again = build(builder)
    assert again.input_ids.tolist() == [1, 2] and again.meta.slot_mapping.tolist() == [16, 9]


def test_rows_that_compute_nothing_are_not_in_the_batch():
    builder = builder_of((1, [5, 6], [3]), (2, [9, 8], [2]), (3, [7, 7], [1]), computed=(1, 1, 1))
    batch = build(builder, counts=[1, 0])
    assert batch.input_ids.tolist() == [6, 7] and batch.sample_rows.tolist() == [0, 2]
    assert batch.meta.block_table.tolist() == [[3], [1]]
    assert builder.advance(batch, np.array([1, 2], np.int32))[0].tolist() == [1, -1, 2]


def test_rows_with_logits_are_parted_from_the_others_only_where_those_are_as_many():
    builder = builder_of((1, [5, 6, 7], [3]), (2, [9], [2]), (3, [8], [4]), (4, list(range(12)), [5, 6, 7]),
                         computed=())
    assert build(builder, counts=[0, 1, 3, 0]).last is None         # of 3 tokens, 2 have logits
    parted = build(builder, counts=[0, 2, 1, 0, 3, 9]).last
    assert parted is not None and parted.rows.tolist() == [2] and parted.meta.seq_lens.tolist() == [1]
    nobody = build(builder, counts=[0, 2, 1, 0, 2, 0, 3, 4]).last
    assert nobody is not None and nobody.rows.tolist() == [] and nobody.meta.block_table.shape == (0, 0)


def test_a_step_in_which_no_row_computes_is_no_batch():
    builder = builder_of((1, [5, 6], [3]), computed=(1,))
    plan = SchedulerOutput(1, 1, counts=pack([0, 0]))
    assert builder.build(plan) is None and builder.advance(None, np.empty(0, np.int32))[0].tolist() == [-1]
    builder.state.clear()
    assert builder.build(SchedulerOutput(2, 0)) is None
    assert builder.advance(None, np.empty(0, np.int32))[0].tolist() == []


@pytest.mark.parametrize("computed, slot", [(3, 4 + 3), (4, 8), (5, 9)])
def test_slots_at_a_block_boundary(computed, slot):
    batch = build(builder_of((1, list(range(computed + 1)), [1, 2]), computed=(computed,)))
    assert batch.meta.slot_mapping.tolist() == [slot]


def test_a_bad_row_leaves_an_id_that_a_step_in_flight_can_read():
    """Its token is -1 in the result; as the next step's input it once failed that step for everybody."""
    builder = builder_of((1, [5, 6], [3]), (2, [9, 8], [2]), computed=(1, 1))
    batch = build(builder)
    assert builder.advance(batch, np.array([-1, 4], np.int32))[0].tolist() == [-1, 4]
    assert build(builder).input_ids.tolist() == [0, 4]


@pytest.mark.parametrize("is_async", [False, True])
def test_batches_equal_a_plain_reference_under_random_plans(is_async):
    compared = decodes = drafted = 0
    for seed in range(20, 32):
        worker: MirrorWorker = mirror(seed, Options(num_requests=25, async_scheduling=is_async))
        compared += worker.num_compared
        decodes += worker.num_decode_batches
        drafted += worker.num_drafted
    assert compared > 500 and decodes > 50 and drafted > 50
