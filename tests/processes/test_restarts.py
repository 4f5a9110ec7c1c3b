"""A killed worker, core or frontend is replaced: streams pause and go on, with exactly the tokens of an undisturbed run
(on the reference backend, for requests whose tokens are no close calls: torch rounds by the size of the batch)."""
from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
from typing import Any

import pytest

from frontend import AsyncLLM, SamplingParams
from ipc.structured_outputs import StructuredOutputs
from tests.processes.tools import (HARD_TIMEOUT_S, OPTIONS, REFERENCE_FLAGS, ServerProcess, assert_nothing_left,
                                   survivors, wait_idle, wait_until)

pytestmark = pytest.mark.timeout(90)

NUM_TOKENS = 300
REQUESTS = [("Count on", SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)),
            ("Or draw", SamplingParams(temperature=1.0, seed=4, n=2, max_tokens=NUM_TOKENS, ignore_eos=True))]


async def collect(llm: AsyncLLM, prompt: str, params: SamplingParams, started: asyncio.Event) -> list[list[int]]:
    """Tokens of each choice, gathered from deltas; `started` is set when some have come."""
    tokens: list[list[int]] = [[] for _ in range(params.n)]
    async for output in llm.generate(prompt, params, output_kind="delta"):
        for choice in output.outputs:
            tokens[choice.index] += choice.token_ids
        if len(tokens[0]) >= 20:
            started.set()
    return tokens


def test_streams_survive_a_killed_worker_and_a_killed_core(tiny_model: str, temp: str) -> None:
    async def run() -> None:
        async with AsyncLLM(tiny_model, **{**OPTIONS, "attention_backend": "reference"}) as llm:
            whole = [await collect(llm, prompt, params, asyncio.Event()) for prompt, params in REQUESTS]
            for index, name in ((1, "worker"), (2, "engine_core")):
                events = [asyncio.Event() for _ in REQUESTS]
                streams = [asyncio.create_task(collect(llm, prompt, params, event))
                           for (prompt, params), event in zip(REQUESTS, events)]
                for event in events:
                    await asyncio.wait_for(event.wait(), HARD_TIMEOUT_S)
                before = list(llm.pids)
                os.kill(before[index], signal.SIGKILL)
                assert await asyncio.wait_for(asyncio.gather(*streams), HARD_TIMEOUT_S) == whole, name
                while llm.pids == before:               # the news is read in a moment
                    await asyncio.sleep(0.01)
                assert [new == old for new, old in zip(llm.pids, before)] == [i != index for i in range(3)]
                stats = await wait_idle(llm)
                if name == "engine_core":               # the worker had kept nearly all: three sequences go on
                    assert stats["num_replayed_tokens"] - stats["num_replayed_hit_tokens"] <= 3 * 16
                    assert stats["num_replayed_hit_tokens"] >= 40
            assert set(llm.pids) == set(survivors(temp))
    asyncio.run(run())
    assert_nothing_left(temp)


def test_a_stream_with_a_grammar_survives_a_killed_worker_and_a_killed_core(tiny_model: str, temp: str) -> None:
    """It waits until the new worker has compiled its grammar, and is followed from its outputs."""
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=NUM_TOKENS,
                            structured_outputs=StructuredOutputs(regex="([a-z]{3}[0-9] ?)*#"))

    async def run() -> None:
        async with AsyncLLM(tiny_model, **{**OPTIONS, "attention_backend": "reference"}) as llm:
            whole = await collect(llm, "By rule", params, asyncio.Event())
            assert len(whole[0]) >= 40
            for index in (1, 2):
                event = asyncio.Event()
                stream = asyncio.create_task(collect(llm, "By rule", params, event))
                await asyncio.wait_for(event.wait(), HARD_TIMEOUT_S)
                os.kill(llm.pids[index], signal.SIGKILL)
                assert await asyncio.wait_for(stream, HARD_TIMEOUT_S) == whole
            await wait_idle(llm)
    asyncio.run(run())
    assert_nothing_left(temp)


def post(server: ServerProcess, **fields: Any) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=HARD_TIMEOUT_S)
    body = {"prompt": "Count on", "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, **fields}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    return connection, connection.getresponse()


def text_of(server: ServerProcess) -> str:
    connection, response = post(server)
    answer = json.loads(response.read())
    connection.close()
    assert response.status == 200, answer
    return str(answer["choices"][0]["text"])


def test_a_server_goes_on_when_its_processes_are_killed_one_after_the_other(tiny_model: str, temp: str) -> None:
    server = ServerProcess(tiny_model, temp, *REFERENCE_FLAGS)
    try:
        server.wait_ready()
        whole = text_of(server)
        for name in ("engine_core", "worker", "frontend"):
            connection, response = post(server, stream=True)
            first = response.readline()
            os.kill(server.pids[name], signal.SIGKILL)
            if name == "frontend":                      # its connections go with it; the port stays open for the next
                with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
                    response.read()
            else:
                events = (first + response.read()).decode().split("\n\n")
                assert events[-2:] == ["data: [DONE]", ""]
                chunks = [json.loads(event[6:]) for event in events[:-2] if event.startswith("data: ")]
                assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole
                assert chunks[-1]["choices"][0]["finish_reason"] == "length"
            connection.close()
            wait_until(lambda: len(survivors(temp)) == 4)
            assert text_of(server) == whole
            assert server.process.poll() is None and f"{server.pids[name]}) ended with signal SIGKILL" in server.screen
        assert "Traceback" not in server.screen
        assert server.end() == 0
        assert_nothing_left(temp)
    finally:
        server.kill()


@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.1])
def test_a_worker_that_ends_while_a_new_core_starts_is_followed(delay_s: float, tiny_model: str, temp: str) -> None:
    """The new core did not hear of the worker's successor, and waited for the dead one for ever."""
    async def run() -> None:
        async with AsyncLLM(tiny_model, **OPTIONS) as llm:
            started = asyncio.Event()
            running = asyncio.create_task(collect(llm, *REQUESTS[0], started))
            await started.wait()
            os.kill(llm.pids[2], signal.SIGKILL)
            await asyncio.sleep(delay_s)
            os.kill(llm.pids[1], signal.SIGKILL)
            assert [len(tokens) for tokens in await asyncio.wait_for(running, 30)] == [NUM_TOKENS]
            await wait_idle(llm)
    asyncio.run(run())


@pytest.mark.parametrize("index", [1, 2])
def test_a_process_that_is_stopped_while_idle_is_noticed_and_replaced(index: int, tiny_model: str, temp: str) -> None:
    """A worker stopped in its wait for a plan cannot say that it is late: the core does."""
    async def run() -> None:
        async with AsyncLLM(tiny_model, **{**OPTIONS, "attention_backend": "reference"}) as llm:
            prompt, params = REQUESTS[0]
            whole = await collect(llm, prompt, params, asyncio.Event())
            pid = llm.pids[index]
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(0.1)
            stream = asyncio.create_task(collect(llm, prompt, params, asyncio.Event()))
            reasons = set()
            while llm.pids[index] == pid:
                reasons.add(llm.status()["reason"])
                await asyncio.sleep(0.05)
            assert {"the engine core makes no progress", "the worker makes no progress"} & reasons
            assert await asyncio.wait_for(stream, HARD_TIMEOUT_S) == whole
            while not llm.status()["ready"]:
                await asyncio.sleep(0.01)
            await wait_idle(llm)
    asyncio.run(asyncio.wait_for(run(), 80))
    assert_nothing_left(temp)


def test_a_call_to_a_worker_that_was_stopped_while_idle_ends(tiny_model: str, temp: str) -> None:
    """The worker owed an answer to no plan, so nobody looked for it: the call never returned."""
    async def run() -> None:
        async with AsyncLLM(tiny_model, **OPTIONS) as llm:
            pid = llm.pids[1]
            os.kill(pid, signal.SIGSTOP)
            with pytest.raises(ValueError, match="the worker ended while it was asked"):
                await llm.start_profile()
            await collect(llm, *REQUESTS[0], asyncio.Event())
            assert llm.pids[1] != pid
    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_process_that_ends_again_and_again_ends_the_engine(tiny_model: str, temp: str) -> None:
    """Five restarts a minute; the sixth death is the last. The core's restart is the quickest."""
    async def run() -> None:
        async with AsyncLLM(tiny_model, **OPTIONS) as llm:
            last = 0
            while not llm.status()["dead"]:
                if llm.status()["ready"] and llm.pids[2] != last:
                    last = llm.pids[2]
                    os.kill(last, signal.SIGKILL)
                await asyncio.sleep(0.01)
            assert f"engine_core (pid {last}) ended with signal SIGKILL" in llm.status()["reason"]
            await asyncio.to_thread(assert_nothing_left, temp)
    asyncio.run(asyncio.wait_for(run(), 60))
