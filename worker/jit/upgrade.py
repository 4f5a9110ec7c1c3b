"""From torch to the compiled model while requests run: compile in another process, pack the weights in a thread, then
change places between two steps.

    serving      torch model over pools in the kernels' layout ...............  compiled model
    process      compile kernels (once per machine)
    thread                            load them, pack the weights

Both models read and write the same pools, so rows in flight keep their keys and values; tokens still to come are those
of the compiled model, which differ where rounding decides. Knows no steps: the worker's loop asks between them.
"""
from __future__ import annotations

import logging
import threading
import time

import torch

from ipc.capacity import size_text, weight_count
from ipc.config import WorkerProcess
from worker.jit import build, compiler, features
from worker.sampling import jit_threads

logger = logging.getLogger("worker")


def reason_to_wait(config: WorkerProcess, free_bytes: int) -> str | None:
    """Why this worker compiles before it serves, or None if torch may serve meanwhile."""
    if config.model.batch_invariant:
        return "--batch-invariant: a change of kernels would change tokens"
    if config.attention_backend == "jit":
        return "--attention-backend jit was asked for"
    if not features.is_cache_writable():
        return f"{features.cache_folder()} cannot be written, so this process compiles them, as each start will"
    both = 2 * 4 * weight_count(config.model.files.config)
    if both > free_bytes // 2:
        return f"torch's and the kernels' weights, up to {size_text(both)}, are more than half of the free memory"
    return None


class Upgrade:
    """`take` returns the compiled model once; is_over: it was taken, or it failed and torch goes on, also after a
    sleep."""

    phase = "compile kernels"

    def __init__(self, config: WorkerProcess, choice: build.Choice) -> None:
        self.config, self.choice, self.is_over, self.began = config, choice, False, time.monotonic()
        self._compilation = compiler.Compilation(config.model.files.config.vocab_size)
        self._thread: threading.Thread | None = None
        self._built: build.Compiled | None = None
        self._error: str | None = None

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def take(self) -> build.Compiled | None:
        """The model when it is ready to run; cheap otherwise."""
        if self.is_over:
            return None
        if self._thread is None:
            if not self._compilation.is_over():
                return None
            failure = self._compilation.failure()
            if failure is not None:
                self._give_up(failure)
                return None
            self._thread = threading.Thread(target=self._build, name="build", daemon=True)
            self._thread.start()
        elif not self._thread.is_alive():
            if self._error is not None:
                self._give_up(self._error)
            else:
                self.is_over = True
                built, self._built = self._built, None
                torch.set_num_threads(1)        # one pool of threads computes: from here on the kernels' own
                return built
        return None

    def _build(self) -> None:
        try:
            build.start_kernels(self.config.num_threads)
            jit_threads.warm_up(self.config.model.files.config.vocab_size)
            self._built = build.build(self.config, self.choice, lambda fraction: None)
        except Exception as error:              # whatever it is: torch can go on
            self._error = f"{type(error).__name__}: {error}"

    def _give_up(self, why: str) -> None:
        self.is_over = True
        features.give_up(why)
        logger.error("no compiled kernels (%s); torch goes on serving", why)
