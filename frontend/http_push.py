"""Pieces of a chunked answer, written from any callback of the loop: past ASGI, and past the transport where it can be.

For an event of one token, ASGI's coroutine and dict cost as much as the kernel, and the transport a fifth of that. So
an event goes straight to the connection's socket while the transport has nothing of its own to send; what the kernel
does not take goes to the transport, and then everything does until its buffer is empty. The events of one message from
the core are sent together, behind it: the kernel's code and Python's then drive each other out of the caches once, not
once for each event. Knows HTTP/1.1's chunks, not what is in them.
"""
from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

PUSH = "threefold.push"         # in scope["extensions"]: a Push
MAX_FORM_BYTES = 4096           # of the head and tail of a ChunkForm, and of its middle
_TAILS: dict[bytes, bytes] = {}  # one object for all answers whose pieces end alike, which then stays in the caches
_MAX_TAILS = 64
_SIZES = [b"%x\r\n" % size for size in range(2 * MAX_FORM_BYTES + 1)]   # the line before a chunk of so many bytes


class BorrowedSocket(socket.socket):
    """A transport's socket, to write to. It never closes the descriptor; `detach` it before the transport does."""

    __slots__ = ()

    def __del__(self) -> None:
        self.detach()

    @classmethod
    def of(cls, transport: asyncio.BaseTransport) -> BorrowedSocket | None:
        """None: what is written is not what goes over the wire (TLS), or there is no socket."""
        sock = transport.get_extra_info("socket")
        if sock is None or transport.get_extra_info("sslcontext") is not None:
            return None
        borrowed = cls(sock.family, sock.type, sock.proto, fileno=sock.fileno())
        borrowed.setblocking(False)
        return borrowed


class Outbox:
    """Chunks that were taken in this turn of the loop and go to their sockets in the next. One for each server."""

    __slots__ = ("_loop", "chunks", "forms")

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self.forms: list[ChunkForm] = []
        self.chunks: list[bytes] = []           # one for each form

    def schedule(self) -> None:
        """The first chunk is about to be put in."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Send them, in order. What else writes to one of these connections flushes first."""
        forms, chunks = self.forms, self.chunks
        self.forms, self.chunks = [], []
        for form, chunk in zip(forms, chunks):
            try:
                num_sent = form.send(chunk)
            except OSError:
                num_sent = 0
            if num_sent != len(chunk):
                form.push.write_rest(chunk[num_sent:])


class Push:
    """The body of one answer. `is_open`: a piece would be written; not before the headers are out, not after the end,
    not while somebody else writes, and not while the client reads so slowly that the piece should wait and grow."""

    __slots__ = ("_borrow", "_flow", "_forms", "_num_writers", "_outbox", "_transport", "cycle")

    def __init__(self, cycle: RequestResponseCycle, borrow: Callable[[], socket.socket | None], outbox: Outbox) -> None:
        self.cycle = cycle
        self._flow: FlowControl = cycle.flow
        self._transport = cycle.transport
        self._borrow = borrow
        self._outbox = outbox
        self._forms: list[ChunkForm] = []
        self._num_writers = 0

    @property
    def is_open(self) -> bool:
        cycle = self.cycle
        return bool(not self._num_writers and cycle.chunked_encoding and not cycle.response_complete
                    and not cycle.disconnected and not self._flow.write_paused)

    @property
    def is_ended(self) -> bool:
        return self.cycle.response_complete or self.cycle.disconnected

    @property
    def last_ns(self) -> int:
        """When a form was last written, on the writer's clock; 0: never."""
        return max((form.last_ns for form in self._forms), default=0)

    def hold(self) -> None:
        """ASGI's `send` is about to write, and may wait first: what comes must not overtake it."""
        self._outbox.flush()
        self._num_writers += 1
        self.settle()

    def release(self) -> None:
        """It has written, or given up."""
        self._num_writers -= 1
        self.settle()

    def settle(self) -> None:
        """Whether the socket is next, and not the transport, may have changed."""
        if self._forms:
            is_clear = self.is_open and not self._transport.get_write_buffer_size()
            for form in self._forms:
                form.is_clear = is_clear

    def lose(self) -> None:
        """The connection is gone. Tells the application, of an answer that is queued behind another one too."""
        if not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.settle()

    def __call__(self, data: bytes) -> bool:
        """Write one piece. False: it is not open."""
        if not self.is_open:
            return False
        self._outbox.flush()
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        self.settle()
        return True

    def form(self, head: bytes, tail: bytes) -> ChunkForm | None:
        """For pieces that differ in their middle only. None: they are too long, or the socket cannot be written to."""
        if self.is_ended or len(head) + len(tail) > MAX_FORM_BYTES:
            return None
        sock = self._borrow()
        if sock is None:
            return None
        self._forms.append(ChunkForm(self, sock.send, self._outbox, head, tail))
        self.settle()
        return self._forms[-1]

    def write_rest(self, data: bytes) -> None:
        """What the kernel did not take of a piece, or all of it, when it refused: then the transport hears why."""
        with contextlib.suppress(RuntimeError):         # uvloop's word for a transport that has closed
            self._transport.write(data)
        self.settle()


def _shared(tail: bytes) -> bytes:
    if len(_TAILS) >= _MAX_TAILS:
        _TAILS.clear()
    return _TAILS.setdefault(tail, tail)


class ChunkForm:
    """Chunks of one answer that begin and end alike. is_clear: the socket is next to be written to."""

    __slots__ = ("_fixed", "_head", "_outbox", "_tail", "is_clear", "last_ns", "push", "send")

    def __init__(self, push: Push, send: Callable[[bytes], int], outbox: Outbox, head: bytes, tail: bytes) -> None:
        self.push, self.send = push, send
        self.is_clear = False
        self.last_ns = 0
        self._outbox = outbox
        self._fixed = len(head) + len(tail)
        self._head, self._tail = head, _shared(tail + b"\r\n")

    def write(self, middle: bytes, now_ns: int) -> bool:
        """Send head + middle + tail as one chunk; `middle` has at most MAX_FORM_BYTES. False: use `Push`."""
        if not self.is_clear:
            return False
        outbox = self._outbox
        if not outbox.forms:
            outbox.schedule()
        outbox.forms.append(self)
        outbox.chunks.append(b"".join((_SIZES[self._fixed + len(middle)], self._head, middle, self._tail)))
        self.last_ns = now_ns
        return True
