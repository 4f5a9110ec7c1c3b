"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API over the model's chat template.

Text, thinking and tools: images and tools that run on a server are refused by name. A last message of the assistant is
continued. Prefix caching is automatic, so cache_control is accepted and nothing waits for it.
"""
from __future__ import annotations

import contextlib
import secrets
from typing import Any

import msgspec

from frontend.openai.anthropic_blocks import Block, Blocks, chat_choice, chat_tools, conversation, event
from frontend.openai.anthropic_output import read_output
from frontend.openai.anthropic_thinking import read_thinking
from frontend.openai.chat import render
from frontend.openai.chat_call import ChatCall, make_call, theirs
from frontend.openai.chat_parts import ChoiceParts
from frontend.openai.dialect import ANTHROPIC
from frontend.openai.engine import EngineLike
from frontend.openai.exchange import Exchange
from frontend.openai.generation import check_engine, check_model, checked_finish, collect_answer
from frontend.openai.protocol import NeutralValues
from frontend.openai.routes import Row
from frontend.outputs import CompletionOutput, RequestOutput
from frontend.tools.request import ToolUse, tool_use
from ipc.errors import RequestError

RENAMED = {"stop_sequences": "stop", "output_config.effort": "reasoning_effort"}


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """What makes a prompt."""
    messages: list[dict[str, Any]]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_control: Any = None
    thinking: dict[str, Any] | None = None      # anthropic_thinking.py
    output_config: dict[str, Any] | None = None     # anthropic_output.py
    output_format: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """Anthropic's fields, then those of ours that chat completions take too."""
    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Any = None
    service_tier: Any = None
    seed: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None


# Documented by Anthropic or vLLM, not supported: the values that ask for nothing.
NEUTRAL: NeutralValues = {
    "billing_policy": (), "compaction": (), "container": (), "context_management": ({}, {"edits": []}),
    "diagnostics": (), "fallback_credit_token": (), "fallbacks": ([],), "inference_geo": (), "thread": (),
    "mcp_servers": ([],), "speed": ("standard",),
    "user_profile_id": (), "workspace_id": (),
    "ec_transfer_params": (), "kv_transfer_params": (), "mm_payload": ("tensors",), "return_mm_kwargs": (False,),
    "vllm_xargs": ({},), "watermarking": (False,),      # vLLM's
}


class MessagesUsage(msgspec.Struct):
    """Anthropic counts prompt tokens that the cache gave apart from the others."""
    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0


class MessagesAnswer(msgspec.Struct):
    """The answer of POST /v1/messages without stream."""
    id: str
    model: str
    content: list[Block]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessagesUsage
    type: str = "message"
    role: str = "assistant"


class CountTokensAnswer(msgspec.Struct):
    """The answer of POST /v1/messages/count_tokens."""
    input_tokens: int


def rows() -> list[Row]:
    """The routes of this API."""
    return [
        Row(("POST",), "/v1/messages", create_message, "answer a conversation (Anthropic's API)",
            request=MessagesRequest, answer=MessagesAnswer, streams=True, dialect=ANTHROPIC),
        Row(("POST",), "/v1/messages/count_tokens", count_tokens, "tokens of a conversation",
            request=CountTokensRequest, answer=CountTokensAnswer, dialect=ANTHROPIC),
    ]


async def create_message(exchange: Exchange, engine: EngineLike) -> None:
    """Answer one call, streamed or not."""
    exchange.headers.append((b"request-id", exchange.request_id.encode()))
    check_engine(engine)
    request, num_bytes = await exchange.read_fields(MessagesRequest, NEUTRAL)
    check_model(engine, request.model)
    shows_thinking = _read_thinking(request, engine, request.max_tokens)
    form, effort = read_output(request.output_config, request.output_format)
    messages, continues = conversation(request.system, request.messages)
    call = await make_call(engine, request, messages, num_bytes, f"msg_{secrets.token_hex(16)}",
                           exchange.cache_salt(request.cache_salt), RENAMED, continue_final_message=continues,
                           tools=_tools(request, engine), form=form, reasoning_effort=effort)
    parts = call.parts(shows_thinking)
    if request.stream:
        await _stream(exchange, call, parts)
        return
    [(choice, reason)], counter, _ = await collect_answer(exchange, [call.run("final")], 1)
    blocks = Blocks()
    _feed(blocks, parts, choice.text, True)
    if not blocks.blocks:
        blocks.open_text()
    blocks.close()
    usage = counter.usage()
    cached = usage.prompt_tokens_details.cached_tokens
    answer = MessagesAnswer(call.id, engine.served_model_name, blocks.blocks, *stop_of(choice, reason, blocks),
                            MessagesUsage(usage.prompt_tokens - cached, usage.completion_tokens, cached))
    await exchange.reply(200, msgspec.json.encode(answer))


async def count_tokens(exchange: Exchange, engine: EngineLike) -> None:
    """Tokens of the prompt that POST /v1/messages would make."""
    exchange.headers.append((b"request-id", exchange.request_id.encode()))
    check_engine(engine)
    request, num_bytes = await exchange.read_fields(CountTokensRequest, NEUTRAL)
    check_model(engine, request.model)
    _read_thinking(request, engine, None)
    _, effort = read_output(request.output_config, request.output_format)
    messages, continues = conversation(request.system, request.messages)
    tools = _tools(request, engine)
    try:
        prompt = await render(engine, messages, num_bytes, continue_final_message=continues,
                              chat_template_kwargs=request.chat_template_kwargs,
                              tools=None if tools is None else tools.shown, reasoning_effort=effort)
    except RequestError as error:
        raise theirs(error, RENAMED) from None
    await exchange.reply(200, msgspec.json.encode(CountTokensAnswer(len(prompt) // 4)))


def _read_thinking(request: CountTokensRequest, engine: EngineLike, max_tokens: int | None) -> bool:
    """Whether thoughts are shown; the request's variables of the chat template then say whether there are any."""
    is_shown, request.chat_template_kwargs = read_thinking(
        request.thinking, request.chat_template_kwargs, thinks=engine.has_reasoning,
        has_switch=engine.has_thinking_switch, max_tokens=max_tokens)
    return is_shown


def _feed(blocks: Blocks, parts: ChoiceParts, text: str, is_final: bool) -> bytes:
    thoughts, pieces = parts.pieces(text, is_final)
    return blocks.think(thoughts) + blocks.feed(pieces)


def stop_of(choice: CompletionOutput, reason: str, blocks: Blocks) -> tuple[str, str | None]:
    """(stop_reason, stop_sequence) in Anthropic's words."""
    if reason == "length":
        return "max_tokens", None
    if blocks.has_calls:
        return "tool_use", None
    return ("stop_sequence", choice.stop_reason) if isinstance(choice.stop_reason, str) else ("end_turn", None)


def _tools(request: CountTokensRequest, engine: EngineLike) -> ToolUse | None:
    choice, is_parallel = chat_choice(request.tool_choice)
    try:
        return tool_use(chat_tools(request.tools), choice, is_parallel, engine.tool_format)
    except RequestError as error:               # this API's names of the same
        text, param = str(error), error.param or ""
        for theirs, ours in ((".function.parameters", ".input_schema"), (".function.", ".")):
            text, param = text.replace(theirs, ours), param.replace(theirs, ours)
        raise RequestError(text, param or None) from None


def _start(call: ChatCall, output: RequestOutput, blocks: Blocks, parts: ChoiceParts) -> bytes:
    """Without tools and thoughts the first block can only be text."""
    cached = output.num_cached_tokens
    message = MessagesAnswer(call.id, call.engine.served_model_name, [], None, None,
                             MessagesUsage(output.usage_prompt_tokens - cached, 0, cached))
    is_text = parts.tools is None and parts.reasoning is None
    return event("message_start", message=message) + (blocks.open_text() if is_text else b"") + event("ping")


async def _stream(exchange: Exchange, call: ChatCall, parts: ChoiceParts) -> None:
    exchange.is_stream = True
    is_started = False
    blocks = Blocks()
    async with exchange.watch(), contextlib.aclosing(call.run("delta")) as outputs:
        async for output in outputs:
            data = b"" if is_started else _start(call, output, blocks, parts)
            is_started = True
            for choice in output.outputs:
                data += _feed(blocks, parts, choice.text, choice.finish_reason is not None)
                if choice.finish_reason is not None:
                    stop_reason, stop_sequence = stop_of(choice, checked_finish(choice), blocks)
                    data += blocks.close() + event(
                        "message_delta", delta={"stop_reason": stop_reason, "stop_sequence": stop_sequence},
                        usage={"output_tokens": output.usage_completion_tokens})
            if data:
                await exchange.write(data)
        await exchange.end(event("message_stop"))
