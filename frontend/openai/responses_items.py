"""Items of the Responses API: what goes in as messages, and what comes out, streamed and whole.

The output is a list of items in the order the model writes them: its reasoning, a message for each stretch of text, a
function_call for each call. One builder makes the items and the events about them, so a stream and a whole answer
cannot differ. Knows no engine.
"""
from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from frontend.json_text import json_text
from frontend.openai import sse
from frontend.openai.chat_call import function_tools, text_of
from frontend.openai.logprobs import TokenLogprob
from frontend.tools.scanner import CallDelta, Piece
from ipc.errors import RequestError

ROLES = ("user", "assistant", "system", "developer")
PARTS = ("input_text", "output_text", "text")
THOUGHTS = ("reasoning_text", "summary_text", "text")
KINDS = ("message", "function_call", "function_call_output", "reasoning")


class OutputText(msgspec.Struct):
    """A part of an output message."""
    text: str
    annotations: list[str] = []
    logprobs: list[TokenLogprob] = []
    type: str = "output_text"


class ReasoningText(msgspec.Struct):
    """A part of a reasoning item."""
    text: str
    type: str = "reasoning_text"


class OutputReasoning(msgspec.Struct, tag="reasoning"):
    """What the model thought before it answered."""
    id: str
    status: str
    content: list[ReasoningText]
    summary: list[ReasoningText] = []           # none is made


class OutputMessage(msgspec.Struct, tag="message"):
    """Text of the answer."""
    id: str
    status: str                                 # in_progress, completed or incomplete
    content: list[OutputText]
    role: str = "assistant"


class OutputCall(msgspec.Struct, tag="function_call"):
    """A call that the model asks for; its result comes back under the same call_id."""
    id: str
    status: str
    call_id: str
    name: str
    arguments: str = ""


OutputItem = OutputMessage | OutputCall | OutputReasoning


class OutputItems:
    """The output as it grows. Each method returns the events that tell of it; a whole answer drops them."""

    def __init__(self, has_logprobs: bool = False) -> None:
        self.items: list[OutputItem] = []
        self._has_logprobs = has_logprobs
        self._new_logprobs: list[TokenLogprob] = []         # not told yet
        self._logprobs: list[TokenLogprob] = []             # of the open message
        self._number = 0
        self._is_open = False
        self._call_index = -1                   # of the open call
        self._texts: list[str] = []             # of the open item
        self._delta_head = b""

    def event(self, kind: str, **fields: Any) -> bytes:
        """Any event, numbered."""
        number, self._number = self._number, self._number + 1
        return sse.named_event(kind, msgspec.json.encode({"type": kind, "sequence_number": number, **fields}))

    def think(self, text: str) -> bytes:
        """News of the thoughts; they come before the answer."""
        if not text:
            return b""
        data = b"" if self._is_open else self._open_reasoning()
        return data + self._delta(text)

    def feed(self, pieces: Iterable[Piece], logprobs: Sequence[TokenLogprob] = ()) -> bytes:
        """News of the answer, in order; the entries go with the text that is told next."""
        self._new_logprobs += logprobs
        data = b""
        for piece in pieces:
            if isinstance(piece, CallDelta):
                if piece.index != self._call_index or not self._is_open:
                    data += self._close("completed") + self._open_call(piece)
                data += self._delta(piece.arguments) if piece.arguments else b""
            else:
                if not self._is_open or not isinstance(self.items[-1], OutputMessage):
                    data += self._close("completed") + self._open_message()
                data += self._delta(piece)
        return data

    def end(self, status: str) -> bytes:
        """The answer is complete: the last item has its status. An answer without anything is an empty message."""
        data = b"" if self.items else self._open_message()
        return data + self._close(status)

    def message(self) -> dict[str, Any]:
        """The answer as a message for the chat template."""
        text = "\n".join(item.content[0].text for item in self.items if isinstance(item, OutputMessage))
        calls = [_call(item.call_id, item.name, item.arguments) for item in self.items if isinstance(item, OutputCall)]
        thoughts = "\n".join(item.content[0].text for item in self.items if isinstance(item, OutputReasoning))
        return {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {}),
                **({"reasoning_content": thoughts} if thoughts else {})}

    def _place(self) -> dict[str, Any]:
        place = {"item_id": self.items[-1].id, "output_index": len(self.items) - 1}
        return place if isinstance(self.items[-1], OutputCall) else {**place, "content_index": 0}

    def _open(self, item: OutputItem, delta_name: bytes, more: bytes) -> bytes:
        self.items.append(item)
        self._is_open, self._texts = True, []
        self._delta_head = (b"event: " + delta_name + b'\ndata: {"type":"' + delta_name + b'",'
                            + msgspec.json.encode(self._place())[1:-1] + more + b',"sequence_number":')
        return self.event("response.output_item.added", output_index=len(self.items) - 1, item=item)

    def _open_message(self) -> bytes:
        item = OutputMessage(f"msg_{secrets.token_hex(16)}", "in_progress", [])
        self._logprobs = []
        data = self._open(item, b"response.output_text.delta", b"" if self._has_logprobs else b',"logprobs":[]')
        return data + self.event("response.content_part.added", **self._place(), part=OutputText(""))

    def _open_reasoning(self) -> bytes:
        item = OutputReasoning(f"rs_{secrets.token_hex(16)}", "in_progress", [])
        data = self._open(item, b"response.reasoning_text.delta", b"")
        return data + self.event("response.content_part.added", **self._place(), part=ReasoningText(""))

    def _open_call(self, call: CallDelta) -> bytes:
        self._call_index = call.index
        item = OutputCall(f"fc_{secrets.token_hex(16)}", "in_progress", call.id or "", call.name or "")
        return self._open(item, b"response.function_call_arguments.delta", b"")

    def _delta(self, text: str) -> bytes:
        """The hot path."""
        self._texts.append(text)
        number, self._number = self._number, self._number + 1
        more = b""
        if self._has_logprobs and isinstance(self.items[-1], OutputMessage):
            more = b'"logprobs":' + msgspec.json.encode(self._new_logprobs) + b","
            self._keep_logprobs()
        return self._delta_head + b"%d," % number + more + b'"delta":' + json_text(text) + b"}\n\n"

    def _keep_logprobs(self) -> None:
        self._logprobs += self._new_logprobs
        self._new_logprobs = []

    def _close(self, status: str) -> bytes:
        if not self._is_open:
            return b""
        self._is_open = False
        item, text = self.items[-1], "".join(self._texts)
        item.status = status
        if isinstance(item, OutputCall):
            item.arguments = text
            data = self.event("response.function_call_arguments.done", **self._place(), name=item.name, arguments=text)
        elif isinstance(item, OutputReasoning):
            item.content = [ReasoningText(text)]
            data = (self.event("response.reasoning_text.done", **self._place(), text=text)
                    + self.event("response.content_part.done", **self._place(), part=item.content[0]))
        else:
            self._keep_logprobs()
            item.content = [OutputText(text, logprobs=self._logprobs)]
            data = (self.event("response.output_text.done", **self._place(), text=text, logprobs=self._logprobs)
                    + self.event("response.content_part.done", **self._place(), part=item.content[0]))
        return data + self.event("response.output_item.done", output_index=len(self.items) - 1, item=item)


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def input_messages(items: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The input as messages for the chat template: calls belong to the assistant's message before them, if there is
    one; reasoning belongs to what the assistant says or calls next. Raises RequestError that names the item."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not items:
        raise RequestError("input is empty; send text or at least one message", "input")
    messages: list[dict[str, Any]] = []
    thoughts = ""
    for index, item in enumerate(items):
        where = f"input[{index}]"
        kind, role = item.get("type", "message"), item.get("role")
        if kind not in KINDS:
            raise RequestError(f"{where}.type is {str(kind)[:60]!r}; this server takes {', '.join(KINDS)}",
                               f"{where}.type")
        if kind == "reasoning":
            thoughts = text_of(item.get("content") or item.get("summary") or "", f"{where}.content", THOUGHTS)
        elif kind == "function_call":
            call = _call(*(_text(item, name, where) for name in ("call_id", "name", "arguments")))
            if thoughts or not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": "", **_thoughts(thoughts)})
                thoughts = ""
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": _text(item, "call_id", where),
                             "content": text_of(item.get("output"), f"{where}.output", PARTS)})
        elif role not in ROLES:
            raise RequestError(f"{where}.role is {str(role)[:60]!r}; known are {', '.join(ROLES)}", f"{where}.role")
        else:
            messages.append({"role": "system" if role == "developer" else role,
                             "content": text_of(item.get("content"), f"{where}.content", PARTS),
                             **_thoughts(thoughts if role == "assistant" else "")})
            thoughts = ""
    return messages


def _thoughts(text: str) -> dict[str, str]:
    return {"reasoning_content": text} if text else {}


def _text(item: dict[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{where}.{name} must be text", f"{where}.{name}")
    return value


def chat_tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Tools in the shape of chat completions. Raises RequestError."""
    return function_tools(tools, "function", {name: name for name in ("name", "description", "parameters")})


def chat_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    """The same for tool_choice."""
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice
