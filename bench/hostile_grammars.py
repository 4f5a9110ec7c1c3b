"""Grammars of people who mean harm: what the published ways to kill an engine with one look like, in every form.

A hundred that must be refused, by what is wrong with them: explosive, too deep, too long, endless, broken. And those
that only look like them and are harmless to automata (nested repetition, left recursion, huge counts): they have to be
answered, either way, without hurting anyone. Knows no engine.
"""
from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from ipc.errors import RequestError
from ipc.structured_outputs import StructuredOutputs

Form = dict[str, Any]
Named = tuple[str, Form]


def hostile() -> list[Named]:
    """(kind and what, form) of each. Some are refused by their sizes before any process sees them."""
    return [*_explosive(), *_too_deep(), *_too_long(), *_endless(), *_broken()]


def harmless() -> list[Named]:
    """The same of those that only look hostile."""
    return [*_harmless_texts(), *_harmless_schemas()]


def sized(form: Form) -> StructuredOutputs | str:
    """The form, or why its size alone is refused."""
    try:
        return StructuredOutputs(**form)
    except RequestError as error:
        return str(error)


def _schema(value: Any) -> Form:
    return {"json": value if isinstance(value, str) else json.dumps(value)}


def _explosive() -> Iterator[Named]:
    for n in (24, 32, 40, 50, 64, 100):
        yield f"explosive: terminals doubled {n} times", {"grammar": "\n".join(
            ["start: R0", *(f"R{i}: R{i + 1} R{i + 1}" for i in range(n)), f"R{n}: /a|b/"])}
    for n in (3000, 4000, 5000):
        yield f"explosive: {n} nested rules", {"grammar": "start: r0\n" + "\n".join(
            f'r{i}: "a" r{i + 1}' for i in range(n)) + f'\nr{n}: "b"'}
    for n in (10**6, 10**7, 10**9, 10**10, 10**20):
        yield f"explosive: repeated {n} times", {"regex": f"(ab){{{n}}}"}
    for n in (10, 20, 40):
        for word in ("anyOf", "oneOf"):
            options = [{"properties": {f"a{i}": {"enum": [i, str(i)]}}, "required": [f"a{i}"]} for i in range(n)]
            yield f"explosive: all of {n} times {word}", _schema({"allOf": [{word: options}] * n, "type": "object"})
    for n in (10**12, 10**18):
        yield f"explosive: text of {n}", _schema({"type": "string", "minLength": n})


def _too_deep() -> Iterator[Named]:
    for n in (65, 1000, 10_000):
        yield f"deep: {n} brackets in a regex", {"regex": "(" * n + "a" + ")" * n}
        yield f"deep: {n} brackets in a grammar", {"grammar": "start: " + "(" * n + '"a"' + ")" * n}
        yield f"deep: {n} objects", _schema('{"properties":{"a":' * n + "{}" + "}}" * n)
        yield f"deep: {n} lists", _schema('{"enum":' + "[" * n + "]" * n + "}")
    yield "deep: never closed", {"regex": "(" * 120_000}


def _too_long() -> Iterator[Named]:
    yield "long: regex", {"regex": "a" * 200_000}
    yield "long: rule", {"grammar": "start: " + '"a" ' * 50_000}
    yield "long: rules", {"grammar": "start: r0\n" + "\n".join(f'r{i}: "a" r{i + 1}' for i in range(10_000))}
    yield "long: enumeration", _schema({"enum": [f"{i}" * 40 for i in range(2900)]})
    yield "long: properties", _schema({"properties": {f"p{i}": {"type": "string", "pattern": f"^(.*{i}){{40}}$"}
                                                      for i in range(2500)}})
    yield "long: choices", {"choice": [str(i) for i in range(1025)]}
    yield "long: choice", {"choice": ["a" * 200_000]}
    for n in (129, 2000):
        tags = [{"begin": f"<f{i}>", "schema": {}, "end": "</f>"} for i in range(n)]
        yield f"long: {n} tags", {"structural_tag": json.dumps({"structures": tags, "triggers": ["<f"]})}
    yield "long: triggers", {"structural_tag": json.dumps({"structures": tags[:1], "triggers": ["<f"] * 200})}


def _endless() -> Iterator[Named]:
    rings: list[Any] = [
        {"$ref": "#"}, {"allOf": [{"$ref": "#"}]}, {"anyOf": [{"$ref": "#"}]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/b"}]}, "b": {"$ref": "#/$defs/a"}}}]
    for ring in rings:
        yield f"endless: {json.dumps(ring)[:60]}", _schema(ring)
    for text in ("start: start", "start: a\na: b\nb: a", "start: A\nA: A", 'start: A\nA: "x" A',
                 "start: A\nA: B\nB: C\nC: A", 'start: A*\nA: A | "a"', "root ::= root", "root ::= a\na ::= root",
                 'start: %json {"$ref": "#"}'):
        yield f"endless: {text!r}", {"grammar": text}
    for text in (r"[^\s\S]", r"a[^\x00-\U0010ffff]"):
        yield f"endless: nothing matches {text}", {"regex": text}


def _broken() -> Iterator[Named]:
    for text in ("(?=a)b", r"(a)\1", "(?<!a)b", "[", "a{5,2}", "(?P<n>a", "(?>a+)", r"\p{Nope}", "[z-a]", "*a", "a)"):
        yield f"broken: {text}", {"regex": text}
    for text in ("start: missing", 'start: "a', "nothing of the kind", "root ::= nobody", "start: X\nstart: X",
                 "start: /[/", "start: <[9999999]>", "%import nowhere.X\nstart: X", "start: %json {"):
        yield f"broken: {text!r}", {"grammar": text}
    for text in ('{"$ref": "#/nowhere"}', '{"$ref": "https://example.com/s"}', '{"$ref": "file:///etc/passwd"}',
                 '{"type": "what"}', "[1]", "{", '{"not": {}}', '{"type": "string", "pattern": "(?=a)b"}',
                 '{"type": "integer", "multipleOf": 0}', '{"type": "string", "minLength": 5, "maxLength": 2}',
                 '{"enum": []}', '{"type": "array", "uniqueItems": true}', '{"minLength": -1, "type": "string"}',
                 '{"const": 1, "type": "string"}', "false", '{"$dynamicRef": "#x"}',
                 '{"type": "object", "required": ["a"], "additionalProperties": false}'):
        yield f"broken: {text}", _schema(text)
    yield "broken: no tags", {"structural_tag": "1"}
    yield "broken: no trigger", {"structural_tag": json.dumps(
        {"structures": [{"begin": "a", "schema": {}, "end": ""}], "triggers": ["b"]})}


def _harmless_texts() -> Iterator[Named]:
    for text in ("(a+)+b", "(a|a)*b", "(a{1,9999}){9999}", "(a{1,1000}){100000}", "(a{1,2}){1000000000}"):
        yield text, {"regex": text}
    for n in (300, 3000):
        yield f"look far back {n}", {"regex": f"(.*a){{1,{n}}}(.*b){{1,{n}}}(a|b)*a(a|b){{{n}}}"}
        yield f"three levels {n}", {"regex": f"((a{{0,{n}}}){{0,{n}}}){{0,{n}}}b"}
        yield f"unicode classes {n}", {"regex": rf"\p{{L}}{{1,{n}}}\p{{N}}{{1,{n}}}[^\p{{L}}]{{1,{n}}}x"}
        yield f"alternatives {n}", {"regex": "(" + "|".join(f".*{i}.*{i + 1}.*" for i in range(n)) + ")"}
        yield f"last but {n}", {"regex": f"(a|b)*a(a|b){{{n}}}"}
        yield f"overlapping {n}", {"regex": "|".join(f"(a{{{i}}})*" for i in range(1, n))}
    for n in (20, 60):
        yield f"classes {n}", {"regex": "".join(f"[{chr(97 + i % 26)}-z{i}]{{1,400}}.*" for i in range(n))}
    for text in ('start: start "a" | start start | "a"', 'root ::= root root | "a"', 'start: "a" start'):
        yield text, {"grammar": text}
    for n in (2000, 60_000):
        yield f"long rule {n}", {"grammar": "start: " + " ".join("a" for _ in range(n)) + '\na: "x" | "y" a'}
    for n in (24, 64):
        lines = [f"r{i}: r{i + 1} r{i + 1}" for i in range(n)]
        yield f"doubling {n}", {"grammar": "\n".join(["start: r0", *lines, f'r{n}: "a" | ""'])}


def _harmless_schemas() -> Iterator[Named]:
    for n in (300, 1500):
        yield f"patterns {n}", _schema({"type": "object", "properties": {
            f"p{i}": {"type": "string", "pattern": f"^(.*{i}){{40}}$"} for i in range(n)}})
    for n in (200, 1000):
        yield f"enumeration {n}", _schema({"enum": [f"{i}" * 40 for i in range(n)], "minLength": 10})
    for n in (10**6, 10**9):
        yield f"long text {n}", _schema({"type": "string", "minLength": n})
        yield f"long array {n}", _schema({"type": "array", "minItems": n, "items": {"type": "integer"}})
    for word in ("prefixItems", "allOf", "anyOf"):
        definitions: dict[str, Any] = {f"d{i}": {word: [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)}
        yield f"references doubled by {word}", _schema({"$ref": "#/$defs/d0", "$defs": {
            **definitions, "d40": {"type": "null"}}})
    yield "an object in itself", _schema({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]})
    yield "a list in itself", _schema({"type": "array", "items": {"$ref": "#"}, "minItems": 1})
