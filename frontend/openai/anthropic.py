"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API over the model's chat template.

Text only, for now: tools, images and thinking are refused by name. A last message of the assistant is continued. Prefix
caching is automatic, so cache_control is accepted and nothing waits for it.
"""
from __future__ import annotations

import contextlib
import secrets
from typing import Any

import msgspec

from frontend.openai import sse
from frontend.openai.chat import render
from frontend.openai.chat_call import ChatCall, make_call, text_of
from frontend.openai.dialect import ANTHROPIC
from frontend.openai.engine import EngineLike
from frontend.openai.exchange import Exchange
from frontend.openai.generation import check_engine, check_model, checked_finish, collect_answer
from frontend.openai.protocol import NeutralValues
from frontend.openai.routes import Row
from frontend.outputs import CompletionOutput, RequestOutput
from ipc.errors import RequestError

ROLES = ("user", "assistant")
RENAMED = {"stop_sequences": "stop"}


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """What makes a prompt."""
    messages: list[dict[str, Any]]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_control: Any = None


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


# Documented by Anthropic, not supported: the values that ask for nothing.
NEUTRAL: NeutralValues = {
    "container": (), "context_management": ({}, {"edits": []}), "diagnostics": (), "inference_geo": (),
    "mcp_servers": ([],), "output_config": ({},), "output_format": (), "speed": ("standard",),
    "thinking": ({"type": "disabled"},), "tool_choice": ({"type": "auto"}, {"type": "none"}), "tools": ([],),
    "user_profile_id": (), "workspace_id": (),
}


class TextBlock(msgspec.Struct):
    """A piece of the answer."""
    text: str
    type: str = "text"


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
    content: list[TextBlock]
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
    messages, continues = conversation(request)
    call = await make_call(engine, request, messages, num_bytes, f"msg_{secrets.token_hex(16)}",
                           exchange.cache_salt(request.cache_salt), RENAMED, continue_final_message=continues)
    if request.stream:
        await _stream(exchange, call)
        return
    [(choice, reason)], usage = await collect_answer(exchange, [call.run("final")], 1)
    cached = usage.prompt_tokens_details.cached_tokens
    answer = MessagesAnswer(call.id, engine.served_model_name, [TextBlock(choice.text)], *stop_of(choice, reason),
                            MessagesUsage(usage.prompt_tokens - cached, usage.completion_tokens, cached))
    await exchange.reply(200, msgspec.json.encode(answer))


async def count_tokens(exchange: Exchange, engine: EngineLike) -> None:
    """Tokens of the prompt that POST /v1/messages would make."""
    exchange.headers.append((b"request-id", exchange.request_id.encode()))
    check_engine(engine)
    request, num_bytes = await exchange.read_fields(CountTokensRequest, NEUTRAL)
    check_model(engine, request.model)
    messages, continues = conversation(request)
    prompt = await render(engine, messages, num_bytes, continue_final_message=continues,
                          chat_template_kwargs=request.chat_template_kwargs)
    await exchange.reply(200, msgspec.json.encode(CountTokensAnswer(len(prompt) // 4)))


def conversation(request: CountTokensRequest) -> tuple[list[dict[str, Any]], bool]:
    """Messages for the chat template, neighbours of one role joined as Anthropic does; whether the last one is the
    assistant's, to be continued. Raises RequestError."""
    if not request.messages:
        raise RequestError("messages is empty; send at least one message", "messages")
    result: list[dict[str, Any]] = []
    if request.system:
        result.append({"role": "system", "content": text_of(request.system, "system", ("text",))})
    for index, message in enumerate(request.messages):
        role, where = message.get("role"), f"messages[{index}]"
        if role not in ROLES:
            raise RequestError(f"{where}.role is {str(role)[:60]!r}; known are {', '.join(ROLES)}", f"{where}.role")
        text = text_of(message.get("content"), f"{where}.content", ("text",))
        if result and result[-1]["role"] == role:
            result[-1]["content"] += "\n" + text
        else:
            result.append({"role": role, "content": text})
    return result, result[-1]["role"] == "assistant"


def stop_of(choice: CompletionOutput, reason: str) -> tuple[str, str | None]:
    """(stop_reason, stop_sequence) in Anthropic's words."""
    if reason == "length":
        return "max_tokens", None
    return ("stop_sequence", choice.stop_reason) if isinstance(choice.stop_reason, str) else ("end_turn", None)


def _event(name: str, **fields: Any) -> bytes:
    return sse.named_event(name, msgspec.json.encode({"type": name, **fields}))


def _start(call: ChatCall, output: RequestOutput) -> bytes:
    cached = output.num_cached_tokens
    message = MessagesAnswer(call.id, call.engine.served_model_name, [], None, None,
                             MessagesUsage(output.usage_prompt_tokens - cached, 0, cached))
    return (_event("message_start", message=message)
            + _event("content_block_start", index=0, content_block=TextBlock("")) + _event("ping"))


_DELTA = (b'event: content_block_delta\n'
          b'data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":')


async def _stream(exchange: Exchange, call: ChatCall) -> None:
    exchange.is_stream = True
    is_started = False
    async with exchange.watch(), contextlib.aclosing(call.run("delta")) as outputs:
        async for output in outputs:
            data = b"" if is_started else _start(call, output)
            is_started = True
            for choice in output.outputs:
                if choice.text:
                    data += _DELTA + sse.json_text(choice.text) + b"}}\n\n"
                if choice.finish_reason is not None:
                    stop_reason, stop_sequence = stop_of(choice, checked_finish(choice))
                    data += _event("content_block_stop", index=0) + _event(
                        "message_delta", delta={"stop_reason": stop_reason, "stop_sequence": stop_sequence},
                        usage={"output_tokens": output.usage_completion_tokens})
            if data:
                await exchange.write(data)
        await exchange.end(_event("message_stop"))
