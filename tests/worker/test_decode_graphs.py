"""Which decode batches are padded and replayed, and in what order graphs are captured. That replays give the tokens of
eager steps: tests/kernels/interpreted/test_runner.py."""
from __future__ import annotations

import types
from collections.abc import Callable

import pytest
import torch

from tests.equivalence.test_milestone import OverlappingEngine
from worker import decode_graphs
from worker.decode_graphs import DecodeGraphs, ladder, resolve_mode


@pytest.mark.parametrize("largest", [1, 2, 3, 8, 9, 64, 65, 100, 256, 257, 1000])
def test_the_ladder_holds_every_batch_with_little_padding(largest):
    sizes = ladder(largest)
    assert sizes == sorted(set(sizes)) and sizes[-1] >= largest and (len(sizes) == 1 or sizes[-2] < largest)
    graphs = DecodeGraphs("static", largest, lambda batch: torch.empty(0), lambda size: None)
    for n in range(1, largest + 1):
        padded = graphs.padded(n)
        assert padded in sizes and padded >= n
        assert n <= 8 and padded < 2 * n or padded - n < max(8, n / 4) or n <= 3


def test_modes_are_resolved_by_device_and_backend():
    assert resolve_mode("auto", "cpu", "cpu")[0] == "off" and resolve_mode("auto", "cuda:1", "triton")[0] == "auto"
    assert resolve_mode("auto", "cuda", "reference") == ("off", "the reference backend cannot be captured")
    assert resolve_mode("static", "cpu", "cpu")[0] == "static" and resolve_mode("off", "cuda", "triton")[0] == "off"
    with pytest.raises(ValueError, match="--cuda-graphs on needs a CUDA device; use static"):
        resolve_mode("on", "cpu", "triton")
    with pytest.raises(ValueError, match="the reference backend cannot be captured; use --attention-backend triton"):
        resolve_mode("on", "cuda", "reference")


def make(mode: str, seats: int = 9) -> tuple[DecodeGraphs, list[int]]:
    captured: list[int] = []

    def forward(batch):
        captured.append(batch.size)
        return torch.zeros(batch.size, 4)

    def capture(run: Callable[[], None], pool: object) -> types.SimpleNamespace:
        run()
        return types.SimpleNamespace(replay=run)
    graphs = DecodeGraphs(mode, seats, forward,
                          lambda size: types.SimpleNamespace(size=size, meta=types.SimpleNamespace(cache={})), capture)
    return graphs, captured


def test_the_largest_size_is_captured_first_and_batches_run_as_they_are_until_then():
    graphs, captured = make("auto")
    assert graphs.sizes == [1, 2, 4, 8, 16] and graphs.padded(9) is None
    graphs.capture_next()
    assert captured == [16, 16] and (graphs.padded(9), graphs.padded(8), graphs.num_left) == (16, None, 4)
    while graphs.num_left:
        graphs.capture_next()
    assert captured[::2] == [16, 8, 4, 2, 1] and graphs.padded(3) == 4


@pytest.mark.parametrize("mode, left", [("auto", 0), ("on", 3)])
def test_a_slow_capture_ends_those_between_steps_but_not_those_at_the_start(mode, left, monkeypatch):
    graphs, _ = make(mode)
    clock = [0.0]
    monkeypatch.setattr(decode_graphs.time, "monotonic", lambda: clock.__setitem__(0, clock[0] + 0.2) or clock[0])
    graphs.capture_next()                       # the first one may compile
    assert graphs.num_left == 4
    graphs.capture_next()
    assert graphs.num_left == left


def test_warming_up_changes_nothing_but_scratch():
    engine = OverlappingEngine("cpu", num_blocks=8, graphs="static")
    pool = engine.worker.pool
    before = [tensor.clone() for cache in pool.caches for tensor in cache]
    for num_tokens in (1, 5):
        engine.worker.warm_up(num_tokens)
    after = [tensor for cache in pool.caches for tensor in cache]
    assert all(torch.equal(a[:-1], b[:-1]) for a, b in zip(before, after))
