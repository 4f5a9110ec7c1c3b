"""What form a request's output must have: exactly one of a JSON schema, any JSON object, a regular expression, a
choice, a grammar, or structural tags. Sizes and nesting are bounded here; whether a grammar makes sense is found out
elsewhere.

`grammar_text` writes every form in the language of the grammar library, so that whoever checks and whoever compiles
read the same text. Knows no library.
"""
from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from ipc.errors import RequestError, shown

MAX_GRAMMAR_CHARS = 128 * 1024                  # of schema, regex or grammar
MAX_NESTING = 64                                # brackets inside brackets
MAX_CHOICES = 1024
MAX_TAGS = 128
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")

# The library's own limits, narrower than its defaults: about 60 MB, and 30 ms a step, for one grammar. The same for the
# helper that tries a grammar out and for the worker.
PARSER_LIMITS: dict[str, Any] = {"initial_lexer_fuel": 1_000_000, "step_lexer_fuel": 200_000, "step_max_items": 50_000,
                                 "max_lexer_states": 30_000, "max_grammar_size": 200_000}

CHECK_ANSWER = struct.Struct("<If")             # head of a grammar helper's answer: bytes of text, seconds of CPU
COMPILED_BYTES = 64 << 20                       # of compiled grammars that a worker keeps, estimated

# Between JSON's tokens. Without a limit a model may put out blanks for ever.
WHITESPACE = r"[\x20\x0A\x0D\x09]{0,24}"


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """One form. Field names are vLLM's. Raises RequestError that names the field."""
    json: str | dict[str, Any] | None = None    # a JSON schema or the text of one; kept as text
    regex: str | None = None                    # the whole output matches it
    choice: list[str] | None = None             # the output is one of them
    grammar: str | None = None                  # Lark or GBNF
    json_object: bool | None = None             # any JSON object
    structural_tag: str | dict[str, Any] | None = None  # {"structures": [{begin, schema, end}], "triggers": [...]}, so

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) is not None and getattr(self, name) is not False]
        if len(given) != 1:
            raise RequestError(f"structured_outputs has {' and '.join(given) or 'nothing'}; give exactly one of "
                               f"{', '.join(KINDS)}", "structured_outputs")
        name = given[0]
        value = getattr(self, name)
        if name in ("json", "structural_tag") and isinstance(value, dict):
            value = _json_text(name, value)
            msgspec.structs.force_setattr(self, name, value)
        if name == "choice":
            _check_choice(value)
        elif name == "json_object":
            if value is not True:
                raise RequestError("json_object must be true", "structured_outputs.json_object")
        else:
            _check_text(name, value)

    @property
    def kind(self) -> str:
        """Which form it is."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False))


def read_structured_outputs(value: Any) -> StructuredOutputs:
    """A form given as such or as a dict of its fields. Raises RequestError."""
    if isinstance(value, StructuredOutputs):
        return value
    field = "structured_outputs"
    if not isinstance(value, dict):
        raise RequestError(f"structured_outputs must be a StructuredOutputs or a dict of its fields, not "
                           f"{shown(value)}", field)
    unknown = next((name for name in value if name not in KINDS), None)
    if unknown is not None:
        name = unknown[:60] if isinstance(unknown, str) else shown(unknown)
        raise RequestError(f"structured_outputs.{name} is not supported; known are {', '.join(KINDS)}", field)
    return StructuredOutputs(**value)


def _json_text(name: str, value: dict[str, Any]) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{name} is no JSON: {error}", f"structured_outputs.{name}") from None


def _check_choice(value: Any) -> None:
    field = "structured_outputs.choice"
    if not isinstance(value, list) or not all(isinstance(text, str) and text for text in value):
        raise RequestError("choice must be a list of strings, none empty", field)
    if not 1 <= len(value) <= MAX_CHOICES:
        raise RequestError(f"choice has {len(value)} strings; allowed are 1 to {MAX_CHOICES}", field)
    length = sum(map(len, value))
    if length > MAX_GRAMMAR_CHARS:
        raise RequestError(f"choice has {length} characters; at most {MAX_GRAMMAR_CHARS}", field)
    for text in value:
        _check_unicode(text, field)


def _check_text(name: str, value: Any) -> None:
    field = f"structured_outputs.{name}"
    if not isinstance(value, str) or not value.strip():
        raise RequestError(f"{name} must be a text that is not empty", field)
    if len(value) > MAX_GRAMMAR_CHARS:
        raise RequestError(f"{name} has {len(value)} characters; at most {MAX_GRAMMAR_CHARS}", field)
    if "\0" in value:
        raise RequestError(f"{name} contains a NUL character", field)
    _check_unicode(value, field)
    depth = _nesting(value)
    if depth > MAX_NESTING:
        raise RequestError(f"{name} nests {depth} brackets; at most {MAX_NESTING}", field)


def _check_unicode(text: str, field: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{field} has an unpaired surrogate at position {error.start}", field) from None


def _nesting(text: str) -> int:
    """The deepest nesting of brackets, whatever they mean: an upper bound for what parsers recurse into. One that
    closes nothing counts for nothing."""
    steps = _BRACKETS[np.frombuffer(text.encode(), np.uint8)]
    depth = np.cumsum(steps[steps != 0], dtype=np.int64)
    if not depth.size:
        return 0
    return int((depth - np.minimum(np.minimum.accumulate(depth), 0)).max())


_BRACKETS = np.zeros(256, np.int8)
_BRACKETS[list(b"([{")], _BRACKETS[list(b")]}")] = 1, -1


def compiled_bytes(key: bytes) -> int:
    """Memory of a compiled grammar and the masks it has made; `key` is its msgpack. The library does not tell; sound
    grammars measured less than this."""
    return (1 << 20) + 256 * len(key)


def one_line(error: str) -> str:
    """An error text of the library, without the line that it adds about itself; at most 500 characters."""
    lines = (line.strip() for line in error.splitlines())
    return " ".join(line for line in lines if line and line != "<non-verbose/>")[:500]


def grammar_text(spec: StructuredOutputs, to_lark: Callable[[str], str]) -> str:
    """The grammar for the library. `to_lark` takes Lark or GBNF and gives Lark. Raises ValueError for text that is not
    of its kind."""
    if spec.json is not None:
        return _json_grammar(_read_schema(spec.json))
    if spec.json_object:
        return _json_grammar({"type": "object"})
    if spec.regex is not None:
        return _lark_grammar(f"start: {_regex(spec.regex)}")
    if spec.choice is not None:
        return _lark_grammar("start: " + " | ".join(map(_quoted, dict.fromkeys(spec.choice))))
    if spec.grammar is not None:
        return _lark_grammar(to_lark(spec.grammar))
    return _lark_grammar(_tag_lark(spec.structural_tag or ""))


def _read_schema(text: Any) -> Any:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the schema is not JSON: {error}") from None
    if not isinstance(schema, (dict, bool)):
        raise ValueError("the schema must be a JSON object")
    return schema


def _with_whitespace(schema: Any) -> Any:
    if not isinstance(schema, dict) or "x-guidance" in schema:
        return schema
    return {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}}


def _json_grammar(schema: Any) -> str:
    return json.dumps({"grammars": [{"json_schema": _with_whitespace(schema)}]})


def _lark_grammar(lark: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": lark}]})


def _quoted(text: str) -> str:
    """A string of Lark; it reads JSON's escapes."""
    return json.dumps(text, ensure_ascii=False)


def _regex(pattern: str) -> str:
    """Between slashes, where a slash and a line end must be escaped."""
    parts, is_escaped = [], False
    for char in pattern:
        if char == "\n":
            parts.append("n" if is_escaped else "\\n")
        elif char == "/" and not is_escaped:
            parts.append("\\/")
        else:
            parts.append(char)
        is_escaped = char == "\\" and not is_escaped
    return "/" + "".join(parts) + "/"


def _tag_lark(text: Any) -> str:
    """Free text, in which each trigger starts one of its tags: begin, a value of its schema, end."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"structural_tag is not JSON: {error}") from None
    structures, triggers = (value.get(name) if isinstance(value, dict) else None for name in ("structures", "triggers"))
    if (not isinstance(structures, list) or not isinstance(triggers, list) or not structures or not triggers
            or not all(isinstance(t, str) and t for t in triggers)):
        raise ValueError('structural_tag must be {"structures": [{"begin", "schema", "end"}, ...], "triggers": [...]}')
    if len(structures) > MAX_TAGS or len(triggers) > MAX_TAGS:
        raise ValueError(f"structural_tag has {max(len(structures), len(triggers))} entries; at most {MAX_TAGS}")
    rules: dict[str, list[str]] = {trigger: [] for trigger in triggers}
    for index, tag in enumerate(structures):
        begin, end = (tag.get(name) if isinstance(tag, dict) else None for name in ("begin", "end"))
        if not isinstance(begin, str) or not isinstance(end, str) or not isinstance(tag.get("schema"), (dict, bool)):
            raise ValueError(f"structures[{index}] needs begin (text), schema (object) and end (text)")
        trigger = next((t for t in triggers if begin.startswith(t)), None)
        if trigger is None:
            raise ValueError(f"structures[{index}].begin {begin[:60]!r} starts with none of the triggers")
        rest = begin[len(trigger):]
        schema = json.dumps(_with_whitespace(tag["schema"]))
        rules[trigger].append(" ".join(filter(None, [_quoted(rest) if rest else "", f"%json {schema}",
                                                     _quoted(end) if end else ""])))
    lines, names = [], []
    for number, (trigger, bodies) in enumerate(rules.items()):
        if bodies:
            names.append(f"tag{number}")
            lines += [f"head{number}[lazy]: TEXT {_quoted(trigger)}",
                      f"tag{number}: head{number} ({' | '.join(bodies)})"]
    return "\n".join([f"start: ({' | '.join(names)})* tail", "tail: TEXT", r"TEXT: /(.|\n)*/", *lines])
