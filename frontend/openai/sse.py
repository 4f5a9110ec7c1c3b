"""Server-sent events, encoded fast: what is the same in every chunk of a stream is joined once.

A chunk is prefix + JSON text + suffix, so its cost does not depend on how many fields it has. Knows the shape of chat
and completion chunks, nothing about where text comes from.
"""
from __future__ import annotations

from typing import Literal

import msgspec

from frontend.json_text import json_text, one_line

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

_encode = msgspec.json.Encoder().encode


def event(body: bytes) -> bytes:
    """One event around JSON."""
    return b"data: " + body + b"\n\n"


def named_event(name: str, body: bytes) -> bytes:
    """One event with a type, around JSON."""
    return b"event: " + name.encode() + b"\ndata: " + body + b"\n\n"


class ChunkEncoder:
    """The chunks of one stream. `usage` arguments are JSON, given when the caller wants it in each chunk."""

    def __init__(self, kind: Literal["chat", "completion"], response_id: str, created: int, model: str,
                 fingerprint: str, include_usage: bool) -> None:
        name = {"chat": "chat.completion.chunk", "completion": "text_completion"}[kind]
        head = _encode({"id": response_id, "object": name, "created": created, "model": model,
                        "system_fingerprint": fingerprint})
        self._head = b"data: " + head[:-1] + b',"choices":['
        self._is_chat = kind == "chat"
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._before_logprobs = b'},"logprobs":' if self._is_chat else b',"logprobs":'
        self._after_logprobs = b',"finish_reason":null}'
        self._after_text = self._before_logprobs + b"null" + self._after_logprobs
        self._text_end = self._after_text + self._tail
        self._prefixes: dict[int, bytes] = {}

    def _prefix(self, index: int) -> bytes:
        prefix = self._head + (b'{"index":%d,"delta":{"content":' if self._is_chat else b'{"index":%d,"text":') % index
        self._prefixes[index] = prefix
        return prefix

    def _close(self, usage: bytes | None) -> bytes:
        return self._tail if usage is None else b'],"usage":' + usage + b"}\n\n"

    def role(self, index: int, usage: bytes | None = None, member: bytes = b"") -> bytes:
        """The first chunk of a chat choice. `member`: JSON that belongs beside the choices, with a comma before it."""
        return (self._head + b'{"index":%d,"delta":{"role":"assistant","content":""' % index + self._after_text
                + b"]" + member + self._close(usage)[1:])

    def around_text(self, index: int) -> tuple[bytes, bytes]:
        """What `text` puts around the JSON of the text when it is given nothing else."""
        return self._prefixes.get(index) or self._prefix(index), self._text_end

    def text(self, index: int, text: str, usage: bytes | None = None, logprobs: bytes | None = None) -> bytes:
        """New text of a running choice: the hot path. `logprobs` is JSON."""
        prefix = self._prefixes.get(index) or self._prefix(index)
        if logprobs is not None:
            return (prefix + json_text(text) + self._before_logprobs + logprobs + self._after_logprobs
                    + self._close(usage))
        if usage is None:
            return prefix + json_text(text) + self._text_end
        return prefix + json_text(text) + self._after_text + self._close(usage)

    def delta(self, index: int, delta: bytes, usage: bytes | None = None, logprobs: bytes | None = None) -> bytes:
        """News of a running chat choice that are more than text. `delta` is JSON."""
        return (self._head + b'{"index":%d,"delta":' % index + one_line(delta) + b',"logprobs":' + (logprobs or b"null")
                + self._after_logprobs + self._close(usage))

    def finish(self, index: int, text: str, finish_reason: str, stop_reason: int | str | None,
               usage: bytes | None = None, logprobs: bytes | None = None) -> bytes:
        """The last chunk of a choice, with the text that was left."""
        if self._is_chat:
            news = b'"delta":{"content":' + json_text(text) + b"}" if text else b'"delta":{}'
        else:
            news = b'"text":' + json_text(text)
        return (self._head + b'{"index":%d,' % index + news + b',"logprobs":' + (logprobs or b"null")
                + b',"finish_reason":' + _encode(finish_reason) + b',"stop_reason":' + _encode(stop_reason) + b"}"
                + self._close(usage))

    def usage(self, usage: bytes) -> bytes:
        """The closing chunk without choices."""
        return self._head + self._close(usage)
