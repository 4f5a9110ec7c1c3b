"""However an engine ends, nothing of it is left: no process, no socket, no directory, no descriptor; and whoever waits
for it hears why. Here a process that is killed ends its engine; with restarts it does not: test_restarts.py."""
from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from frontend import AsyncLLM, SamplingParams
from ipc.errors import ConfigError, EngineDeadError
from ipc.system import bind_listener
from tests.processes.tools import (ENDLESS_TOKENS, FLAGS, GONE_S, HARD_TIMEOUT_S, OPTIONS, ServerProcess,
                                   assert_nothing_left, engine_environment, run_dirs, survivors, wait_idle, wait_until)

pytestmark = pytest.mark.timeout(60)

ENDLESS = SamplingParams(temperature=0, max_tokens=ENDLESS_TOKENS, ignore_eos=True)


async def cycle(model: str, temp: str, is_busy: bool) -> None:
    """One engine from start to close, with requests running at the close or not."""
    async with AsyncLLM(model, **OPTIONS) as llm:
        assert len(run_dirs(temp)) == 1 and set(llm.pids) <= set(survivors(temp))
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        assert [output async for output in llm.generate("Hi", params)][-1].finished
        await wait_idle(llm)
        if is_busy:
            streams = [llm.generate("Go on", ENDLESS) for _ in range(3)]
            for stream in streams:
                await anext(stream)
    assert survivors(temp) == {} and run_dirs(temp) == []       # at once, not after a while


def open_descriptors() -> list[str]:
    """What each descriptor of this process is."""
    folder = "/proc/self/fd"
    found = []
    for name in os.listdir(folder):
        try:
            found.append(os.readlink(f"{folder}/{name}"))
        except OSError:                         # that of the listing itself
            continue
    return found


@pytest.mark.parametrize("count", [3, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(300)])])
def test_cycles_of_create_and_close_leave_nothing_and_nothing_grows(count: int, tiny_model: str, temp: str) -> None:
    asyncio.run(cycle(tiny_model, temp, is_busy=True))
    before, memory = open_descriptors(), psutil.Process().memory_info().rss
    for index in range(1, count):
        asyncio.run(cycle(tiny_model, temp, is_busy=index % 2 == 0))
    assert len(open_descriptors()) <= len(before)
    if count >= 20:
        assert psutil.Process().memory_info().rss < memory + (8 << 20)


# ---------------------------------------------------------------- kill -9 inside AsyncLLM's engine

@pytest.mark.parametrize("victim", ["supervisor", "worker", "engine_core"])
def test_kill_9_ends_the_engine_and_everyone_who_waits_hears_it(victim: str, tiny_model: str, temp: str) -> None:
    async def wait_forever(llm: AsyncLLM) -> None:
        async for _ in llm.generate("Go on", ENDLESS.replace(max_tokens=None)):
            pass
        raise AssertionError("the stream ended as if nothing had happened")

    async def run() -> None:
        llm = await AsyncLLM(tiny_model, max_num_seqs=2, restart=False, **OPTIONS).start()
        pid = llm.pids[["supervisor", "worker", "engine_core"].index(victim)]
        os.kill(llm.pids[1], signal.SIGSTOP)            # nothing finishes before the kill
        waiting = [asyncio.create_task(wait_forever(llm)) for _ in range(4)]
        await llm.stats()
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        results = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), HARD_TIMEOUT_S)
        assert [type(result) for result in results] == [EngineDeadError] * 4
        expected = "the engine's supervisor" if victim == "supervisor" else victim
        text = str(results[0])
        assert text.startswith(expected) and text.endswith(f"(pid {pid}) ended with signal SIGKILL")
        # Without anybody closing it.
        await asyncio.to_thread(assert_nothing_left, temp, killed + GONE_S - time.monotonic())
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await llm.stats()
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await anext(llm.generate("x"))
        assert llm.status()["dead"] and "SIGKILL" in llm.status()["reason"]
        await llm.close()
    asyncio.run(run())


# ---------------------------------------------------------------- the user's process ends

HOST = '''
import asyncio, os, sys, time
from frontend import AsyncLLM, SamplingParams

async def main():
    llm = await AsyncLLM({model!r}, num_gpu_blocks_override=512, attention_backend="cpu", num_threads=1).start()
    stream = llm.generate("Go on", SamplingParams(max_tokens=None, ignore_eos=True))
    await anext(stream)
    forked = os.fork()                  # has a copy of every descriptor
    if forked == 0:
        time.sleep(600)
    print(forked, *llm.pids, flush=True)
    if {how!r} == "exit":
        return                          # without a close
    await asyncio.sleep(600)

asyncio.run(main())
'''


@pytest.fixture
def forked() -> Iterator[list[int]]:
    """Pids that a test forked somewhere and that outlive everything else."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("how", ["kill", "exit"])
def test_the_engine_ends_with_its_host_although_a_forked_child_of_it_lives(
        how: str, tiny_model: str, temp: str, tmp_path: Path, forked: list[int]) -> None:
    script = tmp_path / "host.py"
    script.write_text(HOST.format(model=tiny_model, how=how))
    with subprocess.Popen([sys.executable, str(script)], env=engine_environment(temp), stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True) as host:
        assert host.stdout is not None and host.stderr is not None
        child, *pids = map(int, host.stdout.readline().split())
        forked.append(child)
        if how == "kill":
            assert set(pids) <= set(survivors(temp))
            host.kill()
        status = host.wait(HARD_TIMEOUT_S)
        host.stdout.close()
        host.stderr.close()
    assert status == (-signal.SIGKILL if how == "kill" else 0)
    deadline = time.monotonic() + GONE_S
    while (set(survivors(temp)) != {child} or run_dirs(temp)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(survivors(temp)) == {child} and run_dirs(temp) == []
    os.kill(child, signal.SIGKILL)
    forked.clear()


def test_a_host_that_is_killed_while_its_engine_starts_leaves_nothing(tiny_model: str, temp: str,
                                                                      tmp_path: Path) -> None:
    script = tmp_path / "host.py"
    script.write_text(HOST.format(model=tiny_model, how="kill"))
    with subprocess.Popen([sys.executable, str(script)], env=engine_environment(temp)) as host:
        wait_until(lambda: len(survivors(temp)) == 4)   # host, supervisor, worker, core: the worker imports
        host.kill()
    assert_nothing_left(temp)


# ---------------------------------------------------------------- kill -9 inside a server

def open_stream(server: ServerProcess) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """A completion that streams and has sent its first chunk."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=HARD_TIMEOUT_S)
    body = {"prompt": "Go on", "max_tokens": ENDLESS_TOKENS, "ignore_eos": True, "temperature": 0, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200 and response.readline().startswith(b"data: {")
    return connection, response


def wait_until_free(port: int) -> None:
    """The kernel closes a killed process's connections a moment after it reports the end."""
    deadline = time.monotonic() + GONE_S
    while True:
        try:
            bind_listener("127.0.0.1", port).close()
            return
        except ConfigError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


@pytest.mark.parametrize("victim", ["supervisor", "engine_core", "frontend"])
def test_kill_9_ends_a_server_with_a_reason_and_its_streams_with_an_error(victim: str, tiny_model: str,
                                                                          temp: str) -> None:
    server = ServerProcess(tiny_model, temp, "--no-restart", *FLAGS).wait_ready()
    try:
        assert set(server.pids.values()) == set(survivors(temp))
        connection, response = open_stream(server)
        os.kill(server.pids["worker"], signal.SIGSTOP)  # nothing finishes before the kill
        os.kill(server.pids[victim], signal.SIGKILL)
        killed = time.monotonic()
        try:
            rest = response.read().decode()
        except (http.client.IncompleteRead, ConnectionResetError):
            rest = ""                                   # cut off, which no client takes for an end
        connection.close()
        status = server.wait()
        assert_nothing_left(temp, killed + GONE_S - time.monotonic())
        assert '"finish_reason":"' not in rest
        reason = f"{victim} (pid {server.pids[victim]}) ended with signal SIGKILL"
        if victim == "engine_core":
            assert f'{{"error":{{"message":"{reason}"' in rest and '"code":503' in rest, rest
        assert status == (-signal.SIGKILL if victim == "supervisor" else 3)
        wait_until_free(server.port)                        # for the next start
        if victim != "supervisor":
            assert f"launch.py: {reason}" in server.screen and "Traceback" not in server.screen
    finally:
        server.kill()


def test_ctrl_c_ends_streams_with_an_error_and_the_server_with_status_0(tiny_model: str, temp: str) -> None:
    server = ServerProcess(tiny_model, temp, *FLAGS).wait_ready()
    try:
        connection, response = open_stream(server)
        server.process.send_signal(signal.SIGINT)
        rest = response.read().decode()
        connection.close()
        assert '"finish_reason":"' not in rest and '{"error":{"message":"the engine is stopping"' in rest
        assert rest.endswith("data: [DONE]\n\n")
        assert server.wait() == 0
        assert_nothing_left(temp)
        assert server.screen.endswith("launch.py: stopped\n") and "Traceback" not in server.screen
    finally:
        server.kill()


def test_a_signal_while_the_model_loads_ends_the_start(tiny_model: str, temp: str) -> None:
    server = ServerProcess(tiny_model, temp)
    try:
        wait_until(lambda: len(survivors(temp)) == 4)
        assert server.end(signal.SIGTERM) == 0
        assert_nothing_left(temp)
        assert "Traceback" not in server.screen
    finally:
        server.kill()
