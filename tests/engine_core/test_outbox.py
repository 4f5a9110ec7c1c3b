"""Which steps a frontend is told of."""
from __future__ import annotations

import numpy as np

from engine_core.outbox import TELL_NS, Outbox
from ipc.messages import STAMPS
from ipc.step_ring import RING_STEPS, ROW_BYTES
from tests.engine_core.tools import Engine

STEP, SENT = STAMPS.index("step"), STAMPS.index("outputs_sent")


def commit(outbox: Outbox, step: int) -> None:
    outbox.planned(step, (step, step, step, 0, 0, 0, 0, 0, 0, 0, 0, step, 1, 1, 0))
    outbox.step(step, (*[step] * 9, 0, 0, step, 1, 1, 0))
    outbox.commit_ended(step)


def told(outbox: Outbox, number: int, now_ns: int) -> np.ndarray:
    rows = np.frombuffer(outbox.steps_for(number, now_ns), np.int64).reshape(-1, len(STAMPS))
    outbox.told(number, now_ns)
    return rows


def test_each_frontend_hears_of_each_step_once_and_a_new_one_of_the_last_ones() -> None:
    outbox = Outbox()
    for step in range(1, RING_STEPS + 101):
        commit(outbox, step)
        if step % 50 == 1:
            assert told(outbox, 1, 7)[:, STEP].tolist() == list(range(max(1, step - 49), step + 1))
    rows = told(outbox, 2, 9)
    assert rows[:, STEP].tolist() == list(range(101, RING_STEPS + 101))
    assert rows[0, SENT] == 7 and rows[-1, SENT] == 9           # when the first of them was told
    assert len(told(outbox, 2, 9)) == 0
    assert told(outbox, 1, 9)[:, STEP].tolist() == list(range(RING_STEPS + 56, RING_STEPS + 101))


def test_failed_steps_and_those_under_way_are_not_told() -> None:
    outbox = Outbox()
    commit(outbox, 1)
    outbox.planned(2, (2, 2, 2, 0, 0, 0, 0, 0, 0, 0, 0, 2, 1, 1, 0))
    commit(outbox, 3)
    outbox.planned(4, (4, 4, 4, 0, 0, 0, 0, 0, 0, 0, 0, 4, 1, 1, 0))
    assert told(outbox, 1, 5)[:, STEP].tolist() == [1, 3]
    assert outbox.ring.rows[4, STAMPS.index("plan_sent")] == 4


def test_a_busy_frontend_is_told_of_many_steps_at_once_and_an_idle_one_of_all() -> None:
    engine, start_ns = Engine(), 1_000
    engine.add(1, [1, 2], max_tokens=5)
    counts, sent = [], []
    for step in range(1, 6):
        engine.plan()
        engine.core.commit(engine.result(), 1)
        now_ns = start_ns + step * TELL_NS // 3
        ((number, outputs),) = engine.core.take_outputs(now_ns)
        sent.append(now_ns)
        counts.append(len(outputs.stamps) // ROW_BYTES)
        engine.core.outbox.sent(number)
    assert counts == [1, 0, 0, 3, 1]                        # at first, when it was due, and with the last token
    assert engine.core.outbox.ring.rows[1:6, SENT].tolist() == sent


def test_steps_that_a_frontend_could_not_take_are_told_again() -> None:
    engine = Engine()
    engine.add(1, [1, 2], max_tokens=5)
    for now_ns in (1, 2):
        engine.plan()
        engine.core.commit(engine.result(), 1)
        ((_, outputs),) = engine.core.take_outputs(now_ns)  # its socket was full
    assert np.frombuffer(outputs.stamps, np.int64).reshape(-1, len(STAMPS))[:, STEP].tolist() == [1, 2]
