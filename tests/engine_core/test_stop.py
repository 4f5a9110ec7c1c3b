"""Stop rules, row by row and vectorised: both forms agree, and each rule stops at the exact token."""
from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_core.rows import Rows
from engine_core.stop import StopChecker
from ipc.messages import FINISH_LENGTH, FINISH_STOP
from tests.engine_core.test_rows import make_request
from tests.engine_core.tools import Engine

EOS = 7


def check(token: int, *, known: int = 5, floor: int = 0, limit: int = 10, ignore_eos: bool = False,
          stop_ids: tuple[int, ...] = ()):
    return StopChecker([EOS], 50).check_one(token, known, floor, limit, ignore_eos, frozenset(stop_ids))


@pytest.mark.parametrize("options, expected", [
    (dict(token=3), None),
    (dict(token=EOS), (FINISH_STOP, EOS)),
    (dict(token=EOS, ignore_eos=True), None),
    (dict(token=EOS, ignore_eos=True, stop_ids=(EOS,)), (FINISH_STOP, EOS)),     # asked for by name
    (dict(token=3, stop_ids=(3, 4)), (FINISH_STOP, 3)),
    (dict(token=EOS, floor=6), None),
    (dict(token=EOS, floor=5), (FINISH_STOP, EOS)),
    (dict(token=3, stop_ids=(3,), floor=6), None),
    (dict(token=3, known=10), (FINISH_LENGTH, -1)),
    (dict(token=EOS, known=10), (FINISH_STOP, EOS)),                             # the better reason
    (dict(token=EOS, known=10, floor=11), (FINISH_LENGTH, -1)),
])
def test_one_request(options, expected):
    assert check(**options) == expected


def test_eos_ids_outside_the_vocabulary_are_ignored():
    checker = StopChecker([-1, 3, 50, 99], 50)
    assert checker.is_eos.nonzero()[0].tolist() == [3]


ROW = st.tuples(st.integers(0, 9), st.integers(1, 12), st.integers(0, 12), st.integers(1, 12), st.booleans(),
                st.frozensets(st.integers(0, 9), max_size=2))


@settings(max_examples=200, deadline=None)
@given(st.lists(ROW, min_size=1, max_size=6), st.booleans())
def test_the_vectorised_rule_equals_the_rule_of_one(rows_drawn, as_index):
    checker = StopChecker([EOS], 10)
    rows = Rows(len(rows_drawn), 4)
    expected = []
    for i, (token, known, floor, limit, ignore, stop_ids) in enumerate(rows_drawn):
        request = make_request(i, [1], ignore_eos=ignore, stop_token_ids=sorted(stop_ids))
        rows.append(request, (0, i), 0, 4)
        rows.known[i], rows.floor[i], rows.limit[i] = known, floor, limit
        end = checker.check_one(token, known, floor, limit, ignore, stop_ids)
        if end is not None:
            expected.append((i, *end))
    tokens = np.array([row[0] for row in rows_drawn], np.int32)
    index = np.arange(rows.n) if as_index else slice(0, rows.n)
    assert checker.check_rows(rows, index, tokens) == expected


def test_a_subset_of_rows_is_named_by_row_and_not_by_place():
    checker = StopChecker([EOS], 10)
    rows = Rows(3, 4)
    for i in range(3):
        rows.append(make_request(i, [1], stop_token_ids=[2], ignore_eos=False), (0, i), 0, 4)
        rows.limit[i] = 100
    assert checker.check_rows(rows, np.array([2, 0]),
                              np.array([2, EOS])) == [(2, FINISH_STOP, 2), (0, FINISH_STOP, EOS)]


# ---------------------------------------------------------------- in an engine

def outputs_of(prompt: list[int], count: int) -> list[int]:
    engine = Engine()
    engine.add(1, prompt, max_tokens=count)
    engine.run()
    return engine.tokens[1]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("at", [1, 2, 5, 8])
def test_a_stop_token_ends_the_request_with_it_at_every_position(at, is_async):
    prompt = [5, 6]
    alone = outputs_of(prompt, 12)
    token = alone[at - 1]
    first = alone.index(token)
    engine = Engine(async_scheduling=is_async)
    engine.add(1, prompt, max_tokens=12, stop_token_ids=[token])
    engine.add(2, [9, 9, 9], max_tokens=12)
    engine.run()
    assert engine.tokens[1] == alone[:first + 1]
    assert (engine.ends[1].reason, engine.ends[1].stop_token_id) == (FINISH_STOP, token)
    assert engine.ends[2].reason == FINISH_LENGTH and len(engine.tokens[2]) == 12
    engine.assert_idle()


def test_min_tokens_lets_stop_tokens_pass_until_then():
    alone = outputs_of([5, 6], 12)
    engine = Engine(eos=(alone[1],))
    engine.add(1, [5, 6], max_tokens=12, stop_token_ids=sorted(set(alone)), min_tokens=4, ignore_eos=False)
    engine.run()
    assert engine.tokens[1] == alone[:4] and engine.ends[1].stop_token_id == alone[3]


def test_eos_ends_a_request_unless_it_is_ignored():
    alone = outputs_of([5, 6], 12)
    eos = alone[2]
    engine = Engine(eos=(eos,))
    engine.add(1, [5, 6], max_tokens=12, ignore_eos=False)
    engine.add(2, [5, 6], max_tokens=12, ignore_eos=True)
    engine.run()
    assert engine.tokens[1] == alone[:alone.index(eos) + 1] and engine.ends[1].reason == FINISH_STOP
    assert engine.tokens[2] == alone and engine.ends[2].reason == FINISH_LENGTH


def test_the_context_limit_ends_a_request_with_reason_length():
    engine = Engine(max_model_len=6)
    engine.add(1, [1, 2], max_tokens=None)
    engine.run()
    assert len(engine.tokens[1]) == 4 and engine.ends[1].reason == FINISH_LENGTH
    assert engine.admitted[1] == (0, 4)


def test_nothing_visible_follows_the_end_in_async_mode():
    """The row of plan k+1 whose request ended in plan k is a zombie: its token is dropped and counted."""
    for max_tokens, is_async in itertools.product((1, 2, 3), (False, True)):
        engine = Engine(async_scheduling=is_async)
        engine.add(1, [1, 2, 3], max_tokens=max_tokens, stop_token_ids=[outputs_of([1, 2, 3], 1)[0]])
        engine.run()
        assert len(engine.tokens[1]) == 1
        assert engine.stats.num_wasted_tokens == (1 if is_async and max_tokens > 1 else 0)
        engine.assert_idle()
