"""The kernels that keep the running batch on the device: every batch of random plans equals the host's."""

from __future__ import annotations

from bench.simulation import Options
from tests.worker.resident_mirror import compare_resident
from worker.kernels.rows import TRITON_ROW_OPS


def test_batches_equal_the_hosts_under_random_plans() -> None:
    """New rows, moves, chunks, extensions, preemption, swaps, resets, lost workers; results read a step late."""
    seen: set[str] = set()
    num_batches = 0
    for seed in (0, 1, 5, 8):
        options = Options(num_requests=20, fault_rate=0.02, loss_rate=0.0, async_scheduling=True)
        worker = compare_resident(seed, options, TRITON_ROW_OPS)
        seen |= worker.seen
        num_batches += worker.num_batches
    assert num_batches > 100
    assert seen >= {"moves", "new", "extend", "counts", "reset", "decode", "unread", "no copy", "padded", "parted"}
