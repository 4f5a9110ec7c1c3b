"""A small step runs however it is done sooner; a long one is never taken from the team."""
from __future__ import annotations

from worker.jit.choice import RETRY_EVERY, SMALL_NS, TRIALS, ThreadChoice


def ways(choice: ThreadChoice, team_ns: int, alone_ns: int, steps: int, rows: int = 1) -> list[bool]:
    """What it chooses while each way takes so long."""
    chosen = []
    for _ in range(steps):
        alone = choice.alone(rows)
        choice.observe(rows, alone, alone_ns if alone else team_ns)
        chosen.append(alone)
    return chosen


def test_a_small_step_runs_however_it_is_done_sooner() -> None:
    for team, alone in ((200_000, 100_000), (100_000, 200_000)):
        chosen = ways(ThreadChoice(), team, alone, 100)
        assert chosen[:2 * TRIALS] == [False] * TRIALS + [True] * TRIALS
        assert chosen[2 * TRIALS:] == [alone < team] * (100 - 2 * TRIALS)


def test_the_other_way_is_tried_again_and_taken_when_it_has_become_the_better() -> None:
    choice = ThreadChoice()
    ways(choice, 200_000, 100_000, 2 * TRIALS)
    chosen = ways(choice, 50_000, 100_000, 20 * RETRY_EVERY)
    assert chosen[:RETRY_EVERY // 2] == [True] * (RETRY_EVERY // 2) and chosen[-RETRY_EVERY // 2:].count(True) <= 1


def test_a_long_step_is_never_taken_from_the_team() -> None:
    """Other work on a core may make it look slower than alone, for as long as nobody looks again."""
    choice = ThreadChoice()
    assert not any(ways(choice, 2 * SMALL_NS, SMALL_NS, 3 * RETRY_EVERY, rows=32))
    assert not choice._counts[6][1]             # nor was that ever paid for


def test_row_counts_are_told_apart() -> None:
    choice = ThreadChoice()
    assert ways(choice, 200_000, 100_000, 100)[-1] and not ways(choice, 100_000, 200_000, 100, rows=8)[-1]
