"""Every message keeps its bytes, its kind and its fields."""
from __future__ import annotations

import ast
import inspect
import json

import msgspec
import pytest

from ipc import codec, messages
from ipc.messages import EMPTY, HELLO, KIND_OF, KINDS, LONG_FIELDS, STAMPS, AddRequest, Outputs, SchedulerOutput
from tests.ipc.message_samples import EPOCH, GOLDEN, SEQUENCE, frame_of, samples

SAMPLES = samples()
BY_NAME = {type(message).__name__: message for message in SAMPLES}


def plain(message: object) -> object:
    """As builtins: columns compare by content."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message))


def test_there_is_a_sample_of_every_kind():
    assert [type(message) for message in SAMPLES] == [KINDS[kind] for kind in sorted(KINDS)]


@pytest.mark.parametrize("name", BY_NAME)
def test_the_bytes_of_each_message_are_those_of_the_fixture(name):
    """A difference is a protocol change: if it is meant, run python -m tests.ipc.message_samples."""
    golden = json.loads(GOLDEN.read_text())
    assert frame_of(BY_NAME[name]).hex() == golden[name]


@pytest.mark.parametrize("name", BY_NAME)
def test_each_message_returns_from_its_bytes(name):
    message = BY_NAME[name]
    header, back = codec.decode([bytes.fromhex(json.loads(GOLDEN.read_text())[name])])
    assert type(back) is type(message) and plain(back) == plain(message)
    assert (header.kind, header.epoch, header.sequence) == (KIND_OF[type(message)], EPOCH, SEQUENCE)
    assert codec.encode(back, EPOCH, SEQUENCE)[0] == frame_of(message)


def test_the_hello_fixture_is_a_header_and_nothing_else():
    frame = bytes.fromhex(json.loads(GOLDEN.read_text())["Hello"])
    assert len(frame) == codec.HEADER.size and codec.check_hello(codec.read_header(frame)) == ("worker", 2, 4711)


def test_samples_set_nearly_every_field():
    """A field at its default would not show in the fixture that it is carried."""
    unset = [f"{type(message).__name__}.{field.name}" for message in SAMPLES
             for field in msgspec.structs.fields(type(message))
             if field.default is not msgspec.NODEFAULT
             and plain([getattr(message, field.name)]) == plain([field.default])]
    assert unset == []


def test_kinds_are_unique_and_hello_has_none():
    assert len(KIND_OF) == len(KINDS) and HELLO not in KINDS


def test_request_level_messages_are_maps_and_per_step_ones_arrays():
    """So that an error in a request names its field, and a step costs microseconds."""
    arrays = {tp.__name__ for tp in KINDS.values() if tp.__struct_config__.array_like}
    assert arrays == {"Outputs", "SchedulerOutput", "ModelRunnerOutput"}
    assert all(tp.__struct_config__.forbid_unknown_fields for tp in KINDS.values() if tp.__name__ not in arrays)


def test_every_struct_says_who_sends_it_and_when():
    for tp in KINDS.values():
        assert tp.__doc__ and any(arrow in tp.__doc__ for arrow in ("->", "Either side")), tp.__name__


def test_columns_decode_without_a_copy_as_views_of_the_frame():
    frame = frame_of(BY_NAME["SchedulerOutput"])
    _, plan = codec.decode([frame])
    assert isinstance(plan.new_tokens, memoryview) and plan.new_tokens.obj is frame


def test_defaults_are_empty_columns():
    for message in (Outputs(0), SchedulerOutput(1, 0)):
        _, back = codec.decode(codec.encode(message))
        views = [value for value in msgspec.structs.astuple(back) if isinstance(value, memoryview)]
        assert views and all(bytes(view) == b"" for view in views)
    assert bytes(EMPTY) == b"" and "commit_end" in STAMPS


def test_long_fields_exist():
    for tp, names in LONG_FIELDS.items():
        assert set(names) <= set(tp.__struct_fields__) and tp in KIND_OF


def test_no_message_holds_a_type_that_needs_more_than_msgpack():
    source = ast.parse(inspect.getsource(messages))
    used = {node.id for node in ast.walk(source) if isinstance(node, ast.Name)}
    assert not used & {"Any", "object", "Tensor", "ndarray", "pickle"}


def test_a_decoding_error_names_the_field():
    body = msgspec.msgpack.encode({"request_id": "x", "prompt_token_ids": b"", "sampling_params": {}})
    with pytest.raises(msgspec.ValidationError, match="request_id"):
        msgspec.msgpack.decode(body, type=AddRequest)
