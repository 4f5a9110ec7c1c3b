"""From engine streams to one answer: merging the prompts of a call, counting usage, streaming or collecting.

Shared by chat and completions. A call has one or more prompts, each a stream of RequestOutput with `n` choices; choice
`c` of prompt `p` is choice `p * n + c` of the answer.
"""
from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence

import msgspec

from frontend.openai import sse
from frontend.openai.answers import CompletionTokensDetails, PromptTokensDetails, Timings, Usage
from frontend.openai.chat_parts import ChoiceParts, PartsOf
from frontend.openai.engine import EngineLike
from frontend.openai.errors import NotReadyError
from frontend.openai.exchange import Exchange
from frontend.openai.protocol import GenerationRequest
from frontend.openai.token_details import members, prompt_member
from frontend.outputs import FINISH_ABORT, FINISH_ERROR, CompletionOutput, RequestMetrics, RequestOutput
from frontend.request_log import parts
from frontend.request_stream import TextWriter
from ipc.errors import EngineDeadError, ModelNotFoundError, RequestError, RequestFailedError

OutputStream = AsyncGenerator[RequestOutput, None]
LogprobsOf = Callable[[int, CompletionOutput], bytes]   # (choice of the answer, its new tokens) -> JSON


@dataclasses.dataclass(frozen=True, slots=True)
class AnswerHead:
    """What every chunk and body of one answer repeats. The id is ours, never the caller's."""
    id: str
    created: int
    model: str
    fingerprint: str


def make_head(prefix: str, created: int, engine: EngineLike) -> AnswerHead:
    """A new answer of this engine; the fingerprint changes with the model and with each start."""
    name = engine.served_model_name
    digest = hashlib.blake2b(f"{name}\0{engine.created}".encode(), digest_size=5).hexdigest()
    return AnswerHead(f"{prefix}-{secrets.token_hex(16)}", created, name, f"fp_{digest}")


def check_engine(engine: EngineLike) -> None:
    """Raises EngineDeadError or NotReadyError with the reason the engine gives. While a process is replaced, requests
    wait for it."""
    status = engine.status()
    if status.get("ready") or status.get("restarting"):
        return
    reason = status.get("reason") or status.get("phase") or "no reason given"
    if status.get("dead"):
        raise EngineDeadError(f"the engine is not running: {reason}")
    raise NotReadyError(f"the engine is still starting ({reason}); GET /ready tells when it serves")


def check_model(engine: EngineLike, name: str | None) -> None:
    """Raises ModelNotFoundError; a call that names no model means the served one."""
    if name and name != engine.served_model_name:
        raise ModelNotFoundError(f"model {name[:200]!r} is not served here; this server has "
                                 f"{engine.served_model_name!r} (GET /v1/models)", "model")


def truncated(prompt: bytes, limit: int | None, engine: EngineLike, max_tokens: int | None,
              side: str | None = None) -> bytes:
    """The last `limit` tokens of a prompt in int32 bytes, or with the side "right" the first; -1: as many as leave room
    for max_tokens. Raises RequestError.
    """
    if side not in (None, "left", "right"):
        raise RequestError(f"truncation_side is {side[:60]!r}; known are left (the last tokens are used) and "
                           "right (the first)", "truncation_side")
    if limit is None:
        return prompt
    if limit != -1 and not 1 <= limit <= engine.max_model_len:
        raise RequestError(f"truncate_prompt_tokens is {limit}; allowed are 1 to {engine.max_model_len}, and -1: as "
                           "many as fit", "truncate_prompt_tokens")
    kept = max(1, engine.max_model_len - (max_tokens or 1)) if limit == -1 else limit
    return prompt[:4 * kept] if side == "right" else prompt[-4 * kept:]


class UsageCounter:
    """Tokens of one call; every output brings the counts of its prompt so far."""

    def __init__(self, num_prompts: int, parts: PartsOf | None = None) -> None:
        """parts: of the only prompt's choices; their reasoning tokens are counted."""
        self._parts = parts
        self._token_ids: dict[int, Sequence[int]] = {}
        self._prompt = [0] * num_prompts
        self._completion = [0] * num_prompts
        self._cached = [0] * num_prompts
        self._times: list[RequestMetrics | None] = [None] * num_prompts

    def update(self, prompt_index: int, output: RequestOutput) -> None:
        """Replace the counts of one prompt."""
        self._prompt[prompt_index] = output.usage_prompt_tokens
        self._completion[prompt_index] = output.usage_completion_tokens
        self._cached[prompt_index] = output.num_cached_tokens
        self._times[prompt_index] = output.metrics
        if self._parts is not None:
            for choice in output.outputs:
                self._token_ids[choice.index] = choice.all_token_ids

    def usage(self, with_timings: bool = False) -> Usage:
        """The sums. Of a model that thinks: call when the text of the last `update` is in the parts."""
        prompt, completion = sum(self._prompt), sum(self._completion)
        return Usage(prompt, completion, prompt + completion, PromptTokensDetails(sum(self._cached)), self._details(),
                     self.timings() if with_timings else msgspec.UNSET)

    def _details(self) -> CompletionTokensDetails | msgspec.UnsetType:
        if self._parts is None or not self._token_ids or self._parts(0).reasoning is None:
            return msgspec.UNSET
        return CompletionTokensDetails(sum(self._parts(index).reasoning_tokens(ids)
                                           for index, ids in self._token_ids.items()))

    def timings(self) -> Timings:
        """Until now."""
        now = time.monotonic()
        spans = [parts(times, now) for times in self._times if times is not None]

        def longest(name: str) -> float:
            took = [end - begin for begin, end in (span.get(name, (0.0, 0.0)) for span in spans)]
            return round(1000 * max(took, default=0.0), 3)

        return Timings(longest("tokenize"), longest("queue"), longest("prefill"), longest("decode"))

    def server_timing(self) -> tuple[bytes, bytes]:
        """The same as a header that browsers' tools show (W3C Server Timing), with the tokens found in the cache. What
        has not begun when the headers leave is not in it."""
        told = msgspec.structs.asdict(self.timings())
        entries = [f"{name.removesuffix('_ms')};dur={ms}" for name, ms in told.items() if ms or name != "decode_ms"]
        return b"server-timing", ", ".join([*entries, f'cache;desc="{sum(self._cached)} tokens"']).encode()

    def json(self, with_timings: bool = False) -> bytes:
        """The sums as JSON, for a chunk."""
        return msgspec.json.encode(self.usage(with_timings))


async def merge(streams: Sequence[OutputStream]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """News of all prompts as they come. Closing it, or the first error, closes every stream and so aborts the rest."""
    if len(streams) == 1:
        async with contextlib.aclosing(streams[0]) as stream:
            async for output in stream:
                yield 0, output
        return
    queue: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue(maxsize=len(streams))

    async def pump(index: int, stream: OutputStream) -> None:
        end: Exception | None = None
        try:
            async with contextlib.aclosing(stream):
                async for output in stream:
                    await queue.put((index, output))
        except Exception as exc:                        # handed to the reader, who raises it
            end = exc
        await queue.put((index, end))

    tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            index, news = await queue.get()
            if news is None:
                running -= 1
            elif isinstance(news, Exception):
                raise news
            else:
                yield index, news
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def checked_finish(choice: CompletionOutput) -> str:
    """Its finish_reason, if that is one a caller may see."""
    reason = choice.finish_reason
    if reason is None or reason in (FINISH_ABORT, FINISH_ERROR):
        raise RequestFailedError("the server ended this request before it was complete; send it again")
    return reason


class Pusher:
    """The sink of a stream: an event is written where the engine's news are read, without waking the call's task. That
    task sends the first news and the last, and what a slow client could not take. Opened by `stream_answer`."""

    def __init__(self) -> None:
        self._exchange: Exchange | None = None
        self._writers: dict[int, TextWriter | None] = {}

    def open(self, exchange: Exchange, encoder: sse.ChunkEncoder, parts: PartsOf | None) -> None:
        """From now on text is taken whenever the connection takes it."""
        self._exchange, self._encoder, self._parts = exchange, encoder, parts

    def __call__(self, index: int, text: str) -> bool:
        exchange = self._exchange
        if exchange is None:
            return False
        if self._parts is None:
            return exchange.push(self._encoder.text(index, text))
        if not exchange.can_push:               # the parts remember what they were fed
            return False
        delta = self._parts(index).feed(text, False)
        return delta is None or exchange.push(self._encoder.delta(index, delta))

    def writer(self, index: int) -> TextWriter | None:
        """For events of a choice that are all alike but for their text."""
        if index not in self._writers:
            form = None
            if self._exchange is not None and self._parts is None:
                form = self._exchange.push_form(*self._encoder.around_text(index))
            self._writers[index] = form
        return self._writers[index]


async def stream_answer(exchange: Exchange, request: GenerationRequest, head: AnswerHead, is_chat: bool,
                        streams: Sequence[OutputStream], n: int, logprobs: LogprobsOf | None = None,
                        parts: PartsOf | None = None, pusher: Pusher | None = None) -> None:
    """Send the whole event stream. `parts`: text is split before it is sent. `pusher`: the sink of the only stream.

    Nothing is sent before the engine has accepted the request, so that its refusals still have their status code.
    """
    options = request.stream_options
    include_usage = options is not None and bool(options.include_usage)
    in_every_chunk = include_usage and options is not None and bool(options.continuous_usage_stats)
    encoder = sse.ChunkEncoder("chat" if is_chat else "completion", head.id, head.created, head.model,
                               head.fingerprint, include_usage)
    counter = UsageCounter(len(streams), parts)
    exchange.is_stream = True
    awaiting_role = is_chat
    begun: set[int] = set()                 # choices of completions that had their first chunk
    with_ids = bool(request.return_token_ids)
    if pusher is not None and logprobs is None and not in_every_chunk and not with_ids:
        pusher.open(exchange, encoder, parts)
    async with exchange.watch(), contextlib.aclosing(merge(streams)) as news:
        async for prompt_index, output in news:
            counter.update(prompt_index, output)
            usage = counter.json() if in_every_chunk else None
            data = b""
            if awaiting_role:
                member = prompt_member(output) if with_ids else b""
                data = b"".join(encoder.role(index, usage, member) for index in range(n * len(streams)))
                awaiting_role = False
            for choice in output.outputs:
                index = prompt_index * n + choice.index
                told = None if logprobs is None or not choice.token_ids else logprobs(index, choice)
                if with_ids:
                    told = members(choice, told)
                    if not is_chat and index not in begun:
                        begun.add(index)
                        told += prompt_member(output)
                if parts is not None:
                    data += _split_chunks(encoder, parts(index), index, choice, usage, told)
                elif choice.finish_reason is not None:
                    reason = checked_finish(choice)
                    data += encoder.finish(index, choice.text, reason, choice.stop_reason, usage, told)
                elif choice.text or told is not None:
                    data += encoder.text(index, choice.text, usage, told)
            if data:
                if exchange.returns_timings and not exchange.is_started:
                    exchange.headers.append(counter.server_timing())
                await exchange.write(data)
        end = encoder.usage(counter.json(exchange.returns_timings)) if include_usage else b""
        await exchange.end(end + sse.DONE)


def _split_chunks(encoder: sse.ChunkEncoder, parts: ChoiceParts, index: int, choice: CompletionOutput,
                  usage: bytes | None, told: bytes | None) -> bytes:
    """The chunks of a choice whose text has parts. Log-probabilities come with the first chunk there is."""
    is_final = choice.finish_reason is not None
    delta = parts.feed(choice.text, is_final)
    data = b""
    if delta is not None or (told is not None and not is_final):
        data, told = encoder.delta(index, delta or b"{}", usage, told), None
    if is_final:
        reason = parts.finish_reason(checked_finish(choice))
        data += encoder.finish(index, "", reason, choice.stop_reason, usage, told)
    return data


async def collect_answer(exchange: Exchange, streams: Sequence[OutputStream], n: int, parts: PartsOf | None = None
                         ) -> tuple[list[tuple[CompletionOutput, str]], UsageCounter, dict[int, RequestOutput]]:
    """All choices in order, each with its finish_reason; their counts; the last output of each prompt. `streams` are of
    kind "final" or "cumulative"; `parts` will be fed by the caller."""
    counter = UsageCounter(len(streams), parts)
    last: dict[int, RequestOutput] = {}
    choices: dict[int, CompletionOutput] = {}
    async with exchange.watch(), contextlib.aclosing(merge(streams)) as news:
        async for prompt_index, output in news:
            counter.update(prompt_index, output)
            last[prompt_index] = output
            for choice in output.outputs:
                choices[prompt_index * n + choice.index] = choice
    if len(choices) != n * len(streams):
        raise RuntimeError(f"{len(choices)} choices came from the engine, {n * len(streams)} were asked for")
    if exchange.returns_timings:
        exchange.headers.append(counter.server_timing())
    found = [(choices[index], checked_finish(choices[index])) for index in sorted(choices)]
    return found, counter, last
