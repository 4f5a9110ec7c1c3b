"""Forms of the output, as callers give them."""
from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from ipc.errors import RequestError
from ipc.sampling_params import SamplingParams
from ipc.structured_outputs import StructuredOutputs, grammar_text

SCHEMA = {"type": "object", "properties": {"größe": {"type": "integer"}}}


def no_lark(text: str) -> str:
    raise AssertionError(text)


def test_a_schema_may_be_a_dict_and_is_kept_as_text() -> None:
    spec = StructuredOutputs(json=SCHEMA)
    assert spec == StructuredOutputs(json=json.dumps(SCHEMA, ensure_ascii=False)) and isinstance(spec.json, str)
    assert grammar_text(spec, no_lark) == grammar_text(StructuredOutputs(json=json.dumps(SCHEMA)), no_lark)
    assert StructuredOutputs(json={}).json == "{}"        # any value
    tag = {"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a>"]}
    assert StructuredOutputs(structural_tag=tag) == StructuredOutputs(structural_tag=json.dumps(tag))


def test_sampling_params_take_the_fields_as_a_dict() -> None:
    params = SamplingParams(structured_outputs={"json": SCHEMA, "regex": None})  # type: ignore[arg-type]
    assert params == SamplingParams(structured_outputs=StructuredOutputs(json=SCHEMA))
    packed = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(packed, type=SamplingParams) == params
    assert params.replace(n=2).structured_outputs == params.structured_outputs


@pytest.mark.parametrize(("value", "words"), [
    ({}, "has nothing; give exactly one of"), ({"json": {}, "regex": "a"}, "json and regex"),
    ({"jsn": {}}, "structured_outputs.jsn is not supported; known are json"), ("{}", "must be a StructuredOutputs or"),
    ({"json": {"a": {1}}}, "json is no JSON"), ({"json": []}, "json must be"), ({"regex": {}}, "regex must be a text")])
def test_what_is_no_form_is_refused_by_name(value: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words) as error:
        SamplingParams(structured_outputs=value)
    assert (error.value.param or "").startswith("structured_outputs")
