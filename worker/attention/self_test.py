"""A few seconds that show whether each attention backend computes on this machine what the reference does.

`python -m worker.attention.self_test`, one JSON object a line: the torch build first, then each backend that may run
here. `launch.py doctor` reads it. Prefill, chunk and decode rows in one batch, then timed decodes; no model is needed.
"""
from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import numpy as np
import torch

from worker.attention.base import AttentionBackend, BatchMeta
from worker.attention.reference import ReferenceBackend
from worker.attention.registry import BACKENDS, get_backend

BLOCK_SIZE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 16, 8, 2, 64
QUERY_LENS, SEQ_LENS = (1, 33, 20, 1), (200, 33, 150, 17)       # decode, whole prompt, later chunk, block boundary + 1
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
TIMED_S = 0.3


def make_batch(device: str, query_lens: tuple[int, ...] = QUERY_LENS) -> BatchMeta:
    """One step over SEQ_LENS with blocks handed out in reverse order."""
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    lengths = np.array(SEQ_LENS, np.int32)
    counts = [-(-n // BLOCK_SIZE) for n in SEQ_LENS]
    table = torch.zeros((len(SEQ_LENS), max(counts)), dtype=torch.int32)
    free = list(range(1, sum(counts) + 1))
    for row, count in enumerate(counts):
        table[row, :count] = torch.tensor([free.pop() for _ in range(count)], dtype=torch.int32)
    slots = []
    for row, (query_len, length) in enumerate(zip(query_lens, SEQ_LENS)):
        places = torch.arange(length - query_len, length)
        slots.append(table[row, places // BLOCK_SIZE].long() * BLOCK_SIZE + places % BLOCK_SIZE)
    return BatchMeta.of(starts, lengths, table.to(device), torch.cat(slots).to(device), BLOCK_SIZE)


def outputs(backend: AttentionBackend, device: str, dtype: torch.dtype) -> tuple[torch.Tensor, float]:
    """(attention of the test batch, microseconds of the fastest decode step) on a pool filled through the backend."""
    random = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random).to(dtype).to(device)

    num_blocks = sum(-(-n // BLOCK_SIZE) for n in SEQ_LENS)
    cache = backend.allocate((num_blocks + 2, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM), dtype, device)
    whole = make_batch(device, SEQ_LENS)                        # every context, then the step's own tokens over them
    meta = make_batch(device)
    for batch, num_tokens in ((whole, sum(SEQ_LENS)), (meta, sum(QUERY_LENS))):
        backend.write(cache, draw(num_tokens, NUM_KV_HEADS, HEAD_DIM), draw(num_tokens, NUM_KV_HEADS, HEAD_DIM), batch)
    result = backend.forward(draw(sum(QUERY_LENS), NUM_HEADS, HEAD_DIM), cache, meta).float().cpu()
    decode, q = make_batch(device, (1,) * len(SEQ_LENS)), draw(len(SEQ_LENS), NUM_HEADS, HEAD_DIM)
    times: list[float] = []
    while sum(times) < TIMED_S or len(times) < 3:
        began = time.monotonic()
        backend.forward(q, cache, decode).cpu()
        times.append(time.monotonic() - began)
    return result, min(times) * 1e6             # the others were disturbed


def check(name: str, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """What one backend did: worst difference from the reference, its limit, and the time of a decode step."""
    expected, _ = outputs(ReferenceBackend(), device, dtype)
    found, step_us = outputs(get_backend(name, device), device, dtype)
    difference = float((found - expected).abs().max())
    return {"difference": difference, "limit": TOLERANCE[dtype], "step_us": round(step_us, 1),
            "ok": bool(difference <= TOLERANCE[dtype])}        # NaN is not


def main(argv: list[str] | None = None) -> int:
    """0 when every backend that may run here agrees with the reference."""
    parser = argparse.ArgumentParser(prog="worker.attention.self_test")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args(argv).device
    print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, "device": device,
                      "has_cuda": torch.cuda.is_available()}), flush=True)
    all_ok = True
    for name, entry in BACKENDS.items():
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        refusal = entry.check(device)
        if refusal is not None:
            print(json.dumps({"backend": name, "skipped": refusal}), flush=True)
            continue
        try:
            found = check(name, device, dtype)
        except Exception as error:                              # whatever a backend does: the others are still tested
            found = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        all_ok = all_ok and found["ok"]
        print(json.dumps({"backend": name, **found}), flush=True)
    return 0 if all_ok else 1


if __name__ == "__main__":
    sys.exit(main())
