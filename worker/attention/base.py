"""What a step looks like to attention (BatchMeta), and what an attention backend must offer.

Knows the ragged layout and the pool's shape; does not know which model runs or who owns the blocks.

    request:          a (chunk of 3)   b (decode)  c (decode)  padding
    rows of q:        0  1  2          3           4           5
    query_start_loc:  0                3           4           5          6
    seq_lens:         9                42          10          0
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from worker.models.ops import Ops


@dataclass
class BatchMeta:
    """The structure of one flat batch; built once per step, shared by all layers.

    query_start_loc [R+1] int32, seq_lens [R] int32, block_table [R, W] int32 padded with the null block 0,
    slot_mapping [N] int64. Request r's t queries are rows query_start_loc[r] : query_start_loc[r+1] and are the last t
    positions of its seq_lens[r] tokens, so query i sits at position seq_lens[r] - t + i.
    A row whose length is 0 is padding (graphs pad batches): its slot is -1, and attention returns zeros for it.
    The *_cpu copies let a backend plan on the host without waiting for the device.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    block_size: int
    query_start_loc_cpu: np.ndarray  # int32 [R+1]
    seq_lens_cpu: np.ndarray  # int32 [R]
    max_query_len: int
    max_seq_len: int
    # What backends derive once per step and reuse in every layer. It is valid for this step's tables only: a caller
    # that reuses the object for another step clears it.
    cache: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, query_start_loc: np.ndarray, seq_lens: np.ndarray, block_table: Tensor, slot_mapping: Tensor,
           block_size: int) -> BatchMeta:
        """From the lengths on the host, int32 [R+1] and [R], and the table and slots on the device that runs."""
        device = block_table.device
        return cls(torch.from_numpy(query_start_loc).to(device), torch.from_numpy(seq_lens).to(device), block_table,
                   slot_mapping, block_size, query_start_loc, seq_lens, int(np.diff(query_start_loc).max()),
                   int(seq_lens.max()))

    @property
    def num_reqs(self) -> int:
        """Rows of the batch, padding included."""
        return len(self.seq_lens_cpu)

    @property
    def decode_only(self) -> bool:
        """Every row computes one token."""
        return self.max_query_len == 1

    def resolved_slots(self, num_slots: int) -> Tensor:
        """slot_mapping with padding sent to the pool's last slot; [N] int64, computed once per step."""
        key = ("slots", num_slots)
        if key not in self.cache:
            self.cache[key] = resolve_slots(self.slot_mapping, num_slots)
        slots: Tensor = self.cache[key]
        return slots


class LastRows(NamedTuple):
    """The rows of a step whose hidden states somebody reads: in the last layer nothing else is computed but keys and
    values. For a prompt of thousands of tokens that is one row.

    rows [L] int64, ascending, of the step; meta: each as a request with one query.
    """

    rows: Tensor
    meta: BatchMeta


def resolve_slots(slot_mapping: Tensor, num_slots: int) -> Tensor:
    """Send slot -1 to the last slot, which lies in the scratch block. No filtering: that would need the number of real
    rows on the host, a wait that a CUDA graph cannot contain."""
    return torch.where(slot_mapping >= 0, slot_mapping, num_slots - 1)


@runtime_checkable
class AttentionBackend(Protocol):
    """One way to attend over the pool. `cache` is what `allocate` returned for the layer, opaque to everyone else
    except that each tensor's first axis counts blocks (so blocks can be swapped and copied)."""

    name: str
    ops: Ops  # what models do between their matrix products, for this backend's device

    def allocate(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
        """Zeroed pools of one layer. shape (B + 1, S, Hkv, D): block 0 is the null block, the last one is scratch."""

    def write(self, cache: tuple[Tensor, ...], k: Tensor, v: Tensor, meta: BatchMeta) -> None:
        """Scatter this step's k, v [N, Hkv, D] into the pool at meta.slot_mapping; -1 lands in the last slot."""

    def forward(
        self, q: Tensor, cache: tuple[Tensor, ...], meta: BatchMeta, *, scale: float | None = None, window: int = 0
    ) -> Tensor:
        """Causal attention of q [N, H, D] over the pool, after `write`; returns [N, H, D] in q's dtype.

        scale None means D ** -0.5. window w > 0 lets a query see the last w keys only, its own included. Padding rows
        give zeros. Slots that no query may see (null block, scratch, tails of blocks) never influence the result,
        whatever they hold: they may be NaN.
        """
