"""A hundred grammars that explode, recurse or never end: what the published ways to kill an engine with one look like,
in every form and several sizes. The first two and the recursive ones are harmless to automata; the others have to be
refused. Knows no engine."""
from __future__ import annotations

import json
from collections.abc import Iterator

from ipc.errors import RequestError
from ipc.structured_outputs import StructuredOutputs


def hostile() -> list[tuple[str, dict[str, str]]]:
    """(kind and size, form). Some are refused by their sizes before any process sees them."""
    return [*_regexes(), *_grammars(), *_schemas(), *_tags()]


def sized(form: dict[str, str]) -> StructuredOutputs | str:
    """The form, or why its size alone is refused."""
    try:
        return StructuredOutputs(**form)            # type: ignore[arg-type]
    except RequestError as error:
        return str(error)


def _regexes() -> Iterator[tuple[str, dict[str, str]]]:
    yield "nested repetition", {"regex": "(a+)+b"}
    yield "choice in repetition", {"regex": "(a|a)*b"}
    for low, high in ((9999, 9999), (500, 5000), (1000, 100_000), (2, 10**9)):
        yield f"bounded in bounded {low}/{high}", {"regex": f"(a{{1,{low}}}){{{high}}}"}
    for n in (300, 600, 1000, 3000):
        yield f"look far back {n}", {"regex": f"(.*a){{1,{n}}}(.*b){{1,{n}}}(a|b)*a(a|b){{{n}}}"}
        yield f"three levels {n}", {"regex": f"((a{{0,{n}}}){{0,{n}}}){{0,{n}}}b"}
        yield f"unicode classes {n}", {"regex": rf"\p{{L}}{{1,{n}}}\p{{N}}{{1,{n}}}[^\p{{L}}]{{1,{n}}}x"}
        yield f"alternatives {n}", {"regex": "(" + "|".join(f".*{i}.*{i + 1}.*" for i in range(n)) + ")"}
        yield f"last but {n}", {"regex": f"(a|b)*a(a|b){{{n}}}"}
        yield f"overlapping {n}", {"regex": "|".join(f"(a{{{i}}})*" for i in range(1, n))}
    for n in (20, 40, 60):
        yield f"classes {n}", {"regex": "".join(f"[{chr(97 + i % 26)}-z{i}]{{1,400}}.*" for i in range(n))}
    for n in (65, 1000, 10_000):
        yield f"brackets {n}", {"regex": "(" * n + "a" + ")" * n}
    for text in ("(?=a)b", r"(a)\1", "(?<!a)b", "[", "a{5,2}", "(?P<n>a"):
        yield f"unsupported {text}", {"regex": text}


def _grammars() -> Iterator[tuple[str, dict[str, str]]]:
    yield "left recursion", {"grammar": 'start: start "a" | start start | "a"'}
    yield "left recursion GBNF", {"grammar": 'root ::= root root | "a"'}
    for n in (2000, 20_000, 60_000):
        yield f"long rule {n}", {"grammar": "start: " + " ".join("a" for _ in range(n)) + '\na: "x" | "y" a'}
    for n in (24, 40, 64):
        lines = [f"r{i}: r{i + 1} r{i + 1}" for i in range(n)]
        yield f"doubling {n}", {"grammar": "\n".join(["start: r0", *lines, f'r{n}: "a" | ""'])}
        yield f"doubling terminals {n}", {"grammar": "\n".join(
            ["start: R0", *(f"R{i}: R{i + 1} R{i + 1}" for i in range(n)), f"R{n}: /a|b/"])}
    for n in (5000, 10_000):
        yield f"rules {n}", {"grammar": "start: r0\n" + "\n".join(f'r{i}: "a" r{i + 1}' for i in range(n)) + '\n'
                             + f'r{n}: "b"'}
    for text in ("start: missing", 'start: "a', "nothing of the kind", 'start: A\nA: B\nB: A', "root ::= nobody"):
        yield f"broken {text[:16]!r}", {"grammar": text}
    for n in (100, 10_000):
        yield f"bracketed {n}", {"grammar": "start: " + "(" * n + '"a"' + ")" * n}


def _schemas() -> Iterator[tuple[str, dict[str, str]]]:
    for n in (65, 10_000, 50_000):
        yield f"nested objects {n}", {"json": '{"properties":{"a":' * n + "{}" + "}}" * n}
    for n in (300, 1500, 2500):
        names = {f"p{i}": {"type": "string", "pattern": f"^(.*{i}){{40}}$"} for i in range(n)}
        yield f"patterns {n}", {"json": json.dumps({"type": "object", "properties": names})}
    for n in (200, 1000, 2900):
        yield f"enumeration {n}", {"json": json.dumps({"enum": [f"{i}" * 40 for i in range(n)], "minLength": 10})}
    for n in (10**6, 10**9, 10**15):
        yield f"long text {n}", {"json": json.dumps({"type": "string", "minLength": n})}
        yield f"long array {n}", {"json": json.dumps({"type": "array", "minItems": n, "items": {"type": "integer"}})}
    for n in (8, 12, 16, 20, 24, 30):
        options = [{"properties": {f"a{i}": {"enum": [i, str(i)]}}, "required": [f"a{i}"]} for i in range(n)]
        parts = [{"anyOf": options} for _ in range(n)]
        yield f"all of any {n}", {"json": json.dumps({"type": "object", "allOf": parts})}
    for text in ('{"$ref": "#/nowhere"}', '{"$ref": "https://example.com/s"}', '{"$ref": "file:///etc/passwd"}',
                 '{"type": "what"}', "[1]", "{", '{"type": "array", "uniqueItems": true}', '{"not": {}}',
                 '{"type": "string", "pattern": "(?=a)b"}', '{"type": "integer", "multipleOf": 0}',
                 '{"type": "string", "minLength": 5, "maxLength": 2}', '{"enum": []}'):
        yield f"unsupported {text[:40]}", {"json": text}
    yield "own reference", {"json": '{"$ref": "#"}'}


def _tags() -> Iterator[tuple[str, dict[str, str]]]:
    for n in (129, 2000):
        tags = [{"begin": f"<f{i}>", "schema": {}, "end": "</f>"} for i in range(n)]
        yield f"tags {n}", {"structural_tag": json.dumps({"structures": tags, "triggers": ["<f"]})}
    yield "no tags", {"structural_tag": "1"}
    yield "no trigger", {"structural_tag": json.dumps(
        {"structures": [{"begin": "a", "schema": {}, "end": ""}], "triggers": ["b"]})}
