"""JSON that stays in one line for every client."""
from __future__ import annotations

import msgspec

_encode = msgspec.json.Encoder().encode


def json_text(text: str) -> bytes:
    """A JSON string in one line, also for clients that split lines as Python's str.splitlines does."""
    return one_line(_encode(text))


def one_line(data: bytes) -> bytes:
    """JSON without the characters that some take for line ends."""
    if not data.isascii():
        data = data.replace(b"\xc2\x85", b"\\u0085").replace(b"\xe2\x80\xa8", b"\\u2028")
        data = data.replace(b"\xe2\x80\xa9", b"\\u2029")
    return data
