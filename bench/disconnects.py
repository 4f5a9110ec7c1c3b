"""`python launch.py bench disconnects`: clients that reset their connections at random bytes and moments.

After them every block must be free within a second, and no process may have grown by more than 5 MB.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
import time

from bench.fuzz import tiny_server
from bench.soak import NO_RING, rss_mb, usage_when_idle
from bench.stats import print_json
from ipc.option_help import OptionParser

CLIENTS = 32
MAX_GROWTH_MB, MAX_HELD_S = 5.0, 1.0


async def client(port: int, rng: random.Random) -> None:
    """One request that is cut: in its head, in its body, before the answer, or in mid-stream; sometimes never."""
    body = json.dumps({"prompt": "Go on " * rng.randint(1, 12), "max_tokens": 100, "ignore_eos": True,
                       "n": rng.choice((1, 1, 2)), "stream": rng.random() < 0.7}).encode()
    data = (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
            % len(body) + body)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data[: rng.randrange(len(data))] if rng.random() < 0.3 else data)
    try:
        async with asyncio.timeout(rng.choice((0.0, 0.005, 0.02, 0.1))):
            while await reader.read(256):
                pass
    except (TimeoutError, ConnectionError):
        pass
    if rng.random() < 0.7:  # a reset instead of an orderly end
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
    writer.close()
    try:
        await writer.wait_closed()
    except ConnectionError:
        pass


async def disconnects(port: int, count: int, seed: int) -> None:
    async def some(number: int) -> None:
        rng = random.Random(seed * 1000 + number)
        for _ in range(count // CLIENTS):
            await client(port, rng)

    await asyncio.gather(*(some(number) for number in range(CLIENTS)))


def main(argv: list[str] | None = None) -> int:
    parser = OptionParser(prog="launch.py bench disconnects", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--warm-up", type=int, default=2_000, help="disconnects before memory is compared")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.count < CLIENTS or args.warm_up < CLIENTS:
        parser.error(f"--count and --warm-up must be at least {CLIENTS}")
    with tiny_server("--num-gpu-blocks-override", "512", "--attention-backend", "cpu", "--num-threads", "1",
                     "--log-level", "error", *NO_RING) as (server, _):
        asyncio.run(disconnects(server.port, args.warm_up, args.seed + 1))
        asyncio.run(usage_when_idle(server.port))
        before = {name: rss_mb(pid) for name, pid in server.pids.items()}
        asyncio.run(disconnects(server.port, args.count, args.seed))
        begin = time.monotonic()
        held = asyncio.run(usage_when_idle(server.port))
        seconds = time.monotonic() - begin
        grown = {name: round(rss_mb(pid) - before[name], 2) for name, pid in server.pids.items()}
        result = {"disconnects": args.count, "running_and_cache_in_use": held, "free_after_s": round(seconds, 2),
                  "grown_mb": grown, "restarts": server.num_restarts}
    print_json(result)
    return 1 if any(held) or seconds > MAX_HELD_S or max(grown.values()) > MAX_GROWTH_MB or result["restarts"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
