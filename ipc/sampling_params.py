"""What one request may ask for, checked once, here.

Every door (HTTP, AsyncLLM, LLM, the wire) builds this struct, so a bad value fails the same way everywhere. Checks that
need the model (token ids against the width of the logits, lengths against max_model_len) are in `check_for_model`.
Field names are vLLM's.
"""
from __future__ import annotations

import math
from typing import Any

import msgspec

from ipc.errors import RequestError

MAX_N = 128                 # choices of one request
MAX_STOP_STRINGS = 32
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 256
SEED_LIMIT = 1 << 64


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

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            msgspec.structs.force_setattr(self, "stop", [self.stop])
        elif self.stop is None:
            msgspec.structs.force_setattr(self, "stop", [])
        if self.stop_token_ids is None:
            msgspec.structs.force_setattr(self, "stop_token_ids", [])
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
        if not isinstance(self.stop_token_ids, list):
            raise RequestError(f"stop_token_ids must be a list of token ids, not {_show(self.stop_token_ids)}",
                               "stop_token_ids")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise RequestError(f"stop_token_ids has {len(self.stop_token_ids)} ids; at most {MAX_STOP_TOKEN_IDS}",
                               "stop_token_ids")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, (1 << 31) - 1)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false, not {_show(getattr(self, name))}", name)

    def replace(self, **changes: Any) -> SamplingParams:
        """A checked copy with some fields changed."""
        return msgspec.structs.replace(self, **changes)

    def check_for_model(self, vocab_size: int) -> None:
        """Raises RequestError for a token id that the model's logits do not have."""
        for token in self.stop_token_ids:
            if token >= vocab_size:
                raise RequestError(f"stop_token_ids contains {token}; the model's ids are 0 to {vocab_size - 1}",
                                   "stop_token_ids")


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _integer(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, not {_show(value)}", name)
    if not low <= value <= high:
        raise RequestError(f"{name} is {_show(value)}; allowed are {low} to {high}", name)


def _number(name: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RequestError(f"{name} must be a number, not {_show(value)}", name)
    if not math.isfinite(value) or not low <= value <= high:
        raise RequestError(f"{name} is {_show(value)}; allowed are {low:g} to {high:g}", name)


def _strings(name: str, value: Any) -> None:
    if not isinstance(value, list) or not all(isinstance(s, str) for s in value):
        raise RequestError(f"{name} must be a string or a list of strings, not {_show(value)}", name)
    if len(value) > MAX_STOP_STRINGS:
        raise RequestError(f"{name} has {len(value)} strings; at most {MAX_STOP_STRINGS}", name)
    for text in value:
        if not text or len(text) > MAX_STOP_STRING_CHARS:
            raise RequestError(f"{name} contains {_show(text)}; a stop string has 1 to {MAX_STOP_STRING_CHARS} "
                               "characters", name)
