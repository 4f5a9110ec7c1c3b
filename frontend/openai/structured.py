"""The form of the output as callers ask for it: OpenAI's response_format, vLLM's structured_outputs, and the older
guided_* fields. Knows no engine."""
from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ipc.errors import RequestError
from ipc.structured_outputs import KINDS, StructuredOutputs

if TYPE_CHECKING:
    from frontend.openai.protocol import GenerationRequest

FORMATS = ("text", "json_object", "json_schema", "structural_tag")
GUIDED = ("json", "regex", "choice", "grammar")


def structured_outputs_of(request: GenerationRequest) -> StructuredOutputs | None:
    """The one form that the request asks for. Raises RequestError that names the field."""
    found: list[tuple[str, dict[str, Any]]] = []
    if request.response_format is not None:
        form = _of_response_format(request.response_format)
        if form is not None:
            found.append(("response_format", form))
    if request.structured_outputs is not None:
        found.append(("structured_outputs", _of_vllm(request.structured_outputs)))
    for name in GUIDED:
        value = getattr(request, f"guided_{name}")
        if value is not None:
            found.append((f"guided_{name}", {name: _text(value) if name == "json" else value}))
    if not found:
        return None
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise RequestError(f"the request has {names}; give one of them", found[1][0])
    name, form = found[0]
    try:
        return StructuredOutputs(**form)
    except RequestError as error:
        raise RequestError(f"{name}: {error}", name) from None


def structured_outputs_of_response(text: dict[str, Any] | None, structured_outputs: dict[str, Any] | None
                                   ) -> StructuredOutputs | None:
    """The one form that a call of the Responses API asks for: OpenAI's text, or vLLM's field. Raises RequestError."""
    form = _of_text(text)
    if structured_outputs is None:
        return form
    if form is not None:
        raise RequestError("the request has text.format and structured_outputs; give one of them",
                           "structured_outputs")
    try:
        return StructuredOutputs(**_of_vllm(structured_outputs))
    except RequestError as error:
        raise RequestError(f"structured_outputs: {error}", "structured_outputs") from None


def _of_text(text: dict[str, Any] | None) -> StructuredOutputs | None:
    """The Responses API's json_schema has its fields one level higher."""
    for name, value in (text or {}).items():
        if name != "format" and not (value is None or (name == "verbosity" and value == "medium")):
            raise RequestError(f"text.{name[:60]} is not supported; text takes format", f"text.{name[:60]}")
    value = (text or {}).get("format")
    if value is None:
        return None
    if not isinstance(value, dict):
        raise RequestError('text.format must be an object, for example {"type": "json_object"}', "text.format")
    if value.get("type") == "json_schema":
        value = {"type": "json_schema", "json_schema": value}
    try:
        form = _of_response_format(value)
        return None if form is None else StructuredOutputs(**form)
    except RequestError as error:
        shown = str(error).replace('json_schema: {"name": ..., "schema": {...}}', '"name" and "schema"')
        raise RequestError(shown.replace("response_format", "text.format"), "text.format") from None


def _of_response_format(value: dict[str, Any]) -> dict[str, Any] | None:
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind == "json_schema":
        inner = value.get("json_schema")
        schema = inner.get("schema") if isinstance(inner, dict) else None
        if not isinstance(schema, (dict, bool)):
            raise RequestError('response_format of type json_schema needs json_schema: {"name": ..., "schema": {...}}',
                               "response_format.json_schema")
        return {"json": _text(schema)}
    if kind == "structural_tag":
        return {"structural_tag": _text({name: item for name, item in value.items() if name != "type"})}
    raise RequestError(f"response_format.type is {str(kind)[:60]!r}; known are {', '.join(FORMATS)}",
                       "response_format.type")


def _of_vllm(value: dict[str, Any]) -> dict[str, Any]:
    form = {name: item for name, item in value.items() if item is not None}
    for name in form:
        if name not in KINDS:
            raise RequestError(f"structured_outputs.{name[:60]} is not supported; known are {', '.join(KINDS)}",
                               "structured_outputs")
    for name in ("json", "structural_tag"):
        if name in form:
            form[name] = _text(form[name])
    return form


def _text(value: Any) -> Any:
    """A schema as text; what is text already stays, and anything else is refused by its struct."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (dict, list, bool)) else value
