"""What one request may ask for, checked once, here.

Every door (HTTP, AsyncLLM, LLM, the wire) builds this struct, so a bad value fails the same way everywhere. Checks that
need the model (token ids against the width of the logits, lengths against max_model_len) are in `check_for_model`.
Field names are vLLM's.
"""
from __future__ import annotations

from typing import Any

import msgspec

from ipc.errors import RequestError, shown
from ipc.structured_outputs import StructuredOutputs, read_structured_outputs

MAX_N = 128                 # choices of one request
MAX_STOP_STRINGS = 32
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKEN_IDS = 16384
MAX_BAD_WORDS = 128
MAX_BAD_WORD_TOKENS = 256   # of one sequence; two sequences for each word
MAX_LOGITS_PROCESSORS = 8
POOLING_KINDS = ("", "last", "mean")
SEED_LIMIT = 1 << 64
PRIORITY_LIMIT = 1 << 31    # with ageing a priority stays within an int64 column


def check_priority(value: int | None) -> int:
    """The priority of a request, 0 when none is given. Raises RequestError: it would not fit the queue's columns."""
    priority = 0 if value is None else value
    _integer("priority", priority, -PRIORITY_LIMIT, PRIORITY_LIMIT - 1)
    return priority


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Sampling parameters of one request. Immutable; `replace` gives a changed copy, checked again.

    Raises RequestError that names field, value and range.
    """
    n: int = 1                                  # choices; each is its own request inside the engine
    temperature: float = 1.0                    # 0: greedy
    top_k: int = 0                              # 0 or -1: off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None                     # None: the frontend draws one
    max_tokens: int | None = 16                 # None: as many as fit
    min_tokens: int = 0                         # EOS, stop ids and stop strings do not count before
    stop: list[str] = []
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    # What changes the logits, in the order in which it is applied (worker/sampling/sampler.py).
    logits_processors: list[str] = []           # names registered in the worker
    logit_bias: dict[int, float] = {}           # token id -> added to its logit
    repetition_penalty: float = 1.0             # > 1: tokens of prompt and output become less likely
    frequency_penalty: float = 0.0              # per time a token was put out
    presence_penalty: float = 0.0               # once for each token that was put out
    allowed_token_ids: list[int] | None = None  # only these may be sampled; None: all
    bad_words: list[str] = []                   # texts whose last token is not sampled after the ones before it
    bad_words_token_ids: list[list[int]] = []   # the same as tokens; the frontend adds those of bad_words
    logprobs: int | None = None                 # of each output token and this many likeliest; 0: of the token alone
    prompt_logprobs: int | None = None          # the same for the prompt; its cached prefix is then not reused
    pooling: str = ""                           # "last" or "mean": a vector instead of tokens; set by encode()
    pooling_normalize: bool = True              # the vector has length 1
    structured_outputs: StructuredOutputs | None = None     # form of the output; a dict of its fields is taken, too

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            msgspec.structs.force_setattr(self, "stop", [self.stop])
        elif self.stop is None:
            msgspec.structs.force_setattr(self, "stop", [])
        if self.stop_token_ids is None:
            msgspec.structs.force_setattr(self, "stop_token_ids", [])
        for name, empty in _EMPTY.items():
            if getattr(self, name) is None:
                msgspec.structs.force_setattr(self, name, empty())
        if self.top_k == -1:
            msgspec.structs.force_setattr(self, "top_k", 0)
        _integer("n", self.n, 1, MAX_N)
        _number("temperature", self.temperature, 0.0, 100.0)
        _integer("top_k", self.top_k, 0, 1 << 31)
        _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0 and self.temperature > 0.0:
            raise RequestError("top_p is 0.0 but must be above 0 unless temperature is 0", "top_p")
        _number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _integer("seed", self.seed, -(1 << 63), SEED_LIMIT - 1)
            if self.seed < 0:
                msgspec.structs.force_setattr(self, "seed", self.seed + SEED_LIMIT)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, 1 << 31)
        _integer("min_tokens", self.min_tokens, 0, 1 << 31)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}; lower it or "
                               "raise max_tokens", "min_tokens")
        _strings("stop", self.stop)
        _token_list("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false, not {shown(getattr(self, name))}", name)
        self._check_logits_changes()
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, MAX_LOGPROBS)
        if self.pooling not in POOLING_KINDS:
            raise RequestError(f"pooling is {shown(self.pooling)}; allowed are last and mean", "pooling")
        if self.structured_outputs is not None:
            msgspec.structs.force_setattr(self, "structured_outputs", read_structured_outputs(self.structured_outputs))
        if self.pooling and (self.max_tokens != 1 or self.n != 1):
            raise RequestError("a pooling request puts out no tokens; leave n at 1 and max_tokens at 1", "pooling")

    def _check_logits_changes(self) -> None:
        if self.repetition_penalty == 0:
            raise RequestError("repetition_penalty is 0 but must be above 0; 1 is off", "repetition_penalty")
        _number("repetition_penalty", self.repetition_penalty, 1e-3, 1e3)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if not isinstance(self.logit_bias, dict):
            raise RequestError(f"logit_bias must map token ids to numbers, not {shown(self.logit_bias)}", "logit_bias")
        _count("logit_bias", self.logit_bias, MAX_LOGIT_BIAS)
        if any(isinstance(token, str) for token in self.logit_bias):        # as in JSON
            msgspec.structs.force_setattr(self, "logit_bias", {
                int(token) if isinstance(token, str) and token.isdecimal() and len(token) <= 10 else token: bias
                for token, bias in self.logit_bias.items()})
        for token, bias in self.logit_bias.items():
            _integer("logit_bias", token, 0, (1 << 31) - 1)
            _number("logit_bias", bias, -100.0, 100.0)
        if self.allowed_token_ids is not None:
            _token_list("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS)
            if not self.allowed_token_ids:
                raise RequestError("allowed_token_ids is empty; name at least one token, or leave it out",
                                   "allowed_token_ids")
        _strings("bad_words", self.bad_words, MAX_BAD_WORDS)
        if not isinstance(self.bad_words_token_ids, list):
            raise RequestError(f"bad_words_token_ids must be a list of lists of token ids, not "
                               f"{shown(self.bad_words_token_ids)}", "bad_words_token_ids")
        _count("bad_words_token_ids", self.bad_words_token_ids, 2 * MAX_BAD_WORDS)
        for word in self.bad_words_token_ids:
            _token_list("bad_words_token_ids", word, MAX_BAD_WORD_TOKENS)
            if not word:
                raise RequestError("bad_words_token_ids has an empty list; name at least one token",
                                   "bad_words_token_ids")
        _strings("logits_processors", self.logits_processors, MAX_LOGITS_PROCESSORS)

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def needs_whole_prompt(self) -> bool:
        """Something of every prompt position is asked for: a cached prefix, which has none of it, is of no use."""
        return self.prompt_logprobs is not None or self.pooling == "mean"

    def replace(self, **changes: Any) -> SamplingParams:
        """A checked copy with some fields changed."""
        return msgspec.structs.replace(self, **changes)

    def check_for_model(self, vocab_size: int) -> None:
        """Raises RequestError for a token id that the model's logits do not have."""
        used = {"stop_token_ids": self.stop_token_ids, "logit_bias": self.logit_bias,
                "allowed_token_ids": self.allowed_token_ids or (),
                "bad_words": [token for word in self.bad_words_token_ids for token in word]}
        for name, tokens in used.items():
            largest = max(tokens, default=0)
            if largest >= vocab_size:
                raise RequestError(f"{name} contains {largest}; the model's ids are 0 to {vocab_size - 1}", name)


_EMPTY: dict[str, Any] = {"logits_processors": list, "logit_bias": dict, "bad_words": list, "bad_words_token_ids": list}
_FLAGS = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens",
          "pooling_normalize")


def _integer(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, not {shown(value)}", name)
    if not low <= value <= high:
        raise RequestError(f"{name} is {shown(value)}; allowed are {low} to {high}", name)


def _number(name: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RequestError(f"{name} must be a number, not {shown(value)}", name)
    if not low <= value <= high:                # also false for nan
        raise RequestError(f"{name} is {shown(value)}; allowed are {low:g} to {high:g}", name)


def _count(name: str, value: Any, limit: int, unit: str = "entries") -> None:
    if len(value) > limit:
        raise RequestError(f"{name} has {len(value)} {unit}; at most {limit}", name)


def _token_list(name: str, value: Any, limit: int) -> None:
    if not isinstance(value, list):
        raise RequestError(f"{name} must be a list of token ids, not {shown(value)}", name)
    _count(name, value, limit, "ids")
    for token in value:
        _integer(name, token, 0, (1 << 31) - 1)


def _strings(name: str, value: Any, limit: int = MAX_STOP_STRINGS) -> None:
    if not isinstance(value, list) or not all(isinstance(s, str) for s in value):
        raise RequestError(f"{name} must be a string or a list of strings, not {shown(value)}", name)
    if len(value) > limit:
        raise RequestError(f"{name} has {len(value)} strings; at most {limit}", name)
    for text in value:
        if not text or len(text) > MAX_STOP_STRING_CHARS:
            kind = "a stop string" if name == "stop" else "such a string"
            raise RequestError(f"{name} contains {shown(text)}; {kind} has 1 to {MAX_STOP_STRING_CHARS} "
                               "characters", name)
