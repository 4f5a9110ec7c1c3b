"""Log-probabilities in OpenAI's two shapes, and `echo`, which puts the prompt in front of a completion.

A chat answer lists tokens with their bytes: joined, these are the bytes of the text. A completion lists columns:
tokens, values, alternatives, and where each token begins in the text. Values have a finite floor, because JSON has no
infinity. Knows no engine and no stream.
"""
from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Sequence

import msgspec

from frontend.openai.engine import TokenizerLike
from frontend.outputs import FINISH_ABORT, FINISH_ERROR, Logprob, Logprobs, RequestOutput

FLOOR = -9999.0

_encode = msgspec.json.Encoder().encode


class TopLogprob(msgspec.Struct):
    """One token at a position of a chat answer."""
    token: str
    logprob: float
    bytes: list[int]                            # [] for a token that adds nothing to the text


class TokenLogprob(msgspec.Struct):
    """The token that was put out, and the likeliest ones."""
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """`logprobs` of a chat choice or delta."""
    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    """`logprobs` of a completion or its delta. Of the first token of a prompt the value is null."""
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class ChoiceLogprobs:
    """Of one choice; call it with each of its pieces in order. `num_top`: alternatives per token; names_ids: tokens
    are named token_id:17, which no two share."""

    def __init__(self, tokenizer: TokenizerLike, num_top: int, skip_special_tokens: bool,
                 names_ids: bool = False) -> None:
        self._tokenizer, self._num_top, self._names_ids = tokenizer, num_top, names_ids
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._is_first = True                   # no token has been shown yet
        self._offset = 0
        self._tail = b""                        # of an unfinished character

    def chat(self, tokens: list[int], entries: Sequence[Logprobs | None],
             stop_token: int | None = None) -> ChatLogprobs:
        """stop_token: the last of `tokens`, if it ended the answer as a token and is no text of it."""
        content = []
        for index, (token, entry) in enumerate(zip(tokens, entries)):
            found = entry or {}
            is_end = stop_token is not None and token == stop_token and index == len(tokens) - 1
            data = b"" if is_end else self._shown(token)
            top = sorted((item for item in found.items() if item[1].rank <= self._num_top), key=_by_rank)
            content.append(TokenLogprob(self._name(token), value_of(found[token]), list(data), [
                TopLogprob(self._name(other), value_of(logprob), list(self._tokenizer.token_bytes(other)))
                for other, logprob in top[:self._num_top]]))
        return ChatLogprobs(content)

    def completion(self, tokens: list[int], entries: Sequence[Logprobs | None]) -> CompletionLogprobs:
        """The columns of this piece; text_offset goes on where the piece before ended."""
        result = CompletionLogprobs([], [], [], [])
        for token, entry in zip(tokens, entries):
            result.tokens.append(self._name(token))
            result.text_offset.append(self._offset)
            result.token_logprobs.append(None if entry is None else value_of(entry[token]))
            top: dict[str, float] | None = None
            if entry is not None:
                top = {}
                for other, logprob in sorted(entry.items(), key=_by_rank):
                    top.setdefault(self._name(other), value_of(logprob))
            result.top_logprobs.append(top)
            self._advance(self._shown(token))
        return result

    def _name(self, token: int) -> str:
        """The token as text; one that is no whole characters as OpenAI writes it: bytes:\\xe4\\xb8."""
        if self._names_ids:
            return f"token_id:{token}"
        data = self._tokenizer.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _shown(self, token: int) -> bytes:
        """What the token adds to the text. Some tokenizers drop the space before the first token of a text."""
        if token in self._hidden:
            return b""
        data = self._tokenizer.token_bytes(token)
        if self._is_first and data:
            self._is_first = False
            if data[:1] == b" " and not self._tokenizer.decode([token], False).startswith(" "):
                data = data[1:]
        return data

    def _advance(self, data: bytes) -> None:
        self._tail += data
        try:
            text, self._tail = self._tail.decode(), b""
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data" and len(self._tail) - error.start < 4:
                text, self._tail = self._tail[:error.start].decode("utf-8", "replace"), self._tail[error.start:]
            else:
                text, self._tail = self._tail.decode("utf-8", "replace"), b""
        self._offset += len(text)


def _by_rank(item: tuple[int, Logprob]) -> int:
    return item[1].rank


def value_of(logprob: Logprob) -> float:
    """As JSON can hold it."""
    return max(logprob.logprob, FLOOR)          # also of -inf


@dataclasses.dataclass(slots=True)
class Shape:
    """How a completion differs from what the engine says. `keeps_output`: False for max_tokens 0, which the engine does
    not know: one token is made and dropped."""
    echo: bool
    keeps_output: bool
    prompt: str                                 # shown by echo


async def shaped(stream: AsyncGenerator[RequestOutput, None], shape: Shape) -> AsyncGenerator[RequestOutput, None]:
    """The same outputs with the prompt in front of each choice's first piece, or without the output."""
    echoed: set[int] = set()
    prompt_logprobs: list[Logprobs | None] | None = None
    try:
        async for output in stream:
            prompt_logprobs = output.prompt_logprobs or prompt_logprobs
            if not shape.keeps_output:
                output.usage_completion_tokens = 0
            for choice in output.outputs:
                if not shape.keeps_output:
                    choice.text, choice.token_ids, choice.stop_reason = "", [], None
                    choice.logprobs = None if choice.logprobs is None else []
                    if choice.finish_reason not in (None, FINISH_ABORT, FINISH_ERROR):
                        choice.finish_reason = "length"
                if shape.echo and choice.index not in echoed:
                    echoed.add(choice.index)
                    choice.text = shape.prompt + choice.text
                    choice.token_ids = output.prompt_token_ids + choice.token_ids
                    choice.num_echoed = len(output.prompt_token_ids)
                    if choice.logprobs is not None and prompt_logprobs is not None:
                        choice.logprobs = [*prompt_logprobs, *choice.logprobs]  # type: ignore[list-item]
            yield output
    finally:
        await stream.aclose()


def encode_logprobs(logprobs: ChatLogprobs | CompletionLogprobs) -> bytes:
    """As JSON, for a chunk."""
    return _encode(logprobs)
