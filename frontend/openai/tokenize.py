"""POST /tokenize and /detokenize, in vLLM's shapes: what a prompt or a conversation is in tokens, and back."""
from __future__ import annotations

import asyncio
from array import array
from typing import Any

import msgspec

from frontend.openai.chat import THREAD_BODY_BYTES, checked_messages, render
from frontend.openai.engine import EngineLike
from frontend.openai.exchange import Exchange
from frontend.openai.generation import check_engine, check_model
from frontend.openai.protocol import NeutralValues
from frontend.tools.request import tool_use
from ipc.errors import RequestError


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Exactly one of `prompt` and `messages`."""
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None      # default: true for a prompt, false for messages
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None   # shown to the model, as in chat completions
    return_token_strs: bool | None = None


class TokenizeAnswer(msgspec.Struct):
    """`token_strs` are the vocabulary's spellings."""
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Special tokens are shown."""
    tokens: list[int]
    model: str | None = None


class DetokenizeAnswer(msgspec.Struct):
    """The text of all tokens together."""
    prompt: str


NEUTRAL: NeutralValues = {"chat_template": (), "documents": ([],), "media_io_kwargs": ({},),
                          "mm_processor_kwargs": ({},)}


async def tokenize(exchange: Exchange, engine: EngineLike) -> None:
    """POST /tokenize."""
    check_engine(engine)
    request, body_bytes = await exchange.read_fields(TokenizeRequest, NEUTRAL)
    check_model(engine, request.model)
    if (request.prompt is None) == (request.messages is None):
        raise RequestError("send exactly one of prompt and messages", "prompt")
    if request.messages is not None:
        if request.add_special_tokens:
            raise RequestError("add_special_tokens is true; the chat template writes special tokens itself, leave it "
                               "out", "add_special_tokens")
        tools = tool_use(request.tools, None, True, engine.tool_format)
        packed = await render(engine, checked_messages(request.messages), body_bytes,
                              add_generation_prompt=request.add_generation_prompt,
                              continue_final_message=bool(request.continue_final_message),
                              chat_template_kwargs=request.chat_template_kwargs,
                              tools=None if tools is None else tools.shown)
    elif request.tools:
        raise RequestError("tools is given, which goes with messages; leave it out", "tools")
    else:
        encode, text = engine.tokenizer.encode, request.prompt or ""
        special = request.add_special_tokens is not False
        packed = await asyncio.to_thread(encode, text, special) if body_bytes > THREAD_BODY_BYTES else encode(
            text, special)
    tokens = list(array("i", packed))
    texts = [engine.tokenizer.id_to_token(token) or "" for token in tokens] if request.return_token_strs else None
    await exchange.reply(200, msgspec.json.encode(TokenizeAnswer(len(tokens), engine.max_model_len, tokens, texts)))


async def detokenize(exchange: Exchange, engine: EngineLike) -> None:
    """POST /detokenize."""
    check_engine(engine)
    request, _ = await exchange.read_fields(DetokenizeRequest, {})
    check_model(engine, request.model)
    if request.tokens and not 0 <= min(request.tokens) <= max(request.tokens) < engine.vocab_size:
        raise RequestError(f"tokens has ids from {min(request.tokens)} to {max(request.tokens)}; the model's ids are 0 "
                           f"to {engine.vocab_size - 1}", "tokens")
    text = engine.tokenizer.decode(request.tokens, skip_special_tokens=False)
    await exchange.reply(200, msgspec.json.encode(DetokenizeAnswer(text)))
