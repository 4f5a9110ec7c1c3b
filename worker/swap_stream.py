"""Swap copies of a CUDA worker on a stream of their own, ordered by events: steps go on while blocks travel.

    main stream     gather blocks that leave ─┐           ┌─ wait, write blocks that come ── step ...
    side stream                               └ H2D in ───┘ D2H out ....................
    host slots      read before they are written: both directions are on the one side stream, in this order

Does what apply_block_ops does (worker/kv_pool.py), with the same rule: everything is read before anything is written.
Neighbouring host slots are one copy. On a CPU the streams are absent and the copies plain, so the same code is tested
there. Does not decide which blocks move.
"""
from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from worker.kv_pool import HostPool, KVPool, MoveBlocks, check_block_ops, plain_mover


def mover_of(pool: KVPool) -> Callable[[KVPool, HostPool], MoveBlocks]:
    """What moves this pool's blocks while serving."""
    return (lambda pool, host: SwapStream(pool, host).apply) if pool.device.type == "cuda" else plain_mover


class SwapStream:
    """One per worker; the pool's tensors are touched on the stream of the steps only."""

    def __init__(self, pool: KVPool, host: HostPool) -> None:
        self.pool, self.host = pool, host
        self._side = torch.cuda.Stream(pool.device) if pool.device.type == "cuda" else None

    def apply(self, swap_out: np.ndarray, swap_in: np.ndarray, copies: np.ndarray) -> None:
        """swap_out (block, host slot), swap_in (host slot, block), copies (source, target); int [n, 2]. Queued when it
        returns; later work on the current stream sees the blocks. Raises RuntimeError, before anything moves, for an id
        out of range or a target written twice."""
        check_block_ops(self.pool, self.host, np.concatenate([swap_out[:, 0], copies[:, 0]]),
                        np.concatenate([swap_in[:, 1], copies[:, 1]]), swap_out[:, 1], swap_in[:, 0])
        swap_out, swap_in = swap_out[np.argsort(swap_out[:, 1])], swap_in[np.argsort(swap_in[:, 0])]
        sources = self._index(np.concatenate([swap_out[:, 0], copies[:, 0]]))
        targets = self._index(np.concatenate([swap_in[:, 1], copies[:, 1]]))
        num_out, num_in = len(swap_out), len(swap_in)
        gathered = [words.index_select(0, sources) for words in self.pool.block_words]
        arriving = [torch.empty((num_in, words.shape[1]), dtype=words.dtype, device=words.device)
                    for words in self.pool.block_words]
        if num_out or num_in:
            self._copy(gathered, arriving, swap_out[:, 1], swap_in[:, 0])
        for words, leaving, coming in zip(self.pool.block_words, gathered, arriving, strict=True):
            words.index_copy_(0, targets, torch.cat([coming, leaving[num_out:]]))

    def _copy(self, gathered: list[Tensor], arriving: list[Tensor], out_slots: np.ndarray,
              in_slots: np.ndarray) -> None:
        """The copies between device and host, on the side stream; the current one waits for what arrives."""
        out_runs, in_runs = _runs(out_slots), _runs(in_slots)
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream(self.pool.device))
        with self._on_side():
            for coming, stored in zip(arriving, self.host.block_words, strict=True):
                for begin, slot, count in in_runs:
                    coming[begin:begin + count].copy_(stored[slot:slot + count], non_blocking=True)
            arrived = None if self._side is None else self._side.record_event()
            for leaving, stored in zip(gathered, self.host.block_words, strict=True):
                for begin, slot, count in out_runs:
                    stored[slot:slot + count].copy_(leaving[begin:begin + count], non_blocking=True)
        if self._side is not None and arrived is not None:
            for tensor in (*gathered, *arriving):
                tensor.record_stream(self._side)   # their memory is not given away before the copies are done
            torch.cuda.current_stream(self.pool.device).wait_event(arrived)

    def _on_side(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._side is None else torch.cuda.stream(self._side)

    def _index(self, ids: np.ndarray) -> Tensor:
        host = torch.from_numpy(ids.astype(np.int64))
        if self._side is None:
            return host
        return host.pin_memory().to(self.pool.device, non_blocking=True)


def _runs(slots: np.ndarray) -> list[tuple[int, int, int]]:
    """(first entry, first slot, count) of runs of neighbouring slots; slots are sorted."""
    if not len(slots):
        return []
    begins = np.flatnonzero(np.diff(slots, prepend=slots[0] - 2) != 1)
    counts = np.diff(begins, append=len(slots))
    return list(zip(begins.tolist(), slots[begins].tolist(), counts.tolist()))
