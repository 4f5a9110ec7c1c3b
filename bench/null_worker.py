"""A worker process without a model: real sockets, real batch preparation, a constant token.

`bench core` starts it with an address; a supervisor (bench.null_engine) as it starts every worker.
"""

from __future__ import annotations

import sys
import time

import numpy as np
import zmq

from ipc.lifeline import FD_ARGUMENT, ChildLife
from ipc.messages import HELLO, ConfigWorker, ModelRunnerOutput, WorkerReady
from ipc.sockets import Link
from worker.batch import BatchBuilder
from worker.request_state import RequestState


def serve(address: str, rows: int, max_len: int = 8192, *, num_blocks: int = 1, vocab_size: int = 1) -> None:
    link = Link(zmq.Context(), bind=address)
    state = RequestState(rows, max_len, 16)
    builder = BatchBuilder(state, max(8192, rows))
    token = np.full(rows, 77, np.int32)
    while True:
        link.socket.poll()
        while (item := link.receive()) is not None:
            header, plan = item
            if header.kind == HELLO:
                link.epoch = header.epoch
                link.send(WorkerReady(num_blocks, 0, max_len, vocab_size, [], "", "null"))
                continue
            received = time.monotonic_ns()
            state.apply(plan)
            batch = builder.build(plan)
            prepared = time.monotonic_ns()
            column, _ = builder.advance(batch, token[: len(batch.sample_rows)] if batch is not None else token[:0])
            link.send(
                ModelRunnerOutput(plan.step, memoryview(column).cast("B"), received_ns=received, prepared_ns=prepared)
            )


def supervised() -> None:
    """Until the supervisor's SIGTERM."""
    life = ChildLife.from_argv("worker")
    config = life.config(ConfigWorker)
    life.ready("null worker")
    vocab_size = config.model.files.config.vocab_size
    serve(config.listen, config.max_num_seqs, num_blocks=4096, vocab_size=vocab_size)


if __name__ == "__main__":
    if FD_ARGUMENT in sys.argv:
        supervised()
    else:
        serve(sys.argv[1], int(sys.argv[2]))
