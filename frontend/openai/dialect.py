"""How an API writes its errors: as a response, and inside a stream that has begun.

One dialect per family of clients; the statuses are the same in all of them. Knows no exceptions.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from frontend.openai import sse
from frontend.openai.errors import ErrorBody, ErrorInfo


class Dialect(NamedTuple):
    """`body`: JSON of a failed call; `events`: the last bytes of a stream that failed."""
    name: str
    body: Callable[[ErrorInfo], bytes]
    events: Callable[[ErrorInfo], bytes]


def _openai_body(info: ErrorInfo) -> bytes:
    return msgspec.json.encode(ErrorBody(info))


def _openai_events(info: ErrorInfo) -> bytes:
    return sse.event(_openai_body(info)) + sse.DONE


OPENAI = Dialect("openai", _openai_body, _openai_events)

# Status -> the names of Anthropic's errors, which its clients map to exception classes.
ANTHROPIC_TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error",
                   413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"}


class AnthropicError(msgspec.Struct, frozen=True):
    """The inside of Anthropic's error body."""
    type: str
    message: str


class AnthropicErrorBody(msgspec.Struct, frozen=True):
    """What a failed call under /v1/messages answers with."""
    error: AnthropicError
    type: str = "error"


def _anthropic_body(info: ErrorInfo) -> bytes:
    default = "invalid_request_error" if info.code < 500 else "api_error"
    kind = ANTHROPIC_TYPES.get(info.code, default)
    return msgspec.json.encode(AnthropicErrorBody(AnthropicError(kind, info.message)))


def _anthropic_events(info: ErrorInfo) -> bytes:
    return sse.named_event("error", _anthropic_body(info))


ANTHROPIC = Dialect("anthropic", _anthropic_body, _anthropic_events)
