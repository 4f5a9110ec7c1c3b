"""JSON schemas by keyword, in the style of JSON-Schema-Test-Suite: each keyword alone, at its bounds, and with others.

Every object is closed and every list bounded where the keyword in question allows, so that a model may end. Knows no
engine.
"""
from __future__ import annotations

from typing import Any

INTEGER = {"type": "integer", "minimum": 0, "maximum": 999}
SHORT = {"type": "string", "maxLength": 12}
FORMATS = ("date", "time", "date-time", "email", "ipv4", "ipv6", "uuid", "hostname", "uri", "duration")


def closed(**properties: Any) -> dict[str, Any]:
    """An object with just these, all required."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def corpus() -> dict[str, Any]:
    """Schemas by name."""
    return {**_scalars(), **_strings(), **_arrays(), **_objects(), **_combined(), **_references()}


def _scalars() -> dict[str, Any]:
    found: dict[str, Any] = {f"type {kind}": {"type": kind} for kind in ("null", "boolean", "integer", "number")}
    found |= {f"types {index}": {"type": kinds, "maxLength": 5, "maxItems": 2, "items": INTEGER} for index, kinds in
              enumerate((["null", "boolean"], ["integer", "null"], ["string", "number"], ["boolean", "string"]))}
    bounds: list[dict[str, Any]] = [
        {"minimum": 5}, {"maximum": -3}, {"minimum": -2, "maximum": 2}, {"exclusiveMinimum": 0},
        {"exclusiveMaximum": 10, "minimum": 9}, {"minimum": 0.5, "maximum": 0.75}, {"minimum": 1000, "maximum": 1001}]
    for kind in ("integer", "number"):
        for index, bound in enumerate(bounds):
            if kind == "number" or index != 5:
                found[f"{kind} bounds {index}"] = {"type": kind, **bound}
    for step in (2, 3, 7, 100):
        found[f"multipleOf {step}"] = {"type": "integer", "multipleOf": step, "minimum": 0, "maximum": 10_000}
    values: list[Any] = [None, True, 0, -1.5, "x", "é\n\"", [1, [2]], {"a": {"b": []}}]
    for index, value in enumerate(values):
        found[f"const {index}"] = {"const": value}
        found[f"enum {index}"] = {"enum": values[:index + 1]}
    return found


def _strings() -> dict[str, Any]:
    found: dict[str, Any] = {f"format {name}": {"type": "string", "format": name} for name in FORMATS}
    for low, high in ((0, 0), (1, 1), (3, 8), (0, 20), (10, 10)):
        found[f"length {low}-{high}"] = {"type": "string", "minLength": low, "maxLength": high}
    for index, pattern in enumerate(("^[a-z]{3}$", "^(yes|no)$", "^[A-Z][a-z]{1,8} [0-9]{2}$", "^a*b$",
                                     r"^\d{4}-\d{2}$", "^[^ ]{1,5}$", "^(0|[1-9][0-9]{0,3})$", "^é{1,3}$",
                                     "^x?y{2}z?$")):
        found[f"pattern {index}"] = {"type": "string", "pattern": pattern}
    return found


def _arrays() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for low, high in ((0, 0), (1, 1), (2, 4), (0, 3)):
        found[f"items {low}-{high}"] = {"type": "array", "items": INTEGER, "minItems": low, "maxItems": high}
    pair = [{"type": "boolean"}, SHORT]
    found |= {
        "prefixItems closed": {"type": "array", "prefixItems": pair, "items": False, "minItems": 2},
        "prefixItems open": {"type": "array", "prefixItems": pair, "items": INTEGER, "minItems": 2, "maxItems": 4},
        "prefixItems short": {"type": "array", "prefixItems": pair, "items": False},
        "items false": {"type": "array", "items": False}, "matrix": {
            "type": "array", "minItems": 2, "maxItems": 2,
            "items": {"type": "array", "items": INTEGER, "minItems": 2, "maxItems": 2}},
        "list of objects": {"type": "array", "items": closed(a=INTEGER), "minItems": 1, "maxItems": 2},
        "list of enum": {"type": "array", "items": {"enum": ["a", 1, None]}, "maxItems": 5},
        "uniqueItems": {"type": "array", "items": INTEGER, "uniqueItems": True, "maxItems": 3},
        "contains": {"type": "array", "contains": {"const": 1}, "maxItems": 3}}
    return found


def _objects() -> dict[str, Any]:
    found: dict[str, Any] = {f"required {n}": closed(**{f"p{i}": INTEGER for i in range(n)}) for n in (0, 1, 2, 5)}
    for n in (1, 2, 4):
        found[f"optional {n}"] = {**closed(**{f"p{i}": {"type": "boolean"} for i in range(n)}), "required": []}
        found[f"some required {n}"] = {**closed(**{f"p{i}": SHORT for i in range(n)}), "required": ["p0"]}
    found |= {
        "additional typed": {"type": "object", "additionalProperties": INTEGER, "maxProperties": 2},
        "additional beside": {"type": "object", "properties": {"a": SHORT}, "required": ["a"],
                              "additionalProperties": {"type": "null"}, "maxProperties": 2},
        "patternProperties": {"type": "object", "patternProperties": {"^n[0-9]$": INTEGER},
                              "additionalProperties": False, "required": ["n1"]},
        "minProperties": {"type": "object", "additionalProperties": INTEGER, "minProperties": 1, "maxProperties": 2},
        "propertyNames": {"type": "object", "propertyNames": {"pattern": "^[a-z]$"}, "maxProperties": 1},
        "odd names": closed(**{"a b": INTEGER, "ünï": SHORT, "quo\"te": {"type": "null"}, "": {"type": "boolean"}}),
        "dependentRequired": {**closed(a=INTEGER, b=INTEGER), "required": [], "dependentRequired": {"a": ["b"]}},
        "nested": closed(a=closed(b=closed(c=closed(d={"enum": [1, 2]})))),
        "person": closed(name={"type": "string", "minLength": 1, "maxLength": 20}, age={**INTEGER, "maximum": 120},
                         tags={"type": "array", "items": SHORT, "maxItems": 3}, email={"type": ["string", "null"],
                                                                                     "maxLength": 20})}
    return found


def _combined() -> dict[str, Any]:
    boolean, null = {"type": "boolean"}, {"type": "null"}
    return {
        "anyOf": {"anyOf": [boolean, INTEGER]}, "anyOf objects": {"anyOf": [closed(a=INTEGER), closed(b=SHORT)]},
        "anyOf beside": {"type": "integer", "anyOf": [{"minimum": 5, "maximum": 9}, {"minimum": 100, "maximum": 110}]},
        "oneOf": {"oneOf": [{"const": 1}, {"const": "one"}]}, "oneOf kinds": {"oneOf": [null, closed(x=boolean)]},
        "oneOf overlapping": {"oneOf": [{"type": "integer", "maximum": 5}, {"type": "integer", "minimum": 3}]},
        "allOf": {"allOf": [{"type": "integer"}, {"minimum": 10}, {"maximum": 20}]},
        "allOf objects": {"allOf": [{"type": "object", "properties": {"a": boolean}, "required": ["a"]}, {
            "properties": {"b": null}, "required": ["b"]}], "properties": {"a": {}, "b": {}},
            "additionalProperties": False},
        "allOf lengths": {"type": "string", "allOf": [{"minLength": 2}, {"maxLength": 4}]},
        "not": {"type": "integer", "not": {"const": 3}}, "if": {"if": {"const": 1}, "then": {"const": 1}},
        "tagged union": {"oneOf": [closed(kind={"const": "circle"}, r=INTEGER), closed(
            kind={"const": "box"}, w=INTEGER, h=INTEGER)]}}


def _references() -> dict[str, Any]:
    point = closed(x=INTEGER, y=INTEGER)
    tree = {"type": "object", "properties": {"v": {"type": "boolean"}, "next": {"anyOf": [
        {"type": "null"}, {"$ref": "#/$defs/n"}]}}, "required": ["v", "next"], "additionalProperties": False}
    return {"$ref": {**closed(a={"$ref": "#/$defs/p"}), "$defs": {"p": point}},
            "$ref twice": {**closed(a={"$ref": "#/$defs/p"}, b={"$ref": "#/$defs/p"}), "$defs": {"p": point}},
            "definitions": {**closed(a={"$ref": "#/definitions/p"}), "definitions": {"p": point}},
            "$ref to a property": {**closed(a=INTEGER, b={"$ref": "#/properties/a"})},
            "$ref chain": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": point}},
            "$ref escaped": {**closed(a={"$ref": "#/$defs/a~1b"}), "$defs": {"a/b": INTEGER}},
            "list": {"$defs": {"n": tree}, "$ref": "#/$defs/n"},
            "$anchor": {**closed(a={"$ref": "#here"}), "$defs": {"p": {**point, "$anchor": "here"}}}}
