"""One request on its way back: tokens become text, stop strings end it, the consumer is woken.

A `Choice` is one of the request's n sequences and one request inside the engine; it is also its journal: prompt and
every token received. A `RequestStream` gathers its choices and hands their news out when the consumer asks; a slow
consumer finds joined deltas, not a queue. Knows no sockets.
"""
from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Protocol

import numpy as np

from frontend.detokenizer import make_detokenizer
from frontend.outputs import CompletionOutput, Logprob, Logprobs, OutputKind, RequestMetrics, RequestOutput
from frontend.plain_tokens import PlainTokens, plain_tokens
from frontend.request_context import RequestContext
from frontend.stop_strings import StopChecker
from ipc.errors import error_from_code
from ipc.messages import FINISH_ERROR, FINISH_NAMES, FINISH_STOP, AddRequest, Admitted, Finished, TokenLogprobs
from ipc.sampling_params import SamplingParams

if TYPE_CHECKING:
    from frontend.tokenizer import Tokenizer


class TextWriter(Protocol):
    """The short way into a sink."""

    def write(self, text: bytes, now_ns: int, /) -> bool:
        """A token's text as JSON, and when it came. False: it was not taken."""
        ...


class Sink(Protocol):
    """Where the text of running choices goes before anybody is woken."""

    def __call__(self, index: int, text: str) -> bool:
        """New text of a choice. False: it was not taken."""
        ...

    def writer(self, index: int) -> TextWriter | None:
        """A faster way for tokens whose text stands by itself. It may refuse, and the text is then offered as above.
        Asked for when the sink has just taken text of this choice."""
        ...


class Choice:
    """One sequence. `is_ended`: the caller's view; the engine may still hold it until its Finished arrives."""

    __slots__ = ("stream", "request_id", "index", "token_ids", "text", "num_taken_chars", "num_taken_tokens",
                 "new_text", "finish_reason", "stop_reason", "is_reported", "message", "logprobs",
                 "cumulative_logprob", "token_ns", "plain", "writer", "_tokenizer", "_detokenizer", "_stop",
                 "_min_tokens")

    def __init__(self, stream: RequestStream, request_id: int, index: int, tokenizer: Tokenizer) -> None:
        params = stream.params
        self.stream = stream
        self.request_id = request_id
        self.index = index
        self.token_ids: list[int] = []          # everything received that counts
        self.token_ns: list[int] = []           # when each of them arrived, monotonic
        self.text = ""                          # what the consumer has been given
        self.new_text: list[str] = []
        self.num_taken_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.is_reported = False                # its finish_reason was handed out
        self.message: AddRequest | None = None  # as sent: with token_ids, all that a new core needs
        self.logprobs: list[Logprobs] | None = None if params.logprobs is None else []
        self.cumulative_logprob = 0.0
        self._tokenizer = tokenizer
        self._detokenizer = make_detokenizer(tokenizer, params.skip_special_tokens)
        self._stop = StopChecker(params.stop, params.include_stop_str_in_output) if params.stop else None
        self._min_tokens = params.min_tokens
        self.plain: PlainTokens = plain_tokens(tokenizer, params.skip_special_tokens, tuple(params.stop))
        self.writer: TextWriter | None = None           # while nothing is held back: takes the text of a plain token

    @property
    def is_ended(self) -> bool:
        return self.finish_reason is not None

    def receive(self, token: int, is_stop_token: bool) -> bool:
        """One token. True when a stop string was completed: the rest of the sequence is not wanted."""
        self.token_ids.append(token)
        self.writer = None
        if is_stop_token:                       # ends the sequence and is no text of it
            return False
        text = self._detokenizer.feed((token,))
        if not text:
            return False
        if self._stop is not None:
            text, matched = self._stop.feed(text, len(self.token_ids) >= self._min_tokens)
            if matched is not None:
                self._end("stop", matched, text)
                return True
        if text:
            sink = self.stream.sink
            if sink is None or self.new_text or not sink(self.index, text):
                self.new_text.append(text)
            else:
                self.num_taken_tokens = len(self.token_ids)
                if self._detokenizer.is_idle and (self._stop is None or self._stop.is_idle):
                    self.writer = sink.writer(self.index)
        return False

    def receive_logprobs(self, news: TokenLogprobs) -> None:
        """Those of an output token, which comes with the same news or has come. Repeats after a restart are dropped."""
        if self.logprobs is not None and news.position == len(self.logprobs):
            entry = read_logprobs(news, self._tokenizer)
            self.logprobs.append(entry)
            self.cumulative_logprob += next(iter(entry.values())).logprob

    def finish(self, reason: str, stop_reason: int | str | None) -> bool:
        """The engine ended it: give out what was held back. True when that completes a stop string."""
        tail = self._detokenizer.flush()
        if self._stop is not None:
            tail, matched = self._stop.feed(tail, len(self.token_ids) >= self._min_tokens)
            if matched is not None:
                self._end("stop", matched, tail)
                return True
            tail += self._stop.flush()
        self._end(reason, stop_reason, tail)
        return False

    def _end(self, reason: str, stop_reason: int | str | None, text: str) -> None:
        self.writer = None
        self.finish_reason, self.stop_reason = reason, stop_reason
        if text:
            self.new_text.append(text)

    @property
    def has_news(self) -> bool:
        return (len(self.token_ids) > self.num_taken_tokens or bool(self.new_text)
                or (self.is_ended and not self.is_reported))

    def take(self, kind: OutputKind) -> CompletionOutput:
        """What is new (delta), or all so far."""
        text, self.new_text = "".join(self.new_text), []
        first = self.num_taken_tokens if kind == "delta" else 0
        tokens = self.token_ids[first:]
        logprobs = None if self.logprobs is None else self.logprobs[first:len(self.token_ids)]
        self.num_taken_tokens = len(self.token_ids)
        self.is_reported = self.is_ended
        if kind != "delta":
            self.text += text
            text = self.text
        return CompletionOutput(self.index, text, tokens, self.finish_reason, self.stop_reason, logprobs,
                                None if logprobs is None else self.cumulative_logprob, 0, self.token_ids)


def read_logprobs(news: TokenLogprobs, tokenizer: Tokenizer) -> Logprobs:
    """By token id, the position's own token first. Its rank is given; the others are the likeliest, in order."""
    ids = np.frombuffer(news.token_ids, np.int32).tolist()
    values = np.frombuffer(news.values, np.float32).tolist()
    found: Logprobs = {}
    for index, (token, value) in enumerate(zip(ids, values)):
        if token not in found:
            text = tokenizer.token_bytes(token).decode("utf-8", "replace")
            found[token] = Logprob(value, index or news.rank, text)
    return found


class RequestStream:
    """All choices of one request. Lives in one event loop.

    sink: offered each piece of text of a running choice while nothing older waits; what it takes wakes nobody.
    """

    def __init__(self, request_id: str, prompt: str | None, prompt_token_ids: bytes, params: SamplingParams,
                 kind: OutputKind, arrival_time: float | None = None, sink: Sink | None = None) -> None:
        self.sink = sink
        self.request_id, self.prompt, self.prompt_token_ids, self.params = request_id, prompt, prompt_token_ids, params
        self.kind = kind
        self.choices: list[Choice] = []
        self.metrics = RequestMetrics(time.monotonic() if arrival_time is None else arrival_time)
        self.context: RequestContext | None = None
        self.num_cached_tokens = self.num_preemptions = 0
        self.max_tokens: int | None = params.max_tokens
        self.error: Exception | None = None
        self.prompt_logprobs: list[Logprobs | None] | None = None if params.prompt_logprobs is None else [None]
        self.vector: np.ndarray | None = None   # of a pooling request
        self._prompt_list: list[int] | None = None
        self._wake: asyncio.Event = asyncio.Event()

    @property
    def is_finished(self) -> bool:
        return all(choice.is_ended for choice in self.choices)

    def on_admitted(self, news: Admitted) -> None:
        if self.metrics.first_scheduled_time is None:
            self.metrics.first_scheduled_time = news.scheduled_ns / 1e9
            self.num_cached_tokens, self.max_tokens = news.num_cached_tokens, news.max_tokens

    def on_prompt_logprobs(self, choice: Choice, news: TokenLogprobs) -> None:
        """The choices have the same ones; those of the first are kept."""
        if self.prompt_logprobs is not None and choice.index == 0 and news.position == len(self.prompt_logprobs):
            self.prompt_logprobs.append(read_logprobs(news, choice._tokenizer))
            self._wake.set()

    @property
    def _is_prompt_told(self) -> bool:
        return self.prompt_logprobs is None or 4 * len(self.prompt_logprobs) >= len(self.prompt_token_ids)

    def on_token(self, choice: Choice, now_ns: int) -> None:
        if self.metrics.first_token_time is None:
            self.metrics.first_token_time = now_ns / 1e9
        if self.sink is None or choice.new_text or choice.finish_reason is not None:
            self._wake.set()

    def on_finished(self, choice: Choice, news: Finished) -> None:
        self.num_preemptions += news.num_preemptions
        if not choice.is_ended:
            if news.reason == FINISH_ERROR:
                self.fail(error_from_code(news.error_code, news.message))
            choice.finish(FINISH_NAMES[news.reason],
                          news.stop_token_id if news.reason == FINISH_STOP and news.stop_token_id >= 0 else None)
        self.on_end()

    def on_end(self) -> None:
        if self.is_finished:
            self.metrics.finish_time = time.monotonic()
        self._wake.set()

    def fail(self, error: Exception) -> None:
        if self.error is None:
            self.error = error
        self._wake.set()

    async def next(self) -> RequestOutput:
        """Wait for news and take it all. Raises the request's error."""
        while True:
            if self.error is not None:
                raise self.error
            fresh = [choice for choice in self.choices if choice.has_news]
            done = self.is_finished
            if fresh and (done or (self.kind != "final" and self._is_prompt_told)):
                return self._output(self.choices if self.kind == "final" else fresh, done)
            self._wake.clear()
            await self._wake.wait()

    def _output(self, choices: list[Choice], done: bool) -> RequestOutput:
        if self._prompt_list is None:
            self._prompt_list = memoryview(self.prompt_token_ids).cast("i").tolist()
        prompt_logprobs = self.prompt_logprobs
        if self.kind == "delta":
            self.prompt_logprobs = None
        return RequestOutput(
            self.request_id, self.prompt, self._prompt_list, [choice.take(self.kind) for choice in choices], done,
            self.num_cached_tokens, self.num_preemptions, self.max_tokens, len(self._prompt_list),
            sum(len(choice.token_ids) for choice in self.choices), self.metrics, prompt_logprobs)
