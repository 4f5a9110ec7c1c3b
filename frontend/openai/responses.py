"""The Responses API: create (whole, streamed or in the background), retrieve, cancel, delete.

The output is what the model thinks, text and calls of functions. A stored response may be continued by
previous_response_id; stored ones live in memory only.
"""
from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
import time
from typing import Any

import msgspec

from frontend.openai.answers import Usage
from frontend.openai.chat_call import ChatCall, make_call
from frontend.openai.chat_parts import ChoiceParts
from frontend.openai.dialect import OPENAI
from frontend.openai.engine import EngineLike
from frontend.openai.errors import ErrorInfo, describe
from frontend.openai.exchange import Exchange
from frontend.openai.generation import UsageCounter, check_engine, check_model, checked_finish, collect_answer
from frontend.openai.logprobs import ChoiceLogprobs
from frontend.openai.response_store import ResponseStore, StoredResponse
from frontend.openai.responses_events import ResponseEvents
from frontend.openai.responses_items import OutputItems, chat_choice, chat_tools, input_messages
from frontend.openai.responses_logprobs import TextLogprobs, num_top_logprobs
from frontend.openai.responses_protocol import (NEUTRAL, DeletedResponse, IncompleteDetails, ResponseBody,
                                                ResponseError, ResponsesRequest, effort_of, usage_of)
from frontend.openai.routes import Row
from frontend.openai.shared_responses import SharedResponses
from frontend.openai.structured import structured_outputs_of_response
from frontend.outputs import CompletionOutput
from frontend.tools.request import ToolUse, tool_use
from ipc.errors import RequestError

logger = logging.getLogger(__name__)

RENAMED = {"max_output_tokens": "max_tokens", "top_logprobs": "logprobs", "reasoning.effort": "reasoning_effort"}


def rows(shared: SharedResponses) -> list[Row]:
    """The routes of this API."""
    path = "/v1/responses/{response_id}"
    return [
        Row(("POST",), "/v1/responses", functools.partial(create_response, shared), "answer an input",
            request=ResponsesRequest, answer=ResponseBody, streams=True),
        Row(("GET",), path, functools.partial(get_response, shared), "a stored response", answer=ResponseBody),
        Row(("DELETE",), path, functools.partial(delete_response, shared), "forget one", answer=DeletedResponse),
        Row(("POST",), path + "/cancel", functools.partial(cancel_response, shared),
            "end one that runs in the background", answer=ResponseBody),
    ]


class _Run:
    """One response on its way."""

    def __init__(self, store: ResponseStore, caller: str, call: ChatCall, body: ResponseBody,
                 messages: list[dict[str, Any]], shows_reasoning: bool) -> None:
        self.store, self.caller, self.call, self.body, self.messages = store, caller, call, body, messages
        self.items = OutputItems(call.params.logprobs is not None)
        self.parts = call.parts(shows_reasoning)
        self.logprobs: TextLogprobs | None = None
        if call.params.logprobs is not None:
            self.logprobs = TextLogprobs(ChoiceLogprobs(call.engine.tokenizer, call.params.logprobs,
                                                        call.params.skip_special_tokens), self.parts)
        self.entry = StoredResponse(body, msgspec.json.encode(messages))

    def parts_of(self, _: int) -> ChoiceParts:
        """There is one choice."""
        return self.parts

    def feed(self, choice: CompletionOutput, is_final: bool) -> bytes:
        """News of the answer; the events that tell of it."""
        thoughts, pieces = self.parts.pieces(choice.text, is_final)
        logprobs = () if self.logprobs is None else self.logprobs.feed(choice)
        return self.items.think(thoughts) + self.items.feed(pieces, logprobs)

    def finish(self, reason: str, usage: Usage) -> bytes:
        """The answer is complete: fill the body, and keep it if it is to be kept. The last item's events."""
        status = "incomplete" if reason == "length" else "completed"
        self.body.status = status
        self.body.incomplete_details = IncompleteDetails("max_output_tokens") if status == "incomplete" else None
        events = self.items.end(status)
        self.body.output = self.items.items
        self.body.usage = usage_of(usage)
        self.entry.conversation = msgspec.json.encode([*self.messages, self.items.message()])
        if self.body.store:
            self.store.put(self.caller, self.entry)
        return events

    def fail(self, info: ErrorInfo) -> None:
        """The answer will not be complete."""
        self.body.status = "failed"
        code = "server_error" if info.code >= 500 else "rate_limit_exceeded" if info.code == 429 else "invalid_prompt"
        self.body.error = ResponseError(code, info.message)


async def create_response(shared: SharedResponses, exchange: Exchange, engine: EngineLike) -> None:
    """POST /v1/responses."""
    check_engine(engine)
    request, num_bytes = await exchange.read_fields(ResponsesRequest, NEUTRAL)
    check_model(engine, request.model)
    _check_combination(request)
    messages = input_messages(request.input)
    if request.previous_response_id:
        previous = await shared.read(exchange.caller, request.previous_response_id, "previous_response_id")
        if previous.status not in ("completed", "incomplete"):
            raise RequestError(f"previous_response_id: that response is {previous.status}; only a complete one "
                               "can be continued", "previous_response_id")
        messages = msgspec.json.decode(previous.conversation) + messages
        num_bytes += len(previous.conversation)
    effort = effort_of(request.reasoning)
    # Instructions are of this response only: a later one brings its own.
    system = [{"role": "system", "content": request.instructions}] if request.instructions else []
    call = await make_call(engine, request, system + messages, num_bytes, f"resp_{secrets.token_hex(16)}",
                           exchange.cache_salt(request.cache_salt), RENAMED, tools=_tools(request, engine),
                           form=structured_outputs_of_response(request.text, request.structured_outputs),
                           reasoning_effort=effort, drops_oldest=request.truncation == "auto",
                           logprobs=num_top_logprobs(request.include, request.top_logprobs, bool(request.tools)))
    body = ResponseBody(
        id=call.id, created_at=int(time.time()), model=engine.served_model_name, status="in_progress",
        instructions=request.instructions, max_output_tokens=request.max_output_tokens,
        previous_response_id=request.previous_response_id, metadata=request.metadata or {},
        temperature=call.params.temperature, top_p=call.params.top_p, store=request.store is not False,
        background=bool(request.background), user=request.user, tools=request.tools or [],
        tool_choice=request.tool_choice or "auto", parallel_tool_calls=request.parallel_tool_calls is not False,
        text=request.text or {"format": {"type": "text"}}, reasoning={"effort": effort, "summary": None},
        truncation=request.truncation or "disabled", top_logprobs=request.top_logprobs,
        max_tool_calls=request.max_tool_calls)
    store = shared.store
    run = _Run(store, exchange.caller, call, body, messages, request.include_reasoning is not False)
    if request.background:
        store.check_running()
        run.entry.task = asyncio.create_task(_run_in_background(run))
        run.entry.task.add_done_callback(functools.partial(_on_background_end, run.entry))
        store.put(exchange.caller, run.entry)
    elif request.stream:
        await _stream(exchange, run)
        return
    else:
        [(choice, reason)], counter, _ = await collect_answer(exchange, [call.run("final")], 1, run.parts_of)
        run.feed(choice, True)
        run.finish(reason, counter.usage(exchange.returns_timings))
    await exchange.reply(200, msgspec.json.encode(body))


def _tools(request: ResponsesRequest, engine: EngineLike) -> ToolUse | None:
    try:
        return tool_use(chat_tools(request.tools), chat_choice(request.tool_choice),
                        request.parallel_tool_calls is not False, engine.tool_format)
    except RequestError as error:               # this API's functions have their fields one level higher
        raise RequestError(str(error).replace(".function.", "."), (error.param or "").replace(".function.", ".")
                           or None) from None


def _check_combination(request: ResponsesRequest) -> None:
    if request.truncation not in (None, "auto", "disabled"):
        raise RequestError(f"truncation is {request.truncation[:60]!r}; known are auto and disabled", "truncation")
    if request.max_tool_calls is not None and request.max_tool_calls < 1:
        raise RequestError(f"max_tool_calls is {request.max_tool_calls}; it must be at least 1", "max_tool_calls")
    if not request.background:
        return
    if request.stream:
        raise RequestError("background and stream are both true, which this server does not support; poll GET "
                           "/v1/responses/ID instead of streaming", "background")
    if request.store is False:
        raise RequestError("background is true and store is false; a background response can only be read from the "
                           "store", "store")


async def _stream(exchange: Exchange, run: _Run) -> None:
    events = ResponseEvents(run.body, run.items)

    def error_events(info: ErrorInfo) -> bytes:
        run.fail(info)
        return events.failed()

    exchange.is_stream = True
    exchange.dialect = OPENAI._replace(events=error_events)
    counter = UsageCounter(1, run.parts_of)
    is_started = False
    async with exchange.watch(), contextlib.aclosing(run.call.run("delta")) as outputs:
        async for output in outputs:
            counter.update(0, output)
            data = b"" if is_started else events.start()
            is_started = True
            for choice in output.outputs:
                data += run.feed(choice, choice.finish_reason is not None)
                if choice.finish_reason is not None:
                    data += run.finish(checked_finish(choice), counter.usage())
                    data += events.end()
            if data:
                await exchange.write(data)
        await exchange.end(b"")


async def _run_in_background(run: _Run) -> None:
    """To its end, whatever the client does meanwhile; the outcome is in the store."""
    counter = UsageCounter(1, run.parts_of)
    try:
        async with contextlib.aclosing(run.call.run("final")) as outputs:
            async for output in outputs:
                counter.update(0, output)
                for choice in output.outputs:
                    run.feed(choice, True)
                    run.finish(checked_finish(choice), counter.usage())
    except Exception as exc:                    # nobody waits here: the response tells
        reply = describe(exc)
        if not reply.is_expected:
            logger.error("%s: background response failed", run.body.id, exc_info=exc)
        run.fail(reply.info)


def _on_background_end(entry: StoredResponse, task: asyncio.Task[None]) -> None:
    entry.task = None
    if task.cancelled() and entry.body.status == "in_progress":
        entry.body.status = "cancelled"


async def get_response(shared: SharedResponses, exchange: Exchange, engine: EngineLike) -> None:
    """GET /v1/responses/{id}."""
    if exchange.query().get("stream") == "true":
        raise RequestError("stream is true, which this server does not support here; leave it out", "stream")
    found = await shared.read(exchange.caller, exchange.path_param("response_id"))
    await exchange.reply(200, found.body)


async def delete_response(shared: SharedResponses, exchange: Exchange, engine: EngineLike) -> None:
    """DELETE /v1/responses/{id}."""
    response_id = exchange.path_param("response_id")
    await shared.delete(exchange.caller, response_id)
    await exchange.reply(200, msgspec.json.encode(DeletedResponse(response_id)))


async def cancel_response(shared: SharedResponses, exchange: Exchange, engine: EngineLike) -> None:
    """POST /v1/responses/{id}/cancel: only what runs in the background; a stream is cancelled by closing it."""
    response_id = exchange.path_param("response_id")
    if not (await shared.read(exchange.caller, response_id)).background:
        raise RequestError(f"{response_id} does not run in the background, so there is nothing to cancel",
                           "response_id")
    found = await shared.cancel(exchange.caller, response_id)
    await exchange.reply(200, found.body)
