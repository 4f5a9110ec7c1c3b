"""What a few rows of a batch ask for beyond temperature and the filters, made once when the row enters.

Most rows have none, and steps without such rows look at none of it. A row that moves takes its options along; a request
that returns after a preemption gets new ones, whose state follows from its tokens. Knows no logits.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from ipc.errors import INVALID
from ipc.sampling_params import SamplingParams
from worker.sampling.masks import BadWords
from worker.sampling.penalties import PenaltyCounts
from worker.sampling.processors import Processor, find

if TYPE_CHECKING:
    from worker.sampling.grammar import RowGrammar


class RowOptions:
    """Of one row. `changes_logits`: some stage writes into the row's logits."""

    __slots__ = ("processors", "bias_ids", "bias_values", "penalty_slot", "allowed", "bad_words", "num_logprobs",
                 "num_prompt_logprobs", "pooling", "normalize", "pooled_sum", "failure", "changes_logits",
                 "structured_outputs", "grammar", "grammar_key")

    def __init__(self, params: SamplingParams, penalties: PenaltyCounts) -> None:
        self.failure: tuple[int, str] | None = None     # error code and text: the row cannot be sampled
        self.processors: list[Processor] = []
        try:
            self.processors = find(params.logits_processors)
        except ValueError as error:
            self.failure = INVALID, str(error)
        self.bias_ids = np.fromiter(params.logit_bias.keys(), np.int64, len(params.logit_bias))
        self.bias_values = np.fromiter(params.logit_bias.values(), np.float32, len(params.logit_bias))
        self.penalty_slot = -1
        if params.has_penalties:
            self.penalty_slot = penalties.take(params.repetition_penalty, params.frequency_penalty,
                                               params.presence_penalty)
        self.allowed = None if params.allowed_token_ids is None else np.unique(
            np.array(params.allowed_token_ids, np.int64))
        self.bad_words = BadWords.of(params.bad_words_token_ids)
        self.num_logprobs = -1 if params.logprobs is None else params.logprobs
        self.num_prompt_logprobs = -1 if params.prompt_logprobs is None else params.prompt_logprobs
        self.pooling, self.normalize = params.pooling, params.pooling_normalize
        self.pooled_sum: np.ndarray | None = None       # float64 [E], of the prompt so far
        self.structured_outputs = params.structured_outputs
        self.grammar: RowGrammar | None = None          # made by worker/sampling/grammar.py
        self.grammar_key = b"" if self.structured_outputs is None else msgspec.msgpack.encode(self.structured_outputs)
        self.changes_logits = bool(self.processors or len(self.bias_ids) or self.penalty_slot >= 0
                                   or self.allowed is not None or self.bad_words is not None
                                   or self.structured_outputs is not None)

    @staticmethod
    def of(params: SamplingParams, penalties: PenaltyCounts) -> RowOptions | None:
        """None for the usual row."""
        if (params.logprobs is None and params.prompt_logprobs is None and not params.pooling
                and not params.has_penalties and not params.logit_bias and params.allowed_token_ids is None
                and not params.bad_words_token_ids and not params.logits_processors
                and params.structured_outputs is None):
            return None
        return RowOptions(params, penalties)

    def release(self, penalties: PenaltyCounts) -> None:
        """The row leaves the batch."""
        if self.penalty_slot >= 0:
            penalties.release(self.penalty_slot)
            self.penalty_slot = -1
