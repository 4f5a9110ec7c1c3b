"""Which decode batches are padded and replayed, and in what order graphs are captured. That replays give the tokens of
eager steps: tests/kernels/interpreted/test_runner.py."""
from __future__ import annotations

import contextlib
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


@pytest.mark.parametrize("mode", ["auto", "on"])
def test_a_capture_that_fails_ends_the_captures_between_steps_and_a_start_that_asked_for_them(mode):
    graphs, captured = make(mode)
    graphs.capture_next()
    graphs._capture = lambda run, pool: (_ for _ in ()).throw(RuntimeError("CUDA error: operation not permitted"))
    if mode == "on":
        with pytest.raises(RuntimeError, match="not permitted"):
            graphs.capture_next()
        return
    graphs.capture_next()
    assert (graphs.num_left, graphs.padded(9), graphs.padded(8)) == (0, 16, None)


class FakeCuda:
    """As much of torch.cuda as a capture touches; a failed one leaves the capture's stream, as torch's does."""

    def __init__(self) -> None:
        self.stream, self.modes = "steps", []

    CUDAGraph = staticmethod(lambda: types.SimpleNamespace())

    def current_stream(self):
        return self.stream

    def set_stream(self, stream):
        self.stream = stream

    @contextlib.contextmanager
    def graph(self, graph, pool, capture_error_mode):
        self.modes.append(capture_error_mode)
        before, self.stream = self.stream, "capture"
        yield
        self.stream = before


def test_a_failed_capture_gives_the_stream_back(monkeypatch):
    cuda = FakeCuda()
    monkeypatch.setattr(decode_graphs.torch, "cuda", cuda)
    decode_graphs.capture_cuda(lambda: None, None)

    def fail() -> None:
        raise RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        decode_graphs.capture_cuda(fail, None)
    assert cuda.stream == "steps" and cuda.modes == ["thread_local"] * 2


def test_warming_up_changes_nothing_but_scratch():
    engine = OverlappingEngine("cpu", num_blocks=8, graphs="static")
    pool = engine.worker.pool
    before = [tensor.clone() for cache in pool.caches for tensor in cache]
    for num_tokens in (1, 5):
        engine.worker.warm_up(num_tokens)
    after = [tensor for cache in pool.caches for tensor in cache]
    assert all(torch.equal(a[:-1], b[:-1]) for a, b in zip(before, after))
