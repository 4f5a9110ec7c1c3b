"""POST /v1/chat/completions: messages to token ids by the model's template, then the common answer.

What is inside a message is judged by the chat template's module; here only roles are.
"""
from __future__ import annotations

import asyncio
import functools
import time
from typing import Any

import msgspec

from frontend.openai.answers import AnswerMessage, ChatChoice, ChatResponse
from frontend.openai.chat_parts import ChoiceParts, PartsOf
from frontend.openai.engine import EngineLike
from frontend.openai.exchange import Exchange
from frontend.openai.generation import (
    Pusher,
    check_engine,
    check_model,
    collect_answer,
    make_head,
    stream_answer,
    truncated,
)
from frontend.openai.limits import check_choices
from frontend.openai.logprobs import ChatLogprobs, ChoiceLogprobs, encode_logprobs
from frontend.openai.protocol import ChatRequest, sampling_params
from frontend.openai.token_details import ids_of, prompt_ids_of, prompt_logprobs_of
from frontend.outputs import CompletionOutput
from frontend.reasoning import BEGIN, ReasoningSplitter
from frontend.tools.request import ToolUse, tool_use
from ipc.errors import RequestError
from ipc.sampling_params import SamplingParams

ROLES = ("system", "developer", "user", "assistant", "tool")
TAIL_TOKENS = 16                # of the prompt, in which an opened tag of thoughts is looked for
THREAD_BODY_BYTES = 8192        # larger bodies are templated and tokenized in a thread: a few ms of the loop's time


async def create_chat_completion(exchange: Exchange, engine: EngineLike) -> None:
    """Answer one call, streamed or not."""
    check_engine(engine)
    request, body_bytes = await exchange.read_request(ChatRequest)
    check_model(engine, request.model)
    n = 1 if request.n is None else request.n
    check_choices(n, 1, exchange.limits.max_choices)
    params = sampling_params(request, None)
    tools = tool_use(request.tools, request.tool_choice, request.parallel_tool_calls is not False, engine.tool_format)
    if tools is not None:
        params = with_tools(params, tools)
    prompt = truncated(await _render(engine, request, body_bytes, tools), request.truncate_prompt_tokens, engine,
                       params.max_tokens, request.truncation_side)
    parts_of = make_parts(engine, params, tools, prompt, request.include_reasoning is not False)
    if params.max_tokens is None:
        room = engine.default_max_tokens(len(prompt) // 4)
        if room >= 1:           # otherwise the prompt is too long, and the engine says so with both numbers
            params = params.replace(max_tokens=room)
    head = make_head("chatcmpl", int(time.time()), engine)
    pusher = Pusher() if request.stream else None
    stream = engine.generate(prompt, params, request_id=head.id, priority=request.priority or 0,
                             cache_salt=exchange.cache_salt(request.cache_salt),
                             output_kind="delta" if request.stream else "final", add_special_tokens=False,
                             sink=pusher)
    writers = [ChoiceLogprobs(engine.tokenizer, request.top_logprobs or 0, params.skip_special_tokens,
                              bool(request.return_tokens_as_token_ids))
               for _ in range(n if request.logprobs else 0)]
    if request.stream:
        await stream_answer(exchange, request, head, True, [stream], n, (
            lambda index, choice: encode_logprobs(_chat_logprobs(writers[index], choice))) if writers else None,
            parts_of, pusher)
        return
    found, counter, last = await collect_answer(exchange, [stream], n, parts_of)
    with_ids = bool(request.return_token_ids)
    choices = [_choice(index, choice, reason, _chat_logprobs(writers[index], choice) if writers else None,
                       None if parts_of is None else parts_of(index), with_ids)
               for index, (choice, reason) in enumerate(found)]
    answer = ChatResponse(
        head.id, head.created, head.model, head.fingerprint, choices, counter.usage(exchange.returns_timings),
        prompt_logprobs=prompt_logprobs_of(last[0], request.prompt_logprobs is not None),
        prompt_token_ids=prompt_ids_of(last[0], with_ids))
    await exchange.reply(200, msgspec.json.encode(answer))


def _chat_logprobs(writer: ChoiceLogprobs, choice: CompletionOutput) -> ChatLogprobs:
    is_stop_token = choice.finish_reason == "stop" and isinstance(choice.stop_reason, int)
    return writer.chat(choice.token_ids, list(choice.logprobs or ()), choice.token_ids[-1] if is_stop_token else None)


def _choice(index: int, choice: CompletionOutput, reason: str, logprobs: ChatLogprobs | None,
            parts: ChoiceParts | None, with_ids: bool) -> ChatChoice:
    message, ids = AnswerMessage("assistant", choice.text), ids_of(choice, with_ids)
    if parts is not None:
        message = parts.message(choice.text)
        reason = parts.finish_reason(reason)
    return ChatChoice(index, message, reason, choice.stop_reason, logprobs, ids)


def with_tools(params: SamplingParams, tools: ToolUse) -> SamplingParams:
    """What the choice of tools asks of the sampler. Raises RequestError."""
    if tools.is_special:
        params = params.replace(skip_special_tokens=False)
    if tools.structured is None:
        return params
    if params.structured_outputs is not None:
        raise RequestError("tool_choice and a form of the output (response_format, structured_outputs) are both given; "
                           "give one of them", "tool_choice")
    return params.replace(structured_outputs=tools.structured)


def make_parts(engine: EngineLike, params: SamplingParams, tools: ToolUse | None, prompt: bytes,
               shows_reasoning: bool) -> PartsOf | None:
    """None: the text is all content. What a grammar forms has no thoughts before it."""
    thinks = engine.has_reasoning and params.structured_outputs is None
    if tools is None and not thinks:
        return None
    is_open = False
    if thinks:
        tail = memoryview(prompt).cast("i")[-TAIL_TOKENS:].tolist()
        is_open = engine.tokenizer.decode(tail, False).rstrip().endswith(BEGIN)
    made: dict[int, ChoiceParts] = {}

    def parts_of(index: int) -> ChoiceParts:
        if index not in made:
            made[index] = ChoiceParts(ReasoningSplitter(is_open) if thinks else None,
                                      tools.scanner() if tools is not None else None, shows_reasoning,
                                      functools.partial(engine.tokenizer.decode, skip_special_tokens=False))
        return made[index]
    return parts_of


async def _render(engine: EngineLike, request: ChatRequest, body_bytes: int, tools: ToolUse | None) -> bytes:
    """Token ids of the prompt. Raises RequestError."""
    return await render(engine, checked_messages(request.messages), body_bytes,
                        add_generation_prompt=request.add_generation_prompt,
                        continue_final_message=bool(request.continue_final_message),
                        chat_template_kwargs=request.chat_template_kwargs,
                        tools=None if tools is None else tools.shown, documents=request.documents,
                        reasoning_effort=request.reasoning_effort)


async def render(engine: EngineLike, messages: list[dict[str, Any]], body_bytes: int, *,
                 add_generation_prompt: bool | None = None, continue_final_message: bool = False,
                 chat_template_kwargs: dict[str, Any] | None = None,
                 tools: list[dict[str, Any]] | None = None, documents: list[dict[str, Any]] | None = None,
                 reasoning_effort: str | None = None) -> bytes:
    """Token ids of a conversation, made in a thread when it is long. Raises RequestError."""
    options: dict[str, Any] = {
        "add_generation_prompt": not continue_final_message if add_generation_prompt is None else add_generation_prompt,
        "continue_final_message": continue_final_message,
        "chat_template_kwargs": chat_template_kwargs,
    }
    given = {"tools": tools, "documents": documents, "reasoning_effort": reasoning_effort}
    options |= {name: value for name, value in given.items() if value not in (None, [])}
    if body_bytes > THREAD_BODY_BYTES:
        return await asyncio.to_thread(engine.render_chat, messages, **options)
    return engine.render_chat(messages, **options)


def checked_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with roles that templates know: "developer" is OpenAI's newer word for "system"."""
    if not messages:
        raise RequestError("messages is empty; send at least one message", "messages")
    result = []
    for index, message in enumerate(messages):
        role = message.get("role")
        if role not in ROLES:
            raise RequestError(f"messages[{index}].role is {str(role)[:60]!r}; known are {', '.join(ROLES)}",
                               f"messages[{index}].role")
        for name in ("function_call", "audio"):
            if message.get(name) is not None:
                raise RequestError(f"messages[{index}].{name} is not supported; leave it out",
                                   f"messages[{index}].{name}")
        result.append({**message, "role": "system"} if role == "developer" else message)
    return result
