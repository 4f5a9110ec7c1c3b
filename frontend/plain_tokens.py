"""Tokens whose text is the same whatever came before, as JSON: most tokens of a stream are, and cost one look-up.

Plain is a token that is whole characters, shows at all, and has no character that begins a stop string: where nothing
is held back its text may go out at once, and nothing is held back after it. Knows no streams.
"""
from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from frontend.json_text import json_text

if TYPE_CHECKING:
    from frontend.tokenizer import Tokenizer

MAX_TOKENS = 1 << 16                            # remembered, of each table
MAX_BYTES = 1024                                # of one text
NUM_TABLES = 8                                  # ways to show text that are remembered: callers choose stop strings


class PlainTokens(dict[int, bytes | None]):
    """Token id -> its text as a JSON string, b'" the"'; None: not plain. Filled as tokens are asked for."""

    def __init__(self, texts: list[str | None], first_chars: frozenset[str]) -> None:
        super().__init__()
        self._texts = texts
        self._first_chars = first_chars

    def __missing__(self, token: int) -> bytes | None:
        text = self._texts[token]
        found = json_text(text) if text and self._first_chars.isdisjoint(text) else None
        if found is not None and len(found) > MAX_BYTES:
            found = None
        if len(self) < MAX_TOKENS:
            self[token] = found
        return found


@functools.lru_cache(maxsize=NUM_TABLES)
def plain_tokens(tokenizer: Tokenizer, skip_special_tokens: bool, stops: tuple[str, ...]) -> PlainTokens:
    """Shared by all requests that show text alike. For byte-level tokenizers."""
    texts = tokenizer.shown_texts if skip_special_tokens else tokenizer.all_texts
    return PlainTokens(texts, frozenset(stop[0] for stop in stops))
