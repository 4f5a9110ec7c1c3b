"""What a caller receives while a request runs.

`RequestOutput` is one piece of news about one request: which choices have new text, which ended, and what it cost.
Field names are vLLM's. Knows no sockets and no HTTP.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np

OutputKind = Literal["cumulative", "delta", "final"]

FINISH_STOP, FINISH_LENGTH, FINISH_ABORT, FINISH_ERROR = "stop", "length", "abort", "error"


@dataclasses.dataclass(slots=True)
class Logprob:
    """Of one token at one position: log-softmax of the model's raw logits, before penalties, masks and temperature."""
    logprob: float
    rank: int                                   # among all tokens, 1: the likeliest
    decoded_token: str                          # by itself; part of a character shows as U+FFFD


Logprobs = dict[int, Logprob]                   # token id -> at one position; the token that stands there comes first


@dataclasses.dataclass(slots=True)
class CompletionOutput:
    """One choice. With output_kind "delta", `text` and `token_ids` hold what is new since the last piece."""
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None            # "stop", "length", "abort" or "error"; None while running
    stop_reason: int | str | None = None        # the stop token id or stop string that ended it
    logprobs: list[Logprobs] | None = None      # one entry per entry of token_ids, when asked for
    cumulative_logprob: float | None = None     # of all tokens so far
    num_echoed: int = 0                         # of token_ids: the prompt's, which `echo` put in front
    all_token_ids: Sequence[int] = ()           # also with "delta" all so far; the engine client's own: only to read


@dataclasses.dataclass(slots=True)
class RequestMetrics:
    """Times of one request in seconds of time.monotonic(); None: not yet."""
    arrival_time: float                         # over HTTP: when the request came in
    sent_time: float | None = None              # tokenized and on its way to the core
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finish_time: float | None = None
    delivered_time: float | None = None         # the consumer has its last piece


@dataclasses.dataclass(slots=True)
class RequestOutput:
    """News about one request. `finished` is true exactly once, in its last piece."""
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0                  # prompt tokens that the prefix cache gave at first admission
    num_preemptions: int = 0
    max_tokens: int | None = None               # what the engine allows after clamping to the pool and max_model_len
    usage_prompt_tokens: int = 0
    usage_completion_tokens: int = 0            # over all choices; tokens past a stop string are not counted
    metrics: RequestMetrics | None = None
    # When asked for; of the first token None. With output_kind "delta" in the first piece only.
    prompt_logprobs: list[Logprobs | None] | None = None


@dataclasses.dataclass(slots=True)
class PoolingOutput:
    """The vector of one prompt."""
    data: np.ndarray                            # float32 [E]

    @property
    def embedding(self) -> list[float]:
        """The same as numbers."""
        numbers: list[float] = self.data.tolist()
        return numbers


@dataclasses.dataclass(slots=True)
class PoolingRequestOutput:
    """The answer to `encode`."""
    request_id: str
    outputs: PoolingOutput
    prompt_token_ids: list[int]
    finished: bool = True
    num_cached_tokens: int = 0
