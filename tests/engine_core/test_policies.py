"""The order of the waiting queue."""
from __future__ import annotations

import random

import pytest

from engine_core.policies import LPM_WINDOW, LongestPrefixQueue, WaitingQueue
from engine_core.request import Request, RequestStatus
from ipc.config import SchedulerConfig
from ipc.errors import ConfigError
from tests.engine_core.tools import Engine, add_message


def make_request(arrival: int, priority: int = 0, step: int = 0) -> Request:
    return Request(add_message(arrival, [1, 2], priority=priority), arrival, step)


def make_queue(policy: str, **options) -> WaitingQueue:
    return WaitingQueue(SchedulerConfig(policy=policy, **options))


def drain(queue: WaitingQueue) -> list[int]:
    order = []
    while (request := queue.peek()) is not None:
        queue.pop(request)
        order.append(request.request_id)
    return order


def test_fcfs_is_the_order_of_arrival_whatever_the_priority():
    queue = make_queue("fcfs")
    for arrival, priority in ((2, 0), (1, 5), (3, -1)):
        queue.push(make_request(arrival, priority))
    assert drain(queue) == [1, 2, 3]


def test_priority_runs_lower_numbers_first_and_equals_by_arrival():
    queue = make_queue("priority")
    for arrival, priority in ((1, 2), (2, 0), (3, -4), (4, 0)):
        queue.push(make_request(arrival, priority))
    assert drain(queue) == [3, 2, 4, 1]


def test_waiting_is_worth_priority():
    queue = make_queue("priority", priority_aging_steps=10)
    queue.push(make_request(1, priority=1, step=0))
    queue.push(make_request(2, priority=0, step=9))
    queue.push(make_request(3, priority=0, step=11))
    assert drain(queue) == [2, 1, 3]


def test_a_preempted_request_returns_in_front_of_those_that_came_later():
    queue = make_queue("fcfs")
    first, second = make_request(1), make_request(2)
    queue.push(second)
    queue.push(first)
    assert drain(queue) == [1, 2]


def test_a_finished_request_is_skipped_and_not_counted():
    queue = make_queue("fcfs")
    requests = [make_request(i) for i in range(1, 4)]
    for request in requests:
        queue.push(request)
    requests[0].status = RequestStatus.FINISHED
    queue.discard(requests[0])
    assert len(queue) == 2 and [r.request_id for r in queue] == [2, 3] and drain(queue) == [2, 3]


def test_dead_entries_do_not_pile_up():
    """10,000 requests that are aborted while they wait leave a small heap."""
    queue = make_queue("priority")
    requests = [make_request(i, i % 7) for i in range(10_000)]
    for request in requests:
        queue.push(request)
    random.Random(1).shuffle(requests)
    for request in requests[:9_990]:
        request.status = RequestStatus.FINISHED
        queue.discard(request)
    assert len(queue) == 10 and len(queue._heap) <= 64
    assert sorted(drain(queue)) == sorted(r.request_id for r in requests[9_990:])


def test_one_can_be_taken_out_of_turn_but_only_one_that_waits():
    queue = make_queue("fcfs")
    assert queue.peek() is None
    first, second = make_request(1), make_request(2)
    queue.push(first)
    queue.push(second)
    queue.pop(second)
    assert len(queue) == 1 and queue.peek() is first
    with pytest.raises(RuntimeError, match="does not wait"):
        queue.pop(second)


def test_an_unknown_policy_is_refused_by_name():
    with pytest.raises(ConfigError, match="is 'random'; known are fcfs, priority"):
        SchedulerConfig(policy="random")


def admitted_order(engine: Engine) -> list[int]:
    engine.run()
    return list(engine.admitted)


@pytest.mark.parametrize("policy, order", [("fcfs", [1, 2, 3, 4]), ("priority", [3, 2, 4, 1])])
def test_the_policy_decides_who_is_admitted_first(policy, order):
    engine = Engine(policy=policy, max_num_seqs=1)
    for request_id, priority in ((1, 2), (2, 0), (3, -4), (4, 0)):
        engine.add(request_id, [request_id], priority=priority, max_tokens=2)
    assert admitted_order(engine) == order


# ---------------------------------------------------------------- longest prefix first

def lpm_queue(cached: dict[int, int], **options) -> tuple[LongestPrefixQueue, list[int]]:
    """The queue and its version, which tells it that `cached` (by request id) has changed."""
    version = [0]
    config = SchedulerConfig(policy="lpm", **options)
    return LongestPrefixQueue(config, lambda request: cached.get(request.request_id, 0), lambda: version[0]), version


def test_the_longest_cached_prefix_goes_first_and_equals_by_arrival():
    queue, _ = lpm_queue({2: 4, 4: 8, 5: 8})
    for arrival in range(1, 6):
        queue.push(make_request(arrival))
    assert drain(queue) == [4, 5, 2, 1, 3]


def test_what_enters_the_cache_meanwhile_counts():
    cached: dict[int, int] = {1: 4}
    queue, version = lpm_queue(cached)
    for arrival in (1, 2, 3):
        queue.push(make_request(arrival))
    assert queue.peek().request_id == 1
    cached[3] = 8
    version[0] += 1
    assert queue.peek().request_id == 3


def test_nobody_is_overtaken_more_often_than_allowed():
    cached: dict[int, int] = {i: 9 for i in range(2, 100)}
    queue, _ = lpm_queue(cached, lpm_max_overtakes=3)
    for arrival in range(1, 10):
        queue.push(make_request(arrival))
    assert drain(queue)[:5] == [2, 3, 4, 1, 5]


def test_a_request_that_was_preempted_is_not_overtaken():
    queue, _ = lpm_queue({2: 8})
    back = make_request(1)
    back.num_preemptions = 1
    queue.push(make_request(2))
    assert queue.peek().request_id == 2
    queue.push(back)
    assert drain(queue) == [1, 2]


def test_only_the_first_64_are_looked_at():
    queue, _ = lpm_queue({LPM_WINDOW + 1: 8})
    for arrival in range(1, LPM_WINDOW + 2):
        queue.push(make_request(arrival))
    assert queue.peek().request_id == 1
    queue.pop(queue.peek())
    assert queue.peek().request_id == LPM_WINDOW + 1 and len(queue) == LPM_WINDOW


def test_a_finished_request_leaves_the_window():
    queue, _ = lpm_queue({2: 8})
    requests = [make_request(i) for i in (1, 2, 3)]
    for request in requests:
        queue.push(request)
    assert queue.peek() is requests[1]
    requests[1].status = RequestStatus.FINISHED
    queue.discard(requests[1])
    assert [r.request_id for r in queue] == [1, 3] and drain(queue) == [1, 3] and len(queue) == 0


def test_a_finished_request_makes_room_in_the_window():
    queue, _ = lpm_queue({2: 8, LPM_WINDOW + 1: 16})
    requests = [make_request(i) for i in range(1, LPM_WINDOW + 2)]
    for request in requests:
        queue.push(request)
    assert queue.peek().request_id == 2
    requests[0].status = RequestStatus.FINISHED
    queue.discard(requests[0])
    assert queue.peek().request_id == LPM_WINDOW + 1


def test_lpm_admits_what_the_cache_has_first():
    engine = Engine(policy="lpm", max_num_seqs=1)
    engine.add(1, [5] * 9, max_tokens=1)
    engine.run()
    engine.add(2, [6] * 9, max_tokens=1)
    engine.add(3, [5] * 9, max_tokens=1)
    engine.run()
    assert list(engine.admitted) == [1, 3, 2] and engine.admitted[3] == (8, 1)
