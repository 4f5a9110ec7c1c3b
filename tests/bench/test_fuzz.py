"""Short forms of `launch.py fuzz` and `launch.py soak`, and that both notice what they look for."""
from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Iterator

import psutil
import pytest

from bench import fuzz_frames
from bench.fuzz import tiny_server
from bench.fuzz_frames import Mutator, WireFuzz, into_a_running_core
from bench.fuzz_http import PLAIN, HttpFuzz
from bench.http_corpus import Case, completion, corpus
from bench.server_process import ServerProcess
from bench.soak import Soak, usage_when_idle

pytestmark = pytest.mark.timeout(150)

Served = tuple[ServerProcess, str]


@pytest.fixture(scope="module")
def started() -> Iterator[Served]:
    with tiny_server() as served:
        yield served


@pytest.fixture
def lives_on(started: Served) -> Iterator[Served]:
    """A server of which, whatever a test does, no process ends and no block stays held."""
    yield started
    server, _ = started
    assert asyncio.run(usage_when_idle(server.port)) == (0, 0)
    assert server.num_restarts == 0, server.screen
    assert all(psutil.pid_exists(pid) for pid in server.pids.values())


def test_hostile_frames_meet_only_the_decoders_own_error() -> None:
    wire = WireFuzz(3)
    wire.decoders(10_000)
    wire.sockets(500)
    wire.core(5_000)
    assert min(wire.counts.values()) > 100, wire.counts


def test_another_exception_of_a_decoder_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(frames: object) -> None:
        raise KeyError("a fault")
    monkeypatch.setattr(fuzz_frames.codec, "decode", decode)
    with pytest.raises(KeyError):
        WireFuzz(3).decoders(10)


def test_one_seed_gives_the_same_frames() -> None:
    first, second = Mutator(5), Mutator(5)
    assert [first.next() for _ in range(200)] == [second.next() for _ in range(200)]
    assert fuzz_frames.PICKLE in {first.next() for _ in range(500)}


def test_hostile_frames_do_not_disturb_a_running_core(lives_on: Served) -> None:
    asyncio.run(into_a_running_core(*lives_on, 1, 2_000))


def test_the_corpus_is_refused_case_by_case_and_the_server_goes_on(lives_on: Served) -> None:
    http = HttpFuzz(lives_on[0].port, 1)
    http.run(len(corpus()) + 200)
    http.close()
    assert http.wrong == [] and http.report()["num_5xx"] == 0
    assert len(http.refusals_s) > 800 and http.statuses[200] > 100


def test_a_wrong_status_and_a_lost_connection_are_reported(lives_on: Served) -> None:
    http = HttpFuzz(lives_on[0].port, 1)
    http.send(completion("fine", frozenset({400})))
    http.send(Case("refused", PLAIN.path, b"{", frozenset({200})))
    http.close()
    assert [line.split(":")[0] for line in http.wrong] == ["fine", "refused"]
    http = HttpFuzz(1, 1)
    http.send(PLAIN)
    assert "ConnectionRefusedError" in http.wrong[0]


def test_a_soak_counts_requests_memory_and_descriptors(lives_on: Served) -> None:
    args = argparse.Namespace(requests=400, hours=1.0, clients=8, seed=1)
    soak = Soak(lives_on[0].port, lives_on[0].pids, args)
    asyncio.run(soak.run())
    report = soak.report()
    assert report["requests"] >= 400 and report["failed"] == 0
    assert min(report["rss_mb"].values()) > 5 and max(report["fds_grown"].values()) <= 8


@pytest.mark.parametrize("is_stale", [False, True])
def test_a_soak_replaces_connections_that_rested_too_long_and_counts_others_as_failures(
        monkeypatch: pytest.MonkeyPatch, is_stale: bool) -> None:
    """Whoever stopped the client for a minute saw a failed request for each connection."""
    if is_stale:
        monkeypatch.setattr("bench.soak.IDLE_CONNECTION_S", 0.0)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(3):                      # then it closes, as if the client had been silent for long
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.split(b"Content-Length: ")[1].split()[0]))
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        writer.close()

    async def run() -> Soak:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            args = argparse.Namespace(requests=40, hours=1.0, clients=1, seed=1)
            soak = Soak(server.sockets[0].getsockname()[1], {"here": os.getpid()}, args)
            await soak.run()
            return soak

    soak = asyncio.run(run())
    assert (soak.num_stale > 0, soak.num_failed > 0) == (is_stale, not is_stale)
