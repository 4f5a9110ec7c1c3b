"""The frontend's side of the sockets, against a core that a test plays on a real ROUTER socket."""
from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from frontend.engine_client import EngineClient
from frontend.outputs import RequestOutput
from frontend.request_stream import Choice, RequestStream
from frontend.tokenizer import Tokenizer, pack_ids
from ipc import codec
from ipc.config import Peer
from ipc.errors import INVALID, EngineDeadError, RequestError, RequestFailedError
from ipc.messages import (FINISH_ABORT, FINISH_ERROR, FINISH_LENGTH, FINISH_STOP, HELLO, Abort, AddRequest, Admitted,
                          Command, CommandReply, EngineReady, Finished, Outputs, Phase)
from ipc.sampling_params import SamplingParams
from ipc.sockets import Router

pytestmark = pytest.mark.timeout(30)

NUMBER, EPOCH = 3, 5
FIRST = NUMBER << 40 | 1                        # the first request's id
READY = EngineReady(64, 16, 512, 300, [257], 8, "float32", "tiny")
TOKENIZER = Tokenizer.bytes_only(300)


class FakeCore:
    """Sends what the test says. `received`: messages that came and were not asked for yet."""

    def __init__(self, folder: str, epoch: int = EPOCH) -> None:
        self.context = zmq.Context()
        self.peer = Peer(f"ipc://{folder}/core-{epoch}", epoch)
        self.router = Router(self.context, self.peer.address)
        self.router.epoch = epoch
        self.received: list[Any] = []
        self.num_sent: Counter[int] = Counter()         # tokens of each request

    async def receive(self, kind: type | None) -> Any:
        """The next message, which must be of this kind; None: the Hello."""
        deadline = time.monotonic() + 20
        while not self.received:
            self.received += [(header, message) for _, header, message in self.router.drain()]
            assert time.monotonic() < deadline, f"no {kind}"
            await asyncio.sleep(0.002)
        header, message = self.received.pop(0)
        assert header.kind == HELLO if kind is None else type(message) is kind, message
        return message

    def send(self, message: Any) -> None:
        assert self.router.send(NUMBER, message)

    def tokens(self, *pairs: tuple[int, bytes], finished: list[Finished] | None = None, **fields: Any) -> None:
        """One step's Outputs: rows of (request id, byte tokens)."""
        rows = [(request_id, self.num_sent[request_id] + i, token)
                for request_id, data in pairs for i, token in enumerate(data)]
        columns = [np.array([row[i] for row in rows], dtype).tobytes()
                   for i, dtype in enumerate((np.int64, np.int32, np.int32))]
        self.send(Outputs(1, *map(memoryview, columns), finished=finished or [], **fields))
        if self.router.epoch == self.peer.epoch:
            self.num_sent.update({request_id: len(data) for request_id, data in pairs})

    async def settle(self, client: EngineClient) -> None:
        """Until the client has handled everything sent so far: a message's answer comes behind it."""
        call = asyncio.create_task(client.command("stats"))
        command = await self.receive(Command)
        self.send(CommandReply(command.call_id, msgspec.Raw(msgspec.msgpack.encode({}))))
        await call

    def close(self) -> None:
        self.router.close()
        self.context.term()


Scenario = Callable[[FakeCore, EngineClient], Awaitable[None]]


def play(scenario: Scenario, is_ready: bool = True) -> None:
    """Run a scenario with a connected pair."""
    async def run() -> None:
        with tempfile.TemporaryDirectory(prefix="tf", dir="/tmp") as folder:
            core = FakeCore(folder)
            client = EngineClient(core.peer, NUMBER)
            try:
                await core.receive(None)
                if is_ready:
                    core.send(READY)
                    await client.wait_ready()
                await asyncio.wait_for(scenario(core, client), 25)
            finally:
                client.close()
                core.close()
    asyncio.run(run())


def add(client: EngineClient, **params: Any) -> RequestStream:
    """A request in the client's table and on the wire."""
    wanted = SamplingParams(seed=1, **params)
    stream = RequestStream("request-1", "hi", pack_ids([104, 105]), wanted, "delta")
    stream.choices = [Choice(stream, number, index, TOKENIZER)
                      for index, number in enumerate(client.next_ids(wanted.n))]
    client.add(stream.choices, AddRequest(stream.choices[0].request_id, memoryview(stream.prompt_token_ids), wanted,
                                          num_choices=wanted.n))
    return stream


async def take(stream: RequestStream) -> RequestOutput:
    return await asyncio.wait_for(stream.next(), 20)


def test_the_start_is_visible_and_ends_with_the_engines_facts() -> None:
    async def scenario(core: FakeCore, client: EngineClient) -> None:
        core.send(Phase("worker", "load weights", 0.5))
        waiting = asyncio.create_task(client.wait_ready())
        while client.phase is None:
            await asyncio.sleep(0.002)
        assert (client.phase.name, client.phase.fraction, waiting.done()) == ("load weights", 0.5, False)
        core.send(READY)
        assert await waiting == READY
    play(scenario, is_ready=False)


def test_a_request_travels_and_its_tokens_come_back() -> None:
    async def scenario(core: FakeCore, client: EngineClient) -> None:
        stream = add(client, n=2, temperature=0.5)
        message = await core.receive(AddRequest)
        assert (message.request_id, message.choice, message.num_choices) == (FIRST, 0, 2)
        assert bytes(message.prompt_token_ids) == pack_ids([104, 105]) and message.sampling_params.temperature == 0.5
        core.tokens((FIRST, b"a"), (FIRST + 1, b"z"), admitted=[Admitted(FIRST, 0, 16, 1)], num_running=2,
                    num_free_blocks=60)
        output = await take(stream)
        assert [choice.text for choice in output.outputs] == ["a", "z"] and output.max_tokens == 16
        assert (client.num_running, client.num_free_blocks, client.num_requests) == (2, 60, 2)
        core.tokens((FIRST, b"b"), finished=[Finished(FIRST, FINISH_LENGTH)])
        output = await take(stream)
        assert [(choice.text, choice.finish_reason) for choice in output.outputs] == [("b", "length")]
        core.tokens((FIRST + 1, bytes([10])), finished=[Finished(FIRST + 1, FINISH_STOP, 10)])
        output = await take(stream)
        assert output.finished and output.outputs[0].stop_reason == 10 and output.outputs[0].text == ""
        assert client.num_requests == 0
    play(scenario)


def test_a_long_prompt_travels_unchanged() -> None:
    """Above 100 kB it is a frame of its own."""
    async def scenario(core: FakeCore, client: EngineClient) -> None:
        stream = add(client)
        prompt = pack_ids(list(range(300)) * 100)
        client.add(stream.choices, AddRequest(FIRST + 7, memoryview(prompt), stream.params))
        await core.receive(AddRequest)
        message = await core.receive(AddRequest)
        assert message.request_id == FIRST + 7 and bytes(message.prompt_token_ids) == prompt
    play(scenario)


def test_tokens_past_a_stop_string_are_dropped_and_the_rest_is_aborted_once() -> None:
    async def scenario(core: FakeCore, client: EngineClient) -> None:
        stream = add(client, stop=["cd"], max_tokens=99)
        await core.receive(AddRequest)
        core.tokens((FIRST, b"abcde"))
        core.tokens((FIRST, b"fgh"))
        output = await take(stream)
        assert (output.outputs[0].text, output.outputs[0].stop_reason, output.finished) == ("ab", "cd", True)
        assert (await core.receive(Abort)).request_ids == [FIRST]
        core.tokens((FIRST, b"i"), finished=[Finished(FIRST, FINISH_ABORT)])
        await core.settle(client)                       # would have met a second Abort
        assert stream.choices[0].token_ids == list(b"abcd") and client.num_requests == 0
    play(scenario)


class Writers:
    """A sink whose long and short way each take what they like."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.told: list[str] = []
        self.num_short = 0

    def __call__(self, index: int, text: str) -> bool:
        taken = self.rng.random() < 0.7
        if taken:
            self.told.append(text)
        return taken

    def writer(self, index: int) -> Writers:
        return self

    def write(self, text: bytes, now_ns: int) -> bool:
        taken = self.rng.random() < 0.8
        if taken:
            self.told.append(json.loads(text))
            self.num_short += 1
        return taken


def test_text_by_the_short_way_is_the_text_by_the_long_one() -> None:
    """Whatever a sink takes: characters of several bytes, what may begin a stop string, what comes after one."""
    text = 'a "b"\\ é\n 世界 x zy zx \u2028 end zz never'
    wanted = text[:text.index("zz")]

    async def scenario(core: FakeCore, client: EngineClient) -> None:
        rng = random.Random(5)
        num_short = 0
        for number in range(60):
            stream = add(client, stop=["zz", "zyx"], max_tokens=200)
            await core.receive(AddRequest)
            sink = Writers(rng)
            stream.sink = sink
            request_id, data = stream.choices[0].request_id, text.encode()
            while data:
                cut = rng.randrange(1, 6)
                core.tokens((request_id, data[:cut]))
                data = data[cut:]
                await core.settle(client) if not any(isinstance(m, Abort) for _, m in core.received) else None
                if stream.choices[0].new_text:
                    sink.told += [output.text for output in (await take(stream)).outputs]
                if stream.is_finished:
                    break
            if stream.choices[0].has_news:
                sink.told += [output.text for output in (await take(stream)).outputs]
            assert "".join(sink.told) == wanted, number
            assert stream.choices[0].stop_reason == "zz"
            assert stream.choices[0].token_ids == list(text[:text.index("zz") + 2].encode())
            assert len(stream.choices[0].token_ns) == len(stream.choices[0].token_ids)
            num_short += sink.num_short
            core.received = [item for item in core.received if not isinstance(item[1], Abort)]
            client.forget(stream.choices)
        assert num_short > 500

    play(scenario)


def test_abort_names_only_requests_that_are_known() -> None:
    async def scenario(core: FakeCore, client: EngineClient) -> None:
        stream = add(client, n=2)
        await core.receive(AddRequest)
        core.tokens(finished=[Finished(FIRST, FINISH_LENGTH)])
        await take(stream)
        client.abort(stream.choices)
        client.forget(stream.choices)
        client.abort(stream.choices)
        assert (await core.receive(Abort)).request_ids == [FIRST + 1]
        core.tokens((FIRST + 1, b"late"), finished=[Finished(FIRST + 1, FINISH_ABORT)])
        await core.settle(client)
        assert stream.choices[1].token_ids == []
    play(scenario)


def test_a_refused_request_raises_the_cores_text() -> None:
    async def scenario(core: FakeCore, client: EngineClient) -> None:
        stream = add(client)
        await core.receive(AddRequest)
        core.tokens(finished=[Finished(FIRST, FINISH_ERROR, error_code=INVALID, message="too long by 3")])
        with pytest.raises(RequestError, match="too long by 3"):
            await take(stream)
        assert client.num_requests == 0
    play(scenario)


def test_news_of_unknown_requests_and_of_another_epoch_are_ignored() -> None:
    async def scenario(core: FakeCore, client: EngineClient) -> None:
        stream = add(client)
        await core.receive(AddRequest)
        core.tokens((FIRST + 50, b"who?"), finished=[Finished(FIRST + 51, FINISH_LENGTH)])
        core.router.epoch = EPOCH - 1
        core.tokens((FIRST, b"old"))
        core.router.epoch = EPOCH
        core.tokens((FIRST, b"new"))
        assert (await take(stream)).outputs[0].text == "new"
    play(scenario)


def test_frames_that_are_no_messages_are_dropped_and_counted() -> None:
    async def scenario(core: FakeCore, client: EngineClient) -> None:
        [identity] = core.router.numbers
        for frames in ([b""], [b"x" * 40], [codec.encode(READY)[0][:-1]], [b"a", b"b", b"c"]):
            core.router.socket.send_multipart([identity, *frames])
        await core.settle(client)
        assert client._link.num_bad_frames == 4 and client.dead is None
    play(scenario)


def test_a_command_gets_its_result_or_the_cores_error() -> None:
    async def scenario(core: FakeCore, client: EngineClient) -> None:
        calls = [asyncio.create_task(client.command(name)) for name in ("stats", "what")]
        first, second = [await core.receive(Command) for _ in range(2)]
        assert (first.name, second.name) == ("stats", "what")
        core.send(CommandReply(second.call_id, msgspec.Raw(msgspec.msgpack.encode(None)), "unknown command 'what'"))
        core.send(CommandReply(first.call_id, msgspec.Raw(msgspec.msgpack.encode({"num_steps": 4}))))
        assert await calls[0] == {"num_steps": 4}
        with pytest.raises(ValueError, match="unknown command 'what'"):
            await calls[1]
    play(scenario)


def test_the_engines_end_reaches_everyone_who_waits() -> None:
    async def scenario(core: FakeCore, client: EngineClient) -> None:
        waiting = [asyncio.create_task(client.wait_ready()), asyncio.create_task(client.command("stats")),
                   *(asyncio.create_task(take(add(client))) for _ in range(2))]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        client.fail(EngineDeadError("worker 0 ended with signal SIGKILL"))
        client.fail(EngineDeadError("a later reason"))
        for task in waiting:
            with pytest.raises(EngineDeadError, match="worker 0 ended with signal SIGKILL"):
                await task
        for call in (lambda: take(add(client)), lambda: client.command("stats")):
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                await call()
    play(scenario, is_ready=False)


def test_a_core_of_another_version_is_an_error_with_both_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = codec.SCHEMA_HASH

    async def run() -> None:
        with tempfile.TemporaryDirectory(prefix="tf", dir="/tmp") as folder:
            core = FakeCore(folder)
            monkeypatch.setattr(codec, "SCHEMA_HASH", b"other-id")
            client = EngineClient(core.peer, NUMBER)
            try:
                monkeypatch.setattr(codec, "SCHEMA_HASH", ours)
                waiting = asyncio.create_task(client.wait_ready())
                while not waiting.done():
                    assert list(core.router.drain()) == []
                    await asyncio.sleep(0.002)
                with pytest.raises(EngineDeadError, match=f"(?s){b'other-id'.hex()}.*{ours.hex()}"):
                    await waiting
            finally:
                client.close()
                core.close()
    asyncio.run(run())


def test_a_token_out_of_its_place_fails_its_request_only() -> None:
    async def scenario(core: FakeCore, client: EngineClient) -> None:
        stream, other = add(client), add(client)
        for _ in range(2):
            await core.receive(AddRequest)
        core.num_sent[FIRST] = 1                        # its first token got lost
        core.tokens((FIRST, b"b"), (FIRST + 1, b"o"))
        with pytest.raises(RequestFailedError, match="token 1 arrived where 0 was due"):
            await take(stream)
        assert (await take(other)).outputs[0].text == "o"
    play(scenario)


def test_a_fault_of_ours_in_handling_a_message_reaches_everyone_who_waits(
        monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """An exception in a callback of the loop is only logged: streams would have waited for ever."""
    async def scenario(core: FakeCore, client: EngineClient) -> None:
        stream = add(client)
        await core.receive(AddRequest)
        monkeypatch.setattr(Choice, "receive", lambda *_: 1 // 0)
        core.tokens((FIRST, b"a"))
        with pytest.raises(EngineDeadError, match="ZeroDivisionError"):
            await take(stream)
        assert "this Outputs could not be handled" in caplog.text
    play(scenario)


def test_a_new_core_gets_every_live_request_with_the_tokens_it_had() -> None:
    async def scenario(core: FakeCore, client: EngineClient) -> None:
        stream, left = add(client, n=2, stop=["!"]), add(client)
        for _ in range(2):
            await core.receive(AddRequest)
        core.tokens((FIRST, b"ab"), (FIRST + 1, b"x!"))
        await take(stream)                              # the second choice has ended by its stop string
        await core.receive(Abort)
        client.abort(left.choices)
        client.forget(left.choices)
        call = asyncio.create_task(client.command("stats"))
        await core.receive(Abort)
        await core.receive(Command)
        client.core_down("engine_core ended with signal SIGKILL")
        with pytest.raises(EngineDeadError, match="SIGKILL; the engine is restarting, call again"):
            await call
        while_down = add(client, max_tokens=3)
        call = asyncio.create_task(client.command("stats"))         # waits for the next core
        folder = core.peer.address.removeprefix("ipc://").rpartition("/")[0]
        successor = FakeCore(folder, EPOCH + 1)
        try:
            client.core_up(successor.peer)
            await successor.receive(None)
            assert client.ready is None and "restarting after" in client.phase.name
            successor.send(READY)
            again, new = [await successor.receive(AddRequest) for _ in range(2)]
            assert (again.request_id, again.choice, again.num_choices) == (FIRST, 0, 1)
            assert bytes(again.output_token_ids) == pack_ids(list(b"ab"))
            assert bytes(again.prompt_token_ids) == pack_ids([104, 105]) and again.sampling_params.seed == 1
            assert new.request_id == FIRST + 3 and bytes(new.output_token_ids) == b""
            assert (await successor.receive(Command)).name == "stats" and not call.done()
            call.cancel()
            successor.num_sent[FIRST] = 2
            successor.tokens((FIRST, b"c"), (FIRST + 3, b"n"), finished=[Finished(FIRST, FINISH_LENGTH)])
            output = await take(stream)
            assert output.finished and output.outputs[0].text == "c" and stream.choices[0].token_ids == list(b"abc")
            assert (await take(while_down)).outputs[0].text == "n"
            assert client.num_restarts == 1 and client.num_requests == 1
        finally:
            client.close()
            successor.close()
    play(scenario)


def test_close_aborts_what_is_unfinished() -> None:
    """An attached frontend may end while the engine lives on; nobody else would abort its requests."""
    async def scenario(core: FakeCore, client: EngineClient) -> None:
        stream = add(client, n=2)
        await core.receive(AddRequest)
        client.close()
        client.close()
        assert (await core.receive(Abort)).request_ids == [FIRST, FIRST + 1]
        with pytest.raises(EngineDeadError, match="closed"):
            await take(stream)
    play(scenario)
