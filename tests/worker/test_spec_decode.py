"""The drafter against a plain search, and verification against a plain loop."""
from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.request_state import RequestState
from worker.spec_decode.ngram import NgramDrafter
from worker.spec_decode.verify import accept


def plain_lookup(tokens: list[int], count: int, longest: int, shortest: int) -> list[int]:
    for length in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        suffix = tokens[-length:]
        for end in range(len(tokens) - 2, length - 2, -1):
            if tokens[end - length + 1:end + 1] == suffix:
                return tokens[end + 1:end + 1 + count]
    return []


@settings(max_examples=400, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 5), st.integers(1, 4), st.integers(1, 4))
def test_proposals_are_what_followed_the_latest_longest_match(tokens, count, a, b):
    longest, shortest = max(a, b), min(a, b)
    found = NgramDrafter(count, longest, shortest).propose(np.array(tokens, np.int32))
    assert found.tolist() == plain_lookup(tokens, count, longest, shortest)


def test_only_rows_that_ask_for_nothing_special_get_drafts():
    state = RequestState(3, 32, 4)
    state.n = 3
    for row in range(3):
        state.tokens[row, :6] = [1, 2, 3, 1, 2, 3]
        state.known[row] = 6
    state.options[1] = object()                             # penalties, a grammar, log-probabilities...
    pairs = NgramDrafter(2, 3, 2).step(state, np.arange(3)).reshape(-1, 2).tolist()
    assert pairs == [[0, 1], [0, 2], [2, 1], [2, 2]]
    assert NgramDrafter(2, 3, 2).step(state, np.array([1])).size == 0


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.lists(st.integers(-1, 2), min_size=5, max_size=5),
                          st.lists(st.integers(0, 2), min_size=4, max_size=4)), min_size=1, max_size=4))
def test_a_draft_stands_when_it_and_all_before_it_are_what_is_sampled(rows):
    state = RequestState(4, 32, 4)
    state.n = len(rows)
    row_of, offsets, tokens, expected = [], [], [], []
    for row, (num, sampled, drafts) in enumerate(rows):
        state.known[row], state.num_drafts[row] = 3, num
        state.tokens[row, 3:3 + num] = drafts[:num]
        alive = True
        for i in range(num + 1):
            if alive and (i == 0 or sampled[i] >= 0):
                expected.append(len(row_of))
            alive = alive and i < num and sampled[i] == drafts[i]
            row_of.append(row)
            offsets.append(i)
            tokens.append(sampled[i])
    got = accept(state, np.array(row_of, np.int64), np.array(offsets, np.int64), np.array(tokens, np.int32))
    assert got.tolist() == expected
