"""Limits that hold before a body is understood: sizes of headers and body, JSON depth, choices per call.

Knows bytes and counts, not fields.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

from frontend.openai.errors import BodyTooLargeError, HeadersTooLargeError
from ipc.errors import RequestError


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Sizes in bytes, times in seconds."""
    max_body_bytes: int = 8 << 20
    max_header_bytes: int = 16 << 10
    max_json_depth: int = 64
    max_choices: int = 128                      # n times the number of prompts
    max_request_id_chars: int = 128
    keep_alive_s: float = 15.0                  # silence in a stream before a comment is sent


def check_header_bytes(headers: Iterable[tuple[bytes, bytes]], limit: int) -> None:
    """Raises HeadersTooLargeError. The server also counts while it reads; this holds under any server."""
    size = sum(len(name) + len(value) + 4 for name, value in headers)
    if size > limit:
        raise HeadersTooLargeError(f"the request headers have {size} bytes; at most {limit}")


def check_body_bytes(size: int, limit: int) -> None:
    """Raises BodyTooLargeError; called for the announced length and again while reading."""
    if size > limit:
        raise BodyTooLargeError(f"the request body has {size} bytes or more; at most {limit}")


def checked_request_id(value: bytes, limit: int, name: str = "x-request-id") -> str:
    """A caller's id as text. It is echoed and logged, never looked up.

    Raises RequestError unless it is 1 to `limit` printable ASCII characters.
    """
    if not 0 < len(value) <= limit or not all(0x20 <= char < 0x7F for char in value):
        raise RequestError(f"{name} has {len(value)} bytes; allowed are 1 to {limit} printable ASCII characters", name)
    return value.decode("ascii")


def checked_cache_salt(value: str, limit: int = 128) -> str:
    """Raises RequestError unless it is 1 to `limit` printable ASCII characters; the core only ever hashes it."""
    if not 0 < len(value) <= limit or not all(" " <= char <= "~" for char in value):
        raise RequestError(f"cache_salt has {len(value)} characters; allowed are 1 to {limit}, printable ASCII",
                           "cache_salt")
    return value


def check_choices(n: int, num_prompts: int, limit: int) -> None:
    """Caps the fan-out of one call, before anything is copied per choice."""
    if n * num_prompts > limit:
        raise RequestError(f"n is {n} and there are {num_prompts} prompts: {n * num_prompts} choices; "
                           f"at most {limit} in one call", "n" if num_prompts <= limit else "prompt")


_STEP = np.zeros(256, dtype=np.int8)
_STEP[[0x5B, 0x7B]] = 1                         # [ {
_STEP[[0x5D, 0x7D]] = -1                        # ] }


def check_json_depth(body: bytes, limit: int) -> None:
    """Refuses nesting above `limit` without recursion or a Python loop over bytes.

    Few brackets cannot nest deeply, so ordinary bodies cost two counts. Otherwise: blank out escapes, a running XOR
    over quotes tells what is inside a string, a running sum over the other brackets is the depth. Right for valid JSON;
    anything else is refused by the decoder.
    """
    if body.count(b"[") + body.count(b"{") <= limit:
        return
    if b"\\" in body:
        body = body.replace(b"\\\\", b"  ").replace(b'\\"', b"  ")
    data = np.frombuffer(body, dtype=np.uint8)
    outside = ~np.logical_xor.accumulate(data == 0x22)
    depth = int(np.cumsum(_STEP[data] * outside, dtype=np.int32).max())
    if depth > limit:
        raise RequestError(f"the JSON body is nested {depth} levels deep; at most {limit}")
