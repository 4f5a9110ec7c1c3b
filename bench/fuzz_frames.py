"""Hostile frames against every decoder of the wire, against an engine core, and into a running one.

Frames are mutated from one valid example of each kind: bits flipped, bytes cut, repeated, replaced and added, numbers
made huge, headers and bodies of different kinds joined, pickles and plain noise. What must hold: a decoder answers
WireError and nothing else, allocates no more than the frame justifies, and the next good frame is read; the core
refuses or ignores what is wrong and stays whole; a running engine restarts nothing.
"""

from __future__ import annotations

import asyncio
import os
import random
import resource
import socket
import struct
import time

import zmq

from bench.server_process import ServerProcess
from bench.sim_worker import SimWorker
from bench.wire_samples import samples
from engine_core.core import EngineCore
from frontend import AsyncLLM, SamplingParams
from ipc import codec
from ipc.cli import build_config
from ipc.config import CacheConfig, Peer, SchedulerConfig
from ipc.errors import WireError
from ipc.lifeline import Lifeline
from ipc.messages import HELLO, Abort, AddRequest, Command, WorkerReady
from ipc.sockets import Link, Router

PICKLE = b"\x80\x04\x95\x1a\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R."
HUGE = (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x05", b"\xcf" + b"\xff" * 8, b"\xd3\x80" + b"\0" * 7, b"\xcb\x7f\xf0" + b"\0" * 6)
NUMBER = 77  # of the frontend that sends them
VOCAB, NUM_BLOCKS, BLOCK = 50, 40, 4
MAX_GROWTH_MIB = 100


class Mutator:
    """Frames, one after the other, from one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.valid = [bytes(codec.encode(message, 1, 1)[0]) for message in samples()]
        self.valid += [bytes(codec.hello("frontend", NUMBER, 1, 1)[0])]

    def next(self) -> bytes:
        rng = self.rng
        kind = rng.random()
        if kind < 0.02:
            return rng.randbytes(rng.randrange(200))
        if kind < 0.03:
            return PICKLE
        frame = bytearray(rng.choice(self.valid))
        if kind < 0.08:  # a body under another kind's header
            frame[codec.HEADER.size :] = rng.choice(self.valid)[codec.HEADER.size :]
        for _ in range(rng.choice((1, 1, 1, 2, 5))):
            self._mutate(frame)
        if rng.random() < 0.8 and len(frame) >= codec.HEADER.size:  # else most would end at the announced length
            struct.pack_into("<I", frame, codec.HEADER.size - 4, len(frame) - codec.HEADER.size)
        return bytes(frame)

    def _mutate(self, frame: bytearray) -> None:
        rng = self.rng
        start = codec.HEADER.size if rng.random() < 0.8 else 0
        if len(frame) <= start:
            return
        at = rng.randrange(start, len(frame))
        what = rng.randrange(7)
        if what == 0:
            frame[at] ^= 1 << rng.randrange(8)
        elif what == 1:
            frame[at] = rng.randrange(256)
        elif what == 2:
            del frame[at:]
        elif what == 3:
            del frame[at : at + rng.randrange(1, 9)]
        elif what == 4:
            frame[at:at] = rng.choice(HUGE)
        elif what == 5:
            end = min(len(frame), at + 12)
            frame[at:at] = frame[at:end] * rng.choice((1, 3, 400))
        else:
            frame[at:at] = bytes([rng.choice((0x80, 0x90, 0xC0, 0xC1, 0xC7, 0xD4))]) * rng.choice((1, 2, 300))


def peak_rss_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class WireFuzz:
    """The stages that need no processes. Counts what happened; raises on the first thing that must not."""

    def __init__(self, seed: int) -> None:
        self.mutator = Mutator(seed)
        self.counts = {"refused": 0, "decoded": 0, "core_messages": 0}

    def decoders(self, count: int) -> None:
        """codec.decode, which every socket and lifeline goes through."""
        before = peak_rss_mib()
        for _ in range(count):
            frames = [self.mutator.next()]
            if self.mutator.rng.random() < 0.02:
                frames.append(self.mutator.next())
            try:
                codec.decode(frames)
                self.counts["decoded"] += 1
            except WireError:
                self.counts["refused"] += 1
        if peak_rss_mib() > before + MAX_GROWTH_MIB:
            raise AssertionError(f"decoding grew the process from {before:.0f} to {peak_rss_mib():.0f} MiB")

    def sockets(self, count: int) -> None:
        """A ROUTER, a DEALER and a lifeline get them over real sockets; then each must still read a good frame."""
        context = zmq.Context()
        name = f"inproc://fuzz-{os.getpid()}-{time.monotonic_ns()}"
        router, link = Router(context, name + "-router"), Link(context, bind=name + "-link")
        senders = []
        for suffix in ("-router", "-link"):
            sender = context.socket(zmq.DEALER)
            sender.setsockopt(zmq.LINGER, 0)
            sender.connect(name + suffix)
            senders.append(sender)
        good = codec.hello("frontend", NUMBER, 1, 1)
        senders[0].send_multipart(good)
        list(router.drain())
        for _ in range(count):
            frames = [self.mutator.next() for _ in range(self.mutator.rng.choice((1, 1, 1, 2)))]
            for sender, end in ((senders[0], router), (senders[1], link)):
                sender.send_multipart(frames)
                for _ in end.drain():
                    pass
            self._lifeline(frames[0])
        router.numbers.clear()
        for sender, end in ((senders[0], router), (senders[1], link)):
            sender.send_multipart(good)
            if [item[-2].kind for item in end.drain()] != [HELLO]:
                raise AssertionError("a good frame was not read after hostile ones")
        for sender in senders:
            sender.close()
        router.close()
        link.close()
        context.term()

    def _lifeline(self, frame: bytes) -> None:
        ours, theirs = socket.socketpair()
        lifeline = Lifeline(ours)
        theirs.sendall(frame[: 1 << 16])
        theirs.close()
        try:
            lifeline.receive()
        except WireError:
            pass
        lifeline.close()

    def core(self, count: int) -> None:
        """Whatever decodes as a frontend's message goes to an engine core, which runs between them."""
        core = EngineCore(
            SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, async_scheduling=False),
            CacheConfig(block_size=BLOCK),
            WorkerReady(NUM_BLOCKS, 0, 100, VOCAB, [7], "float32", "simulated"),
            b"k" * 32,
        )
        worker = SimWorker(NUM_BLOCKS, BLOCK, 0, VOCAB)
        requests = [bytes(codec.encode(m)[0]) for m in samples() if isinstance(m, (AddRequest, Abort, Command))]
        requests += [bytes(codec.encode(self._request(i))[0]) for i in range(20)]
        mutator = Mutator(self.mutator.rng.randrange(1 << 30))
        mutator.valid = requests
        for i in range(count):
            try:
                message = codec.decode([mutator.next()])[1]
            except WireError:
                continue
            if isinstance(message, Command) and message.name == "dump_recording":
                continue
            self.counts["core_messages"] += 1
            core.handle(NUMBER, message)
            for _ in range(2):
                if core.can_plan() and (plan := core.plan()) is not None:
                    core.plan_sent(0)
                    core.commit(worker.execute(plan))
            for number, _ in core.take_outputs(0):
                core.outbox.sent(number)
            if i % 1000 == 0:
                core.scheduler.check_invariants(list(core.requests.values()))
        core.frontend_gone(NUMBER)
        core.scheduler.check_invariants([])
        if core.scheduler.blocks.num_free != NUM_BLOCKS:
            raise AssertionError(f"{core.scheduler.blocks.num_free} of {NUM_BLOCKS} blocks are free after all left")

    def _request(self, i: int) -> AddRequest:
        rng = self.mutator.rng
        prompt = struct.pack(f"<{1 + i}i", *(rng.randrange(VOCAB) for _ in range(1 + i)))
        return AddRequest(NUMBER << 40 | i + 1, memoryview(prompt), SamplingParams(max_tokens=3 + i % 5, seed=i))


async def into_a_running_core(server: ServerProcess, model: str, seed: int, count: int) -> None:
    """Frames into the socket of a live core, before and after a Hello, while a stream must stay exact.

    Raises AssertionError when a stream differs or the core's books do not agree.
    """
    mutator = Mutator(seed)
    llm = await AsyncLLM.attach(Peer(server.core_address, 1), NUMBER + 1, build_config(model, {}, serve=False).model)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)

    async def stream() -> list[int]:
        tokens: list[int] = []
        async for output in llm.generate([5, 6, 7], params, output_kind="delta"):
            tokens += output.outputs[0].token_ids
        return tokens

    wanted = await stream()
    context = zmq.Context()
    sender = context.socket(zmq.DEALER)
    sender.setsockopt(zmq.LINGER, 0)
    sender.connect(server.core_address)
    task = asyncio.create_task(stream())
    num_sent = 0
    while num_sent < count:
        frame = mutator.next()
        if num_sent == count // 10:
            frame = bytes(codec.hello("frontend", NUMBER, 1, 1)[0])
        if _is_hello_of_another(frame):
            continue
        sender.send(frame)
        num_sent += 1
        if num_sent % 200 == 0:
            await asyncio.sleep(0)
        if task.done():
            if task.result() != wanted:
                raise AssertionError(f"a stream has {task.result()} instead of {wanted}")
            task = asyncio.create_task(stream())
    if await task != wanted or await stream() != wanted:
        raise AssertionError("a stream differs after hostile frames")
    sender.send_multipart(codec.hello("frontend", NUMBER, 1, 1))  # it comes anew: what it asked for is dropped
    await asyncio.sleep(0.2)
    await llm.check_invariants()
    await llm.close()
    sender.close()
    context.term()


def _is_hello_of_another(frame: bytes) -> bool:
    """A Hello under the number of a frontend that lives would be that frontend coming anew; not what is tried here."""
    try:
        header = codec.read_header(frame)
    except WireError:
        return False
    return header.kind == HELLO and header.sequence >> 32 != NUMBER
