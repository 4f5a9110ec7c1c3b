"""The vocabulary as the grammar library needs it: the bytes of each token, and which tokens are no text.

From tokenizer.json the library reads it itself. GGUF metadata (byte-level BPE) and the byte vocabulary of a model
without tokenizer files are turned into a table here. Knows no requests.
"""
from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from llguidance import LLTokenizer, TokenizerWrapper

from ipc.gguf import read_gguf
from ipc.model_source import ModelFiles

_NORMAL, _USER_DEFINED = 1, 4                   # of tokenizer.ggml.token_type; others are no text


def load_vocabulary(files: ModelFiles | None, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Of a model; None: one without files. `vocab_size` is the width of its logits. Raises ValueError for a file that
    cannot be used."""
    path = files.path if files is not None else ""
    if path.endswith(".gguf"):
        return from_gguf(read_gguf(path).metadata, vocab_size, eos_token_ids)
    tokenizer_json = os.path.join(path, "tokenizer.json")
    if path and os.path.isfile(tokenizer_json):
        # Without an id that ends a sequence the library's own choice could be one that the model puts out as text.
        eos = list(eos_token_ids) or [vocab_size]
        return LLTokenizer(tokenizer_json, n_vocab=max(vocab_size, max(eos) + 1), eos_token=eos)
    return byte_vocabulary(vocab_size, eos_token_ids)


def byte_vocabulary(vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Ids 0 to 255 are bytes; others stand for nothing that a grammar can contain."""
    tokens = [bytes([index]) if index < 256 else b"" for index in range(vocab_size)]
    return from_table(tokens, [], eos_token_ids)


def from_gguf(metadata: dict[str, Any], vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """From a byte-level BPE vocabulary."""
    names: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(names)
    table = _char_to_byte()
    tokens: list[bytes] = []
    for name, kind in zip(names, types):
        is_plain = kind == _NORMAL and all(ord(char) in table for char in name)
        tokens.append(name.translate(table).encode("latin-1") if is_plain else name.encode())
    special = [index for index, kind in enumerate(types) if kind not in (_NORMAL, _USER_DEFINED)]
    tokens += [b""] * (vocab_size - len(tokens))
    return from_table(tokens, special, eos_token_ids)


def from_table(tokens: list[bytes], special_ids: list[int], eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Of id -> bytes. When nothing ends a sequence, the id behind the last stands for the end."""
    eos = list(eos_token_ids)
    if not eos:
        eos, tokens = [len(tokens)], [*tokens, b"<end>"]
    tokens = list(tokens)
    for index in eos:
        tokens[index] = tokens[index] or b"<end>"
    table = _Table(tokens, sorted({*special_ids, *eos}), eos[0])
    tokenizer = LLTokenizer(TokenizerWrapper(table), n_vocab=len(tokens), eos_token=eos)
    table.tokenizer = tokenizer
    return tokenizer


class _Table:
    """What the library asks of a foreign tokenizer. Text that a grammar forces is cut into the longest tokens."""

    def __init__(self, tokens: list[bytes], special_token_ids: list[int], eos_token_id: int) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special_token_ids, eos_token_id
        self.bos_token_id: int | None = None
        self.tokenizer: LLTokenizer | None = None

    def __call__(self, text: bytes | str) -> list[int]:
        if self.tokenizer is None:
            return []
        return self.tokenizer.greedy_tokenize(text.decode("utf-8", "replace") if isinstance(text, bytes) else text)


def _char_to_byte() -> dict[int, int]:
    """Byte-level BPE writes each byte as one printable character (Radford et al. 2019); this is the way back."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {0x100 + index: byte for index, byte in enumerate(others)}
