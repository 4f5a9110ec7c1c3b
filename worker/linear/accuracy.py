"""How far a route is from float32 on a text: mean KL divergence, perplexity ratio, agreement of the likeliest token.

Both models read the same tokens in chunks; every position's distribution is compared. Knows models by their interface
only (forward, compute_logits, kv_spec).
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from worker.attention.base import AttentionBackend, BatchMeta
from worker.kv_pool import KVPool

BLOCK_SIZE = 16
MAX_KL, MAX_PERPLEXITY_RATIO = 0.005, 1.01   # what a route must keep


@dataclass(frozen=True)
class Accuracy:
    """Of a candidate against a reference over `num_tokens` predictions."""
    num_tokens: int
    mean_kl: float                           # of the reference's distribution to the candidate's, in nats
    perplexity: float                        # the reference's
    perplexity_ratio: float                  # candidate / reference
    agreement: float                         # share of positions with the same likeliest token

    @property
    def is_like(self) -> bool:
        """Whether it counts as of like accuracy."""
        return self.mean_kl <= MAX_KL and self.perplexity_ratio <= MAX_PERPLEXITY_RATIO

    def __str__(self) -> str:
        return (f"{self.num_tokens} tokens: mean KL {self.mean_kl:.5f}, perplexity {self.perplexity:.2f} x "
                f"{self.perplexity_ratio:.4f}, same first choice {self.agreement:.1%}")


class Reader:
    """Feeds one text through a model in chunks; gives the logits of each chunk."""

    def __init__(self, model: Any, backend: AttentionBackend, max_tokens: int,
                 dtype: torch.dtype = torch.float32) -> None:
        self.model, self.backend = model, backend
        self.num_blocks = -(-max_tokens // BLOCK_SIZE)
        self.pool = KVPool(backend, self.num_blocks, BLOCK_SIZE, model.kv_spec(), dtype)
        self.table = torch.arange(1, self.num_blocks + 1, dtype=torch.int32)[None]
        self.length = 0

    def read(self, tokens: Sequence[int]) -> Tensor:
        """Logits [n, V] after each of the tokens, which continue what was read before."""
        begin, count = self.length, len(tokens)
        self.length += count
        positions = torch.arange(begin, self.length)
        slots = self.table[0][positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
        starts, lengths = np.array([0, count], np.int32), np.array([self.length], np.int32)
        meta = BatchMeta.of(starts, lengths, self.table, slots, BLOCK_SIZE)
        ids = torch.tensor(tokens, dtype=torch.int64)
        with torch.inference_mode():
            hidden = self.model(ids, positions, self.pool.caches, meta, self.backend)
            logits: Tensor = self.model.compute_logits(hidden)
        return logits


def compare(reference: tuple[Any, AttentionBackend], candidate: tuple[Any, AttentionBackend], tokens: Sequence[int], *,
            chunk: int = 128, window: int = 512, pool: torch.dtype = torch.float32) -> Accuracy:
    """Both given as (model, backend); pool: dtype of the candidate's keys and values. The text is read in windows that
    start afresh, `chunk` tokens a step."""
    kl = log_reference = log_candidate = 0.0
    same = count = 0
    for begin in range(0, len(tokens) - 1, window):
        part = tokens[begin:begin + window + 1]
        readers = [Reader(*reference, window), Reader(*candidate, window, pool)]
        for at in range(0, len(part) - 1, chunk):
            inputs = part[at:min(at + chunk, len(part) - 1)]
            targets = torch.tensor(part[at + 1:at + 1 + len(inputs)])[:, None]
            p, q = (torch.log_softmax(reader.read(inputs), -1) for reader in readers)     # new tensors: one model
            kl += float((p.exp() * (p - q)).sum(dtype=torch.float64))
            log_reference -= float(p.gather(1, targets).sum(dtype=torch.float64))
            log_candidate -= float(q.gather(1, targets).sum(dtype=torch.float64))
            same += int((p.argmax(-1) == q.argmax(-1)).sum())
            count += len(inputs)
    if count == 0:
        raise ValueError(f"a text of {len(tokens)} tokens predicts nothing; give at least 2")
    return Accuracy(count, kl / count, math.exp(log_reference / count),
                    math.exp((log_candidate - log_reference) / count), same / count)
