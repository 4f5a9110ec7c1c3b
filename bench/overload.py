"""`python launch.py bench overload`: what clients that hold without using cost the others.

The real frontend over a core that sends tokens at a steady rate. Some clients read their streams as fast as they come;
then 100 more read one byte a second, and 2,000 connections say nothing or half a header. Compared are the gaps between
tokens of the first ones, before, during and after, and the frontend's memory. Goals: p99 at most 10 % longer, 100 MB.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.null_engine import NULL_CORE, NullEngine
from bench.soak import rss_mb
from bench.stats import percentile, print_json
from bench.tiny_model import write_tiny_model
from ipc.option_help import OptionParser

RATE = 20.0  # tokens per second of each stream
MAX_LONGER, MAX_MB = 1.10, 100.0
HALF = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-"


def stream_request(max_tokens: int) -> bytes:
    body = json.dumps({"prompt": "Go on", "max_tokens": max_tokens, "stream": True, "ignore_eos": True}).encode()
    return (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
            % len(body) + body)


class Reader(asyncio.Protocol):
    """A client that keeps up; `gaps` are seconds between arrivals of text."""

    def __init__(self) -> None:
        self.gaps: list[float] = []
        self._last = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(stream_request(4000))  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._last:
            self.gaps.append(now - self._last)
        self._last = now


async def slow_reader(port: int) -> None:
    """One byte a second of a stream, through a small window."""
    loop = asyncio.get_running_loop()
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await loop.sock_connect(sock, ("127.0.0.1", port))
        await loop.sock_sendall(sock, stream_request(4000))
        while await loop.sock_recv(sock, 1):
            await asyncio.sleep(1)


async def idle_sockets(port: int, count: int) -> list[socket.socket]:
    """Every tenth has sent half a header, the others nothing."""
    loop = asyncio.get_running_loop()
    sockets = []
    for number in range(count):
        sock = socket.socket()
        sock.setblocking(False)
        await loop.sock_connect(sock, ("127.0.0.1", port))
        if number % 10 == 0:
            await loop.sock_sendall(sock, HALF)
        sockets.append(sock)
    return sockets


async def watch(readers: list[Reader], seconds: float) -> list[float]:
    """The gaps of all readers in the next seconds."""
    for reader in readers:
        reader.gaps.clear()
    await asyncio.sleep(seconds)
    return [gap for reader in readers for gap in reader.gaps]


async def run(args: argparse.Namespace, port: int, pid: int) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    readers, transports = [], []
    for _ in range(args.readers):
        transport, reader = await loop.create_connection(Reader, "127.0.0.1", port)
        readers.append(reader)
        transports.append(transport)
    await asyncio.sleep(2)
    before = await watch(readers, args.seconds)
    mb = rss_mb(pid)
    sockets = await idle_sockets(port, args.idle)
    slow = [asyncio.create_task(slow_reader(port)) for _ in range(args.slow)]
    await asyncio.sleep(2)
    during = await watch(readers, args.seconds)
    grown = rss_mb(pid) - mb
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)
    for sock in sockets:
        sock.close()
    await asyncio.sleep(2)
    after = await watch(readers, args.seconds)
    for transport in transports:
        transport.close()
    p99 = [percentile(gaps, 99) for gaps in (before, during, after)]
    return {"itl_p99_ms": [round(value * 1e3, 2) for value in p99], "gaps": len(during),
            "longer": round(p99[1] / ((p99[0] + p99[2]) / 2), 3), "frontend_mb": round(mb, 1),
            "grown_mb": round(grown, 1)}


def main(argv: list[str] | None = None) -> int:
    parser = OptionParser(prog="launch.py bench overload", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--slow", type=int, default=100, help="clients that read one byte a second")
    parser.add_argument("--idle", type=int, default=2000, help="connections that say nothing, or half a header")
    parser.add_argument("--readers", type=int, default=16, help="clients that keep up and are measured")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each of the three windows")
    args = parser.parse_args(argv)
    if min(args.slow, args.idle) < 0 or args.readers < 1 or args.seconds <= 0:
        parser.error("counts must not be below 0, --readers at least 1, --seconds above 0")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory(prefix="tf") as folder:
        model = write_tiny_model(Path(folder))
        tokens = np.arange(65, 91, dtype=np.int32)
        with NullEngine(model, NULL_CORE, tokens=tokens, rate=RATE) as engine:
            pid = next(pid for name, pid in engine.pids.items() if name.startswith("frontend"))
            result = asyncio.run(run(args, engine.port, pid))
    print_json(result)
    return 0 if result["longer"] <= MAX_LONGER and result["grown_mb"] <= MAX_MB else 1


if __name__ == "__main__":
    raise SystemExit(main())
