"""How model families write their calls: one row of data each, found by name or by the model's chat template."""
from __future__ import annotations

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way to write calls in text.

    begin       what stands before calls; empty: they stand alone
    end         what stands behind them; may be missing
    is_bare     an answer that begins with { is a call without `begin`
    is_named    name{arguments} may stand in place of {"name": ..., "arguments": ...}
    signs       in the template of a model that writes so
    """
    name: str
    begin: str = ""
    end: str = ""
    is_bare: bool = False
    is_named: bool = False
    is_special: bool = False                    # `begin` is a special token, which text usually hides
    id_chars: int = 24
    signs: tuple[str, ...] = ()


_formats: dict[str, ToolFormat] = {}


def register(tool_format: ToolFormat) -> None:
    """Make a format known by its name; a later one of the same name replaces it."""
    _formats[tool_format.name] = tool_format


def get_format(name: str) -> ToolFormat:
    """Raises ValueError that names the known ones."""
    found = _formats.get(name)
    if found is None:
        raise ValueError(f"tool call format {name!r} is not known; known are {', '.join(sorted(_formats))}")
    return found


def detect_format(templates: Iterable[str]) -> ToolFormat:
    """By the model's chat templates; Hermes' when nothing tells, because most models know it."""
    text = "\n".join(templates)
    for tool_format in _formats.values():
        if any(sign in text for sign in tool_format.signs):
            return tool_format
    return _formats["hermes"]


register(ToolFormat("hermes", "<tool_call>", "</tool_call>", signs=("<tool_call>",)))
register(ToolFormat("qwen", "<tool_call>", "</tool_call>"))
register(ToolFormat("mistral", "[TOOL_CALLS]", "", is_named=True, is_special=True, id_chars=9, signs=("[TOOL_CALLS]",)))
register(ToolFormat("llama3_json", "<|python_tag|>", "", is_bare=True, is_special=True,
                    signs=("<|python_tag|>", "Environment: ipython")))
LIST = ToolFormat("list")                       # [{"name": ..., "parameters": ...}, ...]: what a grammar enforces
