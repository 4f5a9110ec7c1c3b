"""The engine core process: sockets, handshake, and the loop that is its table of contents.

Started by the supervisor as `python -m engine_core.main`. One thread; the poll is the only place where it sleeps.
"""
from __future__ import annotations

import gc
import logging
import os
import time
import traceback

import zmq

from engine_core.core import EngineCore
from ipc.config import CoreProcess
from ipc.errors import ConfigError
from ipc.lifeline import ChildLife
from ipc.messages import (HELLO, ConfigCore, EngineReady, HelloAck, ModelRunnerOutput, Outputs, Phase, Shutdown,
                          StepFailed, WorkerReady)
from ipc.process import configure_logging
from ipc.sockets import Link, Router

logger = logging.getLogger("engine_core")

BEAT_NS = 1_000_000_000                         # an idle core says once a second that it lives


class Links:
    """The sockets of the core: frontends, workers (rank 0 answers), and the supervisor's lifeline."""

    def __init__(self, config: CoreProcess, life: ChildLife) -> None:
        self.context = zmq.Context()
        self.life = life
        self.frontends = Router(self.context, config.listen)
        self.frontends.epoch = config.epoch
        self.workers: list[Link] = []
        for peer in config.workers:
            link = Link(self.context, connect=peer.address)
            link.epoch = config.epoch
            link.hello("engine_core", 0, os.getpid())
            self.workers.append(link)
        self.poller = zmq.Poller()
        self.poller.register(self.frontends.socket, zmq.POLLIN)
        for link in self.workers:
            self.poller.register(link.socket, zmq.POLLIN)
        self.poller.register(life.lifeline.fileno(), zmq.POLLIN)
        self.is_stopping = False

    def poll(self, timeout_ms: int) -> None:
        """Sleep until something arrives. Notes a Shutdown; ends the process when the supervisor is gone."""
        fd = self.life.lifeline.fileno()
        if any(source == fd for source, _ in self.poller.poll(timeout_ms)):
            for _, message in self.life.lifeline.receive():
                self.is_stopping |= isinstance(message, Shutdown)
            if self.life.lifeline.is_closed:
                self.life.exit_orphaned()

    def send_plan(self, plan: object) -> None:
        for link in self.workers:
            link.send(plan)

    def close(self) -> None:
        self.frontends.close(linger_ms=200)
        for link in self.workers:
            link.close()
        self.context.term()


def await_workers(links: Links, waiting_frontends: set[int]) -> WorkerReady:
    """Until every worker is ready: pass its phases on to frontends, remember who said Hello."""
    ready: list[WorkerReady | None] = [None] * len(links.workers)
    while not links.is_stopping and not all(ready):
        links.poll(1000)
        for number, header, _ in links.frontends.drain():
            if header.kind == HELLO:
                waiting_frontends.add(number)
        for rank, link in enumerate(links.workers):
            for _, message in link.drain():
                if isinstance(message, HelloAck):
                    raise ConfigError(f"worker {rank} refused the core: {message.refused}")
                if isinstance(message, Phase):
                    for number in waiting_frontends:
                        links.frontends.send(number, message)
                elif isinstance(message, WorkerReady):
                    ready[rank] = message
    return ready[0] or WorkerReady(0, 0, 0, 0, [], "", "stopping")


def run(core: EngineCore, links: Links, ready: EngineReady) -> None:
    """Serve until Shutdown."""
    clock = time.monotonic_ns
    last_beat = clock()
    rank0 = links.workers[0]
    while not links.is_stopping:
        links.poll(max(1, (last_beat + BEAT_NS - clock()) // 1_000_000 + 1))
        for number, header, message in links.frontends.drain():
            if header.kind == HELLO:
                core.frontend_gone(number)
                links.frontends.send(number, ready)
            else:
                reply = core.handle(number, message)
                if reply is not None:
                    links.frontends.send(number, reply)
        for _, message in rank0.drain():
            if isinstance(message, ModelRunnerOutput):
                core.commit(message, clock())
            elif isinstance(message, StepFailed):
                logger.error("step %d failed: %s\n%s", message.step, message.reason, message.traceback)
                core.abort_step(message)
        for link in links.workers[1:]:
            for _ in link.drain():
                pass
        while core.can_plan():
            plan = core.plan(clock())
            if plan is None:
                break
            links.send_plan(plan)
            core.plan_sent(clock())
        now = clock()
        for number, outputs in core.take_outputs(now):
            if links.frontends.send(number, outputs):
                core.outbox.sent(number)
        if now - last_beat >= BEAT_NS:
            last_beat = now
            for number in links.frontends.numbers.values():
                links.frontends.send(number, core.fill(Outputs(0)))


def serve(config: CoreProcess, life: ChildLife) -> None:
    links = Links(config, life)
    waiting_frontends: set[int] = set()
    worker = await_workers(links, waiting_frontends)
    if not links.is_stopping:
        core = EngineCore(config.scheduler, config.cache, worker, config.hash_key)
        ready = EngineReady(worker.num_blocks, config.cache.block_size, worker.max_model_len, worker.vocab_size,
                            worker.eos_token_ids, config.scheduler.max_num_seqs, worker.dtype, worker.detail)
        for number in waiting_frontends:
            links.frontends.send(number, ready)
        life.ready(worker.detail)
        gc.freeze()
        run(core, links, ready)
    links.close()


def main() -> None:
    life = ChildLife.from_argv("engine_core")
    try:
        config = life.config(ConfigCore)
        configure_logging("engine_core", config.log_level)
        serve(config, life)
    except ConfigError as error:
        life.fail(str(error))
    except Exception as error:                  # the process ends; its reason must reach the screen
        life.fail(f"engine core: {type(error).__name__}: {error}", traceback.format_exc())


if __name__ == "__main__":
    main()
