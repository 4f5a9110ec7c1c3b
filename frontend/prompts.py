"""What a prompt may be in the Python API. Field names are vLLM's. Knows no tokenizer."""
from __future__ import annotations

from typing import Any, NamedTuple, NotRequired, TypedDict

from ipc.errors import RequestError, shown


class TextPrompt(TypedDict):
    """A text, which is tokenized here."""
    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """Token ids. `prompt` is only shown in the output."""
    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


Prompt = str | list[int] | bytes | TextPrompt | TokensPrompt       # bytes: int32 token ids
FIELDS = ("prompt", "prompt_token_ids", "cache_salt")


class ReadPrompt(NamedTuple):
    """A prompt without its dict."""
    tokens_or_text: Any
    text: str | None                            # what the output shows
    cache_salt: str


def read_prompt(prompt: Any) -> ReadPrompt:
    """Raises RequestError that names the field of a dict. What is no dict is judged where it is tokenized."""
    if not isinstance(prompt, dict):
        return ReadPrompt(prompt, prompt if isinstance(prompt, str) else None, "")
    given = {name: value for name, value in prompt.items() if value is not None}
    unknown = next((name for name in given if name not in FIELDS), None)
    if unknown is not None:
        name = unknown[:60] if isinstance(unknown, str) else shown(unknown)
        raise RequestError(f"a prompt's {name} is not supported; known are {', '.join(FIELDS)}", "prompt")
    text, ids, salt = (given.get(name) for name in FIELDS)
    if text is None and ids is None:
        raise RequestError("a prompt as a dict needs prompt or prompt_token_ids", "prompt")
    if text is not None and not isinstance(text, str):
        raise RequestError(f"a prompt's prompt must be text, not {type(text).__name__}", "prompt")
    if ids is not None and not isinstance(ids, (list, bytes)):
        raise RequestError(f"a prompt's prompt_token_ids must be a list of token ids, not {type(ids).__name__}",
                           "prompt")
    return ReadPrompt(text if ids is None else ids, text, checked_salt(salt or ""))


def checked_salt(salt: Any) -> str:
    """A cache_salt that can travel: any Unicode text. Raises RequestError."""
    if not isinstance(salt, str):
        raise RequestError(f"cache_salt must be text, not {type(salt).__name__}", "cache_salt")
    try:
        salt.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"cache_salt has an unpaired surrogate at position {error.start}", "cache_salt") from None
    return salt
