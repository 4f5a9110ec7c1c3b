"""Dense rows: moves, what plans in flight remember of them, and the ring of newest tokens."""
from __future__ import annotations

import pytest

from engine_core.request import Request, RequestStatus
from engine_core.rows import PlanRecord, Rows
from bench.simulation import pack, unpack
from tests.engine_core.tools import add_message


def make_request(request_id: int, prompt: list[int], **params) -> Request:
    request = Request(add_message(request_id, prompt, **params), request_id)
    request.max_total_tokens = 100
    return request


def fill(rows: Rows, count: int, prompt: tuple[int, ...] = (1, 2, 3)) -> list[Request]:
    requests = [make_request(i + 1, list(prompt)) for i in range(count)]
    for request in requests:
        rows.append(request, (0, request.arrival), computed=2, capacity=0)
    return requests


def in_flight(rows: Rows) -> PlanRecord:
    record = PlanRecord(1, rows.n, None, None, rows.n)
    rows.in_flight.append(record)
    return record


def test_a_new_request_takes_the_next_row():
    rows = Rows(4, 4)
    a, b = fill(rows, 2)
    assert (a.row, b.row, rows.n) == (0, 1, 2)
    assert a.status == RequestStatus.RUNNING
    assert rows.computed[:2].tolist() == rows.planned[:2].tolist() == [2, 2]
    assert rows.known[:2].tolist() == rows.length[:2].tolist() == [3, 3]
    assert rows.ids[:2].tolist() == [1, 2] and rows.limit[:2].tolist() == [100, 100]


def test_the_last_row_takes_the_place_of_one_that_leaves():
    rows = Rows(4, 4)
    a, b, c = fill(rows, 3)
    rows.computed[2] = 1
    rows.remove(a)
    assert (c.row, b.row, a.row, rows.n) == (0, 1, -1, 2)
    assert rows.request == [c, b, None, None] and rows.computed[0] == 1 and rows.ids[0] == 3
    assert rows.moves == [0, 2]


def test_the_last_row_leaves_without_a_move_of_others():
    rows = Rows(4, 4)
    a, b = fill(rows, 2)
    rows.remove(b)
    assert rows.moves == [1, 1] and (a.row, rows.n) == (0, 1)


def test_a_plan_in_flight_knows_where_its_rows_are_now():
    rows = Rows(4, 4)
    a, b, c = fill(rows, 3)
    record = in_flight(rows)
    a.status = RequestStatus.FINISHED
    rows.remove(a)                              # c: row 2 -> 0
    b.status = RequestStatus.FINISHED
    rows.remove(b)                              # row 1 was the last
    assert record.is_moved and record.current.tolist() == [-1, -1, 0] and record.detached == {}
    fill(rows, 1)                               # a newcomer in row 1 has nothing to do with the plan's row 1
    assert record.inverse.tolist() == [2, -1, -1, -1]


def test_a_preempted_request_stays_attached_to_plans_in_flight():
    rows = Rows(4, 4)
    a, b = fill(rows, 2)
    record = in_flight(rows)
    a.status = RequestStatus.PREEMPTED
    rows.remove(a)
    assert record.detached == {0: a} and a.num_in_flight == 1 and record.current.tolist() == [-1, 0]
    late = in_flight(rows)                      # planned without a
    b.status = RequestStatus.PREEMPTED
    rows.remove(b)
    assert record.detached == {0: a, 1: b} and late.detached == {0: b} and b.num_in_flight == 2


@pytest.mark.parametrize("block_size", [1, 4])
def test_newest_tokens_reach_the_request_in_order_whatever_the_ring_does(block_size):
    rows = Rows(1, block_size)
    (a,) = fill(rows, 1)
    for token in range(10, 40):
        known = int(rows.known[0])
        rows.flat_ring[rows.ring_base[0] + known % rows.ring_width] = token
        rows.known[0] = rows.length[0] = known + 1
        if (known + 1) % block_size == 0:
            rows.flush(a)
    rows.flush(a)
    assert unpack(a.tokens) == [1, 2, 3, *range(10, 40)]


def test_tokens_in_the_ring_move_with_their_row():
    rows = Rows(3, 4)
    a, b = fill(rows, 2)
    rows.flat_ring[rows.ring_base[1] + 3 % rows.ring_width] = 77
    rows.known[1] = rows.length[1] = 4
    rows.remove(a)
    rows.flush(b)
    assert unpack(b.tokens) == [1, 2, 3, 77]


def test_a_request_that_leaves_takes_its_tokens_along():
    rows = Rows(2, 4)
    (a,) = fill(rows, 1)
    rows.flat_ring[rows.ring_base[0] + 3] = 9
    rows.known[0] = rows.length[0] = 4
    rows.remove(a)
    assert unpack(a.tokens) == [1, 2, 3, 9]


def test_in_order_keeps_the_best_rank_first():
    rows = Rows(4, 4)
    requests = [make_request(i, [1, 2]) for i in range(1, 4)]
    for request, order in zip(requests, ((1, 1), (0, 2), (0, 3))):
        rows.append(request, order, 1, 0)
    assert [r.request_id for r in rows.in_order()] == [2, 3, 1]


def test_requests_with_stop_ids_are_counted():
    rows = Rows(4, 4)
    a, b = make_request(1, [1, 2], stop_token_ids=[5]), make_request(2, [1, 2])
    rows.append(a, (0, 1), 1, 0)
    rows.append(b, (0, 2), 1, 0)
    assert rows.num_with_stop_ids == 1
    rows.remove(a)
    assert rows.num_with_stop_ids == 0 and rows.has_stop_ids[0] == 0


def test_reset_to_committed_takes_back_what_was_promised():
    rows = Rows(2, 4)
    fill(rows, 1)
    rows.planned[0], rows.length[0] = 3, 4
    rows.reset_to_committed()
    assert (int(rows.planned[0]), int(rows.length[0])) == (2, 3)


@pytest.mark.parametrize("column, value", [("computed", 3), ("planned", 3), ("known", 4), ("length", 101), ("ids", 9),
                                           ("capacity", 8)])
def test_check_invariants_finds_a_wrong_column(column, value):
    rows = Rows(2, 4)
    (a,) = fill(rows, 1)
    a.blocks, rows.capacity[0] = [1], 4
    rows.check_invariants()
    getattr(rows, column)[0] = value
    with pytest.raises(RuntimeError):
        rows.check_invariants()


def test_a_request_counts_prompt_and_re_added_outputs_apart():
    request = Request(add_message(5, [1, 2, 3], outputs=(8, 9), min_tokens=1), 1)
    assert (request.num_known_tokens, request.num_prompt_tokens, request.min_total_tokens) == (5, 3, 4)
    assert bytes(request.tokens) == bytes(pack([1, 2, 3, 8, 9]))
    assert repr(request) == "<Request 5 WAITING row -1 blocks 0>"
