"""An engine core without scheduler or worker: every request of every frontend gets one token per beat, in one message.

What a frontend costs can then be measured alone: it is the real process, and receives what a real core would send it
after a decode step of that many rows. Started by the supervisor of bench.null_engine in place of engine_core.main.
"""

from __future__ import annotations

import math
import os
import time

import msgspec
import numpy as np
import zmq

from bench.null_engine import RATE_VARIABLE, TOKENS_VARIABLE
from ipc.config import CoreProcess
from ipc.lifeline import ChildLife
from ipc.messages import (
    FINISH_ABORT,
    FINISH_LENGTH,
    HELLO,
    Abort,
    AddRequest,
    Admitted,
    Command,
    CommandReply,
    ConfigCore,
    EngineReady,
    Finished,
    Outputs,
    Shutdown,
)
from ipc.sockets import Router

MAX_MODEL_LEN = 1 << 17
STATS = ("num_running", "num_waiting", "num_blocks", "num_free_blocks")


class NullCore:
    """Columns of live requests, per frontend."""

    def __init__(self, tokens: np.ndarray) -> None:
        self.tokens = tokens
        self.requests: dict[int, dict[int, list[int]]] = {}  # frontend -> request id -> [outputs so far, wanted]
        self.admitted: dict[int, list[Admitted]] = {}
        self.finished: dict[int, list[Finished]] = {}
        self.step = 0

    def handle(self, number: int, message: object) -> CommandReply | None:
        live = self.requests.setdefault(number, {})
        if isinstance(message, AddRequest):
            wanted = message.sampling_params.max_tokens or 16
            for i in range(message.num_choices):
                live[message.request_id + i] = [len(message.output_token_ids) // 4, wanted]
                self.admitted.setdefault(number, []).append(
                    Admitted(message.request_id + i, 0, wanted, time.monotonic_ns()))
        elif isinstance(message, Abort):
            for request_id in message.request_ids:
                if live.pop(request_id, None) is not None:
                    self.finished.setdefault(number, []).append(Finished(request_id, FINISH_ABORT))
        elif isinstance(message, Command):
            return CommandReply(message.call_id, _packed(dict.fromkeys(STATS, 0)))
        return None

    def outputs(self, number: int) -> Outputs:
        """One more token for each request of a frontend."""
        self.step += 1
        live = self.requests.get(number, {})
        news = Outputs(self.step, num_running=len(live), admitted=self.admitted.pop(number, []))
        ids = np.fromiter(live, np.int64, len(live))
        counts = np.fromiter((entry[0] for entry in live.values()), np.int32, len(live))
        news.request_ids, news.output_index = ids.data.cast("B"), counts.data.cast("B")
        news.tokens = self.tokens[counts % len(self.tokens)].data.cast("B") if len(live) else news.tokens
        ended = self.finished.pop(number, [])
        for request_id, entry in list(live.items()):
            entry[0] += 1
            if entry[0] >= entry[1]:
                del live[request_id]
                ended.append(Finished(request_id, FINISH_LENGTH))
        news.finished = ended
        return news


def _packed(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(value))


def serve(life: ChildLife, config: CoreProcess, core: NullCore, rate: float) -> None:
    router = Router(zmq.Context(), config.listen)
    router.epoch = config.epoch
    poller = zmq.Poller()
    poller.register(router.socket, zmq.POLLIN)
    poller.register(life.lifeline.fileno(), zmq.POLLIN)
    life.ready("null core")
    ready = EngineReady(1 << 16, 16, MAX_MODEL_LEN, 1 << 20, [], 1 << 16, "float32", "null")
    period, due = 1.0 / rate, time.monotonic()
    while True:
        wait_s = due - time.monotonic()
        poller.poll(max(0, math.ceil(wait_s * 1000)))
        for _, message in life.lifeline.receive():
            if isinstance(message, Shutdown):
                return
        if life.lifeline.is_closed:
            life.exit_orphaned()
        for number, header, message in router.drain():
            if header.kind == HELLO:
                core.requests[number] = {}
                router.send(number, ready)
            elif (reply := core.handle(number, message)) is not None:
                router.send(number, reply)
        if time.monotonic() < due:
            continue
        due = max(due + period, time.monotonic())
        for number in list(core.requests):
            router.send(number, core.outputs(number))


def main() -> None:
    life = ChildLife.from_argv("engine_core")
    config = life.config(ConfigCore)
    serve(life, config, NullCore(np.fromfile(os.environ[TOKENS_VARIABLE], np.int32)),
          float(os.environ[RATE_VARIABLE]))


if __name__ == "__main__":
    main()
