"""How many token ids the tokenizer names, read from the model's files: logits may be wider.

Widths are often padded to a round number; the rows behind the last token are untrained and must not be sampled. Reads
only the ids, not the tokenizer itself. Does not know text.
"""
from __future__ import annotations

import os
from typing import Any

import msgspec

from ipc.errors import ConfigError
from ipc.gguf import read_gguf
from ipc.model_source import ModelFiles


class _Added(msgspec.Struct):
    id: int


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[Any] = {}      # a list (Unigram) has the tokens in order of id


class _Tokenizer(msgspec.Struct):
    """What is read of tokenizer.json; the rest, merges above all, is skipped."""
    model: _Model
    added_tokens: list[_Added] | None = None


class _TokenizerConfig(msgspec.Struct):
    added_tokens_decoder: dict[int, Any] = {}


def num_valid_tokens(files: ModelFiles) -> int | None:
    """One more than the largest id with a token; None: every id counts (a dummy model, or a file without names).

    Raises ConfigError for a file that is broken.
    """
    if not files.path:
        return None
    if files.path.endswith(".gguf"):
        tokens = read_gguf(files.path).metadata.get("tokenizer.ggml.tokens")
        return len(tokens) if tokens else None
    path = os.path.join(files.path, "tokenizer.json")
    if not os.path.isfile(path):
        return None
    tokenizer = _read(path, _Tokenizer)
    vocab = tokenizer.model.vocab
    ids = [len(vocab) - 1 if isinstance(vocab, list) else max(vocab.values(), default=-1)]
    ids += [token.id for token in tokenizer.added_tokens or ()]
    path = os.path.join(files.path, "tokenizer_config.json")
    if os.path.isfile(path):
        ids += _read(path, _TokenizerConfig).added_tokens_decoder
    return max(ids) + 1 or None


def _read(path: str, tp: Any) -> Any:
    with open(path, "rb") as file:
        data = file.read()
    try:
        return msgspec.json.decode(data, type=tp)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
