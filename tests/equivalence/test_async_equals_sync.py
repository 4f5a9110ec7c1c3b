"""The synchronous loop is the oracle of the asynchronous one: equal tokens and ends over random traces."""
from __future__ import annotations

import pytest

from ipc.messages import FINISH_ERROR, Finished
from bench.simulation import Options, Simulation


def run(seed: int, is_async: bool, **options) -> dict[int, tuple[list[int], int, int]]:
    """Per request: its tokens, reason and stop token."""
    simulation = Simulation(seed, Options(async_scheduling=is_async, abort_rate=0.0, num_requests=30,
                                          bounded_queue=False, **options))
    simulation.run()
    found = {}
    for request_id, sent in simulation.sent.items():
        end: Finished | None = sent.end
        assert end is not None
        found[request_id] = sent.tokens, end.reason, end.stop_token_id
    return found


@pytest.mark.parametrize("seed", range(100, 125))
def test_equal_tokens_over_random_traces(seed):
    sync, asynchronous = run(seed, False), run(seed, True)
    assert len(sync) >= 30 and sync == asynchronous


@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
@pytest.mark.parametrize("faults", [dict(fault_rate=0.02), dict(loss_rate=0.03)], ids=["failed-steps", "lost-workers"])
def test_equal_tokens_with_faults(mode, faults):
    """Which requests end with an error depends on the steps that fail; what the others say does not."""
    for seed in range(140, 144):
        sync = run(seed, False, preemption_mode=mode, **faults)
        asynchronous = run(seed, True, preemption_mode=mode, **faults)
        both = [i for i in sync if FINISH_ERROR not in (sync[i][1], asynchronous[i][1])]
        assert len(both) > 5 and all(sync[i] == asynchronous[i] for i in both)
