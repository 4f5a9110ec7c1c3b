"""A `tokenizers` tokenizer from GGUF metadata, for the byte-level BPE vocabularies ("gpt2" in GGUF's words).

A GGUF file stores the pieces of a tokenizer (tokens, merges, token types) but names its pre-tokenizer instead of
describing it, so the rule that splits text into words is chosen here by `tokenizer.ggml.pre`. A name that is not in
the table is refused: a tokenizer that splits a little differently gives fluent, wrong answers. Knows no files and no
models.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from ipc.errors import ConfigError

_CONTROL, _USER_DEFINED = 3, 4       # of tokenizer.ggml.token_type; control tokens are the special ones

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _TAIL
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _TAIL
_DIGITS = r"\p{N}"


class _Rule(NamedTuple):
    """How a pre-tokenizer splits: one pass per pattern, each over the pieces the one before left."""

    patterns: tuple[str, ...]
    is_nfc: bool = False             # text is normalised to NFC first
    ignore_merges: bool = False      # a word that is a token as a whole is that token, whatever the merges say
    adds_bos: bool = False           # when the file does not say


_GPT2_RULE = _Rule((_GPT2,))
_QWEN2_RULE = _Rule((_QWEN2,), is_nfc=True)
_LLAMA3_RULE = _Rule((_LLAMA3,), ignore_merges=True, adds_bos=True)
PRE_TOKENIZERS: dict[str, _Rule] = {
    "default": _Rule((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": _GPT2_RULE,
    "smollm": _Rule((_DIGITS, _GPT2)),
    "qwen2": _QWEN2_RULE,
    "deepseek-r1-qwen": _QWEN2_RULE,
    "llama-bpe": _LLAMA3_RULE,
    "llama3": _LLAMA3_RULE,
    "llama-v3": _LLAMA3_RULE,
}


class TokenizerParts(NamedTuple):
    """What a tokenizer is made of, whichever file it came from."""

    backend: Tokenizer
    special_tokens: dict[str, str]   # "bos_token", "eos_token", ... -> the token's text, as chat templates name them
    chat_templates: dict[str, str]   # "default" and others by name


def tokenizer_from_gguf(metadata: dict[str, Any], where: str) -> TokenizerParts:
    """Build the tokenizer that `metadata` describes. `where` names the file in errors. Raises ConfigError."""
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise ConfigError(f"{where}: tokenizer.ggml.model is {model!r}; only byte-level BPE ('gpt2') can be read. Use "
                          f"the model's safetensors folder with its tokenizer.json instead")
    pre = metadata.get("tokenizer.ggml.pre", "default")
    rule = PRE_TOKENIZERS.get(pre)
    if rule is None:
        raise ConfigError(f"{where}: tokenizer.ggml.pre {pre!r} is not known; known: {', '.join(PRE_TOKENIZERS)}. Use "
                          f"the model's safetensors folder with its tokenizer.json instead")
    tokens, merges = _strings(metadata, "tokens", where), _strings(metadata, "merges", where)
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise ConfigError(f"{where}: tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    vocab = dict(zip(tokens, range(len(tokens))))
    if len(vocab) != len(tokens):
        raise ConfigError(f"{where}: tokenizer.ggml.tokens has {len(tokens) - len(vocab)} tokens twice")
    backend = Tokenizer(_bpe(vocab, merges, rule.ignore_merges, where))
    if rule.is_nfc:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rule.patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(_added(tokens, types, _CONTROL, special=True))
    backend.add_tokens(_added(tokens, types, _USER_DEFINED, special=False))

    special_tokens = {}
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if index is not None:
            if not 0 <= index < len(tokens):
                raise ConfigError(f"{where}: tokenizer.ggml.{key}_token_id is {index}, must be below {len(tokens)}")
            special_tokens[name] = tokens[index]
    if metadata.get("tokenizer.ggml.add_bos_token", rule.adds_bos) and "bos_token" in special_tokens:
        add_bos(backend, special_tokens["bos_token"])
    return TokenizerParts(backend, special_tokens, _chat_templates(metadata))


def add_bos(backend: Tokenizer, bos_token: str) -> None:
    """Make `encode(..., add_special_tokens=True)` start with `bos_token`."""
    numbered = [(bos_token, backend.token_to_id(bos_token))]
    backend.post_processor = processors.TemplateProcessing(
        single=[bos_token, "$A"], pair=[bos_token, "$A", "$B"], special_tokens=numbered)


def _bpe(vocab: dict[str, int], merges: list[str], ignore_merges: bool, where: str) -> models.BPE:
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    try:
        return models.BPE(vocab=vocab, merges=pairs, ignore_merges=ignore_merges)
    except Exception as error:       # the library raises plain Exception for a merge of unknown tokens
        raise ConfigError(f"{where}: tokenizer.ggml.merges do not fit its tokens: {error}") from error


def _strings(metadata: dict[str, Any], key: str, where: str) -> list[str]:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        raise ConfigError(f"{where}: tokenizer.ggml.{key}: expected a list of strings, found {type(value).__name__}")
    return value


def _added(tokens: list[str], types: list[int], kind: int, special: bool) -> list[AddedToken]:
    return [AddedToken(token, special=special, normalized=False) for token, type_ in zip(tokens, types)
            if type_ == kind and token]


def _chat_templates(metadata: dict[str, Any]) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    templates = {key[len(prefix) + 1:] or "default": value for key, value in metadata.items()
                 if (key == prefix or key.startswith(prefix + ".")) and isinstance(value, str)}
    return templates
