"""Reading tensors with several threads: chunks of rows, conversion, broadcast, files that end too early."""
from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ipc.errors import ConfigError
from worker.models import parallel_read
from worker.models.parallel_read import ParallelReader, Piece


def write(path: Path, tensors: list[torch.Tensor], targets: list[torch.Tensor], lead: int = 3) -> list[Piece]:
    pieces, raw = [], b"x" * lead
    for tensor, target in zip(tensors, targets, strict=True):
        data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        pieces.append(Piece(str(path), len(raw), len(data), tensor.dtype, tuple(tensor.shape), target))
        raw += data
    path.write_bytes(raw)
    return pieces


@pytest.mark.parametrize("chunk_bytes", [1, 100, 1 << 20])
def test_tensors_land_in_their_places_whatever_the_chunks(chunk_bytes, tmp_path, monkeypatch):
    """Odd offsets, views of a larger parameter, narrower and wider dtypes, one row for every head, nothing at all."""
    monkeypatch.setattr(parallel_read, "CHUNK_BYTES", chunk_bytes)
    generator = torch.Generator().manual_seed(0)
    fused = torch.zeros(50, 24)
    targets = [fused[10:30], torch.zeros(7, 5, 4, dtype=torch.bfloat16), torch.zeros(6, 16), torch.zeros(9),
               torch.zeros(0, 8)]
    tensors = [torch.randn(20, 24, generator=generator), torch.randn(7, 5, 4, generator=generator),
               torch.randn(16, generator=generator).half(), torch.randn(9, generator=generator).bfloat16(),
               torch.zeros(0, 8)]
    seen: list[float] = []
    ParallelReader(torch.device("cpu")).read(write(tmp_path / "f", tensors, targets), seen.append)
    for tensor, target in zip(tensors, targets, strict=True):
        assert torch.equal(target, tensor.to(target.dtype).expand(target.shape))
    assert not fused[:10].any() and not fused[30:].any()
    assert seen == sorted(seen) and seen[-1] == 1.0


def test_a_file_that_ends_while_it_is_read_is_named(tmp_path):
    pieces = write(tmp_path / "f", [torch.zeros(100, 8)], [torch.zeros(100, 8)])
    (tmp_path / "f").write_bytes(b"y" * 50)
    with pytest.raises(ConfigError, match="f: ends at byte 50, while it is being read"):
        ParallelReader(torch.device("cpu")).read(pieces, lambda fraction: None)
    (tmp_path / "f").unlink()
    with pytest.raises(ConfigError, match="f: cannot be read: No such file"):
        ParallelReader(torch.device("cpu")).read(pieces, lambda fraction: None)
