"""GET /openapi.json, made from the table of routes and the structs that decode and encode the bodies.

So it cannot promise what the code does not do. Knows no route by name but those whose body is not all in its struct.
"""
from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from frontend.openai.auth import Access
from frontend.openai.dialect import ANTHROPIC, AnthropicErrorBody
from frontend.openai.engine import EngineLike
from frontend.openai.errors import ErrorBody
from frontend.openai.exchange import Exchange
from frontend.openai.routes import Handler, Row

REF = "#/components/schemas/{name}"

# Fields that a struct keeps as raw JSON, because their type is a union that it cannot express.
_RAW_FIELDS: dict[tuple[str, str], dict[str, Any]] = {
    ("CompletionRequest", "prompt"): {"anyOf": [
        {"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1},
        {"type": "array", "items": {"type": "integer"}, "minItems": 1},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}, "minItems": 1}, "minItems": 1}]},
}


def openapi_handler(rows: Sequence[Row], version: str) -> Handler:
    """Serves the description of `rows`, encoded once."""
    body = msgspec.json.encode(describe_api(rows, version))

    async def get_openapi(exchange: Exchange, _: EngineLike) -> None:
        await exchange.reply(200, body)
    return get_openapi


def describe_api(rows: Sequence[Row], version: str) -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    types = [kind for row in rows for kind in (row.request, row.answer) if kind is not None]
    types += [ErrorBody, AnthropicErrorBody]
    _, components = msgspec.json.schema_components(list(dict.fromkeys(types)), ref_template=REF)
    for (struct, field), schema in _RAW_FIELDS.items():
        if struct in components:
            components[struct]["properties"][field] = schema
    paths: dict[str, Any] = {}
    for row in rows:
        path = re.sub(r"\{(\w+)(:\w+)?\}", r"{\1}", row.path)
        for method in row.methods:
            paths.setdefault(path, {})[method.lower()] = _operation(row, path, method)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Threefold", "version": version, "description": "An LLM serving engine."},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {
            "key": {"type": "http", "scheme": "bearer"}, "admin_key": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(row: Row, path: str, method: str) -> dict[str, Any]:
    name = re.sub(r"\W+", "_", f"{method.lower()} {path}").strip("_")
    error = AnthropicErrorBody if row.dialect is ANTHROPIC else ErrorBody
    answer: dict[str, Any] = {"description": "done"}
    if row.answer is not None:
        answer["content"] = {"application/json": {"schema": _ref(row.answer)}}
        if row.streams:
            answer["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    operation: dict[str, Any] = {"operationId": name, "summary": row.summary, "responses": {
        "200": answer,
        "default": {"description": "refused, or failed", "content": {"application/json": {"schema": _ref(error)}}}}}
    if row.request is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": _ref(row.request)}}}
    parameters = re.findall(r"\{(\w+)\}", path)
    if parameters:
        operation["parameters"] = [{"name": one, "in": "path", "required": True, "schema": {"type": "string"}}
                                   for one in parameters]
    operation["security"] = {Access.OPEN: [], Access.KEY: [{"key": []}, {}],
                             Access.ADMIN: [{"admin_key": []}]}[row.access]
    return operation


def _ref(kind: Any) -> dict[str, str]:
    return {"$ref": REF.format(name=kind.__name__)}
