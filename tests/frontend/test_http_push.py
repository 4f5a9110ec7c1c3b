"""Pieces written past the transport: in order with what goes through it, whatever the kernel takes, and no descriptor
is used or closed that is not ours any more."""
from __future__ import annotations

import asyncio
import random
import socket
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop
from uvicorn.protocols.http.flow_control import FlowControl

from frontend.http_push import BorrowedSocket, ChunkForm, Outbox, Push

pytestmark = pytest.mark.timeout(30)


class Connection(asyncio.Protocol):
    """The server's end of one connection, with an answer that has begun."""

    transport: asyncio.Transport
    sock: BorrowedSocket | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.flow = FlowControl(transport)
        self.cycle: Any = SimpleNamespace(flow=self.flow, transport=transport, chunked_encoding=True,
                                          response_complete=False, disconnected=False, message_event=asyncio.Event())
        self.outbox = Outbox()
        self.push = Push(self.cycle, self.borrow, self.outbox)

    def borrow(self) -> BorrowedSocket | None:
        self.sock = self.sock or BorrowedSocket.of(self.transport)
        return self.sock

    def pause_writing(self) -> None:
        self.flow.pause_writing()
        self.push.settle()

    def resume_writing(self) -> None:
        self.flow.resume_writing()
        self.push.settle()

    def connection_lost(self, exc: Exception | None) -> None:
        self.push.lose()
        if self.sock is not None:
            self.sock.detach()


async def connect() -> tuple[Connection, socket.socket]:
    """A connection and the client's socket, whose buffers are small."""
    ours, theirs = socket.socketpair()
    for sock in (ours, theirs):
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    _, connection = await asyncio.get_running_loop().connect_accepted_socket(Connection, ours)
    return connection, theirs


def form_of(push: Push, head: bytes = b"<", tail: bytes = b">") -> ChunkForm:
    form = push.form(head, tail)
    assert form is not None
    return form


def chunks(data: bytes) -> list[bytes]:
    found = []
    while data:
        line, data = data.split(b"\r\n", 1)
        size = int(line, 16)
        assert data[size:size + 2] == b"\r\n"
        found.append(data[:size])
        data = data[size + 2:]
    return found


def test_pieces_are_whole_and_in_order_whichever_way_they_go() -> None:
    """By the socket, by the transport behind what it holds, and by ASGI, which may wait in the middle."""
    async def run() -> None:
        rng = random.Random(4)
        connection, client = await connect()
        loop = asyncio.get_running_loop()
        push, form = connection.push, form_of(connection.push)
        sent, received, ways = [], b"", {"form": 0, "push": 0, "send": 0, "refused": 0}
        for number in range(4000):
            middle = b"%d%s" % (number, b"." * rng.randrange(300))
            draw = rng.random()
            if draw < 0.7 and form.write(middle, number + 1):
                way = "form"
            elif draw < 0.9 and push(b"<" + middle + b">"):
                way = "push"
            elif draw >= 0.9:
                push.hold()
                await connection.flow.drain() if rng.random() < 0.3 and not connection.flow.write_paused else None
                connection.transport.write(b"%x\r\n<%b>\r\n" % (len(middle) + 2, middle))
                push.release()
                way = "send"
            else:
                way = "refused"
            ways[way] += 1
            if way != "refused":
                sent.append(b"<" + middle + b">")
            if rng.random() < 0.2:
                await asyncio.sleep(0)
            if rng.random() < (0.5, 0.02)[number // 1000 % 2]:         # the client reads well, then badly
                received += await loop.sock_recv(client, 1 << rng.randrange(8, 18))
        connection.outbox.flush()
        connection.transport.close()
        while piece := await loop.sock_recv(client, 1 << 18):
            received += piece
        client.close()
        assert chunks(received) == sent
        assert min(ways.values()) > 50 and ways["form"] > 500, ways
        assert 0 < push.last_ns <= 4000

    uvloop.run(run())


def test_a_lost_connection_takes_nothing_more_and_its_number_may_be_anothers() -> None:
    async def run() -> None:
        connection, client = await connect()
        form = form_of(connection.push)
        number = connection.transport.get_extra_info("socket").fileno()
        assert form.write(b"1", 1)
        await asyncio.sleep(0)
        client.close()
        connection.transport.abort()
        assert form.write(b"2", 2)              # the loop has not told anybody yet
        while not connection.cycle.disconnected:
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        left, right = socket.socketpair()       # one of them has the old number now
        assert number in (left.fileno(), right.fileno())
        assert not form.write(b"3", 3) and not connection.push(b"4") and connection.push.form(b"", b"") is None
        for sock in (left, right):
            sock.setblocking(False)
            with pytest.raises(BlockingIOError):
                sock.recv(10)
        sock_object = connection.sock
        connection.sock = None
        del sock_object, form
        left.send(b"still open")
        assert right.recv(20) == b"still open"
        left.close()
        right.close()

    uvloop.run(run())


def test_a_form_says_no_where_it_must() -> None:
    async def run() -> None:
        connection, client = await connect()
        assert connection.push.form(b"h" * 5000, b"t") is None
        form = form_of(connection.push)
        connection.push.hold()
        assert not form.write(b"1", 1)
        connection.push.release()
        assert form.write(b"2", 2)
        connection.cycle.response_complete = True
        connection.push.settle()
        assert not form.write(b"3", 3)
        connection.outbox.flush()
        assert client.recv(100) == b"3\r\n<2>\r\n"
        connection.transport.abort()
        client.close()
        await asyncio.sleep(0.01)

    uvloop.run(run())


def test_a_borrowed_socket_that_is_forgotten_closes_nothing() -> None:
    left, right = socket.socketpair()
    transport: Any = SimpleNamespace(get_extra_info=lambda name: left if name == "socket" else None)
    borrowed = BorrowedSocket.of(transport)
    assert borrowed is not None and borrowed.send(b"x") == 1
    del borrowed
    left.send(b"y")
    assert right.recv(10) == b"xy"
    left.close()
    right.close()


def test_what_is_encrypted_has_no_socket_to_borrow() -> None:
    left, right = socket.socketpair()
    transport: Any = SimpleNamespace(get_extra_info={"socket": left, "sslcontext": object()}.get)
    assert BorrowedSocket.of(transport) is None
    left.close()
    right.close()
