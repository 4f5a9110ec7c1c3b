"""Greedy tokens that the output layer notes while it makes the logits: the arg-max of those, or not known."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from tests.worker.test_jit_model import make_config, make_flat  # noqa: E402
from worker.jit import matmul  # noqa: E402
from worker.jit.model import NOTED_ROWS, JitModel  # noqa: E402
from worker.jit.team import get_team  # noqa: E402
from worker.linear.source import ModelSource  # noqa: E402
from worker.sampling.sampler import Sampler, SampleResult, SamplingColumns  # noqa: E402

VOCAB = 3000                                    # several units of tiles, the last one not whole


def make_model(mode: str = "none", num_threads: int = 2) -> JitModel:
    flat = make_flat(make_config(vocab_size=VOCAB))
    with torch.no_grad():
        flat.lm_head.weight[2001] = flat.lm_head.weight[40]         # equal logits, in different units
        flat.lm_head.weight[41] = flat.lm_head.weight[40]
    return JitModel(ModelSource(flat, mode), team=get_team(num_threads))


def noted(model: JitModel, hidden: torch.Tensor, width: int) -> tuple[np.ndarray, Any]:
    """(logits, what was noted), with the width known beforehand."""
    for _ in range(2):
        logits = model.compute_logits(hidden)
        found = model.best_of(logits, width)
    return logits.numpy()[:, :width], found


def some_hidden(rows: int) -> torch.Tensor:
    """A third of the rows like best the token that there is three times."""
    hidden = torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows))
    hidden[::3] = 50 * make_flat(make_config(vocab_size=VOCAB)).lm_head.weight[40].detach()
    return hidden


@pytest.mark.parametrize("mode", ["none", "int8", "int4"])
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_what_is_noted_is_the_first_largest_of_each_row(mode: str, num_threads: int) -> None:
    model = make_model(mode, num_threads)
    for rows in (NOTED_ROWS, 32, matmul.MANY_ROWS - 1):
        for width in (VOCAB, VOCAB - 1, 2002, 41, 7):
            logits, (numbers, largest) = noted(model, some_hidden(rows), width)
            assert numbers.tolist() == logits.argmax(axis=1).tolist()
            assert largest.tolist() == logits.max(axis=1).tolist()
        assert noted(model, some_hidden(rows), VOCAB)[1][0][0] == 40


def test_rows_that_are_not_finite_are_told_apart_like_those_the_sampler_reads() -> None:
    model, sampler = make_model(), Sampler(VOCAB)
    hidden = some_hidden(12)
    hidden[3, 5], hidden[7] = float("nan"), float("inf")
    logits, (numbers, largest) = noted(model, hidden, VOCAB)
    read = sampler.sample(torch.from_numpy(logits), SamplingColumns.greedy(12))
    found = SampleResult.of_best(numbers, largest)
    assert found.bad_rows.nonzero()[0].tolist() == [3, 7]
    for name in ("tokens", "bad_rows", "empty_rows"):
        assert getattr(found, name).tolist() == getattr(read, name).tolist()
    empty = SampleResult.of_best(np.array([5, 0]), np.array([1.0, -np.inf], np.float32))
    assert empty.tokens.tolist() == [5, 0] and empty.empty_rows.tolist() == [False, True] == empty.bad_rows.tolist()


def test_nothing_is_known_of_other_logits_of_few_or_many_rows_or_of_a_new_width() -> None:
    model = make_model()
    for rows, is_known in ((NOTED_ROWS - 1, False), (NOTED_ROWS, True), (matmul.MANY_ROWS, False), (12, True)):
        assert (noted(model, some_hidden(rows), VOCAB)[1] is not None) is is_known
    logits = model.compute_logits(some_hidden(12))
    assert model.best_of(logits, VOCAB) is not None
    assert model.best_of(logits.clone(), VOCAB) is None and model.best_of(logits[:11], VOCAB) is None
    assert model.best_of(logits, 100) is None   # from the next ones on
    assert model.best_of(model.compute_logits(some_hidden(12)), 100) is not None
