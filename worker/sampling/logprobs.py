"""Log-probabilities of chosen tokens and of the likeliest ones: log-softmax of the model's raw logits.

Raw means before penalties, masks and temperature, over the whole width of the logits. Ranks count from 1 and by value:
1 + the number of tokens with a larger logit. Knows no requests.
"""
from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from worker.sampling import placement
from worker.sampling.jit_threads import RowKernels


class Logprobs(NamedTuple):
    """Of n rows. Column 0 is the row's own token, the others its likeliest in falling order."""
    ids: np.ndarray                             # int32 [n, 1 + most]
    values: np.ndarray                          # float32 [n, 1 + most]
    ranks: np.ndarray                           # int64 [n], of the own token


def compute_logprobs(logits: Tensor, targets: np.ndarray, num_top: np.ndarray, kernels: RowKernels | None) -> Logprobs:
    """logits [n, V] float32; targets int [n]; num_top int [n], of which row i's first 1 + num_top[i] entries count."""
    if kernels is not None and logits.device.type == "cpu":
        ids, values, ranks = kernels.logprobs(logits.numpy(), targets, num_top)
    elif placement.on_device(logits):
        from worker.sampling import device_rows
        index, own, found, totals = device_rows.logprobs_of(logits, targets)
        top = torch.topk(logits, min(int(num_top.max(initial=0)), logits.shape[1]), dim=1)
        ids = torch.cat([index[:, None], top.indices], dim=1).cpu().numpy()
        values = torch.cat([own[:, None], top.values - totals[:, None]], dim=1).cpu().numpy()
        ranks = found.cpu().numpy().astype(np.int64)
    else:
        index = torch.from_numpy(np.asarray(targets, np.int64)).to(logits.device)[:, None]
        total = torch.logsumexp(logits.double(), dim=1, keepdim=True)
        own = logits.gather(1, index)
        ranks = (1 + (logits > own).sum(dim=1)).cpu().numpy()
        most = min(int(num_top.max(initial=0)), logits.shape[1])
        top = torch.topk(logits, most, dim=1)
        ids = torch.cat([index, top.indices], dim=1).cpu().numpy()
        values = (torch.cat([own, top.values], dim=1).double() - total).cpu().numpy()
    return Logprobs(ids.astype(np.int32), values.astype(np.float32), ranks)
