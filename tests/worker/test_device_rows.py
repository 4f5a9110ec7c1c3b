"""Batches made on the device equal those of worker/batch.py over random plans: in torch here, as Triton kernels in
tests/kernels/interpreted."""
from __future__ import annotations

from bench.simulation import Options
from tests.worker.resident_mirror import compare_resident
from worker.row_ops import TORCH_ROW_OPS


def test_batches_equal_the_hosts_under_random_plans():
    """New rows, moves, chunks, extensions, preemption, swaps, resets, lost workers; results read a step late."""
    seen, num_batches = set(), 0
    for seed in range(20):
        worker = compare_resident(seed, Options(num_requests=30, fault_rate=0.03, loss_rate=0.005), TORCH_ROW_OPS)
        seen |= worker.seen
        num_batches += worker.num_batches
    assert num_batches > 500
    assert seen == {"moves", "new", "extend", "advance", "counts", "reset", "decode", "unread", "no copy", "padded",
                    "preempted", "spec_token_ids", "parted"}
