"""Tokenizers from every source give the ids of the library's own rules, and text comes back unchanged."""

from __future__ import annotations

import functools
import json
import pathlib
from array import array
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from frontend.gguf_tokenizer import tokenizer_from_gguf
from frontend.tokenizer import Tokenizer, pack_ids, unpack_ids
from ipc.errors import ConfigError, RequestError
from ipc.model_config import ModelConfig
from ipc.model_source import ModelFiles, fetch_demo_model, resolve_model

REPEATABLE = settings(derandomize=True, deadline=None, max_examples=300)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CORPUS = ["The year 2024 isn't 1999, it's 25 years later!\n\n    def f(x):\r\n\treturn x + 12345\n",
          "naïve café, żółć; 日本語のテキスト 한국어 🙂🚀 I'LL SAY ½ ²³"] * 8
TEXT = st.text(st.characters(codec="utf-8") | st.sampled_from("abc 'sLl1234\n\r\t.,é½"), max_size=40)


def split_rules(pre: str) -> pre_tokenizers.PreTokenizer:
    """The pre-tokenizers as the models' own tokenizer.json files state them."""
    if pre == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    if pre == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = r"\p{N}{1,3}" if pre == "llama-bpe" else r"\p{N}"
    pattern = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits +
               r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"),
                                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


@functools.cache
def trained(pre: str) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    backend.pre_tokenizer = split_rules(pre)
    backend.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(
        vocab_size=340, show_progress=False, special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    return backend


@functools.cache
def as_gguf(pre: str) -> dict[str, Any]:
    """What a converter would write for `trained(pre)`."""
    backend = trained(pre)
    vocab = backend.get_vocab()
    tokens = sorted(vocab, key=lambda token: vocab[token])
    merges = [" ".join(pair) for pair in json.loads(backend.to_str())["model"]["merges"]]
    kinds = [3 if token in SPECIALS else 4 if token == "<think>" else 1 for token in tokens]
    return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.merges": merges, "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2, "tokenizer.chat_template": "hello"}


def from_gguf(pre: str, /, vocab_size: int = 0, **changes: Any) -> Tokenizer:
    metadata = as_gguf(pre) | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return Tokenizer(tokenizer_from_gguf(metadata, "m.gguf"), vocab_size)


@functools.cache
def plain(pre: str) -> Tokenizer:
    return from_gguf(pre, add_bos_token=False)


def config(vocab_size: int, **changes: Any) -> ModelConfig:
    return ModelConfig(architecture="LlamaForCausalLM", vocab_size=vocab_size, hidden_size=8, intermediate_size=8,
                       num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=8, **changes)


def folder_files(path: pathlib.Path, tokenizer_config: dict[str, Any] | None, **changes: Any) -> ModelFiles:
    trained("smollm").save(str(path / "tokenizer.json"))
    if tokenizer_config is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return ModelFiles("safetensors", str(path), config(512, **changes), "m")


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "qwen2", "llama-bpe"])
def test_a_gguf_tokenizer_gives_the_ids_of_the_models_own_rules(pre: str) -> None:
    @REPEATABLE
    @given(TEXT)
    def check(text: str) -> None:
        assert plain(pre).encode_ids(text, False) == trained(pre).encode(text, add_special_tokens=False).ids

    check()
    for text in CORPUS:
        assert plain(pre).encode_ids(text, False) == trained(pre).encode(text).ids


@REPEATABLE
@given(TEXT)
def test_text_comes_back_unchanged(text: str) -> None:
    for pre in ("smollm", "llama-bpe"):
        assert plain(pre).decode(plain(pre).encode(text, False)) == text


@REPEATABLE
@given(st.data(), st.booleans())
def test_decode_equals_the_librarys_for_any_ids(data: st.DataObject, skip: bool) -> None:
    tokenizer = plain("smollm")
    ids = data.draw(st.lists(st.integers(0, tokenizer.num_tokens - 1), max_size=20))
    assert tokenizer.decode(ids, skip) == tokenizer._backend.decode(ids, skip_special_tokens=skip)


def test_prompts_leave_as_little_endian_int32_and_batches_equal_single_texts() -> None:
    tokenizer = plain("smollm")
    ids = tokenizer.encode_ids(CORPUS[0], True)
    assert tokenizer.encode(CORPUS[0], True) == b"".join(index.to_bytes(4, "little") for index in ids) == pack_ids(ids)
    assert unpack_ids(pack_ids(ids)) == unpack_ids(array("i", ids)) == ids
    texts = [*CORPUS[:2], CORPUS[0] * 30]       # short and long ones take different ways
    assert tokenizer.encode_batch(texts, True) == [tokenizer.encode(text, True) for text in texts]


def test_special_tokens_written_in_a_prompt_are_those_tokens() -> None:
    tokenizer = plain("qwen2")
    ids = tokenizer.encode_ids("<|im_start|>a<|im_end|><think>", False)
    assert [ids[0], ids[-2], ids[-1]] == [1, 2, tokenizer.token_to_id("<think>")]
    assert tokenizer.decode(ids) == "a<think>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>a<|im_end|><think>"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.special_ids) == (1, 2, {0, 1, 2})


def test_bos_is_added_where_the_file_or_the_family_says_so() -> None:
    assert from_gguf("llama-bpe").encode_ids("", True) == [1]
    assert from_gguf("llama-bpe").encode_ids("", False) == []
    assert from_gguf("llama-bpe", add_bos_token=False).encode_ids("", True) == []
    assert from_gguf("smollm").encode_ids("", True) == []
    assert from_gguf("smollm", add_bos_token=True).encode_ids("", True) == [1]


def test_tokens_have_bytes_and_padding_ids_have_none() -> None:
    tokenizer = from_gguf("smollm", vocab_size=500)
    assert (tokenizer.num_tokens, tokenizer.vocab_size) == (341, 500)
    assert tokenizer.token_bytes(tokenizer.encode_ids("é", False)[0])[:1] == "é".encode()[:1]
    assert (tokenizer.token_bytes(499), tokenizer.id_to_token(499)) == (b"", None)
    assert tokenizer.token_to_id("none such") is None
    assert tokenizer.decode([499]) == ""
    for wrong in ([-1], [500]):
        with pytest.raises(RequestError, match="0 to 499"):
            tokenizer.decode(wrong)


def test_half_a_surrogate_pair_is_refused_before_the_library_sees_it() -> None:
    with pytest.raises(RequestError, match="surrogate at position 1"):
        plain("smollm").encode("a\ud83d", False)
    with pytest.raises(RequestError, match="surrogate"):
        plain("smollm").encode_batch(["ok", "\udc00"], False)


@pytest.mark.parametrize(("changes", "expected"), [
    ({"model": "llama"}, "tokenizer.ggml.model is 'llama'"),
    ({"pre": "nonesuch"}, "'nonesuch' is not known; known: default"),
    ({"tokens": None}, "expected a list of strings"),
    ({"tokens": ["a", "a"], "token_type": [1, 1]}, "1 tokens twice"),
    ({"token_type": [1]}, "token_type has 1 entries for 341 tokens"),
    ({"merges": ["x9 y9"]}, "merges do not fit"),
    ({"eos_token_id": 341}, "eos_token_id is 341, must be below 341"),
])
def test_a_gguf_tokenizer_that_cannot_be_built_is_refused_by_name(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=f"m.gguf: .*{expected}"):
        from_gguf("smollm", **changes)


def test_a_folder_gives_tokenizer_specials_and_template(tmp_path: pathlib.Path) -> None:
    files = folder_files(tmp_path, {"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>",
                                    "chat_template": "inside", "add_bos_token": True})
    tokenizer = Tokenizer.from_files(files)
    assert tokenizer.encode_ids("a", True) == [1, *trained("smollm").encode("a").ids]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert tokenizer.chat_templates == {"default": "inside"}
    assert tokenizer.vocab_size == 512


def test_template_files_outrank_the_copy_inside_and_named_ones_are_kept(tmp_path: pathlib.Path) -> None:
    files = folder_files(tmp_path, {"chat_template": [{"name": "default", "template": "a"},
                                                      {"name": "tool_use", "template": "b"}]})
    assert Tokenizer.from_files(files).chat_templates == {"default": "a", "tool_use": "b"}
    (tmp_path / "chat_template.jinja").write_text("c")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("d")
    assert Tokenizer.from_files(files).chat_templates == {"default": "c", "tool_use": "b", "rag": "d"}


def test_padding_and_truncation_left_in_the_file_do_not_touch_prompts(tmp_path: pathlib.Path) -> None:
    files = folder_files(tmp_path, None, bos_token_id=1)
    stored = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    stored.enable_truncation(2)
    stored.enable_padding(length=5)
    stored.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_files(files)
    assert tokenizer.decode(tokenizer.encode(CORPUS[0], True)) == CORPUS[0]
    assert tokenizer.special_tokens == {"bos_token": "<|im_start|>"}


def test_tokens_that_only_the_config_lists_are_added_under_their_number(tmp_path: pathlib.Path) -> None:
    entry = {"content": "<|new|>", "special": True}
    tokenizer = Tokenizer.from_files(folder_files(tmp_path, {"added_tokens_decoder": {"341": entry}}))
    assert tokenizer.encode_ids("<|new|>", False) == [341]
    assert 341 in tokenizer.special_ids
    with pytest.raises(ConfigError, match="'<|new|>' has id 350 there, but 341"):
        Tokenizer.from_files(folder_files(tmp_path, {"added_tokens_decoder": {"350": entry}}))


def test_a_folder_without_or_with_a_broken_tokenizer_is_refused(tmp_path: pathlib.Path) -> None:
    files = ModelFiles("safetensors", str(tmp_path), config(512), "m")
    with pytest.raises(ConfigError, match="has no tokenizer.json"):
        Tokenizer.from_files(files)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="tokenizer.json cannot be read"):
        Tokenizer.from_files(files)


@REPEATABLE
@given(TEXT)
def test_a_dummy_model_without_files_speaks_bytes(text: str) -> None:
    tokenizer = dummy()
    ids = tokenizer.encode_ids(text, True)
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


@functools.cache
def dummy() -> Tokenizer:
    return Tokenizer.from_files(ModelFiles("dummy", "", config(1000, eos_token_ids=[900]), "m"))


def test_the_byte_tokenizer_has_chat_tokens_ends_where_the_model_does_and_shows_every_id() -> None:
    assert dummy().encode_ids("<|im_start|>a<|im_end|>", False) == [256, 97, 900]
    assert (dummy().eos_token_id, dummy().vocab_size) == (900, 1000)
    assert dummy().decode([900]) == ""
    assert len(dummy().decode([999, 257, 901])) == 3
    assert "default" in dummy().chat_templates
    with pytest.raises(ConfigError, match="vocabulary of 258, the model has 100"):
        Tokenizer.bytes_only(100)


@pytest.mark.slow
@pytest.mark.network
def test_the_default_models_tokenizer_knows_its_chat_tokens() -> None:
    files = resolve_model(fetch_demo_model(None, lambda line: None))
    tokenizer = Tokenizer.from_files(files)
    assert tokenizer.encode_ids("<|im_start|>user\nhi<|im_end|>\n", True) == [1, 4093, 198, 6004, 2, 198]
    assert tokenizer.decode(tokenizer.encode(CORPUS[1], True)) == CORPUS[1]
    assert "SmolLM" in tokenizer.chat_templates["default"]


def test_a_long_text_gives_the_ids_that_it_gives_in_one_call() -> None:
    """Long texts are encoded without the interpreter's lock, so that a megabyte does not stop the event loop."""
    tokenizer = from_gguf("smollm")
    text = "a b " * 20_000 + SPECIALS[0]
    assert tokenizer.encode_ids(text, True) == tokenizer._backend.encode(text, add_special_tokens=True).ids
