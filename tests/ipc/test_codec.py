"""Frames: headers, long fields, the schema hash, and that bytes which are no message raise only WireError."""
from __future__ import annotations

import os
import struct
import subprocess
import sys

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ipc import codec
from ipc.codec import HEADER, INLINE_LIMIT, MAGIC, SCHEMA_HASH, check_hello, decode, encode, hello, read_header
from ipc.errors import WireError
from ipc.messages import HELLO, KIND_OF, KINDS, ROLES, Abort, AddRequest, Phase, SchedulerOutput
from ipc.sampling_params import SamplingParams
from tests.ipc.message_samples import frame_of, samples

FRAMES = [frame_of(message) for message in samples()] + [bytes(hello("frontend", 1, 2, 3)[0])]


def frame(kind: int, body: bytes = b"", *, flags: int = 0, magic: bytes = MAGIC, schema: bytes = SCHEMA_HASH,
          size: int | None = None) -> bytes:
    return HEADER.pack(magic, schema, kind, flags, 0, 0, len(body) if size is None else size) + body


def refused(*frames: bytes) -> str:
    with pytest.raises(WireError) as caught:
        decode(frames)
    return str(caught.value)


def decode_quietly(*frames: bytes) -> None:
    """Anything but a message or WireError is a failure."""
    try:
        header, message = decode(frames)
        assert (message is None) == (header.kind == HELLO)
    except WireError:
        pass


# ---------------------------------------------------------------- the header

def test_the_header_is_32_bytes_in_the_documented_order():
    data = bytes(encode(Abort([1]), epoch=7, sequence=9)[0])
    assert HEADER.size == 32 and data[:4] == b"TF3F" and data[4:12] == SCHEMA_HASH
    assert struct.unpack_from("<HHIQI", data, 12) == (21, 0, 7, 9, len(data) - 32)


def test_a_hello_is_a_header_that_every_version_can_read():
    data = bytes(hello("engine_core", 5, 4711, 2)[0])
    other = data[:4] + bytes(8) + data[12:]
    assert check_hello(read_header(data)) == ("engine_core", 5, 4711)
    header = read_header(other)                 # readable, and then refused with both hashes
    with pytest.raises(WireError, match=f"peer speaks schema {'00' * 8}, this process {SCHEMA_HASH.hex()}"):
        check_hello(header)
    assert decode([other])[1] is None


def test_what_is_no_hello_or_has_no_role_is_refused():
    with pytest.raises(WireError, match="expected a Hello, got kind 21"):
        check_hello(read_header(bytes(encode(Abort([1]))[0])))
    with pytest.raises(WireError, match="unknown role 9"):
        check_hello(read_header(frame(HELLO, flags=9)))


@pytest.mark.parametrize("role", ROLES)
def test_every_role_returns_from_its_hello(role):
    assert check_hello(read_header(bytes(hello(role, (1 << 32) - 1, 1, 0)[0]))) == (role, (1 << 32) - 1, 1)


# ---------------------------------------------------------------- what is refused, and how

def test_wrong_frames_are_refused_with_what_is_wrong():
    good = bytes(encode(Abort([1]))[0])
    assert refused() == "no frames"
    assert "frame of 31 bytes" in refused(good[:31])
    assert "frame begins with b'XF3F'" in refused(b"X" + good[1:])
    assert "header announces" in refused(good[:-1])
    assert "header announces" in refused(good + b"\0")
    assert "unknown kind 99" in refused(frame(99, b"\xc0"))
    assert f"this process {SCHEMA_HASH.hex()}" in refused(frame(21, good[32:], schema=b"12345678"))
    assert "Abort: " in refused(frame(21, b"\xc1"))
    assert "Abort: " in refused(frame(21, b""))
    assert "Abort: " in refused(frame(21, good[32:] + b"\xc0"))         # something after the message
    assert "request_ids" in refused(frame(21, msgspec.msgpack.encode({"request_ids": ["a"]})))
    assert "unknown" in refused(frame(21, msgspec.msgpack.encode({"request_ids": [1], "more": 1})))


def test_a_frame_above_the_limit_is_refused_before_it_is_decoded(monkeypatch):
    monkeypatch.setattr(codec, "MAX_FRAME_BYTES", 100)
    assert "frame of 132 bytes; a message has 32 to 100" in refused(frame(21, bytes(100)))


def test_a_value_that_a_check_refuses_is_a_wire_error():
    """Checks in __post_init__ run for what comes from the wire too."""
    body = msgspec.msgpack.encode({"request_id": 1, "prompt_token_ids": b"", "sampling_params": {"top_p": 7.0}})
    assert "top_p is 7.0; allowed are 0 to 1" in refused(frame(KIND_OF[AddRequest], body))


def test_deep_nesting_is_refused():
    assert "CommandReply" in refused(frame(32, b"\x91" * 100_000))
    assert "SchedulerOutput" in refused(frame(40, b"\x91" * 100_000 + b"\xc0"))


def test_an_announced_length_that_is_not_there_is_refused():
    assert "Abort" in refused(frame(21, b"\xdf\xff\xff\xff\xff"))       # a map of 4 billion entries
    assert "Outputs" in refused(frame(31, b"\xdd\xff\xff\xff\xff"))
    assert "Phase" in refused(frame(13, b"\xdb\xff\xff\xff\xff"))


# ---------------------------------------------------------------- long fields

def long_request(num_tokens: int, num_outputs: int = 0) -> AddRequest:
    return AddRequest(1, np.arange(num_tokens, dtype=np.int32).data.cast("B"), SamplingParams(seed=1),
                      np.arange(num_outputs, dtype=np.int32).data.cast("B"))


@pytest.mark.parametrize("num_tokens, num_outputs, flags", [
    (INLINE_LIMIT // 4, 0, 0), (INLINE_LIMIT // 4 + 1, 0, 1), (5, INLINE_LIMIT, 2), (INLINE_LIMIT, INLINE_LIMIT, 3)])
def test_long_fields_travel_as_frames_of_their_own(num_tokens, num_outputs, flags):
    message = long_request(num_tokens, num_outputs)
    frames = encode(message)
    assert len(frames) == 1 + bin(flags).count("1")
    header, back = decode(frames)
    assert header.flags == flags
    assert bytes(back.prompt_token_ids) == bytes(message.prompt_token_ids)
    assert bytes(back.output_token_ids) == bytes(message.output_token_ids)
    if flags & 1:
        assert frames[1] is message.prompt_token_ids        # not copied


def test_further_frames_that_do_not_match_the_flags_are_refused():
    frames = encode(long_request(INLINE_LIMIT))
    assert "0 further frames, flags 0x1" in refused(frames[0])
    assert "2 further frames, flags 0x1" in refused(*frames, b"")
    assert "1 further frames, flags 0x0" in refused(frame_of(Abort([1])), b"")
    body = bytes(encode(SchedulerOutput(1, 0))[0])[32:]
    assert "flags 0x2" in refused(frame(KIND_OF[SchedulerOutput], body, flags=2), b"")


# ---------------------------------------------------------------- the schema hash

def test_the_schema_hash_is_the_same_in_every_process():
    code = "import sys; sys.path[:0] = sys.argv[1:]; from ipc.codec import SCHEMA_HASH; print(SCHEMA_HASH.hex())"
    root = os.path.dirname(os.path.dirname(codec.__file__))
    for seed in ("0", "1"):
        done = subprocess.run([sys.executable, "-c", code, root], capture_output=True, text=True, timeout=60,
                              env={**os.environ, "PYTHONHASHSEED": seed}, check=True)
        assert done.stdout.strip() == SCHEMA_HASH.hex()


def schema_of(monkeypatch: pytest.MonkeyPatch, **changes: type) -> bytes:
    """The hash when some messages had another layout."""
    kinds = {kind: changes.get(tp.__name__, tp) for kind, tp in KINDS.items()}
    monkeypatch.setattr(codec, "KINDS", kinds)
    return codec._schema_hash()


@pytest.mark.parametrize("fields, options", [
    ([("request_ids", list[int]), ("more", int)], {}), ([("request_ids", list[str])], {}), ([("ids", list[int])], {}),
    ([("request_ids", list[int], [])], {}), ([("request_ids", list[int])], {"array_like": True}), ([], {})])
def test_the_schema_hash_changes_with_every_change_of_a_field(monkeypatch, fields, options):
    same = msgspec.defstruct("Abort", [("request_ids", list[int])])
    assert schema_of(monkeypatch, Abort=same) == SCHEMA_HASH
    assert schema_of(monkeypatch, Abort=msgspec.defstruct("Abort", fields, **options)) != SCHEMA_HASH


def test_the_schema_hash_sees_order_defaults_and_nested_structs(monkeypatch):
    def phase(*fields: tuple) -> bytes:
        return schema_of(monkeypatch, Phase=msgspec.defstruct("Phase", fields))
    fields = [("role", str), ("name", str), ("fraction", float), ("seconds", float, 0.0), ("detail", str, "")]
    assert phase(*fields) == SCHEMA_HASH and Phase.__struct_fields__ == tuple(f[0] for f in fields)
    assert phase(*fields[1::-1], *fields[2:]) != SCHEMA_HASH
    assert phase(*fields[:3], ("seconds", float, 1.0), fields[4]) != SCHEMA_HASH
    inner = msgspec.defstruct("Inner", [("x", int)]), msgspec.defstruct("Inner", [("y", int)])
    assert phase(("inner", inner[0]), *fields) != phase(("inner", inner[1]), *fields)


def test_the_schema_hash_sees_kinds_and_long_fields(monkeypatch):
    monkeypatch.setattr(codec, "KINDS", {**KINDS, 99: KINDS[21]})
    assert codec._schema_hash() != SCHEMA_HASH
    monkeypatch.setattr(codec, "KINDS", KINDS)
    monkeypatch.setattr(codec, "LONG_FIELDS", {AddRequest: ("prompt_token_ids",)})
    assert codec._schema_hash() != SCHEMA_HASH


# ---------------------------------------------------------------- fuzzing

@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data):
    with pytest.raises(WireError):
        decode([data])


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(KINDS)), st.binary(max_size=120))
def test_a_random_body_behind_a_right_header_is_a_message_or_a_wire_error(kind, body):
    decode_quietly(frame(kind, body))


def test_every_truncation_of_every_message_is_refused():
    for data in FRAMES:
        for size in range(len(data)):
            refused(data[:size])


def test_a_body_cut_short_behind_a_header_that_agrees_is_refused():
    for data in FRAMES[:-1]:
        kind = int.from_bytes(data[12:14], "little")
        for size in range(len(data) - HEADER.size):
            decode_quietly(frame(kind, data[HEADER.size:HEADER.size + size]))


MUTATION = st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=4)


@settings(max_examples=1500, deadline=None)
@given(st.sampled_from(FRAMES), MUTATION, st.booleans())
def test_mutated_messages_are_messages_or_wire_errors(data, mutations, keep_header):
    mutated = bytearray(data)
    first = HEADER.size if keep_header and len(data) > HEADER.size else 0
    for place, value in mutations:
        mutated[first + place % (len(mutated) - first)] = value
    decode_quietly(bytes(mutated))


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(FRAMES), st.integers(0, 10_000), st.binary(max_size=8), st.integers(0, 8))
def test_inserted_and_deleted_bytes_are_messages_or_wire_errors(data, place, inserted, deleted):
    body = data[HEADER.size:]
    at = place % (len(body) + 1)
    body = body[:at] + inserted + body[at + deleted:]
    decode_quietly(frame(int.from_bytes(data[12:14], "little"), body))
