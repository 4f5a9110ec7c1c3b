"""Decode batches at padded sizes: captured once as CUDA graphs and replayed, or padded only.

    off      every batch as it is
    static   padded to the next size of the ladder, nothing captured: what a graph computes, on any device
    on       every size is captured before the worker is ready
    auto     the largest first, one at a time while no plan waits; until a size is there its batches run as they are

Launching a decode step costs the host more than the device needs to compute it; a replay is one call. A padding row has
slot -1 and length 0: its keys go to the scratch slot, its attention is zero, nobody reads its output. A graph ends
before the sampler. Does not know rows or plans. Sources: NVIDIA's CUDA graphs; Kwon et al. 2023 for slot -1.
"""
from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from worker.batch import Batch

logger = logging.getLogger("worker")

MODES = ("auto", "on", "off", "static")
CAPTURE_LIMIT_S = 0.15                          # a capture between steps may not take longer: auto stops there


class Replayable(Protocol):
    """What capturing gives."""

    def replay(self) -> None: ...


Forward = Callable[[Batch], Tensor]


def resolve_mode(option: str, device: str, backend: str) -> tuple[str, str]:
    """(mode, reason); `auto` is off on a CPU, and with a backend that plans a step on the host: what such a step
    launches cannot be replayed. Raises ValueError for `on` where there is nothing to capture."""
    is_cuda, can_capture = torch.device(device).type == "cuda", backend == "triton"
    if option == "auto":
        if is_cuda and can_capture:
            return "auto", "captured while idle, from the largest"
        return "off", f"the {backend} backend cannot be captured" if is_cuda else "there are none on a CPU"
    if option == "on" and not is_cuda:
        raise ValueError("--cuda-graphs on needs a CUDA device; use static for the same padded steps on a CPU, or auto")
    if option == "on" and not can_capture:
        raise ValueError(f"--cuda-graphs on: the {backend} backend cannot be captured; use --attention-backend triton, "
                         "or auto")
    return option, "as asked"


def ladder(largest: int) -> list[int]:
    """Padded sizes up to one that holds `largest` rows: 1 2 4 8 16 24 ... 64, then steps of 16, and of 32 from 256 on.
    Beyond 8 rows at most one row in three is padding, beyond 64 one in four."""
    sizes = [1, 2, 4, 8]
    while sizes[-1] < largest:
        last = sizes[-1]
        sizes.append(last + (8 if last < 64 else 16 if last < 256 else 32))
    while len(sizes) > 1 and sizes[-2] >= largest:
        sizes.pop()
    return sizes


def capture_cuda(run: Callable[[], None], pool: Any) -> Replayable:
    """Record what `run` launches. Graphs of one pool share memory: they run one after another. What other threads do
    meanwhile (a profiler, say) does not end the capture."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            run()
    except BaseException:
        torch.cuda.set_stream(stream)           # torch leaves the capture's own one when it fails
        raise
    return graph


class DecodeGraphs:
    """`forward`: a batch -> hidden [rows, E]; `blank`: a batch of padding rows only, at the addresses of all later
    ones. `capture`: see capture_cuda."""

    def __init__(self, mode: str, seats: int, forward: Forward, blank: Callable[[int], Batch],
                 capture: Callable[[Callable[[], None], Any], Replayable] = capture_cuda) -> None:
        self.mode, self.sizes = mode, ladder(seats)
        self._forward, self._blank, self._capture = forward, blank, capture
        self._graphs: dict[int, Replayable] = {}
        self._hidden: Tensor | None = None      # where every graph leaves its result
        self._pool: Any = None
        self._left = list(self.sizes) if mode in ("auto", "on") else []
        self._next_size = [next(size for size in self.sizes if size >= n) for n in range(1, self.sizes[-1] + 1)]

    def padded(self, num_rows: int) -> int | None:
        """The size to which a decode batch of so many rows is padded; None: it runs as it is."""
        if self.mode == "off":
            return None
        size = self._next_size[num_rows - 1]
        return size if self.mode == "static" or size in self._graphs else None

    def run(self, batch: Batch) -> Tensor:
        """hidden of the decode batch, padding included. Valid until the next run."""
        size = batch.meta.num_reqs
        if size not in self._graphs or self._hidden is None:
            return self._forward(batch)
        self._graphs[size].replay()
        return self._hidden[:size]

    @property
    def num_left(self) -> int:
        """Sizes that are still to be captured."""
        return len(self._left)

    def capture_next(self) -> float:
        """Capture the largest size that is left; seconds taken. No step may be under way on the host. In `auto` a
        failure ends capturing, not the worker: what is not captured runs as it is."""
        begin = time.monotonic()
        size = self._left.pop()
        try:
            self._capture_size(size)
        except RuntimeError as error:           # also torch's out of memory
            if self.mode != "auto":
                raise
            logger.warning("capturing a decode graph of %d rows failed, %d more sizes are not tried: %s", size,
                           len(self._left), str(error).split("\n", 1)[0])
            self._left.clear()
        seconds = time.monotonic() - begin
        logger.debug("captured a decode graph of %d rows in %.0f ms", size, 1e3 * seconds)
        if self.mode == "auto" and seconds > CAPTURE_LIMIT_S and size != self.sizes[-1] and self._left:
            logger.info("capturing %d rows took %.0f ms, more than %.0f: %d sizes run as they are; --cuda-graphs on "
                        "captures them at start", size, 1e3 * seconds, 1e3 * CAPTURE_LIMIT_S, len(self._left))
            self._left.clear()
        return seconds

    def _capture_size(self, size: int) -> None:
        batch = self._blank(size)
        hidden = self._forward(batch)           # compiles what is not compiled; not recorded
        if self._hidden is None:
            self._hidden = torch.empty((self.sizes[-1], hidden.shape[1]), dtype=hidden.dtype, device=hidden.device)
            if hidden.is_cuda:
                self._pool = torch.cuda.graph_pool_handle()
        if hidden.is_cuda:
            torch.cuda.synchronize(hidden.device)
        target = self._hidden[:size]
        batch.meta.cache.clear()                # what the recording uses is made in it
        self._graphs[size] = self._capture(lambda: _into(target, self._forward(batch)), self._pool)


def _into(target: Tensor, value: Tensor) -> None:
    target.copy_(value)
