"""`python launch.py soak`: many requests of a few tokens over HTTP, and what they leave behind.

Mixed completions and chats, streamed and not, some with stop strings, seeds, log-probabilities or a closed connection.
A connection that rested until the server closed it (this process was stopped, say) is replaced, as every HTTP client
does; one that is closed earlier is a failed request.
Every process's resident memory and descriptors are read along the way; after a warm-up the memory's slope is fitted.
Exit status 1 when a request failed, blocks were held at the end, descriptors grew, or memory did (by 1 MB per 100,000
requests, judged on runs of at least that many).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.fuzz import tiny_server
from bench.stats import percentile, print_json
from frontend.http_server import IDLE_CONNECTION_S
from ipc.option_help import OptionParser

MAX_SLOPE_MB = 1.0  # per 100,000 requests
JUDGED_REQUESTS = 100_000
WARM_UP = 0.25  # share of the run that no figure counts
NO_RING = ("--no-flight-recorder",)  # its ring is bounded, but fills for so long that growth could not be told apart
FDS_SLACK = 8  # connections that are just opening or closing


def rss_mb(pid: int) -> float:
    """Resident memory, without pages of files."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return int(fields["RssAnon"].split()[0]) / 1000


def num_fds(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def make_body(rng: random.Random) -> tuple[str, bytes]:
    """(path, JSON) of the next request."""
    body: dict[str, Any] = {"max_tokens": 1 if rng.random() < 0.9 else rng.randint(2, 6),
                            "temperature": rng.choice((0, 0.7)), "stream": rng.random() < 0.3}
    text = "".join(rng.choice("abcdefgh ") for _ in range(rng.randint(1, 60)))
    for name, value in (("seed", rng.randrange(1 << 40)), ("stop", ["zz", "q"]), ("n", 2), ("user", text[:9]),
                        ("min_p", 0.1), ("repetition_penalty", 1.1), ("logit_bias", {"65": 2})):
        if rng.random() < 0.1:
            body[name] = value
    if rng.random() < 0.5:
        return "/v1/chat/completions", json.dumps({**body, "messages": [{"role": "user", "content": text}]}).encode()
    if rng.random() < 0.1:
        body["logprobs"] = 2
    return "/v1/completions", json.dumps({**body, "prompt": text}).encode()


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


class Soak:
    """`clients` keep-alive connections that never rest."""

    def __init__(self, port: int, pids: dict[str, int], args: argparse.Namespace) -> None:
        self.port, self.pids, self.args = port, pids, args
        self.num_done = self.num_failed = self.num_cut = self.num_stale = 0
        self.latencies: list[tuple[float, float]] = []  # (when, seconds)
        self.samples: list[tuple[int, dict[str, float], dict[str, int]]] = []
        self._begin = time.monotonic()

    @property
    def is_over(self) -> bool:
        if self.args.requests:
            return self.num_done >= int(self.args.requests)
        return time.monotonic() - self._begin > self.args.hours * 3600

    async def run(self) -> None:
        watch = asyncio.create_task(self._watch())
        await asyncio.gather(*(self._client(i) for i in range(self.args.clients)))
        watch.cancel()
        await asyncio.sleep(0.5)
        self._sample()

    def _sample(self) -> None:
        self.samples.append((self.num_done, {name: rss_mb(pid) for name, pid in self.pids.items()},
                             {name: num_fds(pid) for name, pid in self.pids.items()}))

    async def _watch(self) -> None:
        last = 0.0
        while True:
            await asyncio.sleep(0.5)
            self._sample()
            if time.monotonic() - last > 10:
                last = time.monotonic()
                print(f"{self.num_done} requests, {self.num_failed} failed; MB " + ", ".join(
                    f"{name} {mb:.1f}" for name, mb in self.samples[-1][1].items()), flush=True)

    async def _client(self, number: int) -> None:
        rng = random.Random(self.args.seed * 1000 + number)
        while not self.is_over:
            connection = await asyncio.open_connection("127.0.0.1", self.port)
            sent = time.monotonic()
            try:
                for _ in range(rng.randint(50, 500)):
                    path, body = make_body(rng)
                    before, sent = sent, time.monotonic()
                    try:
                        is_kept = not self.is_over and await self._one(rng, path, body, *connection)
                    except (OSError, asyncio.IncompleteReadError):
                        if sent - before < IDLE_CONNECTION_S:       # it cannot have rested for so long
                            raise
                        self.num_stale += 1
                        await _close(connection[1])
                        connection = await asyncio.open_connection("127.0.0.1", self.port)
                        is_kept = await self._one(rng, path, body, *connection)
                    if not is_kept:
                        break
            except (OSError, asyncio.IncompleteReadError) as error:
                self.num_failed += 1
                print(f"request failed: {type(error).__name__}: {error}")
            await _close(connection[1])

    async def _one(self, rng: random.Random, path: str, body: bytes, reader: asyncio.StreamReader,
                   writer: asyncio.StreamWriter) -> bool:
        """One request. False: this connection was cut, as clients do."""
        begin = time.monotonic()
        writer.write(b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
                     % (path.encode(), len(body)) + body)
        if rng.random() < 0.002:
            self.num_cut += 1
            self.num_done += 1
            return False
        head = await reader.readuntil(b"\r\n\r\n")
        if b"transfer-encoding: chunked" in head.lower():
            while (size := int(await reader.readline(), 16)) > 0:
                await reader.readexactly(size + 2)
            await reader.readline()
        else:
            await reader.readexactly(int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]))
        self.num_done += 1
        if not head.startswith(b"HTTP/1.1 200"):
            self.num_failed += 1
            print(f"{path} {body!r}: {head[:60]!r}")
        self.latencies.append((begin, time.monotonic() - begin))
        if len(self.latencies) > 400_000:
            self.latencies = self.latencies[::2]
        return True

    def report(self) -> dict[str, Any]:
        """Slopes in MB per 100,000 requests, after the warm-up."""
        late = [s for s in self.samples[:-1] if s[0] >= self.num_done * WARM_UP] or self.samples
        done = np.array([s[0] for s in late], float)
        slopes = {name: float(np.polyfit(done, [s[1][name] for s in late], 1)[0] * 1e5) if len(late) > 2 else 0.0
                  for name in self.pids}
        half = len(self.latencies) // 2
        first, second = (percentile([s for _, s in part], 99) if part else 0.0
                         for part in (self.latencies[:half], self.latencies[half:]))
        return {"requests": self.num_done, "failed": self.num_failed, "cut_by_client": self.num_cut,
                "replaced_connections": self.num_stale,
                "seconds": round(time.monotonic() - self._begin, 1),
                "rss_mb": {name: round(mb, 1) for name, mb in self.samples[-1][1].items()},
                "rss_mb_per_100k": {name: round(slope, 2) for name, slope in slopes.items()},
                "fds_grown": {name: self.samples[-1][2][name] - self.samples[0][2][name] for name in self.pids},
                "p99_ms": [round(first * 1e3, 1), round(second * 1e3, 1)]}


async def usage_when_idle(port: int) -> tuple[float, float]:
    """(running, share of the cache in use), from /metrics once nothing runs."""
    for _ in range(100):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        lines = (await reader.read()).decode().splitlines()
        await _close(writer)
        values = {line.split("{")[0].split()[0]: float(line.split()[-1]) for line in lines
                  if line.startswith(("vllm:num_requests_running", "vllm:kv_cache_usage_perc"))}
        if not values["vllm:num_requests_running"] and not values["vllm:kv_cache_usage_perc"]:
            return 0.0, 0.0
        await asyncio.sleep(0.02)
    return values["vllm:num_requests_running"], values["vllm:kv_cache_usage_perc"]


def main(argv: list[str] | None = None) -> int:
    parser = OptionParser(prog="launch.py soak", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--hours", type=float, default=8.0)
    parser.add_argument("--requests", type=int, default=0, metavar="N", help="stop after so many instead; short: 50000")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.hours <= 0 or args.requests < 0 or args.clients < 1:
        parser.error("--hours must be above 0, --requests not below 0, --clients at least 1")
    with tiny_server("--num-gpu-blocks-override", "512", "--attention-backend", "cpu", "--num-threads",
                     "1", "--log-level", "error", *NO_RING) as (server, _):
        soak = Soak(server.port, server.pids, args)
        asyncio.run(soak.run())
        result = soak.report()
        running, usage = asyncio.run(usage_when_idle(server.port))
        result.update(running_at_end=running, cache_in_use_at_end=usage, restarts=server.num_restarts)
    print_json(result)
    is_judged = result["requests"] >= JUDGED_REQUESTS
    bad = (result["failed"] or running or usage or result["restarts"]
           or max(result["fds_grown"].values()) > FDS_SLACK
           or (is_judged and max(result["rss_mb_per_100k"].values()) >= MAX_SLOPE_MB))
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
