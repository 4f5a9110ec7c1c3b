"""What a prompt may be in the Python API. Field names are vLLM's. Knows no tokenizer."""
from __future__ import annotations

from typing import Any, NamedTuple, NotRequired, TypedDict

from ipc.errors import RequestError


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
        raise RequestError(f"a prompt's {str(unknown)[:60]} is not supported; known are {', '.join(FIELDS)}", "prompt")
    text, ids, salt = (given.get(name) for name in FIELDS)
    if text is None and ids is None:
        raise RequestError("a prompt as a dict needs prompt or prompt_token_ids", "prompt")
    for name, value in (("prompt", text), ("cache_salt", salt)):
        if value is not None and not isinstance(value, str):
            raise RequestError(f"a prompt's {name} must be text, not {type(value).__name__}", "prompt")
    if ids is not None and not isinstance(ids, (list, bytes)):
        raise RequestError(f"a prompt's prompt_token_ids must be a list of token ids, not {type(ids).__name__}",
                           "prompt")
    return ReadPrompt(text if ids is None else ids, text, salt or "")
