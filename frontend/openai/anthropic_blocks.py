"""Content blocks of the Messages API: what goes in as messages, and what comes out, streamed and whole.

The answer is a list of blocks in the order the model writes them: thinking, text, tool_use for each call. One builder
makes the blocks and the events about them, so a stream and a whole answer cannot differ. Knows no engine.
"""
from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import msgspec

from frontend.json_text import json_text
from frontend.openai import sse
from frontend.openai.chat_call import function_tools, text_of
from frontend.tools.scanner import CallDelta, Piece
from ipc.errors import RequestError

ROLES = ("user", "assistant")
TEXT = ("text",)
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class TextBlock(msgspec.Struct, tag="text"):
    """A piece of the answer."""
    text: str


class ThinkingBlock(msgspec.Struct, tag="thinking"):
    """What the model thought before it answered. It is not signed: it comes back as text like any other."""
    thinking: str
    signature: str = ""


class ToolUseBlock(msgspec.Struct, tag="tool_use"):
    """A call that the model asks for; its result comes back under the same id."""
    id: str
    name: str
    input: dict[str, Any] = {}


Block = TextBlock | ToolUseBlock | ThinkingBlock


def event(name: str, **fields: Any) -> bytes:
    """One event of a stream."""
    return sse.named_event(name, msgspec.json.encode({"type": name, **fields}))


class Blocks:
    """The answer as it grows. Each method returns the events that tell of it; a whole answer drops them."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._is_open = False
        self._call_index = -1                   # of the open call
        self._texts: list[str] = []             # of the open block
        self._delta_head, self._delta_tail = b"", b"}}\n\n"

    @property
    def has_calls(self) -> bool:
        """Whether the model asked for any."""
        return any(isinstance(block, ToolUseBlock) for block in self.blocks)

    def think(self, text: str) -> bytes:
        """News of the thoughts; they come before the answer."""
        if not text:
            return b""
        data = b"" if self._is_open else self._open(ThinkingBlock(""), b'"thinking_delta","thinking":')
        return data + self._delta(text)

    def feed(self, pieces: Iterable[Piece]) -> bytes:
        """News of the answer, in order."""
        data = b""
        for piece in pieces:
            if isinstance(piece, CallDelta):
                if piece.index != self._call_index or not self._is_open:
                    self._call_index = piece.index
                    data += self.close() + self._open(ToolUseBlock(piece.id or "", piece.name or ""),
                                                      b'"input_json_delta","partial_json":')
                data += self._delta(piece.arguments) if piece.arguments else b""
            else:
                if not self._is_open or not isinstance(self.blocks[-1], TextBlock):
                    data += self.close() + self.open_text()
                data += self._delta(piece)
        return data

    def open_text(self) -> bytes:
        """A block of text begins."""
        return self._open(TextBlock(""), b'"text_delta","text":')

    def close(self) -> bytes:
        """The open block, if there is one, is complete."""
        if not self._is_open:
            return b""
        self._is_open = False
        block, text = self.blocks[-1], "".join(self._texts)
        if isinstance(block, ToolUseBlock):
            block.input = _arguments(text)
        elif isinstance(block, ThinkingBlock):
            block.thinking = text
        else:
            block.text = text
        return event("content_block_stop", index=len(self.blocks) - 1)

    def _open(self, block: Block, delta: bytes) -> bytes:
        self.blocks.append(block)
        self._is_open, self._texts = True, []
        index = len(self.blocks) - 1
        self._delta_head = (b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":'
                            b'{"type":' % index + delta)
        return event("content_block_start", index=index, content_block=block)

    def _delta(self, text: str) -> bytes:
        """The hot path."""
        self._texts.append(text)
        return self._delta_head + json_text(text) + self._delta_tail


def _arguments(text: str) -> dict[str, Any]:
    """As an object. What the model left unfinished is kept as Anthropic's documentation wraps it."""
    try:
        value = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": text}


def conversation(system: Any, given: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], bool]:
    """Messages for the chat template, neighbours of one role joined as Anthropic does; whether the last one is the
    assistant's, to be continued. Raises RequestError."""
    if not given:
        raise RequestError("messages is empty; send at least one message", "messages")
    result: list[dict[str, Any]] = []
    if system:
        result.append({"role": "system", "content": text_of(system, "system", TEXT)})
    for index, message in enumerate(given):
        role, where = message.get("role"), f"messages[{index}]"
        if role not in ROLES:
            raise RequestError(f"{where}.role is {str(role)[:60]!r}; known are {', '.join(ROLES)}", f"{where}.role")
        _add(result, role, message.get("content"), f"{where}.content")
    if result[-1].get("tool_calls"):
        raise RequestError(f"messages[{len(given) - 1}] ends with tool_use; send the results as tool_result blocks of "
                           "a user message", "messages")
    return result, result[-1]["role"] == "assistant"


def _add(result: list[dict[str, Any]], role: str, content: Any, where: str) -> None:
    """A message's text, thoughts, calls and results; results stand before the text of their message."""
    texts: list[Any] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    is_list = isinstance(content, list)
    for index, block in enumerate(content if is_list else ()):
        kind, at = block.get("type") if isinstance(block, dict) else None, f"{where}[{index}]"
        if kind == "tool_use" and role == "assistant":
            calls.append(_call(block, at))
        elif kind == "tool_result" and role == "user":
            result.append(_result(block, at))
        elif kind == "thinking" and role == "assistant":
            thoughts.append(_thinking(block, at))
        else:
            known = ("text", "tool_use", "thinking") if role == "assistant" else ("text", "tool_result")
            if kind not in known:
                raise RequestError(f"{at}.type is {str(kind)[:60]!r}; this server takes {', '.join(known)}",
                                   f"{at}.type")
            texts.append(text_of([block], f"{where}", TEXT))
    text = "\n".join(texts) if is_list else text_of(content, where, TEXT)
    has_results = is_list and len(texts) + len(calls) + len(thoughts) < len(content)
    if result and result[-1]["role"] == role and not result[-1].get("tool_calls"):
        result[-1]["content"] += "\n" + text if text else ""
    elif text or calls or not has_results:
        result.append({"role": role, "content": text})
    if calls:
        result[-1]["tool_calls"] = calls
    if any(thoughts):
        result[-1]["reasoning_content"] = "\n".join(thoughts)


def _call(block: dict[str, Any], where: str) -> dict[str, Any]:
    given = block.get("input")
    if not isinstance(given, dict):
        raise RequestError(f"{where}.input must be an object", f"{where}.input")
    return {"id": _name(block, "id", where), "type": "function",
            "function": {"name": _name(block, "name", where), "arguments": json.dumps(given, ensure_ascii=False)}}


def _result(block: dict[str, Any], where: str) -> dict[str, Any]:
    content = block.get("content", "")
    return {"role": "tool", "tool_call_id": _name(block, "tool_use_id", where),
            "content": text_of(content, f"{where}.content", TEXT)}


def _thinking(block: dict[str, Any], where: str) -> str:
    value = block.get("thinking")
    if not isinstance(value, str):
        raise RequestError(f"{where}.thinking must be text", f"{where}.thinking")
    return value


def _name(block: dict[str, Any], field: str, where: str) -> str:
    value = block.get(field)
    if not isinstance(value, str) or not value:
        raise RequestError(f"{where}.{field} must be a text that is not empty", f"{where}.{field}")
    return value


def chat_tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Tools in the shape of chat completions. Raises RequestError."""
    return function_tools(tools, "custom", {"name": "name", "description": "description", "parameters": "input_schema"},
                          default="custom")


def chat_choice(choice: dict[str, Any] | None) -> tuple[str | dict[str, Any] | None, bool]:
    """tool_choice as chat completions have it, and whether calls may be parallel. Raises RequestError."""
    if choice is None:
        return None, True
    kind = choice.get("type")
    is_parallel = choice.get("disable_parallel_tool_use") is not True
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}, is_parallel
    if not isinstance(kind, str) or kind not in CHOICES:
        raise RequestError(f"tool_choice.type is {str(kind)[:60]!r}; known are {', '.join([*CHOICES, 'tool'])}",
                           "tool_choice.type")
    return CHOICES[kind], is_parallel
