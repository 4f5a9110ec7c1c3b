"""Token ids to text while they arrive: the pieces joined are the decode of all ids, and no piece has half a character.

Two forms with one interface. Byte-level BPE looks ids up in a table and keeps at most three bytes of an unfinished
character. Other vocabularies are decoded by the library over a short window. Either way the cost of a token does not
depend on how many came before. Knows nothing of requests or stop strings.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from frontend.tokenizer import Tokenizer

_MAX_HELD_TOKENS = 32                # of a window whose text ends in U+FFFD without bytes being the reason


class Detokenizer(Protocol):
    """The text of one choice of one request."""

    @property
    def is_idle(self) -> bool:
        """Nothing is held back, and the text of what follows does not depend on what came before."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that `token_ids` complete; "" while a character is unfinished."""

    def flush(self) -> str:
        """The end: what an unfinished character shows as. Feed nothing afterwards."""


def make_detokenizer(tokenizer: Tokenizer, skip_special_tokens: bool = True) -> Detokenizer:
    """A fresh detokenizer. Ids must be below `tokenizer.vocab_size`."""
    if tokenizer.byte_table is not None:
        return TableDetokenizer(tokenizer, skip_special_tokens)
    return WindowDetokenizer(tokenizer, skip_special_tokens)


class TableDetokenizer:
    """For byte-level BPE. The invariant: every byte fed is in text already returned or in `_pending`, in order.

    `_pending` is a proper prefix of a UTF-8 character, so decoding it together with what follows gives exactly what
    decoding everything at once gives, for invalid bytes too.
    """

    __slots__ = ("_bytes", "_hidden", "_pending", "_texts")

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        if tokenizer.byte_table is None:
            raise RuntimeError("a table detokenizer needs a byte-level tokenizer")
        self._texts = tokenizer.shown_texts if skip_special_tokens else tokenizer.all_texts
        self._bytes = tokenizer.byte_table
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._pending = b""

    @property
    def is_idle(self) -> bool:
        return not self._pending

    def feed(self, token_ids: Sequence[int]) -> str:
        if not self._pending:
            texts = self._texts
            if len(token_ids) == 1:
                text = texts[token_ids[0]]
                if text is not None:
                    return text
            else:
                pieces = [texts[index] for index in token_ids]
                if None not in pieces:
                    return "".join(pieces)  # type: ignore[arg-type]
        table, hidden = self._bytes, self._hidden
        data = self._pending + b"".join([table[index] for index in token_ids if index not in hidden])
        text, num_decoded = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[num_decoded:]
        return text

    def flush(self) -> str:
        text = self._pending.decode("utf-8", "replace")
        self._pending = b""
        return text


class WindowDetokenizer:
    """For every other vocabulary: the text of a token is what it adds to the decode of the tokens just before it.

    A run of byte tokens (`<0xE4> <0xB8> <0x96>`) is held until it ends, because such decoders replace the *whole* run
    if one byte of it is invalid. Hidden special tokens never enter the window: the decoder strips the space in front of
    the first token it sees, which must be the same token here as in the full decode.
    """

    __slots__ = ("_backend_decode", "_byte_ids", "_hidden", "_prefix", "_prefix_text", "_waiting")

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._backend_decode = tokenizer.decode
        self._byte_ids = tokenizer.byte_token_ids
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._prefix: list[int] = []     # tokens whose text is out; they give the next ones their context
        self._prefix_text = ""
        self._waiting: list[int] = []

    @property
    def is_idle(self) -> bool:
        return False

    def feed(self, token_ids: Sequence[int]) -> str:
        return "".join([self._step(index) for index in token_ids])

    def _step(self, index: int) -> str:
        if index in self._hidden:
            return ""
        self._waiting.append(index)
        return "" if index in self._byte_ids else self._emit(is_end=False)

    def _emit(self, is_end: bool) -> str:
        text = self._backend_decode(self._prefix + self._waiting, False)
        if text.endswith("\ufffd") and not is_end and len(self._waiting) < _MAX_HELD_TOKENS:
            return ""
        new = text[len(self._prefix_text):]
        self._prefix, self._waiting = self._waiting, []
        self._prefix_text = self._backend_decode(self._prefix, False)
        return new

    def flush(self) -> str:
        return self._emit(is_end=True) if self._waiting else ""
