"""Messages to bytes and back. Fixed 32-byte header, then a msgspec body; `kind` selects the decoder.

    0    4         12     14      16      20         28          32
    | TF3F | schema | kind | flags | epoch | sequence | body bytes | body ...

`flags` says which long fields travel as further frames (bit i: LONG_FIELDS[i]). Anything wrong with a frame raises
WireError and nothing else. Does not know sockets.
"""
from __future__ import annotations

import dataclasses
import hashlib
import struct
import typing
from collections.abc import Sequence
from typing import Any

import msgspec

from ipc.errors import WireError
from ipc.messages import HELLO, KIND_OF, KINDS, LONG_FIELDS, ROLES

MAGIC = b"TF3F"
HEADER = struct.Struct("<4s8sHHIQI")
INLINE_LIMIT = 100_000                          # bytes; a further frame costs more than copying less than this
MAX_FRAME_BYTES = 64 << 20

Frames = list[bytes | memoryview]

def _describe(tp: Any, seen: dict[type, None]) -> str:
    """A text that changes when the layout of `tp` does: names, order, types, defaults, array or map."""
    if isinstance(tp, type) and issubclass(tp, msgspec.Struct):
        if tp in seen:
            return tp.__name__
        seen[tp] = None
        hints = typing.get_type_hints(tp)
        fields = ",".join(f"{f.encode_name}:{_describe(hints[f.name], seen)}={_default(f)}"
                          for f in msgspec.structs.fields(tp))
        return f"{tp.__name__}{'[' if tp.__struct_config__.array_like else '{'}{fields}"
    args = typing.get_args(tp)
    if args:
        return f"{typing.get_origin(tp)}<{','.join(_describe(a, seen) for a in args)}>"
    return getattr(tp, "__name__", str(tp))

def _default(field: Any) -> str:
    """Columns default to an empty view, whose repr is an address; lists to what a factory makes."""
    if field.default_factory is not msgspec.NODEFAULT:
        return f"{getattr(field.default_factory, '__name__', 'made')}()"
    return "" if isinstance(field.default, memoryview) else repr(field.default)


def _schema_hash() -> bytes:
    seen: dict[type, None] = {}
    text = ";".join(f"{kind}={_describe(tp, seen)}|{LONG_FIELDS.get(tp, ())}" for kind, tp in sorted(KINDS.items()))
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


SCHEMA_HASH = _schema_hash()

@dataclasses.dataclass(frozen=True, slots=True)
class Header:
    kind: int
    flags: int
    epoch: int
    sequence: int
    schema: bytes

_encoder = msgspec.msgpack.Encoder()
_decoders: dict[int, msgspec.msgpack.Decoder[Any]] = {kind: msgspec.msgpack.Decoder(tp) for kind, tp in KINDS.items()}

def encode(message: Any, epoch: int = 0, sequence: int = 0) -> Frames:
    """One frame, or more when a long field exceeds INLINE_LIMIT."""
    tp = type(message)
    kind = KIND_OF[tp]
    flags = 0
    extra: Frames = []
    for bit, name in enumerate(LONG_FIELDS.get(tp, ())):
        value = getattr(message, name)
        if len(value) > INLINE_LIMIT:
            flags |= 1 << bit
            extra.append(value)
            message = msgspec.structs.replace(message, **{name: b""})
    body = _encoder.encode(message)
    return [HEADER.pack(MAGIC, SCHEMA_HASH, kind, flags, epoch & 0xFFFFFFFF, sequence, len(body)) + body, *extra]

def hello(role: str, rank: int, pid: int, epoch: int) -> Frames:
    """A Hello: header only. `flags` is the role, `sequence` is rank << 32 | pid."""
    return [HEADER.pack(MAGIC, SCHEMA_HASH, HELLO, ROLES.index(role), epoch, rank << 32 | pid, 0)]

def read_header(frame: Any) -> Header:
    """Raises WireError for anything but a header of ours of any version; the schema is not compared."""
    if not HEADER.size <= len(frame) <= MAX_FRAME_BYTES:
        raise WireError(f"frame of {len(frame)} bytes; a message has {HEADER.size} to {MAX_FRAME_BYTES}")
    magic, schema, kind, flags, epoch, sequence, size = HEADER.unpack_from(frame)
    if magic != MAGIC:
        raise WireError(f"frame begins with {bytes(magic)!r}, not {MAGIC!r}")
    if size != len(frame) - HEADER.size:
        raise WireError(f"header announces {size} bytes of body, {len(frame) - HEADER.size} follow")
    return Header(kind, flags, epoch, sequence, bytes(schema))

def decode(frames: Sequence[Any]) -> tuple[Header, Any]:
    """(header, message); the message of a Hello is None.

    Columns of the message are memoryviews into `frames`. Raises WireError.
    """
    if not frames:
        raise WireError("no frames")
    header = read_header(frames[0])
    if header.kind == HELLO:
        return header, None
    if header.schema != SCHEMA_HASH:
        raise WireError(f"peer speaks schema {header.schema.hex()}, this process {SCHEMA_HASH.hex()}; "
                        "all processes must run the same version")
    decoder = _decoders.get(header.kind)
    if decoder is None:
        raise WireError(f"unknown kind {header.kind}")
    names = LONG_FIELDS.get(KINDS[header.kind], ())
    outside = [name for bit, name in enumerate(names) if header.flags >> bit & 1]
    if header.flags >> len(names) or len(outside) != len(frames) - 1:
        raise WireError(f"{len(frames) - 1} further frames, flags {header.flags:#x}")
    try:
        message = decoder.decode(memoryview(frames[0])[HEADER.size:])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise WireError(f"{KINDS[header.kind].__name__}: {error}") from None
    for name, frame in zip(outside, frames[1:]):
        msgspec.structs.force_setattr(message, name, memoryview(frame))
    return header, message

def check_hello(header: Header) -> tuple[str, int, int]:
    """(role, rank, pid) of a Hello. Raises WireError when its schema is not ours, with both hashes."""
    if header.kind != HELLO:
        raise WireError(f"expected a Hello, got kind {header.kind}")
    if header.schema != SCHEMA_HASH:
        raise WireError(f"peer speaks schema {header.schema.hex()}, this process {SCHEMA_HASH.hex()}; "
                        "all processes must run the same version")
    if header.flags >= len(ROLES):
        raise WireError(f"unknown role {header.flags}")
    return ROLES[header.flags], header.sequence >> 32, header.sequence & 0xFFFFFFFF
