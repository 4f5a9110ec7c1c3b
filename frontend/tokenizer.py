"""Text to token ids and back, for one model.

Wraps the `tokenizers` library, whatever the tokenizer came from: tokenizer.json, GGUF metadata, or nothing at all (a
dummy model gets a byte tokenizer). For byte-level BPE it also has a table id -> bytes, which makes decoding a join and
incremental decoding a list look-up. Knows nothing of requests; prompts leave here as int32 little-endian bytes, the
form in which they travel.
"""

from __future__ import annotations

import functools
import glob
import json
import os
import sys
from array import array
from collections.abc import Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from frontend.gguf_tokenizer import TokenizerParts, add_bos, tokenizer_from_gguf
from ipc.errors import ConfigError, RequestError
from ipc.gguf import read_gguf
from ipc.model_source import ModelFiles, read_json_object

CHATML = ("{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
          "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")


def _byte_alphabet() -> dict[int, str]:
    """Byte-level BPE writes every byte as one printable character: itself where it is printable Latin-1, else the next
    one from U+0100 on (Radford et al. 2019)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) if byte in printable else chr(0x100 + others.index(byte)) for byte in range(256)}


BYTE_TO_CHAR = _byte_alphabet()
_CHAR_TO_LATIN1 = {ord(char): byte for byte, char in BYTE_TO_CHAR.items()}
_ALPHABET = frozenset(BYTE_TO_CHAR.values())
SHORT_TEXT_CHARS = 1_000
_SEPARATOR = "\u2028"               # in no byte-level token, and no byte's character


class Tokenizer:
    """One model's tokenizer. Immutable; safe to use from several threads.

    vocab_size    width of the model's logits (num_tokens, if that is more): decode takes every id below it
    num_tokens    ids from here on name no token; the sampler must never choose them
    byte_table    id -> bytes, vocab_size entries; None unless the tokenizer is byte-level BPE
    special_ids   ids that `skip_special_tokens` hides
    """

    def __init__(self, parts: TokenizerParts, vocab_size: int) -> None:
        self._backend = parts.backend
        self.special_tokens = parts.special_tokens
        self.chat_templates = parts.chat_templates
        vocab = self._backend.get_vocab(with_added_tokens=False)
        added = self._backend.get_added_tokens_decoder()
        self.num_tokens = max([*vocab.values(), *added], default=-1) + 1
        self.vocab_size = max(vocab_size, self.num_tokens)
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self.byte_table: list[bytes] | None = None
        if _is_byte_level(self._backend):
            contents = {index: token.content for index, token in added.items()}
            self.byte_table = _build_byte_table(vocab, contents, self.vocab_size)

    # -- where it comes from ------------------------------------------------------------------------------------------

    @classmethod
    def from_files(cls, files: ModelFiles) -> Tokenizer:
        """The tokenizer of a resolved model. Raises ConfigError."""
        vocab_size = files.config.vocab_size
        if files.path.endswith(".gguf"):
            return cls(tokenizer_from_gguf(read_gguf(files.path).metadata, files.path), vocab_size)
        if files.path and os.path.isfile(os.path.join(files.path, "tokenizer.json")):
            return cls(_parts_from_folder(files), vocab_size)
        if files.kind == "dummy":
            return cls.bytes_only(vocab_size, files.config.eos_token_ids)
        raise ConfigError(f"model folder {files.path} has no tokenizer.json; save the fast tokenizer there (a "
                          f"tokenizer.model alone cannot be read)")

    @classmethod
    def bytes_only(cls, vocab_size: int, eos_token_ids: Sequence[int] = ()) -> Tokenizer:
        """For a model without tokenizer files: ids 0-255 are bytes, two more mark chat turns, and every other id shows
        as one letter, so that random weights give visible text. Raises ConfigError."""
        if vocab_size < 258:
            raise ConfigError(f"the byte tokenizer needs a vocabulary of 258, the model has {vocab_size}; give the "
                              f"model folder a tokenizer.json")
        end = next((index for index in eos_token_ids if 256 <= index < vocab_size), 257)
        start = 256 if end != 256 else 257
        vocab = {char: byte for byte, char in BYTE_TO_CHAR.items()} | {"<|im_start|>": start, "<|im_end|>": end}
        backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens([AddedToken(token, special=True, normalized=False)
                                    for token in ("<|im_start|>", "<|im_end|>")])
        tokenizer = cls(TokenizerParts(backend, {"eos_token": "<|im_end|>"}, {"default": CHATML}), vocab_size)
        table = tokenizer.byte_table
        if table is None:
            raise RuntimeError("the byte tokenizer has no byte table")
        named = set(vocab.values())
        for index in range(256, vocab_size):
            if index not in named:
                table[index] = b"abcdefghijklmnopqrstuvwxyz"[index % 26:index % 26 + 1]
        return tokenizer

    # -- text to ids --------------------------------------------------------------------------------------------------

    def encode(self, text: str, add_special_tokens: bool) -> bytes:
        """Token ids of `text`, int32 little-endian.

        Special tokens written out in the text become those tokens, as a rendered chat prompt needs. Such a prompt
        already has its beginning-of-text token, so pass add_special_tokens=False for it.
        """
        return pack_ids(self.encode_ids(text, add_special_tokens))

    def encode_ids(self, text: str, add_special_tokens: bool) -> list[int]:
        """The same as a list.

        The library's `encode` keeps the interpreter's lock and finds offsets too; its batches go to other threads, and
        to wake those takes longer than a short text does.
        """
        _check_text(text)
        if len(text) <= SHORT_TEXT_CHARS:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[bytes]:
        """`encode` of each text, on all cores and without the interpreter's lock."""
        for text in texts:
            _check_text(text)
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [pack_ids(encoding.ids) for encoding in encodings]

    # -- ids to text --------------------------------------------------------------------------------------------------

    def decode(self, token_ids: Sequence[int] | bytes, skip_special_tokens: bool = True) -> str:
        """The text of all ids together; bytes that are no UTF-8 show as U+FFFD. Raises RequestError for an id that the
        model does not have."""
        ids = unpack_ids(token_ids)
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise RequestError(f"token ids must be 0 to {self.vocab_size - 1}; found {min(ids)} to {max(ids)}")
        if self.byte_table is None:
            return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        table, hidden = self.byte_table, self.special_ids if skip_special_tokens else ()
        return b"".join([table[index] for index in ids if index not in hidden]).decode("utf-8", "replace")

    @functools.cached_property
    def shown_texts(self) -> list[str | None]:
        """id -> text with special tokens hidden (""); None where the bytes are no whole characters by themselves."""
        texts = self.all_texts.copy()
        for index in self.special_ids:
            texts[index] = ""
        return texts

    @functools.cached_property
    def all_texts(self) -> list[str | None]:
        """id -> text, special tokens included; None where the bytes are no whole characters by themselves."""
        texts: list[str | None] = []
        for data in self.byte_table or ():
            try:
                texts.append(data.decode())
            except UnicodeDecodeError:
                texts.append(None)
        return texts

    @functools.cached_property
    def byte_token_ids(self) -> frozenset[int]:
        """Ids of single bytes (`<0xE4>`) in a vocabulary that falls back to bytes; empty for byte-level BPE."""
        return frozenset() if self.byte_table is not None else frozenset(
            index for token, index in self._backend.get_vocab().items() if _is_byte_token(token))

    def save(self, path: str) -> None:
        """Write it as a tokenizer.json. Raises OSError."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(self._backend.to_str())

    # -- single tokens ------------------------------------------------------------------------------------------------

    def token_to_id(self, token: str) -> int | None:
        """The id of a token's own text, special tokens included; None if there is none."""
        return self._backend.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary writes it (byte-level characters, not text)."""
        return self._backend.id_to_token(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to the text; b"" for an id without a token."""
        if self.byte_table is not None:
            return self.byte_table[token_id]
        token = self._backend.id_to_token(token_id) or ""
        return bytes([int(token[3:5], 16)]) if _is_byte_token(token) else token.replace("\u2581", " ").encode()

    @property
    def bos_token_id(self) -> int | None:
        """The beginning-of-text token, if the tokenizer names one."""
        return self._special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's own end token; the ids that end a request are the model's `eos_token_ids`."""
        return self._special_id("eos_token")

    def _special_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)


def pack_ids(ids: Sequence[int]) -> bytes:
    """Ids as they travel: int32, little-endian."""
    packed = array("i", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(token_ids: Sequence[int] | bytes) -> list[int]:
    """The inverse of pack_ids; a sequence of ids is taken as it is."""
    if not isinstance(token_ids, (bytes, bytearray, memoryview)):
        return list(token_ids)
    packed = array("i", bytes(token_ids))
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tolist()


def _check_text(text: str) -> None:
    """Half of a surrogate pair is no character; JSON can carry one, the tokenizer cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"the text has an unpaired surrogate at position {error.start}; send Unicode") from None


def _build_byte_table(vocab: dict[str, int], added: dict[int, str], size: int) -> list[bytes]:
    """One translation of the joined vocabulary instead of one per token; ids without a token stay empty."""
    table = [b""] * size
    joined = _SEPARATOR.join(vocab)
    if joined.count(_SEPARATOR) == len(vocab) - 1 and set(joined) <= _ALPHABET | {_SEPARATOR}:
        texts = joined.translate(_CHAR_TO_LATIN1).split(_SEPARATOR)
        for index, text in zip(vocab.values(), texts):
            table[index] = text.encode("latin-1")
    else:
        for token, index in vocab.items():
            table[index] = _token_to_bytes(token)
    for index, token in added.items():
        table[index] = _token_to_bytes(token)
    return table


def _token_to_bytes(token: str) -> bytes:
    """Bytes of one byte-level token. One with a character outside the alphabet is an added token, written as it is
    (one that is inside by chance is translated too: so does the library)."""
    if set(token) <= _ALPHABET:
        return token.translate(_CHAR_TO_LATIN1).encode("latin-1")
    return token.encode()


def _is_byte_token(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    """Whether the decoder is byte-level BPE's alone. The library shows a decoder's parts only through its state."""
    if backend.decoder is None:
        return False
    state = json.loads(backend.decoder.__getstate__())
    parts = state.get("decoders", [state])
    return [part["type"] for part in parts] == ["ByteLevel"]


# -- Hugging Face folders ---------------------------------------------------------------------------------------------

def _parts_from_folder(files: ModelFiles) -> TokenizerParts:
    """tokenizer.json, and what tokenizer_config.json and the template files beside it add."""
    path = os.path.join(files.path, "tokenizer.json")
    try:
        backend = tokenizers.Tokenizer.from_file(path)
    except Exception as error:           # the library raises plain Exception for any fault of the file
        raise ConfigError(f"{path} cannot be read: {error}") from error
    backend.no_padding()                 # both may be stored in the file, left from training
    backend.no_truncation()
    config_path = os.path.join(files.path, "tokenizer_config.json")
    config = read_json_object(config_path) if os.path.isfile(config_path) else {}
    _add_missing_tokens(backend, config.get("added_tokens_decoder") or {}, config_path)
    special_tokens = {}
    for key, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            special_tokens[key] = text
    if "bos_token" not in special_tokens and files.config.bos_token_id is not None and not config:
        token = backend.id_to_token(files.config.bos_token_id)
        special_tokens |= {"bos_token": token} if token else {}
    bos_token = special_tokens.get("bos_token")
    wants_bos = config.get("add_bos_token") is True and not backend.encode("", add_special_tokens=True).ids
    if wants_bos and bos_token and backend.token_to_id(bos_token) is not None:
        add_bos(backend, bos_token)
    return TokenizerParts(backend, special_tokens, _chat_templates(files.path, config))


def _add_missing_tokens(backend: tokenizers.Tokenizer, added: dict[str, Any], where: str) -> None:
    """Tokens that only tokenizer_config.json lists. The library numbers them itself, so the number is checked."""
    for index, entry in sorted(added.items(), key=lambda item: int(item[0])):
        content = entry["content"]
        if backend.token_to_id(content) is None:
            flags = {name: bool(entry.get(name, False)) for name in ("single_word", "lstrip", "rstrip", "normalized")}
            backend.add_tokens([AddedToken(content, special=bool(entry.get("special", False)), **flags)])
        if backend.token_to_id(content) != int(index):
            raise ConfigError(f"{where}: token {content!r} has id {index} there, but {backend.token_to_id(content)} in "
                              f"tokenizer.json; the two files are from different tokenizers")


def _chat_templates(folder: str, config: dict[str, Any]) -> dict[str, str]:
    """By name. A template file beside the tokenizer outranks the copy inside tokenizer_config.json."""
    inside = config.get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(inside, str):
        templates["default"] = inside
    elif isinstance(inside, list):
        templates |= {entry["name"]: entry["template"] for entry in inside}
    json_path = os.path.join(folder, "chat_template.json")
    if os.path.isfile(json_path) and isinstance(text := read_json_object(json_path).get("chat_template"), str):
        templates["default"] = text
    paths = {"default": os.path.join(folder, "chat_template.jinja")}
    for path in glob.glob(os.path.join(glob.escape(folder), "additional_chat_templates", "*.jinja")):
        paths[os.path.splitext(os.path.basename(path))[0]] = path
    for name, path in paths.items():
        if os.path.isfile(path):
            with open(path, encoding="utf-8") as file:
                templates[name] = file.read()
    return templates
