"""Endpoints over real ZeroMQ sockets in one process: Hello first, bad frames counted, nobody blocks."""
from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from ipc import codec, sockets
from ipc.codec import HEADER, MAGIC, SCHEMA_HASH, hello
from ipc.errors import WireError
from ipc.messages import HELLO, Abort, AddRequest, Command, HelloAck, Outputs, Phase
from ipc.sampling_params import SamplingParams
from ipc.sockets import MAX_FRONTEND_NUMBER, AsyncLink, Link, MemoryLink, Router
from tests.ipc.message_samples import column


class Wires:
    """A context whose sockets are closed at the end, on addresses of their own."""

    def __init__(self, folder: Path) -> None:
        self.context, self.folder, self.endpoints = zmq.Context(), folder, []

    def address(self, name: str = "core") -> str:
        return f"ipc://{self.folder}/{name}"

    def router(self) -> Router:
        self.endpoints.append(Router(self.context, self.address()))
        return self.endpoints[-1]

    def link(self, **options) -> Link:
        self.endpoints.append(Link(self.context, **options))
        return self.endpoints[-1]

    def frontend(self, number: int = 1, identity: bytes | None = None) -> Link:
        link = self.link(connect=self.address(), identity=identity)
        link.hello("frontend", number, 4711)
        return link


@pytest.fixture
def wires(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wires]:
    found = Wires(tmp_path_factory.mktemp("w"))
    yield found
    for endpoint in found.endpoints:
        endpoint.close()
    found.context.term()


def until(condition: Callable[[], object], seconds: float = 10.0) -> object:
    """Poll; the value that was true."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.001)
    return value


def drained(endpoint: Router | Link, count: int) -> list:
    found: list = []
    until(lambda: found.extend(endpoint.drain()) or len(found) >= count)
    return found


# ---------------------------------------------------------------- Router

def test_a_frontend_exists_from_its_hello_on(wires):
    router, link = wires.router(), wires.frontend(5)
    link.send(Abort([1]))
    (first, header, message), (second, _, abort) = drained(router, 2)
    assert (first, header.kind, message) == (5, HELLO, None) and (second, abort) == (5, Abort([1]))
    assert router.send(5, Phase("worker", "load", 1.0))
    ((_, phase),) = drained(link, 1)
    assert phase == Phase("worker", "load", 1.0)


def test_messages_before_hello_are_dropped_and_counted(wires):
    router, link = wires.router(), wires.link(connect=wires.address())
    link.send(Abort([1]))
    until(lambda: list(router.drain()) or router.num_bad_frames)
    assert router.num_bad_frames == 1 and router.numbers == {}
    link.hello("frontend", 2, 1)
    link.send(Abort([3]))
    assert [number for number, _, _ in drained(router, 2)] == [2, 2]


@pytest.mark.parametrize("frames", [[b""], [b"x" * 100], [b"", b"", b""], [MAGIC + bytes(28)],
                                    [HEADER.pack(MAGIC, SCHEMA_HASH, 21, 0, 0, 0, 1) + b"\xc1"]])
def test_a_bad_frame_is_counted_and_the_next_message_arrives(wires, frames):
    router, link = wires.router(), wires.frontend(1)
    drained(router, 1)
    link.socket.send_multipart(frames)
    link.send(Abort([1]))
    ((_, _, message),) = drained(router, 1)
    assert message == Abort([1]) and router.num_bad_frames == 1


def test_another_role_cannot_speak_to_the_frontends_socket(wires):
    router, link = wires.router(), wires.link(connect=wires.address())
    link.hello("worker", 1, 1)
    until(lambda: list(router.drain()) or router.num_bad_frames)
    assert router.numbers == {}


def test_a_frontend_number_that_request_ids_cannot_hold_is_refused(wires):
    router, link = wires.router(), wires.link(connect=wires.address())
    link.hello("frontend", MAX_FRONTEND_NUMBER + 1, 1)
    until(lambda: list(router.drain()) or router.num_bad_frames)
    assert router.numbers == {} and (MAX_FRONTEND_NUMBER << 40) + (1 << 40) - 1 < 1 << 63


def test_a_peer_of_another_schema_is_told_both_hashes(wires):
    router, link = wires.router(), wires.link(connect=wires.address())
    data = bytes(hello("frontend", 1, 1, 0)[0])
    link.socket.send(data[:4] + b"12345678" + data[12:])
    until(lambda: list(router.drain()) or router.num_bad_frames)
    ((_, message),) = drained(link, 1)
    assert isinstance(message,
                      HelloAck) and SCHEMA_HASH.hex() in message.refused and b"12345678".hex() in message.refused


def test_sending_to_an_unknown_or_gone_frontend_returns_false(wires):
    router = wires.router()
    assert not router.send(7, Outputs(1))
    link = wires.frontend(7)
    drained(router, 1)
    assert router.send(7, Outputs(1))
    link.close()
    until(lambda: not router.send(7, Outputs(1)))


def test_a_frontend_that_reads_nothing_fills_its_own_queue_and_no_other(wires, monkeypatch):
    """Then send returns False and nothing of the message was sent; the core keeps it."""
    monkeypatch.setattr(sockets, "OUTPUT_QUEUE_MESSAGES", 4)
    router = wires.router()
    slow = wires.link(connect=wires.address("none"))
    slow.socket.setsockopt(zmq.RCVHWM, 4)
    slow.socket.connect(wires.address())
    slow.socket.disconnect(wires.address("none"))
    slow.hello("frontend", 1, 1)
    quick = wires.frontend(2)
    until(lambda: list(router.drain()) is not None and len(router.numbers) == 2)
    big = Outputs(1, tokens=memoryview(bytes(1 << 20)))
    sent = 0
    while router.send(1, big):
        sent += 1
        assert sent < 10_000
    assert router.send(2, Outputs(9))
    ((_, message),) = drained(quick, 1)
    assert message.step == 9
    received = drained(slow, sent)
    assert len(received) == sent and router.send(1, Outputs(2))


def test_a_new_hello_of_a_number_replaces_the_old_identity(wires):
    router = wires.router()
    wires.frontend(3, b"old")
    drained(router, 1)
    second = wires.frontend(3, b"new")
    drained(router, 1)
    assert router.send(3, Outputs(4))
    ((_, message),) = drained(second, 1)
    assert message.step == 4


# ---------------------------------------------------------------- Link

def pair(wires: Wires) -> tuple[Link, Link]:
    return wires.link(bind=wires.address("w")), wires.link(connect=wires.address("w"))


def test_messages_arrive_in_order_with_epoch_and_sequence(wires):
    worker, core = pair(wires)
    core.epoch = 4
    core.hello("engine_core", 0, 1)
    for call in (1, 2, 3):
        core.send(Command(call, "stats"))
    found = drained(worker, 4)
    assert [header.kind for header, _ in found] == [HELLO, 22, 22, 22] and {header.epoch for header, _ in found} == {4}
    assert [header.sequence for header, _ in found[1:]] == [1, 2, 3]
    assert [message.call_id for _, message in found[1:]] == [1, 2, 3]


def test_a_prompt_of_any_length_arrives_whole(wires):
    worker, core = pair(wires)
    for count in (1, codec.INLINE_LIMIT // 4, codec.INLINE_LIMIT):
        core.send(AddRequest(count, column(*range(count)), SamplingParams(seed=1), cache_salt="x"))
        ((_, message),) = drained(worker, 1)
        assert bytes(message.prompt_token_ids) == bytes(column(*range(count))) and message.cache_salt == "x"


def test_a_link_counts_bad_frames_and_goes_on(wires, caplog):
    worker, core = pair(wires)
    for _ in range(12):
        core.socket.send(b"garbage")
    core.socket.send(bytes(4) + bytes(hello("frontend", 1, 1, 0)[0])[4:])
    core.send(Abort([9]))
    ((_, message),) = drained(worker, 1)
    assert message == Abort([9]) and worker.num_bad_frames == 13
    told = [record for record in caplog.records if "dropped a frame" in record.message]
    assert len(told) == 10                      # then it is quiet


def test_the_side_that_binds_may_outlive_several_peers(wires):
    worker = wires.link(bind=wires.address("w"))
    for epoch in (1, 2):
        core = wires.link(connect=wires.address("w"))
        core.epoch = epoch
        core.hello("engine_core", 0, epoch)
        ((header, _),) = drained(worker, 1)
        assert header.epoch == epoch
        core.close()


def test_sending_never_blocks_without_a_peer(wires):
    link = wires.link(bind=wires.address("w"))
    link.send(Abort([1]))                       # a bound link whose peer is not there
    assert link.num_unsent == 1


# ---------------------------------------------------------------- AsyncLink

def test_an_async_link_delivers_everything_while_it_sends(wires):
    """Sending can swallow the edge that signals an arrival; the link reads after each send too."""
    router = wires.router()
    got: list[int] = []

    async def talk() -> None:
        link = AsyncLink(wires.context, wires.address(), b"a", lambda header, message: got.append(message.call_id))
        wires.endpoints.append(link)
        link.hello("frontend", 1, 1)
        link.start(asyncio.get_running_loop())
        for call in range(200):
            link.send(Command(call, "stats"))
            for number, _, message in router.drain():
                if message is not None:
                    router.send(number, message)
            if call % 10 == 0:
                await asyncio.sleep(0)
        end = time.monotonic() + 10
        while len(got) < 200 and time.monotonic() < end:
            for number, _, message in router.drain():
                if message is not None:
                    router.send(number, message)
            await asyncio.sleep(0.001)
        link.close()

    asyncio.run(talk())
    assert got == list(range(200))


def test_an_async_link_may_be_closed_by_a_message(wires):
    router = wires.router()
    got: list[object] = []

    async def talk() -> None:
        def on_message(_: object, message: object) -> None:
            got.append(message)
            link.close()
        link = AsyncLink(wires.context, wires.address(), b"a", on_message)
        link.hello("frontend", 1, 1)
        link.start(asyncio.get_running_loop())
        while not list(router.drain()):
            await asyncio.sleep(0.001)
        router.send(1, Outputs(1))
        router.send(1, Outputs(2))
        while not got:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)

    asyncio.run(talk())
    assert [message.step for message in got] == [1]


# ---------------------------------------------------------------- MemoryLink

def test_a_memory_pair_carries_messages_through_the_codec():
    a, b = MemoryLink.pair()
    a.epoch = 3
    a.send(Abort([1, 2]))
    a.send(Command(1, "stats"))
    assert b.receive()[1] == Abort([1, 2])
    assert [(header.epoch, message.name) for header, message in b.drain()] == [(3, "stats")]
    assert a.receive() is None
    b.send(Outputs(1))
    assert next(a.drain())[1].step == 1


def test_a_memory_pair_refuses_what_the_wire_refuses():
    a, b = MemoryLink.pair()
    b._inbox.append([b"garbage"])
    with pytest.raises(WireError):
        b.receive()
    with pytest.raises(KeyError):               # not a message at all
        a.send(object())
