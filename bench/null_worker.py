"""A worker process without a model, for `bench core`: real sockets, real batch preparation, a constant token."""

from __future__ import annotations

import sys
import time

import numpy as np
import zmq

from ipc.messages import HELLO, ModelRunnerOutput, WorkerReady
from ipc.sockets import Link
from worker.batch import BatchBuilder
from worker.request_state import RequestState


def serve(address: str, rows: int, max_len: int = 8192) -> None:
    link = Link(zmq.Context(), bind=address)
    state = RequestState(rows, max_len, 16)
    builder = BatchBuilder(state, max(8192, rows))
    token = np.full(rows, 77, np.int32)
    while True:
        link.socket.poll()
        while (item := link.receive()) is not None:
            header, plan = item
            if header.kind == HELLO:
                link.send(WorkerReady(1, 0, max_len, 1, [], "", "null"))
                continue
            received = time.monotonic_ns()
            state.apply(plan)
            batch = builder.build(plan)
            prepared = time.monotonic_ns()
            column, _ = builder.advance(batch, token[: len(batch.sample_rows)] if batch is not None else token[:0])
            link.send(
                ModelRunnerOutput(plan.step, memoryview(column).cast("B"), received_ns=received, prepared_ns=prepared)
            )


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
