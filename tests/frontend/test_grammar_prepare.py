"""Which grammars the worker is asked to compile before their requests are sent."""
from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from frontend.grammar_prepare import CHEAP_S, MAX_BYTES, GrammarPreparer
from ipc.errors import EngineDeadError, RequestError
from ipc.structured_outputs import StructuredOutputs, compiled_bytes

DEAR_S = 2 * CHEAP_S


class FakeClient:
    """Answers with `problem`, or raises `error`, when `gate` opens."""

    def __init__(self) -> None:
        self.num_workers = 0
        self.problem = ""
        self.error: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.asked: list[str] = []

    async def command(self, name: str, grammar: bytes = b"") -> Any:
        assert name == "prepare_grammar"
        spec = msgspec.msgpack.decode(grammar, type=StructuredOutputs)
        self.asked.append(spec.regex or "")
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return {"problem": self.problem}


def run(task: Callable[[FakeClient, GrammarPreparer], Awaitable[None]]) -> None:
    async def whole() -> None:
        client: Any = FakeClient()
        await task(client, GrammarPreparer(client))
    asyncio.run(whole())


def test_each_is_asked_for_once_and_cheap_ones_only_to_load_the_vocabulary():
    async def task(client: FakeClient, preparer: GrammarPreparer) -> None:
        for regex, seconds in (("a", 0.0), ("b", 0.0), ("c", DEAR_S), ("c", DEAR_S), ("a", 0.0)):
            await preparer.prepare(StructuredOutputs(regex=regex), seconds)
        assert client.asked == ["a", "c"]
        client.num_workers = 1                  # it knows nothing
        for regex, seconds in (("b", 0.0), ("c", DEAR_S)):
            await preparer.prepare(StructuredOutputs(regex=regex), seconds)
        assert client.asked == ["a", "c", "b", "c"]
    run(task)


def test_those_who_ask_for_the_same_wait_for_one_answer_and_may_leave():
    async def task(client: FakeClient, preparer: GrammarPreparer) -> None:
        client.gate.clear()
        waiting = [asyncio.create_task(preparer.prepare(StructuredOutputs(regex="x"), DEAR_S)) for _ in range(3)]
        await asyncio.sleep(0.01)
        waiting[0].cancel()
        await asyncio.sleep(0.01)
        assert waiting[0].cancelled() and not waiting[1].done()
        client.gate.set()
        await asyncio.gather(*waiting[1:])
        assert client.asked == ["x"]
    run(task)


def test_what_does_not_compile_is_refused_and_a_worker_that_ends_is_no_reason_to():
    async def task(client: FakeClient, preparer: GrammarPreparer) -> None:
        client.problem = "nothing of the kind"
        for _ in range(2):
            with pytest.raises(RequestError, match="structured_outputs.regex: nothing of the kind"):
                await preparer.prepare(StructuredOutputs(regex="x"), DEAR_S)
        assert client.asked == ["x"]
        for error in (EngineDeadError("restarting"), ValueError("the worker ended")):
            client.error = error
            await preparer.prepare(StructuredOutputs(regex="y"), DEAR_S)
        client.error, client.problem = None, ""
        await preparer.prepare(StructuredOutputs(regex="y"), DEAR_S)
        assert client.asked == ["x", "y", "y", "y"]
    run(task)


def test_what_the_worker_may_have_pushed_out_is_asked_for_again():
    async def task(client: FakeClient, preparer: GrammarPreparer) -> None:
        size = compiled_bytes(msgspec.msgpack.encode(StructuredOutputs(regex="a" * 1000)))
        names = [str(number).zfill(1000) for number in range(MAX_BYTES // size + 1)]
        for name in names:
            await preparer.prepare(StructuredOutputs(regex=name), DEAR_S)
        for name in (names[-1], names[0]):
            await preparer.prepare(StructuredOutputs(regex=name), DEAR_S)
        assert client.asked == [*names, names[0]]
    run(task)
