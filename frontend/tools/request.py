"""`tools` and `tool_choice` of a chat request: checked, and made into what the engine and the answer need.

auto: the model decides, and a scanner finds its calls. required and a named function: a grammar enforces them, so the
answer holds nothing else. Knows no HTTP.
"""
from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any

from frontend.tools.formats import ToolFormat
from frontend.tools.scanner import ListScanner, NamedScanner, Scanner, ToolScanner
from ipc.errors import RequestError
from ipc.structured_outputs import StructuredOutputs

MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


@dataclasses.dataclass(frozen=True, slots=True)
class ToolUse:
    """What tools mean for one request.

    shown       the tools for the chat template
    structured  what enforces the choice; None: nothing does
    scanner     one for each choice of the answer
    is_special  calls begin with a special token, which the text must then show
    """
    shown: list[dict[str, Any]]
    structured: StructuredOutputs | None
    scanner: Callable[[], Scanner]
    is_special: bool


def tool_use(tools: list[dict[str, Any]] | None, choice: str | dict[str, Any] | None, is_parallel: bool,
             tool_format: ToolFormat) -> ToolUse | None:
    """None: no calls are wanted. Raises RequestError that names the field."""
    found = _checked(tools or [])
    if choice is None:
        choice = "auto" if found else "none"
    if isinstance(choice, str) and choice not in ("none", "auto", "required"):
        raise RequestError(f"tool_choice is {choice[:60]!r}; known are none, auto, required and a function's name as "
                           '{"type": "function", "function": {"name": ...}}', "tool_choice")
    if choice == "none" or (choice == "auto" and not found):
        return None
    shown = list(tools or [])
    if choice == "auto":
        names = frozenset(found)
        return ToolUse(shown, None, lambda: ToolScanner(tool_format, names), tool_format.is_special)
    if not found:
        raise RequestError("tool_choice asks for a call, but tools is empty; send the tools", "tool_choice")
    if choice == "required":
        schema = _list_schema(found, is_parallel)
        return ToolUse(shown, _schema(schema, "tools"), ListScanner, False)
    name = _chosen(choice)
    if name not in found:
        raise RequestError(f"tool_choice names {name[:64]!r}; tools has {', '.join(found)}", "tool_choice")
    return ToolUse(shown, _schema(found[name], "tools"), lambda: NamedScanner(name), False)


def _checked(tools: list[dict[str, Any]]) -> dict[str, Any]:
    """The schema of each function's arguments, by name."""
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"tools has {len(tools)} entries; at most {MAX_TOOLS}", "tools")
    found: dict[str, Any] = {}
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if tool.get("type") != "function":
            raise RequestError(f"{where}.type is {str(tool.get('type'))[:60]!r}; this server takes function",
                               f"{where}.type")
        function = tool.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str) or not _NAME.fullmatch(name):
            raise RequestError(f"{where}.function.name must be 1 to 64 letters, digits, _, - or .",
                               f"{where}.function.name")
        schema = function.get("parameters")
        if schema is not None and not isinstance(schema, dict):
            raise RequestError(f"{where}.function.parameters must be a JSON schema", f"{where}.function.parameters")
        if name in found:
            raise RequestError(f"{where}.function.name is {name!r} for the second time", f"{where}.function.name")
        found[name] = schema or {"type": "object", "properties": {}}
    return found


def _chosen(choice: str | dict[str, Any]) -> str:
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise RequestError("tool_choice must be none, auto, required or "
                           '{"type": "function", "function": {"name": ...}}', "tool_choice")
    return name


def _list_schema(found: dict[str, Any], is_parallel: bool) -> dict[str, Any]:
    """Definitions of the tools' own schemas move to the top, where their references point."""
    definitions: dict[str, Any] = {}
    calls = []
    for name, schema in found.items():
        inner = dict(schema)
        for key in ("$defs", "definitions"):
            moved = inner.pop(key, None)
            if isinstance(moved, dict):
                kept = definitions.setdefault(key, {})
                for label, definition in moved.items():
                    if kept.setdefault(label, definition) != definition:
                        raise RequestError(f"two tools define {key}/{label[:60]} differently; rename one of them",
                                           "tools")
        calls.append({"type": "object", "properties": {"name": {"const": name}, "parameters": inner},
                      "required": ["name", "parameters"], "additionalProperties": False})
    schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}, **definitions}
    return schema if is_parallel else {**schema, "maxItems": 1}


def _schema(schema: Any, where: str) -> StructuredOutputs:
    try:
        return StructuredOutputs(json=json.dumps(schema, ensure_ascii=False))
    except RequestError as error:
        raise RequestError(f"{where}: {error}", where) from None
