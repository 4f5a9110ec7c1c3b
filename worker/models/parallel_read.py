"""Reads tensors from files into their places with several threads: the disk and the copy to the device work at once.

    file ── pread ──▶ two staging buffers a thread (pinned on CUDA) ── copy, converted on the way ──▶ target rows

A tensor is read in chunks of whole rows, so memory beyond the model is two buffers a thread. On CUDA each thread copies
on a stream of its own and waits only when it comes back to a buffer. Does not know names, headers or formats.
"""
from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import NamedTuple

import torch
from torch import Tensor

from ipc.errors import ConfigError

NUM_THREADS = 8
CHUNK_BYTES = 16 << 20


class Scales(NamedTuple):
    """What the codes of a matrix are multiplied by: values float32 [ceil(out / group_n), ceil(K / group_k)], on the
    device of the target."""
    values: Tensor
    group_n: int
    group_k: int


class Piece(NamedTuple):
    """One stored tensor and where it goes: `target` has its shape, or one that it broadcasts to. A matrix [out, K] of
    codes with scales is widened."""
    file: str
    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    target: Tensor
    scales: Scales | None = None


def widen(codes: Tensor, scales: Scales | None, first: int) -> Tensor:
    """What the rows from `first` on of a matrix of codes [n, K] stand for, float32; without scales they are as they
    are."""
    if scales is None:
        return codes
    rows = torch.arange(first, first + len(codes), device=codes.device) // scales.group_n
    columns = torch.arange(codes.shape[1], device=codes.device) // scales.group_k
    return codes.float() * scales.values[rows][:, columns]


def read_bytes(path: str, offset: int, nbytes: int) -> Tensor:
    """uint8 [nbytes] of a file, at once. Raises ConfigError."""
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            data = bytearray(file.read(nbytes))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(data) < nbytes:
        raise ConfigError(f"{path}: ends at byte {offset + len(data)}, while it is being read")
    return torch.frombuffer(data, dtype=torch.uint8) if nbytes else torch.empty(0, dtype=torch.uint8)


class _Staging(threading.local):
    """Of one thread: buffers, the events of their copies, open files."""

    def __init__(self) -> None:
        self.buffers: list[Tensor] = []
        self.events: list[torch.cuda.Event | None] = [None, None]
        self.stream: torch.cuda.Stream | None = None
        self.next = 0


class ParallelReader:
    """Use once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._staging = _Staging()
        self._files: dict[str, int] = {}

    def read(self, pieces: Sequence[Piece], progress: Callable[[float], None]) -> None:
        """Fill every target; `progress` is called from this thread. Raises ConfigError for a file that cannot be read.
        """
        total, done = sum(piece.nbytes for piece in pieces) or 1, 0
        try:
            for path in {piece.file for piece in pieces}:
                self._files[path] = os.open(path, os.O_RDONLY)
            with ThreadPoolExecutor(NUM_THREADS, "weights") as pool:
                futures = {pool.submit(self._fill, piece): piece for piece in pieces}
                try:
                    for future in as_completed(futures):
                        future.result()
                        done += futures[future].nbytes
                        progress(done / total)
                except BaseException:
                    for future in futures:
                        future.cancel()
                    raise
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        except OSError as error:
            where = error.filename or "a weight file"
            raise ConfigError(f"{where}: cannot be read: {error.strerror or error}") from error
        finally:
            for fd in self._files.values():
                os.close(fd)

    def _fill(self, piece: Piece) -> None:
        rows = piece.shape[0] if len(piece.shape) > 1 and piece.target.shape == piece.shape else 1
        if piece.nbytes == 0:
            return
        row_bytes = piece.nbytes // rows
        step = max(1, CHUNK_BYTES // row_bytes)
        for begin in range(0, rows, step):
            count = min(step, rows - begin)
            stored = self._read(piece, begin * row_bytes, count * row_bytes).view(piece.dtype)
            if rows == 1:
                self._copy(piece, piece.target, stored.view(piece.shape), 0)
            else:
                self._copy(piece, piece.target[begin:begin + count], stored.view(count, *piece.shape[1:]), begin)

    def _read(self, piece: Piece, begin: int, nbytes: int) -> Tensor:
        """These bytes of the piece, in one of the thread's buffers."""
        staging = self._staging
        is_cuda = self._device.type == "cuda"
        if not staging.buffers:
            staging.buffers = [torch.empty(0, dtype=torch.uint8)] * 2
            staging.stream = torch.cuda.Stream(self._device) if is_cuda else None
        at = staging.next = 1 - staging.next
        event = staging.events[at]
        if event is not None:
            event.synchronize()
        if staging.buffers[at].numel() < nbytes:
            staging.buffers[at] = torch.empty(nbytes, dtype=torch.uint8, pin_memory=is_cuda)
        buffer = staging.buffers[at][:nbytes]
        view, got = memoryview(buffer.numpy()), 0
        while got < nbytes:
            count = os.preadv(self._files[piece.file], [view[got:]], piece.offset + begin + got)
            if count == 0:
                raise ConfigError(f"{piece.file}: ends at byte {piece.offset + begin + got}, while it is being read")
            got += count
        return buffer

    def _copy(self, piece: Piece, target: Tensor, source: Tensor, first: int) -> None:
        """`source`: the piece's rows from `first` on. What is converted is converted on the device: the host would copy
        it once more, into memory that is not pinned."""
        stream = self._staging.stream
        if stream is None:
            target.copy_(widen(source, piece.scales, first))
            return
        with torch.cuda.stream(stream):
            if source.dtype != target.dtype:
                source = widen(source.to(self._device, non_blocking=True), piece.scales, first)
            target.copy_(source, non_blocking=True)
            event = self._staging.events[self._staging.next] = torch.cuda.Event()
            event.record(stream)
