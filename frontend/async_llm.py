"""AsyncLLM: one engine inside an asyncio program, or one frontend's view of an engine that runs already.

    async with AsyncLLM(model="smollm2-135m") as llm:
        async for output in llm.generate("The capital of France is", SamplingParams(max_tokens=8)):
            print(output.outputs[0].text)

Works from a script without a __main__ guard, a notebook and pytest: the engine's processes are `python -m` programs
held by a supervisor that ends them when this process ends, however it does. Text lives here; tokens live in the engine.
"""
from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import os
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any

import msgspec

from frontend.chat_template import ChatTemplate, has_thinking_switch
from frontend.engine_client import EngineClient
from frontend.grammar_check import GrammarChecker
from frontend.grammar_prepare import GrammarPreparer
from frontend.outputs import OutputKind, PoolingOutput, PoolingRequestOutput, RequestOutput
from frontend.prompts import Prompt, checked_salt, read_prompt
from frontend.reasoning import detect_reasoning
from frontend.request_context import CURRENT
from frontend.request_log import RequestLog, RequestRecord
from frontend.request_stream import Choice, RequestStream, Sink
from frontend.step_report import StepTotals
from frontend.timeline import Timeline
from frontend.tokenizer import Tokenizer, pack_ids
from frontend.tools.formats import detect_format
from ipc.attach import read_engine_file
from ipc.cli import build_config
from ipc.config import EngineConfig, ModelSection, Peer
from ipc.engine_process import EngineProcess
from ipc.errors import ConfigError, EngineDeadError, RequestError, RequestFailedError, shown
from ipc.messages import AddRequest, EngineReady, EngineUp, PeerDown, PeerUp, Phase
from ipc.progress import EngineProgress
from ipc.sampling_params import SamplingParams, check_priority

logger = logging.getLogger(__name__)

LONG_PROMPT_CHARS = 8192                        # above this, tokenizing moves to a thread
WATCH_INTERVAL_S = 0.1
EARLY_S = 1.0                                   # before the supervisor ends a silent process, /ready says no
FILE_INTERVAL_S = 0.5
ATTACHED_NUMBERS = 1 << 22                      # frontend numbers from here on belong to programs that attach


class _Opening:
    """A request that is read and checked, and not yet with the engine."""

    def __init__(self, name: str) -> None:
        self.name, self.is_aborted = name, False


class AsyncLLM:
    """An engine. Options are launch.py's, with underscores: AsyncLLM(model="qwen3-0.6b", max_num_seqs=16).

    Use as an async context manager, or `await start()` and `await close()`. All calls belong to the loop that started
    it. Raises ConfigError for bad options, EngineDeadError when the engine cannot start or has ended.
    """

    def __init__(self, model: str | None = None, *, config: EngineConfig | None = None,
                 on_phase: Callable[[Phase], None] | None = None, **options: Any) -> None:
        if (model is None) == (config is None):
            raise ConfigError("AsyncLLM needs a model: AsyncLLM(model='smollm2-135m')")
        self._model, self._options, self._config = model, options, config
        self._on_phase = on_phase
        self._process: EngineProcess | None = None
        self._client: EngineClient | None = None
        self._watch: asyncio.Task[None] | None = None        # runs before the core is ready: that may end before
        self._waiter: asyncio.Task[None] | None = None
        self._names = itertools.count()
        self._openings: set[_Opening] = set()
        self._grammars = GrammarChecker()
        self._resumed = asyncio.Event()         # clear: new requests wait
        self._resumed.set()
        self.created = int(time.time())
        self.served_model_name = ""
        self.max_model_len = self.vocab_size = 0
        self.request_log = RequestLog()
        self.observers: list[Callable[[RequestStream], None]] = [self.request_log.observe]  # told of every ended stream
        self.operator_trace: dict[str, Any] | None = None              # what stop_profile read last
        self.pids: list[int] = []               # of the engine's processes, the supervisor first
        self.run_dir = ""                       # where others may attach, see attach_to
        self._progress: EngineProgress | None = None

    # ------------------------------------------------------------ life

    async def start(self) -> AsyncLLM:
        """Start the engine and wait until it serves."""
        if self._client is not None:
            raise RuntimeError("this AsyncLLM is started already")
        try:
            if self._config is None:
                self._config = await asyncio.to_thread(build_config, self._model or "", self._options, serve=False)
            loading = asyncio.create_task(asyncio.to_thread(Tokenizer.from_files, self._config.model.files))
            loading.add_done_callback(lambda task: task.cancelled() or task.exception())    # seen, if nobody awaits it
            try:
                self._process = EngineProcess()
                up = await self._start_process(self._process, self._config)
                self.pids = up.pids
                self.watch_progress(up.run_dir)
                await self._connect(Peer(up.core_address, up.core_epoch), 0, self._config.model, await loading)
            finally:
                loading.cancel()
            self._watch = asyncio.create_task(self._watch_process(self._process))
            await self.wait_ready()
        except BaseException:
            await self.close()
            raise
        return self

    async def _start_process(self, process: EngineProcess, config: EngineConfig) -> Any:
        starting = asyncio.create_task(asyncio.to_thread(process.start, config, self._on_phase))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            await asyncio.to_thread(process.stop)
            with contextlib.suppress(Exception):
                await starting
            raise

    @classmethod
    async def attach(cls, core: Peer, number: int, model: ModelSection, served_model_name: str = "", *,
                     wait: bool = True) -> AsyncLLM:
        """A frontend of an engine that somebody else started. With wait=False it becomes ready later (see `status`)."""
        llm = cls(config=EngineConfig(model=model))
        await llm._connect(core, number, model, await asyncio.to_thread(Tokenizer.from_files, model.files))
        llm.served_model_name = served_model_name or llm.served_model_name
        if wait:
            await llm.wait_ready()
        else:
            llm._waiter = asyncio.create_task(llm._become_ready())
        return llm

    @classmethod
    async def attach_to(cls, run_dir: str) -> AsyncLLM:
        """One more frontend of a running engine, beside its own: `run_dir` is the folder that launch.py prints, or
        `run_dir` of the AsyncLLM that started it. It lives through restarts of the core, and ends with the engine;
        `close` leaves the engine as it is. Raises ConfigError when none serves there."""
        engine = read_engine_file(run_dir)
        number = ATTACHED_NUMBERS + secrets.randbelow(ATTACHED_NUMBERS)
        llm = await cls.attach(engine.core, number, engine.model, engine.served_model_name, wait=False)
        llm.watch_progress(run_dir)
        llm._watch = asyncio.create_task(llm._watch_file(run_dir))
        try:
            await llm.wait_ready()
        except BaseException:
            await llm.close()
            raise
        return llm

    async def _watch_file(self, run_dir: str) -> None:
        """Follow the core from process to process."""
        while True:
            await asyncio.sleep(FILE_INTERVAL_S)
            try:
                engine = read_engine_file(run_dir)
            except ConfigError:
                self.engine_died("the engine has ended")
                return
            if self._client is not None:
                self._client.core_up(engine.core)

    async def _connect(self, core: Peer, number: int, model: ModelSection, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.chat_template = ChatTemplate(tokenizer.chat_templates, tokenizer.special_tokens)
        self.tool_format = detect_format(self.chat_template.sources)
        self.has_reasoning = detect_reasoning(self.chat_template.sources)
        self.has_thinking_switch = any(map(has_thinking_switch, self.chat_template.sources))
        self.served_model_name = model.files.served_name
        self._client = EngineClient(core, number)
        self._preparer = GrammarPreparer(self._client)

    async def _become_ready(self) -> None:
        with contextlib.suppress(EngineDeadError):
            await self.wait_ready()

    async def wait_ready(self) -> EngineReady:
        """Until the engine serves. Raises EngineDeadError when it ends first."""
        ready = await self._engine().wait_ready()
        self._on_ready(ready)
        return ready

    def _on_ready(self, ready: EngineReady) -> None:
        self.max_model_len, self.vocab_size = ready.max_model_len, ready.vocab_size

    async def _watch_process(self, process: EngineProcess) -> None:
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            for message in process.receive():
                if isinstance(message, (PeerDown, PeerUp)):
                    self.on_peer(message)
                elif isinstance(message, EngineUp):
                    self.pids = message.pids
            if process.died() is not None and self._client is not None:
                self._client.fail(process.error())
                await asyncio.to_thread(process.stop)   # a killed supervisor could not tidy up
                return

    def watch_progress(self, run_dir: str) -> None:
        """From now on `status` also sees whether core and worker get on: their files are in this folder."""
        self.run_dir = run_dir
        self._progress = EngineProgress(run_dir)

    def on_peer(self, news: PeerDown | PeerUp) -> None:
        """The supervisor says that a process of the engine ended or was replaced."""
        if self._client is not None and news.role == "worker" and isinstance(news, PeerDown):
            self._client.worker_down(news.reason)
        elif self._client is not None and news.role == "engine_core":
            if isinstance(news, PeerUp):
                self._client.core_up(news.peer)
            else:
                self._client.core_down(news.reason)

    def engine_died(self, reason: str) -> None:
        """Somebody who watches the engine says it is gone."""
        if self._client is not None:
            self._client.fail(EngineDeadError(reason))

    async def close(self) -> None:
        """Abort what runs and end the engine. Idempotent; nothing of it is left when this returns."""
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
            self._watch = None
        await self._grammars.close()
        if self._client is not None:
            self._client.close()
            self._client = None
        if self._progress is not None:
            self._progress.close()
            self._progress = None
        if self._process is not None:
            process, self._process = self._process, None
            try:
                await asyncio.to_thread(process.stop)
            except RuntimeError:                # the interpreter is exiting and starts no threads any more
                process.stop()

    async def __aenter__(self) -> AsyncLLM:
        return await self.start() if self._client is None else self     # attached ones are connected already

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _engine(self) -> EngineClient:
        if self._client is None:
            raise EngineDeadError("this AsyncLLM is not running; use `async with AsyncLLM(...) as llm`")
        if self._client.dead is not None:
            raise self._client.dead
        return self._client

    # ------------------------------------------------------------ requests

    async def generate(self, prompt: Prompt, sampling_params: SamplingParams | None = None, *,
                       request_id: str | None = None, output_kind: OutputKind = "cumulative", priority: int = 0,
                       add_special_tokens: bool = True, cache_salt: str = "",
                       sink: Sink | None = None) -> AsyncGenerator[RequestOutput, None]:
        """Yield news about one request until it is finished.

        prompt: text, token ids, token ids as int32 bytes, or a dict with one of them (prompts.py). sink (with
        output_kind "delta"): called with choice and new text the moment there is some; what it takes (True) is not
        yielded, and costs no switch of tasks. Closing or cancelling the iterator aborts the request and frees its
        blocks. Raises RequestError (the caller's mistake), OverloadedError, EngineDeadError, RequestFailedError.
        """
        client = self._engine()
        context = CURRENT.get()
        arrival = time.monotonic() if context is None else context.arrival_time
        params = sampling_params if sampling_params is not None else SamplingParams()
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params must be SamplingParams, not {type(params).__name__}",
                               "sampling_params")
        read, priority = read_prompt(prompt), check_priority(priority)
        salt = checked_salt(cache_salt) or read.cache_salt
        opening = _Opening(request_id or f"request-{next(self._names)}")
        self._openings.add(opening)
        try:
            tokens = await self._tokens(read.tokens_or_text, add_special_tokens)
            if params.seed is None:
                params = params.replace(seed=secrets.randbits(63))
            if params.bad_words:
                params = params.replace(bad_words_token_ids=self._bad_word_tokens(params))
            params.check_for_model(self.vocab_size)
            if params.structured_outputs is not None:
                seconds = await self._grammars.check(params.structured_outputs)
                await self._preparer.prepare(params.structured_outputs, seconds)
            if self.is_paused:
                await self._wait_resumed(opening)
        finally:
            self._openings.discard(opening)
        stream = RequestStream(opening.name, read.text, tokens, params, output_kind, arrival, sink)
        stream.context = context
        wire = params.replace(n=1, stop=[], bad_words=[]) if params.stop or params.bad_words or params.n > 1 else params
        stream.choices = [Choice(stream, number, index, self.tokenizer)
                          for index, number in enumerate(client.next_ids(params.n))]
        try:
            stream.metrics.sent_time = time.monotonic()
            if opening.is_aborted:
                client.end(stream)
            else:
                client.add(stream.choices, AddRequest(
                    stream.choices[0].request_id, memoryview(tokens), wire, num_choices=params.n, priority=priority,
                    arrival_time=arrival, cache_salt=salt))
            while True:
                output = await stream.next()
                yield output
                if output.finished:
                    return
        finally:
            stream.metrics.delivered_time = time.monotonic()
            for observe in self.observers:
                observe(stream)
            if not stream.is_finished or stream.error is not None:
                client.abort(stream.choices)
                client.forget(stream.choices)

    def _bad_word_tokens(self, params: SamplingParams) -> list[list[int]]:
        """Each word as it is written at the start of a text and behind a space."""
        found = list(params.bad_words_token_ids)
        for word in params.bad_words:
            for text in (word.lstrip(), " " + word.lstrip()):
                tokens = self.tokenizer.encode_ids(text, False)
                if tokens and tokens not in found:
                    found.append(tokens)
        return found

    async def encode(self, prompt: Prompt, *, pooling: str = "last", normalize: bool = True,
                     request_id: str | None = None, priority: int = 0, add_special_tokens: bool = True,
                     cache_salt: str = "") -> PoolingRequestOutput:
        """The vector of a prompt: the hidden state after the last norm, of its last token or the mean of all.

        It runs in the same batches as `generate`. With normalize it has length 1. Raises as `generate` does; cancelling
        aborts the request.
        """
        client = self._engine()
        if pooling not in ("last", "mean"):
            raise RequestError(f"pooling is {pooling!r}; allowed are last and mean", "pooling")
        params = SamplingParams(max_tokens=1, temperature=0.0, seed=0, pooling=pooling, pooling_normalize=normalize)
        read, priority = read_prompt(prompt), check_priority(priority)
        salt = checked_salt(cache_salt) or read.cache_salt
        tokens = await self._tokens(read.tokens_or_text, add_special_tokens)
        stream = RequestStream(request_id or f"request-{next(self._names)}", None, tokens, params, "final")
        stream.choices = [Choice(stream, client.next_ids(1)[0], 0, self.tokenizer)]
        if self.is_paused:
            await self._wait_resumed()
        try:
            client.add(stream.choices, AddRequest(
                stream.choices[0].request_id, memoryview(tokens), params, priority=priority,
                arrival_time=stream.metrics.arrival_time, cache_salt=salt))
            output = await stream.next()
        finally:
            if not stream.is_finished or stream.error is not None:
                client.abort(stream.choices)
                client.forget(stream.choices)
        if stream.vector is None:
            raise RequestFailedError(f"{stream.request_id} ended ({output.outputs[0].finish_reason}) without a vector")
        return PoolingRequestOutput(output.request_id, PoolingOutput(stream.vector), output.prompt_token_ids,
                                    num_cached_tokens=output.num_cached_tokens)

    async def embed(self, prompt: Prompt, **options: Any) -> list[float]:
        """`encode`, as a list of numbers."""
        return (await self.encode(prompt, **options)).outputs.embedding

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests by the names that generate() was given: their iterators then yield a last output whose choices
        have the finish_reason "abort". One that is not running is ignored."""
        names = {request_id} if isinstance(request_id, str) else set(request_id)
        client = self._engine()
        for stream in client.streams:
            if stream.request_id in names:
                client.end(stream)
        for opening in self._openings:
            opening.is_aborted |= opening.name in names

    async def _tokens(self, prompt: str | list[int] | bytes, add_special_tokens: bool) -> bytes:
        if isinstance(prompt, str):
            encode = functools.partial(self.tokenizer.encode, prompt, add_special_tokens)
            return await asyncio.to_thread(encode) if len(prompt) > LONG_PROMPT_CHARS else encode()
        if isinstance(prompt, (bytes, bytearray, memoryview)):
            return bytes(prompt)
        if not isinstance(prompt, list):
            raise RequestError(f"a prompt is text, a list of token ids or int32 bytes, not {type(prompt).__name__}",
                               "prompt")
        for token in prompt:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self.vocab_size:
                raise RequestError(f"prompt contains {shown(token)}; token ids are 0 to {self.vocab_size - 1}",
                                   "prompt")
        return pack_ids(prompt)

    async def chat(self, messages: list[dict[str, Any]], sampling_params: SamplingParams | None = None, *,
                   tools: list[dict[str, Any]] | None = None, documents: list[dict[str, Any]] | None = None,
                   reasoning_effort: str | None = None, add_generation_prompt: bool = True,
                   continue_final_message: bool = False, chat_template_kwargs: dict[str, Any] | None = None,
                   **arguments: Any) -> AsyncGenerator[RequestOutput, None]:
        """`generate` for a conversation, rendered by the model's chat template; `arguments` are those of generate."""
        tokens = self.render_chat(messages, tools=tools, documents=documents, reasoning_effort=reasoning_effort,
                                  add_generation_prompt=add_generation_prompt,
                                  continue_final_message=continue_final_message,
                                  chat_template_kwargs=chat_template_kwargs)
        stream = self.generate(tokens, sampling_params, **arguments)
        try:
            async for output in stream:
                yield output
        finally:
            await stream.aclose()

    def render_chat(self, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None = None,
                    documents: list[dict[str, Any]] | None = None, reasoning_effort: str | None = None,
                    add_generation_prompt: bool = True, continue_final_message: bool = False,
                    chat_template_kwargs: dict[str, Any] | None = None) -> bytes:
        """The conversation as int32 token ids. Raises RequestError when the template refuses it."""
        text = self.chat_template.render(messages, tools=tools, documents=documents,
                                         reasoning_effort=reasoning_effort,
                                         add_generation_prompt=add_generation_prompt,
                                         continue_final_message=continue_final_message,
                                         chat_template_kwargs=chat_template_kwargs)
        return self.tokenizer.encode(text, False)

    # ------------------------------------------------------------ the engine

    @property
    def is_paused(self) -> bool:
        """Whether new requests wait."""
        return not self._resumed.is_set()

    def pause(self) -> None:
        """From now on new requests wait for `resume`; those that the engine has go on to their end. Idempotent."""
        self._resumed.clear()

    def resume(self) -> None:
        """Let the waiting requests in. Idempotent."""
        self._resumed.set()

    async def _wait_resumed(self, opening: _Opening | None = None) -> None:
        """Or until the request is aborted. Raises EngineDeadError when the engine ends meanwhile."""
        while self.is_paused and not (opening is not None and opening.is_aborted):
            self._engine()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WATCH_INTERVAL_S):
                    await self._resumed.wait()

    def default_max_tokens(self, prompt_len: int) -> int:
        """Tokens that fit behind a prompt of this length."""
        return self.max_model_len - prompt_len

    def status(self) -> dict[str, Any]:
        """ready, dead, phase and reason, without asking anybody. `restarting`: it was ready and will be again; requests
        wait meanwhile."""
        client = self._client
        if client is None or client.dead is not None:
            reason = str(client.dead) if client is not None else "not running"
            return {"ready": False, "dead": True, "phase": "ended", "reason": reason}
        if client.ready is None:
            phase = client.phase
            return {"ready": False, "dead": False, "phase": phase.name if phase else "starting",
                    "reason": f"{phase.name}: {phase.fraction:.0%}" if phase else "the engine core is starting",
                    "restarting": client.is_restarting}
        silent = self._progress.silent(EARLY_S) if self._progress is not None else ""
        if client.lost_worker or silent:
            return {"ready": False, "dead": False, "phase": "restarting a process" if client.lost_worker else "silent",
                    "reason": client.lost_worker or silent, "restarting": True}
        return {"ready": True, "dead": False, "phase": "serving", "reason": "", "num_running": client.num_running,
                "num_waiting": client.num_waiting, "num_free_blocks": client.num_free_blocks}

    async def stats(self) -> dict[str, Any]:
        """Totals of the engine core since its start."""
        result: dict[str, Any] = await self._engine().command("stats")
        return result

    async def reset_prefix_cache(self) -> None:
        """Nothing computed until now is reused, also not what running requests hold."""
        await self._engine().command("reset_prefix_cache")

    async def dump_recording(self) -> str:
        """Write the flight recording of the engine core to a file, for `launch.py replay`; its path.

        Raises ValueError when the engine runs with flight_recorder=False.
        """
        return str(await self._engine().command("dump_recording"))

    @property
    def timeline(self) -> Timeline:
        """The last steps of all processes, see frontend/timeline.py."""
        return self._engine().timeline

    @property
    def totals(self) -> StepTotals:
        """Sums over all steps since the start."""
        return self._engine().totals

    async def overview(self) -> dict[str, Any]:
        """The core's pool and queue now: states of blocks, and why the first waiting requests wait."""
        result: dict[str, Any] = await self._engine().command("overview")
        return result

    async def sleep(self, level: int = 1) -> None:
        """Give the pool's memory back, and at level 2 the weights' too (level 1: a GPU's weights move to host memory).
        Returns when it is done. Running requests are preempted and go on after `wake_up`, computed again; new ones wait
        for it. Nothing cached survives. Raises ValueError when it sleeps already."""
        if level not in (1, 2):
            raise RequestError(f"level is {level}; allowed are 1 and 2", "level")
        await self._engine().command("sleep", level=level)

    async def wake_up(self) -> None:
        """Be as before `sleep`; returns when requests go on. Does nothing when awake."""
        await self._engine().command("wake_up")

    async def is_sleeping(self) -> bool:
        """Also while it falls asleep or wakes up."""
        return bool(await self._engine().command("is_sleeping"))

    async def start_profile(self) -> None:
        """The worker records its operators until `stop_profile`, for a minute at most. Raises ValueError when it does
        so already."""
        await self._engine().command("start_profile")

    async def stop_profile(self) -> dict[str, Any]:
        """What torch's profiler recorded, as Chrome trace events on its own clock; kept as `operator_trace`.

        Takes seconds, in which requests go on. Raises ValueError when nothing is recorded.
        """
        told = await self._engine().command("stop_profile")
        self.operator_trace = await asyncio.to_thread(_read_and_remove, told["path"])
        return self.operator_trace

    @property
    def num_blocks(self) -> int:
        """Usable blocks of the pool."""
        ready = self._engine().ready
        return 0 if ready is None else ready.num_blocks

    def requests(self) -> list[RequestRecord]:
        """Those of this frontend that the engine has, oldest first."""
        return [RequestRecord.of(stream) for stream in self._engine().streams]

    async def request_status(self, request_id: int) -> dict[str, Any]:
        """State of a live request of this frontend, by the engine's number for it: where it is and why it waits."""
        result: dict[str, Any] = await self._engine().command("request_status", request_id)
        return result

    async def check_invariants(self) -> None:
        """Have the core check its blocks, rows and queue against each other. A contradiction ends the engine."""
        await self._engine().command("check")


def _read_and_remove(path: str) -> dict[str, Any]:
    with open(path, "rb") as file:
        trace: dict[str, Any] = msgspec.json.decode(file.read())
    os.unlink(path)
    return trace
