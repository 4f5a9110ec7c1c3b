"""Repetition, frequency and presence penalties from counts that persist between steps.

A row that uses them holds a slot: which tokens its prompt and output have, and how often each was put out. Tokens that
are new since the last step are added; a row that enters the batch, first or again, begins with an empty slot and is
counted from its tokens, so preemption and restarts change nothing. A slot is a row of V counters of which only the
pages of tokens that occurred are ever touched, and a list of those tokens: applying costs in proportion to that list.
Does not know temperature or masks.

    x > 0: x / r   else: x * r        for tokens of prompt or output        (Keskar et al. 2019, CTRL)
    x - frequency * count - presence  for tokens of the output              (OpenAI)
"""
from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from worker.sampling import placement
from worker.sampling.jit_threads import RowKernels


class PenaltyCounts:
    """Slots for rows that use penalties; none are held by others. Arrays are made at the first use."""

    def __init__(self) -> None:
        self.width = 0
        self._free: list[int] = []
        self.num_slots = 0
        self.counts = np.zeros((0, 0), np.int32)        # 0: not in the request; else 1 + times put out
        self.seen = np.zeros((0, 0), np.int32)          # [slot, :num_seen]: the tokens with a count
        self.num_seen = np.zeros(0, np.int64)
        self.num_counted = np.zeros(0, np.int64)        # leading tokens of the row that are counted
        self.factors = np.zeros((0, 3), np.float32)     # repetition, frequency, presence

    def take(self, repetition: float, frequency: float, presence: float) -> int:
        """An empty slot."""
        slot = self._free.pop() if self._free else self.num_slots
        if slot == self.num_slots:
            self.num_slots += 1
            if self.num_slots > len(self.num_seen):
                self._grow()
        self.factors[slot] = repetition, frequency, presence
        self.num_seen[slot] = self.num_counted[slot] = 0
        return slot

    def release(self, slot: int) -> None:
        """Empty it; costs in proportion to the tokens it saw."""
        if self.width:
            self.counts[slot, self.seen[slot, :self.num_seen[slot]]] = 0
        self.num_seen[slot] = 0
        self._free.append(slot)

    def _grow(self) -> None:
        size = max(4, 2 * len(self.num_seen))
        counts, seen = self.counts, self.seen
        old = len(self.num_seen)
        for name, shape in (("num_seen", (size,)), ("num_counted", (size,)), ("factors", (size, 3))):
            before = getattr(self, name)
            after = np.zeros(shape, before.dtype)
            after[:old] = before
            setattr(self, name, after)
        if self.width:
            self.counts, self.seen = (np.zeros((size, self.width), np.int32) for _ in range(2))
            for slot in range(old):             # copies what was touched, and nothing else
                tokens = seen[slot, :self.num_seen[slot]]
                self.seen[slot, :tokens.size] = tokens
                self.counts[slot, tokens] = counts[slot, tokens]

    def apply(self, logits: Tensor, entries: np.ndarray, rows: np.ndarray, slots: np.ndarray, tokens: np.ndarray,
              known: np.ndarray, num_prompt: np.ndarray, kernels: RowKernels | None) -> None:
        """Penalise logits[entries[i]] by the tokens of rows[i], whose slot is slots[i], in place.

        tokens int32 [seats, stride]; known, num_prompt int64 [seats].
        """
        if self.width != logits.shape[1]:
            self.width = logits.shape[1]
            self.counts, self.seen = (np.zeros((len(self.num_seen), self.width), np.int32) for _ in range(2))
        begin, end = self.num_counted[slots], known[rows]
        if kernels is not None:
            kernels.count(tokens, num_prompt[rows], rows, slots, begin, end, self.counts, self.seen, self.num_seen)
        else:
            for row, slot, first, last in zip(rows.tolist(), slots.tolist(), begin.tolist(), end.tolist()):
                self._count(tokens[row, first:last], slot, max(int(num_prompt[row]) - first, 0))
        self.num_counted[slots] = end
        factors = self.factors[slots]
        if kernels is not None and logits.device.type == "cpu":
            kernels.penalise(logits.numpy(), entries, slots, self.counts, self.seen, self.num_seen,
                             *np.ascontiguousarray(factors.T))
            return
        lengths = self.num_seen[slots]
        ids = np.concatenate([self.seen[slot, :n] for slot, n in zip(slots, lengths)]).astype(np.int64)
        used = self.counts[np.repeat(slots, lengths), ids] - 1
        if placement.on_device(logits):
            from worker.sampling import device_rows
            device_rows.penalise_rows(logits, entries, lengths, ids, used, factors)
            return
        device = logits.device
        place = (torch.from_numpy(np.repeat(entries, lengths)).to(device), torch.from_numpy(ids).to(device))
        factor, per_use, once = (torch.from_numpy(np.repeat(column, lengths)).to(device) for column in factors.T)
        times = torch.from_numpy(used).to(device)
        values = logits[place]
        values = torch.where(values > 0, values / factor, values * factor)
        logits[place] = torch.where(times > 0, values - per_use * times.float() - once, values)

    def _count(self, new: np.ndarray, slot: int, num_prompt: int) -> None:
        """The plain form of the kernel: `new` tokens, of which the first num_prompt are of the prompt."""
        counts = self.counts[slot]
        for place, token in enumerate(new.tolist()):
            if counts[token] == 0:
                counts[token] = 1
                self.seen[slot, self.num_seen[slot]] = token
                self.num_seen[slot] += 1
            if place >= num_prompt:
                counts[token] += 1
