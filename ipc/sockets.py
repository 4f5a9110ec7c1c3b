"""ZeroMQ endpoints that carry messages: the core's ROUTER, DEALER links, their asyncio form, and an in-memory pair.

All are non-blocking: a process sleeps in one place of its own, its poll. A frame that is no message of ours is dropped
and counted, never raised into a loop. Does not know what the messages mean.
"""
from __future__ import annotations

import asyncio
import collections
import logging
from collections.abc import Callable, Iterator
from typing import Any

import zmq

from ipc.codec import Header, check_hello, decode, encode, hello
from ipc.errors import WireError
from ipc.messages import HELLO, HelloAck

logger = logging.getLogger(__name__)

MAX_FRONTEND_NUMBER = (1 << 23) - 1             # request ids, number << 40 | counter, are int64
OUTPUT_QUEUE_MESSAGES = 256                     # per frontend, before the core coalesces its outputs


class Endpoint:
    """Common ground: counters of what was dropped, and the sequence number of what is sent."""

    def __init__(self, socket: zmq.Socket) -> None:
        self.socket = socket
        self.epoch = 0
        self.num_bad_frames = self.num_unsent = 0
        self.last_frames: list[Any] = []        # of the message that was returned last, without the routing id
        self._sequence = 0

    def close(self, linger_ms: int = 0) -> None:
        self.socket.close(linger=linger_ms)

    def _recv(self) -> list[Any] | None:
        if not int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:       # costs less than the exception
            return None
        try:
            return self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def _refuse(self, error: WireError) -> None:
        self.num_bad_frames += 1
        if self.num_bad_frames <= 10 or self.num_bad_frames % 1000 == 0:
            logger.warning("dropped a frame (%d so far): %s", self.num_bad_frames, error)


class Link(Endpoint):
    """A DEALER with one peer. The side that may outlive the other binds."""

    def __init__(self, context: zmq.Context, *, bind: str | None = None, connect: str | None = None,
                 identity: bytes | None = None) -> None:
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        if identity is not None:
            socket.setsockopt(zmq.IDENTITY, identity)
        super().__init__(socket)
        if bind is not None:
            socket.bind(bind)
        if connect is not None:
            socket.connect(connect)

    def hello(self, role: str, rank: int, pid: int) -> None:
        self.socket.send_multipart(hello(role, rank, pid, self.epoch))

    def send(self, message: Any) -> bytes:
        """Returns the first frame."""
        self._sequence += 1
        frames = encode(message, self.epoch, self._sequence)
        try:
            if len(frames) == 1:
                self.socket.send(frames[0], zmq.NOBLOCK)
            else:
                self.socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:                       # the peer is gone, and with it who would read this
            self.num_unsent += 1
        return bytes(frames[0])                 # is bytes already: not copied

    def receive(self) -> tuple[Header, Any] | None:
        """The next message, or None when nothing waits."""
        while True:
            frames = self._recv()
            if frames is None:
                return None
            try:
                header, message = decode(frames)
                if header.kind == HELLO:
                    check_hello(header)
                self.last_frames = frames
                return header, message
            except WireError as error:
                self._refuse(error)

    def drain(self) -> Iterator[tuple[Header, Any]]:
        while (item := self.receive()) is not None:
            yield item


class Router(Endpoint):
    """The core's socket for all frontends. A frontend exists from its Hello on; bytes before it are dropped."""

    def __init__(self, context: zmq.Context, bind: str) -> None:
        socket = context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.SNDHWM, OUTPUT_QUEUE_MESSAGES)
        socket.setsockopt(zmq.RCVHWM, 0)
        super().__init__(socket)
        self.identities: dict[int, bytes] = {}  # frontend number -> routing id
        self.numbers: dict[bytes, int] = {}
        self.unreachable: set[int] = set()      # frontends whose connection is gone, for the loop to take
        socket.bind(bind)

    def drain(self) -> Iterator[tuple[int, Header, Any]]:
        """(frontend number, header, message) of everything that waits. A Hello has message None."""
        while (frames := self._recv()) is not None:
            identity = frames[0]
            try:
                header, message = decode(frames[1:])
                if header.kind == HELLO:
                    role, number, _ = check_hello(header)
                    if role != "frontend":
                        raise WireError(f"a {role} said Hello to the frontends' socket")
                    if number > MAX_FRONTEND_NUMBER:
                        raise WireError(f"frontend number {number}; at most {MAX_FRONTEND_NUMBER}")
                    self.identities[number] = identity
                    self.numbers[identity] = number
                number = self.numbers.get(identity, -1)
                if number < 0:
                    raise WireError(f"{type(message).__name__} before Hello")
            except WireError as error:
                self._refuse(error)
                if "schema" in str(error):
                    self._send(identity, HelloAck(str(error)))
                continue
            self.last_frames = frames[1:]
            yield number, header, message

    def forget(self, number: int) -> None:
        """This frontend has ended."""
        identity = self.identities.pop(number, None)
        if identity is not None:
            self.numbers.pop(identity, None)

    def send(self, number: int, message: Any) -> bool:
        """False when this frontend cannot take it now (or is gone); nothing was sent then."""
        identity = self.identities.get(number)
        return identity is not None and self._send(identity, message)

    def _send(self, identity: bytes, message: Any) -> bool:
        self._sequence += 1
        try:
            self.socket.send_multipart([identity, *encode(message, self.epoch, self._sequence)], zmq.NOBLOCK)
            return True
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            if identity in self.numbers:
                self.unreachable.add(self.numbers[identity])
            return False


class AsyncLink(Link):
    """A Link read by an asyncio loop. The socket's descriptor only signals edges, so every wake and every send reads
    until nothing is left."""

    def __init__(self, context: zmq.Context, connect: str, identity: bytes,
                 on_message: Callable[[Header, Any], None]) -> None:
        super().__init__(context, connect=connect, identity=identity)
        self._on_message = on_message
        self._loop: asyncio.AbstractEventLoop | None = None
        self._scheduled = False

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        loop.add_reader(self.socket.fileno(), self._read)
        self._read()

    def send(self, message: Any) -> bytes:
        frame = super().send(message)
        if self._loop is not None and not self._scheduled:      # sending may have swallowed the edge of an arrival
            self._scheduled = True
            self._loop.call_soon(self._read)
        return frame

    def _read(self) -> None:
        self._scheduled = False
        if self.socket.closed:                  # it was scheduled by a send just before the close
            return
        for header, message in self.drain():
            self._on_message(header, message)
            if self.socket.closed:
                return

    def close(self, linger_ms: int = 0) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self.socket.fileno())
        self._loop = None
        super().close(linger_ms)


class MemoryLink:
    """One end of an in-memory pair with a Link's send and receive; messages go through the codec. For tests and for
    running all parts in one process."""

    def __init__(self) -> None:
        self._inbox: collections.deque[list[Any]] = collections.deque()
        self.peer: MemoryLink = self
        self.epoch = 0

    @staticmethod
    def pair() -> tuple[MemoryLink, MemoryLink]:
        a, b = MemoryLink(), MemoryLink()
        a.peer, b.peer = b, a
        return a, b

    def send(self, message: Any) -> bytes:
        frames = encode(message, self.epoch)
        self.peer._inbox.append(frames)
        return bytes(frames[0])                 # is bytes already: not copied

    def receive(self) -> tuple[Header, Any] | None:
        return decode(self._inbox.popleft()) if self._inbox else None

    def drain(self) -> Iterator[tuple[Header, Any]]:
        while (item := self.receive()) is not None:
            yield item
