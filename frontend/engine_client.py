"""The only user of the engine's sockets in a frontend: requests out, outputs in, commands and their replies.

One asyncio loop, one DEALER. Numbers requests, keeps who waits for which number, and notices when the core falls
silent. Knows no HTTP and no tokenizer.
"""
from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from typing import Any

import msgspec
import numpy as np
import zmq

from frontend.outputs import FINISH_ABORT
from frontend.request_stream import Choice, RequestStream
from frontend.step_report import StepTotals
from frontend.timeline import Timeline
from ipc.codec import Header
from ipc.config import Peer
from ipc.errors import EngineDeadError, RequestFailedError
from ipc.messages import (FINISH_STOP, SERVING, Abort, AddRequest, Command, CommandReply, EngineReady, Finished,
                          HelloAck, Outputs, Phase)
from ipc.sockets import AsyncLink

logger = logging.getLogger(__name__)

NUMBER_SHIFT = 40                               # request_id = frontend number << 40 | counter


class EngineClient:
    """A frontend's side of the engine core. Create and use it inside one running loop."""

    def __init__(self, core: Peer, number: int) -> None:
        self.number = number
        self.core = core
        self.ready: EngineReady | None = None
        self.phase: Phase | None = None
        self.dead: Exception | None = None
        self.num_running = self.num_waiting = self.num_free_blocks = 0
        self._context = zmq.Context()
        self._loop = asyncio.get_running_loop()
        self._counter = itertools.count(1)
        self._calls = itertools.count(1)
        self._choices: dict[int, Choice] = {}
        self._row_ids = b""                     # of the last tokens, and whose they were
        self._rows: list[Choice | None] = []
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._became_ready = asyncio.Event()
        self.timeline = Timeline(time.monotonic_ns())
        self.totals = StepTotals(self.timeline)
        self.is_restarting = False              # the core is being replaced; it was ready before
        self.lost_worker = ""                   # why the worker ended, until its successor is there
        self.num_restarts = 0                   # of the core, survived
        self.num_workers = 0                    # that took over from another one, or woke up
        self._link = self._connect(core)

    def _connect(self, core: Peer) -> AsyncLink:
        link = AsyncLink(self._context, core.address, f"{self.number}-{os.getpid()}-{core.epoch}".encode(),
                         self._on_message)
        link.epoch = core.epoch
        link.hello("frontend", self.number, os.getpid())
        link.start(self._loop)
        return link

    # ------------------------------------------------------------ the core's death and return

    def core_down(self, reason: str) -> None:
        """The core has ended and another one will come: streams pause. Control calls in progress fail."""
        if self.dead is not None:
            return
        self.ready = None
        self.is_restarting = True
        self._became_ready.clear()
        self.phase = Phase("engine_core", f"restarting after: {reason}", 0.0)
        for future in self._replies.values():
            if not future.done():
                future.set_exception(EngineDeadError(f"{reason}; the engine is restarting, call again"))

    def worker_down(self, reason: str) -> None:
        """The worker has ended and another one will come: the core recomputes everyone then."""
        self.lost_worker = reason

    def core_up(self, core: Peer) -> None:
        """Connect to the new core. When it is ready, every live request is added again as prompt + tokens received."""
        if self.dead is not None or core.epoch == self.core.epoch:
            return
        if self.ready is not None:
            self.core_down("the engine core was replaced")
        self.core = core
        self.timeline.begin()
        self.num_restarts += 1
        self._link.close()
        self._link = self._connect(core)

    def _replay(self) -> None:
        for choice in list(self._choices.values()):
            if choice.is_ended:
                self._pop(choice.request_id)    # it waited for the end of what nobody wants
                continue
            if choice.message is None:
                raise RuntimeError(f"request {choice.request_id} is live and was never sent")
            self._link.send(msgspec.structs.replace(
                choice.message, request_id=choice.request_id, choice=choice.index, num_choices=1, is_replay=True,
                output_token_ids=np.array(choice.token_ids, np.int32).data.cast("B")))

    async def wait_ready(self) -> EngineReady:
        """Raises EngineDeadError when the engine ends first."""
        await self._became_ready.wait()
        if self.dead is not None:
            raise self.dead
        if self.ready is None:
            raise RuntimeError("woken without EngineReady")
        return self.ready

    # ------------------------------------------------------------ requests

    def next_ids(self, count: int) -> list[int]:
        """Consecutive numbers for the choices of one request."""
        return [self.number << NUMBER_SHIFT | next(self._counter) for _ in range(count)]

    def add(self, choices: list[Choice], message: AddRequest) -> None:
        if self.dead is not None:
            raise self.dead
        for choice in choices:
            choice.message = message
            self._choices[choice.request_id] = choice
        if self.ready is not None:              # else they are sent when the core is ready
            self._link.send(message)

    def abort(self, choices: list[Choice]) -> None:
        """Their outputs are not wanted any more. Idempotent; unknown ones are ignored."""
        ids = [choice.request_id for choice in choices if choice.request_id in self._choices]
        if ids and self.dead is None and self.ready is not None:
            self._link.send(Abort(ids))

    def end(self, stream: RequestStream) -> None:
        """As an abort, and whoever reads the stream gets its last output, with what came so far."""
        self.abort(stream.choices)
        for choice in stream.choices:
            if not choice.is_ended:
                choice.finish(FINISH_ABORT, None)
        stream.on_end()

    def forget(self, choices: list[Choice]) -> None:
        for choice in choices:
            self._pop(choice.request_id)

    async def command(self, name: str, request_id: int = 0, level: int = 0, grammar: bytes = b"") -> Any:
        """A control call to the core. Raises ValueError with the core's text."""
        await self.wait_ready()
        call = next(self._calls)
        future = self._replies[call] = self._loop.create_future()
        self._link.send(Command(call, name, request_id, level, memoryview(grammar)))
        try:
            return await future
        finally:
            self._replies.pop(call, None)

    @property
    def num_requests(self) -> int:
        return len(self._choices)

    @property
    def streams(self) -> list[RequestStream]:
        """Of the requests that run, each once, oldest first."""
        return list({id(choice.stream): choice.stream for choice in self._choices.values()}.values())

    # ------------------------------------------------------------ what arrives

    def _on_message(self, header: Header, message: Any) -> None:
        """Called by the loop, which would only log an exception: a fault of ours must not leave anyone waiting."""
        if header.epoch != self.core.epoch:
            return                              # of a core that is gone
        try:
            self._handle(message)
        except Exception as error:
            logger.exception("this %s could not be handled", type(message).__name__)
            self.fail(EngineDeadError(f"the frontend failed on a message: {type(error).__name__}: {error}"))

    def _handle(self, message: Any) -> None:
        if isinstance(message, Outputs):
            received_ns = time.monotonic_ns()
            self._on_outputs(message, received_ns)
            if self.timeline.hear(message, received_ns):    # the loop runs it behind the tasks just woken
                self._loop.call_soon(self.timeline.written)
            if message.stamps and self.totals.is_due:
                self.totals.update()
        elif isinstance(message, EngineReady):
            self.ready = message
            self.is_restarting, self.lost_worker = False, ""
            self._replay()
            self._became_ready.set()
        elif isinstance(message, Phase):
            self.phase = message
            if message.name == SERVING:
                self.lost_worker = ""
                self.num_workers += 1
        elif isinstance(message, CommandReply):
            future = self._replies.get(message.call_id)
            if future is not None and not future.done():
                if message.error:
                    future.set_exception(ValueError(message.error))
                else:
                    future.set_result(msgspec.msgpack.decode(message.result))
        elif isinstance(message, HelloAck):
            self.fail(EngineDeadError(f"the engine core refused this frontend: {message.refused}"))

    def _on_outputs(self, outputs: Outputs, now_ns: int) -> None:
        self.num_running, self.num_waiting = outputs.num_running, outputs.num_waiting
        self.num_free_blocks = outputs.num_free_blocks
        choices = self._choices
        for news in outputs.admitted:
            choice = choices.get(news.request_id)
            if choice is not None:
                choice.stream.on_admitted(news)
        if outputs.logprobs or outputs.prompt_logprobs or outputs.pooled:
            self._on_extras(outputs)            # before the tokens they belong to
        if outputs.tokens:
            self._on_tokens(outputs, now_ns)
        for finished in outputs.finished:
            choice = self._pop(finished.request_id)
            if choice is not None:
                choice.stream.on_finished(choice, finished)

    def _on_tokens(self, outputs: Outputs, now_ns: int) -> None:
        """One token for each row. Most are plain, and go the short way: into the journal and to the sink's writer."""
        rows = self._rows_of(outputs.request_ids)
        stop_at = self._stop_positions(np.frombuffer(outputs.request_ids, np.int64), outputs.finished)
        for i in stop_at:
            if (choice := rows[i]) is not None:
                choice.writer = None       # this token ends it, and is no text
        numbers, tokens = np.frombuffer(outputs.output_index, np.int32), np.frombuffer(outputs.tokens, np.int32)
        unwanted: list[Choice] = []
        for i, (choice, number, token) in enumerate(zip(rows, numbers.tolist(), tokens.tolist())):
            if choice is None:
                continue                        # aborted
            writer = choice.writer
            if writer is not None and number == len(choice.token_ids):
                text = choice.plain[token]
                if text is not None and writer.write(text, now_ns):
                    choice.token_ids.append(token)
                    choice.token_ns.append(now_ns)
                    choice.num_taken_tokens = number + 1
                    continue
            if choice.finish_reason is not None:
                continue                        # past a stop string: never text, never usage
            if number != len(choice.token_ids):
                choice.stream.fail(RequestFailedError(
                    f"token {number} arrived where {len(choice.token_ids)} was due"))
                continue
            choice.token_ns.append(now_ns)
            if choice.receive(token, i in stop_at):
                unwanted.append(choice)
                choice.stream.on_end()
            choice.stream.on_token(choice, now_ns)
        if unwanted:
            self.abort(unwanted)

    def _rows_of(self, request_ids: memoryview) -> list[Choice | None]:
        """Whose they are. Step after step they are mostly the same."""
        ids = bytes(request_ids)
        if ids != self._row_ids:
            self._row_ids = ids
            self._rows = [self._choices.get(request_id) for request_id in np.frombuffer(ids, np.int64).tolist()]
        return self._rows

    def _pop(self, request_id: int) -> Choice | None:
        self._row_ids, self._rows = b"", []
        return self._choices.pop(request_id, None)

    def _on_extras(self, outputs: Outputs) -> None:
        for news in outputs.logprobs:
            choice = self._choices.get(news.request_id)
            if choice is not None and choice.finish_reason is None:
                choice.receive_logprobs(news)
        for news in outputs.prompt_logprobs:
            choice = self._choices.get(news.request_id)
            if choice is not None:
                choice.stream.on_prompt_logprobs(choice, news)
        for pooled in outputs.pooled:
            choice = self._choices.get(pooled.request_id)
            if choice is not None:
                choice.stream.vector = np.frombuffer(pooled.vector, np.float32).copy()

    @staticmethod
    def _stop_positions(ids: np.ndarray, finished: list[Finished]) -> frozenset[int]:
        """Positions of tokens that ended their requests as EOS or stop token: the last one of each."""
        return frozenset(int((ids == f.request_id).nonzero()[0][-1]) for f in finished
                         if f.reason == FINISH_STOP and f.stop_token_id >= 0 and (ids == f.request_id).any())

    def fail(self, error: Exception) -> None:
        """The engine is gone: everyone who waits hears why."""
        if self.dead is not None:
            return
        self.dead = error
        for choice in list(self._choices.values()):
            choice.stream.fail(error)
        self._choices.clear()
        self._row_ids, self._rows = b"", []
        for future in self._replies.values():
            if not future.done():
                future.set_exception(error)
        self._became_ready.set()

    def close(self) -> None:
        """Abort what is unfinished; the engine itself may live on. Idempotent."""
        if self._context.closed:
            return
        self.abort(list(self._choices.values()))
        self.fail(EngineDeadError("the client was closed"))
        self._link.close(linger_ms=100)
        self._context.term()
