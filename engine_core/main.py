"""The engine core process: sockets, handshake, and the loop that is its table of contents.

Started by the supervisor as `python -m engine_core.main`. One thread; the poll is the only place where it sleeps.
"""
from __future__ import annotations

import gc
import logging
import os
import tempfile
import time
import traceback

import msgspec
import zmq

from engine_core.core import EngineCore
from engine_core.nap import NAMES as NAP_NAMES
from engine_core.nap import Nap
from engine_core.recorder import (ABORT_STEP, COMMIT, GONE, GRAMMAR_PREPARED, HANDLE, WORKER_LOST, WORKER_REPLACED,
                                  NoRecorder, Recorder)
from engine_core.snapshot import Origin
from engine_core.worker_relay import NAMES as RELAY_NAMES
from engine_core.worker_relay import WorkerRelay
from ipc.config import CoreProcess
from ipc.errors import ConfigError
from ipc.lifeline import ChildLife
from ipc.messages import (EMPTY, HELLO, SERVING, Command, CommandReply, ConfigCore, EngineReady, GrammarPrepared,
                          HelloAck, ModelRunnerOutput, PeerDown, PeerUp, Phase, Profiled, Shutdown, Sleep, Slept,
                          StepFailed, WorkerReady)
from ipc.process import configure_logging
from ipc.progress import PLANS, Progress
from ipc.sockets import Link, Router
from ipc.step_ring import StepRing

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
        self.news: list[PeerUp | PeerDown] = []  # what the supervisor said of other processes, for the loop to take

    def poll(self, timeout_ms: int) -> None:
        """Sleep until something arrives. Notes a Shutdown; ends the process when the supervisor is gone."""
        fd = self.life.lifeline.fileno()
        if self.life.early or any(source == fd for source, _ in self.poller.poll(timeout_ms)):
            for message in self.life.receive():
                self.is_stopping |= isinstance(message, Shutdown)
                if isinstance(message, (PeerUp, PeerDown)):
                    self.news.append(message)
            if self.life.lifeline.is_closed:
                self.life.exit_orphaned()

    def replace_worker(self, up: PeerUp) -> None:
        """A new process plays this rank: greet it. It answers WorkerReady once its weights are there."""
        old = self.workers[up.rank]
        self.poller.unregister(old.socket)
        old.close()
        link = Link(self.context, connect=up.peer.address)
        link.epoch = self.frontends.epoch
        link.hello("engine_core", 0, os.getpid())
        self.poller.register(link.socket, zmq.POLLIN)
        self.workers[up.rank] = link

    def tell(self, replies: list[tuple[int, CommandReply]]) -> None:
        """Answers of this process itself, each to its frontend."""
        for number, reply in replies:
            self.frontends.send(number, reply)

    def send_plan(self, plan: object) -> bytes:
        """To every worker; returns the frame that rank 0 got."""
        return [link.send(plan) for link in self.workers][0]

    def close(self) -> None:
        self.frontends.close(linger_ms=200)
        for link in self.workers:
            link.close()
        self.context.term()


def await_workers(links: Links, waiting_frontends: set[int]) -> WorkerReady:
    """Until every worker is ready: pass its phases on to frontends, remember who said Hello. A worker may be replaced
    meanwhile."""
    ready: list[WorkerReady | None] = [None] * len(links.workers)
    while not links.is_stopping and not all(ready):
        links.poll(1000)
        for news in links.news:
            if news.role == "worker":
                ready[news.rank] = None
                if isinstance(news, PeerUp):
                    links.replace_worker(news)
            elif news.role == "frontend" and isinstance(news, PeerDown):
                waiting_frontends.discard(news.rank)
                links.frontends.forget(news.rank)
        links.news.clear()
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


def run(core: EngineCore, links: Links, ready: EngineReady, recorder: Recorder, progress: Progress,
        plans: Progress) -> None:
    """Serve until Shutdown. `plans` says since when the worker owes an answer: one that is stopped cannot say so."""
    clock = time.monotonic_ns
    last_beat = clock()
    relay, nap = WorkerRelay(), Nap()
    steps = core.step, core.committed_step
    has_worker = True                           # false between a worker's end and its successor's WorkerReady
    while not links.is_stopping:
        progress.working()
        links.poll(max(1, (last_beat + BEAT_NS - clock()) // 1_000_000 + 1))
        for news in links.news:
            has_worker &= take_news(core, links, recorder, news)
        links.news.clear()
        rank0 = links.workers[0]
        was_asked = False
        for number, header, message in links.frontends.drain():
            if header.kind == HELLO:
                recorder.note(GONE, number, ())
                core.frontend_gone(number)
                links.frontends.send(number, ready)
            else:
                if isinstance(message, Command) and message.name in RELAY_NAMES:
                    rank0.send(relay.ask(number, message))
                    was_asked = True
                    continue
                if isinstance(message, Command) and message.name in NAP_NAMES:
                    links.tell(nap.ask(number, message))
                    continue
                recorder.note(HANDLE, number, links.frontends.last_frames)
                reply = core.handle(number, message)
                if reply is not None:
                    links.frontends.send(number, reply)
        for _, message in rank0.drain():
            if isinstance(message, ModelRunnerOutput):
                recorder.note(COMMIT, 0, rank0.last_frames)
                core.commit(message, clock())
                core.committed(clock())
            elif isinstance(message, StepFailed):
                recorder.note(ABORT_STEP, 0, rank0.last_frames)
                logger.error("step %d failed: %s\n%s", message.step, message.reason, message.traceback)
                core.abort_step(message)
            elif isinstance(message, WorkerReady):
                check_successor(core, message)
                has_worker = True
                recorder.note(WORKER_REPLACED, 0, ())
                core.worker_replaced()
                relay.forget_own()
                links.tell(nap.woken())
                for number in links.frontends.numbers.values():
                    links.frontends.send(number, Phase("engine_core", SERVING, 1.0))
            elif isinstance(message, Slept):
                links.tell(nap.slept())
            elif isinstance(message, GrammarPrepared) and (grammar := relay.prepared(message)) is not None:
                recorder.note(GRAMMAR_PREPARED, 0, [grammar])
                core.grammar_prepared(grammar)
                was_asked = True                # what is still owed is owed since now
            elif isinstance(message, (Profiled, GrammarPrepared)) and (told := relay.answer(message)) is not None:
                links.frontends.send(*told)
            elif isinstance(message, Phase):
                for number in links.frontends.numbers.values():
                    links.frontends.send(number, message)
        for number, lost in relay.lost() if not has_worker else ():
            links.frontends.send(number, lost)
        while has_worker and core.holds.unasked:
            rank0.send(relay.ask_for(core.holds.unasked.pop(0)))
            was_asked = True
        for link in links.workers[1:]:
            for _ in link.drain():
                pass
        order = nap.next_message(len(core.scheduler.rows.in_flight)) if has_worker else None
        if order is not None:
            if isinstance(order, Sleep):
                recorder.note(WORKER_LOST, 0, ())
                core.worker_lost("it was sent to sleep")
            for link in links.workers:
                link.send(order)
        while has_worker and nap.may_plan and recorder.turn() and core.can_plan():
            plan = core.plan(clock())
            planned_ns = clock()
            if plan is None:
                recorder.note_plan(b"")
                break
            recorder.note_plan(links.send_plan(plan))
            core.plan_sent(clock(), planned_ns)
        if not has_worker or not (core.scheduler.rows.in_flight or nap.is_owed or relay.is_owed):
            plans.waiting()
        elif was_asked or order is not None or steps != (core.step, core.committed_step):
            plans.working()
        steps = core.step, core.committed_step
        now = clock()
        for number, outputs in core.take_outputs(now):
            if links.frontends.send(number, outputs):
                core.outbox.sent(number)
        for number in links.frontends.unreachable:
            recorder.note(GONE, number, ())
            core.frontend_gone(number)
            links.frontends.forget(number)
        links.frontends.unreachable.clear()
        if now - last_beat >= BEAT_NS:
            last_beat = now
            for number in links.frontends.numbers.values():
                if links.frontends.send(number, core.beat(number, now)):
                    core.outbox.told(number, now)


def take_news(core: EngineCore, links: Links, recorder: Recorder, news: PeerUp | PeerDown) -> bool:
    """Another process ended or began. False: the worker is gone and no plan can be sent."""
    if news.role == "frontend" and isinstance(news, PeerDown):
        recorder.note(GONE, news.rank, ())
        core.frontend_gone(news.rank)
        links.frontends.forget(news.rank)
    elif news.role == "worker" and isinstance(news, PeerDown):
        logger.warning("%s; %d requests wait for its successor", news.reason, len(core.requests))
        recorder.note(WORKER_LOST, 0, ())
        core.worker_lost(news.reason)
        return False
    elif news.role == "worker" and isinstance(news, PeerUp):
        links.replace_worker(news)
        return False
    return True


def check_successor(core: EngineCore, ready: WorkerReady) -> None:
    """Raises RuntimeError when a restarted worker offers less than the one before: blocks are numbered already."""
    before = core.ready
    if ready.num_blocks < before.num_blocks or ready.num_host_blocks < before.num_host_blocks:
        raise RuntimeError(f"the new worker has {ready.num_blocks} blocks and {ready.num_host_blocks} host slots, the "
                           f"old one had {before.num_blocks} and {before.num_host_blocks}")


def recording_path(config: CoreProcess) -> str:
    folder = config.flight_recorder_dir or tempfile.gettempdir()
    return os.path.join(folder, f"threefold-flight-{os.getpid()}-{time.strftime('%H%M%S')}.msgpack")


def serve(config: CoreProcess, life: ChildLife) -> None:
    links = Links(config, life)
    waiting_frontends: set[int] = set()
    worker = await_workers(links, waiting_frontends)
    if not links.is_stopping:
        core = EngineCore(config.scheduler, config.cache, worker, config.hash_key)
        core.outbox.ring = StepRing(config.run_dir, "engine_core-0")
        core.kept.take(worker, core.scheduler.blocks)
        worker = msgspec.structs.replace(worker, kept=[], kept_tokens=EMPTY, kept_blocks=EMPTY)
        ready = EngineReady(worker.num_blocks, config.cache.block_size, worker.max_model_len, worker.vocab_size,
                            worker.eos_token_ids, config.scheduler.max_num_seqs, worker.dtype, worker.detail)
        for number in waiting_frontends:
            links.frontends.send(number, ready)
        life.ready(worker.detail)
        origin = Origin(config.scheduler, config.cache, worker, config.hash_key)
        recorder = Recorder(core, origin) if config.flight_recorder else NoRecorder(core, origin)
        if config.flight_recorder:
            core.on_dump = lambda: recorder.dump(recording_path(config))
        gc.freeze()
        try:
            run(core, links, ready, recorder, Progress(config.run_dir, "engine_core-0"),
                Progress(config.run_dir, PLANS))
        except Exception as error:
            error.add_note(f"flight recording: {recorder.dump(recording_path(config))}; see launch.py replay")
            raise
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
