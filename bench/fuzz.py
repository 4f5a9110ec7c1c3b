"""`python launch.py fuzz`: hostile frames and hostile HTTP against every door of the engine.

    --frames N   mutated, cut, huge, mixed-up frames: N against the decoders, and parts of N over sockets, into an
                 engine core, and into the socket of a running one
    --http N     the hand corpus and variations of it up to N, raw bytes, and as many of schemathesis (extra `fuzz`)

Starts a server with a tiny model, or takes `--base-url` for HTTP. Prints what was wrong and one JSON object last; exit
status 1 when a decoder raised anything but its own error, an answer was 5xx, or a process ended.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.fuzz_frames import WireFuzz, into_a_running_core
from bench.fuzz_http import HttpFuzz
from bench.server_process import ServerProcess
from bench.stats import print_json
from bench.tiny_model import write_tiny_model
from ipc.option_help import OptionParser

FLAGS = ("--num-gpu-blocks-override", "512", "--attention-backend", "reference", "--num-threads", "1",
         "--max-model-len", "128", "--log-level", "error")


@contextlib.contextmanager
def tiny_server(*options: str) -> Iterator[tuple[ServerProcess, str]]:
    """A server with a tiny model, and the folder of that model. Gone at the end."""
    with tempfile.TemporaryDirectory(prefix="tf") as folder:
        temp, model = Path(folder, "t"), Path(folder, "tiny")
        temp.mkdir()
        model.mkdir()
        server = ServerProcess(write_tiny_model(model), str(temp), *(options or FLAGS))
        try:
            yield server.wait_ready(), str(model)
            server.end()
        finally:
            server.kill()


def fuzz_frames(count: int, seed: int, server: ServerProcess, model: str) -> dict[str, Any]:
    logging.getLogger("ipc.sockets").setLevel(logging.ERROR)  # one line for each of the first bad frames
    logging.getLogger("engine_core").setLevel(logging.ERROR)
    wire = WireFuzz(seed)
    begin = time.monotonic()
    wire.decoders(count)
    seconds = time.monotonic() - begin
    wire.sockets(count // 20)
    wire.core(count // 10)
    num_live = max(100, count // 20)
    asyncio.run(into_a_running_core(server, model, seed, num_live))
    return {"frames": count, "frames_per_s": round(count / seconds), **wire.counts, "socket_frames": count // 20,
            "live_frames": num_live}


def main(argv: list[str] | None = None) -> int:
    parser = OptionParser(prog="launch.py fuzz", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--frames", type=int, default=0, metavar="N",
                        help="frames for the decoders, 200000 for a short run")
    parser.add_argument("--http", type=int, default=0, metavar="N", help="HTTP requests, 5000 for a short run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--base-url", help="HTTP only: a server that runs already")
    parser.add_argument("--no-schemathesis", action="store_true", help="the corpus and its variations only")
    args = parser.parse_args(argv)
    if args.frames <= 0 and args.http <= 0:
        parser.error("say how much: --frames N, --http N, or both")
    if args.base_url and args.frames > 0:
        parser.error("--frames needs an engine of its own; leave --base-url out")
    if args.base_url:
        return _finish({}, HttpFuzz(int(args.base_url.rstrip("/").rpartition(":")[2]), args.seed), args, None)
    with tiny_server() as (server, model):
        result = fuzz_frames(args.frames, args.seed, server, model) if args.frames > 0 else {}
        http = HttpFuzz(server.port, args.seed) if args.http > 0 else None
        return _finish(result, http, args, server)


def _finish(result: dict[str, Any], http: HttpFuzz | None, args: argparse.Namespace,
            server: ServerProcess | None) -> int:
    wrong: list[str] = []
    if http is not None:
        http.run(args.http)
        if not args.no_schemathesis:
            result["schemathesis"] = http.schemathesis(args.http)
        http.close()
        result.update(http.report())
        wrong = http.wrong
    for line in wrong[:50]:
        print(line)
    if server is not None:
        result["restarts"] = server.num_restarts
    print_json(result)
    return 1 if wrong or result.get("num_5xx") or result.get("restarts") else 0


if __name__ == "__main__":
    raise SystemExit(main())
