"""A chat choice's text split into reasoning, content and tool calls, in OpenAI's shapes, streamed and whole.

One splitter for each choice; the same one serves both kinds of answer, so they cannot differ. Knows no engine.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import msgspec

from frontend.openai.answers import AnswerMessage, FunctionCall, ToolCall
from frontend.reasoning import ReasoningSplitter, num_thinking_tokens
from frontend.tools.scanner import CallDelta, Piece, Scanner


class FunctionDelta(msgspec.Struct, omit_defaults=True):
    """New text of a call's arguments; the first has the name."""
    arguments: str
    name: str | None = None


class ToolCallDelta(msgspec.Struct, omit_defaults=True):
    """News of one call inside a chunk."""
    index: int
    function: FunctionDelta
    id: str | None = None
    type: str | None = None


class Delta(msgspec.Struct, omit_defaults=True):
    """What a chunk adds to a message."""
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] = []


def no_text(_: Sequence[int]) -> str:
    """Where nothing thinks."""
    return ""


@dataclasses.dataclass(slots=True)
class ChoiceParts:
    """Of one choice. `shows_reasoning`: false drops it. `decode`: of token ids, special ones too."""
    reasoning: ReasoningSplitter | None = None
    tools: Scanner | None = None
    shows_reasoning: bool = True
    decode: Callable[[Sequence[int]], str] = no_text
    num_thinking: int = -1                      # tokens until the thoughts ended; -1: not counted

    def feed(self, text: str, is_final: bool) -> bytes | None:
        """The JSON of the next delta; None: nothing to tell yet."""
        thoughts, pieces = self.pieces(text, is_final)
        content = "".join(piece for piece in pieces if isinstance(piece, str))
        calls = [_call_delta(piece) for piece in joined(pieces)]
        if not (thoughts or content or calls):
            return None
        return msgspec.json.encode(Delta(content or None, thoughts or None, calls))

    def message(self, text: str) -> AnswerMessage:
        """The whole message."""
        thoughts, pieces = self.pieces(text, True)
        content = "".join(piece for piece in pieces if isinstance(piece, str))
        calls = [ToolCall(piece.id or "", FunctionCall(piece.name or "", piece.arguments)) for piece in joined(pieces)]
        return AnswerMessage("assistant", content if content or not calls else None, tool_calls=calls,
                             reasoning_content=thoughts or None)

    def reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        """Of the output so far, whose text was fed: those of thoughts and their tags."""
        splitter = self.reasoning
        if splitter is None or not splitter.has_thoughts:
            return 0
        if splitter.is_thinking:
            return len(token_ids)
        if self.num_thinking < 0:
            self.num_thinking = num_thinking_tokens(token_ids, self.decode)
        return self.num_thinking

    def finish_reason(self, reason: str) -> str:
        """What ended the choice, as callers expect it."""
        return "tool_calls" if reason == "stop" and self.tools is not None and self.tools.num_calls else reason

    def pieces(self, text: str, is_final: bool) -> tuple[str, list[Piece]]:
        """(thoughts, text and calls) that are new; what is thought comes before what is said."""
        thoughts = ""
        if self.reasoning is not None:
            thoughts, text = self.reasoning.feed(text, is_final)
        if self.tools is None:
            pieces: list[Piece] = [text] if text else []
        else:
            pieces = self.tools.feed(text)
            if is_final:
                pieces += self.tools.finish()
        return thoughts if self.shows_reasoning else "", pieces


PartsOf = Callable[[int], ChoiceParts]          # choice of the answer -> its parts


def joined(pieces: list[Piece]) -> list[CallDelta]:
    """The news of calls, one entry for each call."""
    found: list[CallDelta] = []
    for piece in pieces:
        if isinstance(piece, str):
            continue
        if found and found[-1].index == piece.index:
            found[-1].arguments += piece.arguments
        else:
            found.append(dataclasses.replace(piece))
    return found


def _call_delta(piece: CallDelta) -> ToolCallDelta:
    return ToolCallDelta(piece.index, FunctionDelta(piece.arguments, piece.name), piece.id,
                         None if piece.id is None else "function")
