"""Incremental text: the pieces joined are the decode of all ids, for every tokenizer and every way of cutting."""

from __future__ import annotations

import functools

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

from frontend.detokenizer import TableDetokenizer, WindowDetokenizer, make_detokenizer
from frontend.gguf_tokenizer import TokenizerParts
from frontend.tokenizer import BYTE_TO_CHAR, Tokenizer

REPEATABLE = settings(derandomize=True, deadline=None, max_examples=400)


def byte_level(extra: list[bytes]) -> Tokenizer:
    """Ids 0-255 are the bytes, then `extra`, then one special and one plain added token."""
    pieces = [bytes([byte]) for byte in range(256)] + extra
    vocab = {"".join(BYTE_TO_CHAR[byte] for byte in piece): index for index, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    backend.add_tokens([AddedToken("<tool a>", normalized=False)])
    return Tokenizer(TokenizerParts(backend, {}, {}), vocab_size=len(pieces) + 8)


@functools.cache
def mixed_tokenizer() -> Tokenizer:
    first, last = "世".encode()[:2], "世".encode()[2:]
    return byte_level(["世界".encode(), first, last + b"a", " hé".encode(), b"\xf0\x9f", b"\x80\xc3"])


@functools.cache
def byte_fallback_tokenizer() -> Tokenizer:
    """As sentencepiece vocabularies are: words with a mark for the space, and bytes for what has no token."""
    words = ["<unk>", "<s>", "\u2581", "\u2581hello", "hello", "世", "\u2581\u2581", "."]
    vocab = {token: index for index, token in enumerate(words + [f"<0x{byte:02X}>" for byte in range(256)])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence([
        decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    return Tokenizer(TokenizerParts(backend, {}, {}), vocab_size=len(vocab))


def stream(tokenizer: Tokenizer, ids: list[int], step: int, skip: bool) -> list[str]:
    detokenizer = make_detokenizer(tokenizer, skip)
    pieces = [detokenizer.feed(ids[start:start + step]) for start in range(0, len(ids), step)]
    return [*pieces, detokenizer.flush()]


@REPEATABLE
@given(st.data(), st.integers(1, 4), st.booleans())
def test_pieces_of_random_tokens_join_to_the_full_decode(data: st.DataObject, step: int, skip: bool) -> None:
    tokenizer = mixed_tokenizer()
    high = st.integers(0xC0, tokenizer.vocab_size - 1)      # mostly tokens that begin or continue a character
    ids = data.draw(st.lists(high | st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    joined = "".join(stream(tokenizer, ids, step, skip))
    assert joined == tokenizer.decode(ids, skip)
    assert joined == tokenizer._backend.decode(ids, skip_special_tokens=skip)


@REPEATABLE
@given(st.binary(max_size=40), st.integers(1, 4))
def test_random_bytes_are_replaced_exactly_as_in_a_full_decode(data: bytes, step: int) -> None:
    assert "".join(stream(mixed_tokenizer(), list(data), step, True)) == data.decode("utf-8", "replace")


@REPEATABLE
@given(st.text(max_size=20))
def test_valid_text_never_shows_a_replacement_character_on_the_way(text: str) -> None:
    ids = list(text.replace("\ufffd", "").encode())
    pieces = stream(mixed_tokenizer(), ids, 1, True)
    assert "\ufffd" not in "".join(pieces)
    assert pieces[-1] == ""


@REPEATABLE
@given(st.data(), st.integers(1, 3), st.booleans())
def test_byte_fallback_vocabularies_join_to_the_full_decode_too(data: st.DataObject, step: int, skip: bool) -> None:
    tokenizer = byte_fallback_tokenizer()
    byte = st.sampled_from([8 + value for value in b"\xe4\xb8\x96ab\xff"])
    ids = data.draw(st.lists(st.integers(0, 7) | byte, max_size=24))
    assert isinstance(make_detokenizer(tokenizer), WindowDetokenizer)
    assert "".join(stream(tokenizer, ids, step, skip)) == tokenizer.decode(ids, skip)


def test_a_special_token_between_two_words_does_not_eat_the_space() -> None:
    """A window that begins with a hidden token would strip the space of the word after it."""
    assert stream(byte_fallback_tokenizer(), [3, 1, 3], 1, True) == ["hello", "", " hello", ""]


def test_text_after_an_unfinished_character_is_neither_doubled_nor_replaced() -> None:
    """Seen elsewhere: 'A 世?', 'A 世a?', 'A 世ab' (? unfinished) streamed with a doubled or replaced character."""
    tokenizer = byte_level([b"A \xe4\xb8\x96\xc3", b"\xa9\xc3"])
    assert stream(tokenizer, [256, 257, 0x9F], 1, True) == ["A 世", "é", "ß", ""]


def test_an_emoji_in_four_byte_tokens_comes_whole() -> None:
    assert stream(mixed_tokenizer(), list("🙂".encode()), 1, True) == ["", "", "", "🙂", ""]


def test_an_end_inside_a_character_shows_one_replacement_character_once() -> None:
    assert stream(mixed_tokenizer(), [65, *"🙂".encode()[:3]], 1, True) == ["A", "", "", "", "\ufffd"]


def test_special_tokens_are_hidden_or_shown_and_never_break_a_character() -> None:
    tokenizer = mixed_tokenizer()
    end, tool = tokenizer.token_to_id("<|end|>"), tokenizer.token_to_id("<tool a>")
    assert end is not None and tool is not None
    first, *rest = "é".encode()
    assert stream(tokenizer, [first, end, *rest, tool], 1, True) == ["", "", "é", "<tool a>", ""]
    assert stream(tokenizer, [65, end], 1, False) == ["A", "<|end|>", ""]


def test_ids_without_a_token_show_nothing() -> None:
    tokenizer = mixed_tokenizer()
    assert stream(tokenizer, [65, tokenizer.vocab_size - 1, 66], 1, True) == ["A", "", "B", ""]


def test_the_table_detokenizer_needs_a_byte_level_vocabulary() -> None:
    with pytest.raises(RuntimeError, match="byte-level"):
        TableDetokenizer(byte_fallback_tokenizer())
