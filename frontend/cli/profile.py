"""`python launch.py profile`: where the time goes, scheduler against device, per process.

Attaches to a running server (--url) and watches it for some seconds, or starts an engine and runs a small load on it,
or shows what was saved when a process failed (--steps). Needs no preparation of the server: the records are always on.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
import time
import urllib.error
import urllib.request
from typing import Any

import numpy as np
from rich.console import Console

from frontend.cli import steps_view
from frontend.cli.common import (StartError, UsageError, engine_config, make_command_parser, parse_command, run_command,
                                 server_api_key)
from frontend.cli.profile_view import shares, show
from frontend.processes import ProcessUse, process_use
from frontend.step_report import analyse
from frontend.trace import chrome_trace
from ipc.option_help import OptionParser
from ipc.screen import Screen

TIMEOUT_S = 120.0


def main(argv: list[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    given = {word.partition("=")[0] for word in argv}
    return run_command("profile", lambda: attach(argv) if "--url" in given else
                       saved_steps(argv) if "--steps" in given else own_load(argv))


def console() -> Console:
    """Standard output; as wide as the tables need where it is no terminal."""
    return Console(width=None if sys.stdout.isatty() else 120)


# ---------------------------------------------------------------- a server that runs


class Server:
    """A running server's debug routes."""

    def __init__(self, url: str, api_key: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def call(self, path: str, method: str = "GET") -> Any:
        """Raises StartError with the server's own words."""
        request = urllib.request.Request(f"{self.url}{path}", method=method, headers=self._headers)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise StartError(f"{self.url}{path}: {_reason(error)}") from None
        except (OSError, ValueError) as error:
            raise StartError(f"{self.url}{path}: {error}") from None


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        return f"{error.code}: {json.load(error)['error']['message']}"
    except (ValueError, KeyError, TypeError, OSError):
        return str(error)


def attach(argv: list[str]) -> int:
    """Watch a server for --seconds."""
    parser = OptionParser(prog="launch.py profile")
    parser.add_argument("--url", required=True, help="of a running server, for example http://127.0.0.1:8000")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--api-key", help="of the server; its admin key for --torch-profiler")
    parser.add_argument("--trace", metavar="FILE", help="also write the window as a trace for ui.perfetto.dev")
    parser.add_argument("--torch-profiler", action="store_true", help="with the worker's operators in the trace")
    args = parser.parse_args(argv)
    check_trace(args.trace, args.torch_profiler)
    if not 0 < args.seconds <= 3600:
        raise UsageError(f"--seconds is {args.seconds:g}; allowed is above 0 up to 3600")
    server = Server(args.url, server_api_key(vars(args)))
    window = f"/debug/timeline?seconds={args.seconds}"
    if args.torch_profiler:
        server.call("/start_profile", "POST")
    before = server.call(window)["processes"]
    time.sleep(args.seconds)
    report = server.call(window)
    if args.torch_profiler:
        server.call("/stop_profile", "POST")
    if args.trace:
        window = f"/debug/timeline?seconds={args.seconds + 30 * args.torch_profiler}"
        write_trace(args.trace, server.call(window + "&format=trace"))
    show(report, shares(before, report.pop("processes"), args.seconds), console())
    return 0


def check_trace(path: str | None, is_with_operators: bool) -> None:
    """Before the time is spent. Raises UsageError."""
    if is_with_operators and not path:
        raise UsageError("--torch-profiler adds the worker's operators to a trace; name one with --trace FILE")
    if path and not os.path.isdir(os.path.dirname(os.path.abspath(path))):
        raise UsageError(f"--trace {path}: there is no such folder")


def write_trace(path: str, trace: dict[str, Any]) -> None:
    with open(path, "w") as file:
        json.dump(trace, file)
    print(f"{path}: {len(trace['traceEvents'])} events; open it in ui.perfetto.dev", file=sys.stderr)


def saved_steps(argv: list[str]) -> int:
    """What the engine did before a process failed."""
    args = steps_view.make_parser().parse_args(argv)
    check_trace(args.trace, False)
    reason, rows = steps_view.read(args.steps)
    steps_view.show_steps(reason, rows, console())
    if args.trace:
        write_trace(args.trace, chrome_trace(rows))
    return 0


# ---------------------------------------------------------------- a load of our own


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """Requests of equal size, so many at a time."""
    concurrency: int = 8
    requests: int = 32
    prompt_tokens: int = 128
    output_tokens: int = 64

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value < 1:
                raise UsageError(f"--{field.name.replace('_', '-')} is {value}; at least 1 is needed")


@dataclasses.dataclass(slots=True)
class Measured:
    """What a load left in the timeline."""
    rows: np.ndarray
    processes: list[dict[str, Any]]
    seconds: float


async def run_load(llm: Any, load: Load) -> Measured:
    """Run it on a started engine, after a request that warms up."""
    from frontend import SamplingParams

    seats = asyncio.Semaphore(load.concurrency)
    params = SamplingParams(temperature=0.0, max_tokens=load.output_tokens, ignore_eos=True)

    async def one(number: int) -> None:
        async with seats:
            prompt = [1 + (number * 7919 + i * 31) % (llm.vocab_size - 1) for i in range(load.prompt_tokens)]
            async for _ in llm.generate(prompt, params, output_kind="delta"):
                pass

    def uses() -> list[dict[str, Any]]:
        found: list[ProcessUse] = process_use([os.getpid(), *llm.pids])
        return [use._asdict() for use in found]

    await one(0)
    before, begin = uses(), time.monotonic_ns()
    await asyncio.gather(*(one(i + 1) for i in range(load.requests)))
    seconds = (time.monotonic_ns() - begin) / 1e9
    await asyncio.sleep(0)                      # the last step's row is written behind the tasks it woke
    return Measured(llm.timeline.window(begin), shares(before, uses(), seconds), seconds)


def own_load(argv: list[str]) -> int:
    """Start an engine, run --requests of them --concurrency at a time, and say where the time went."""
    parser, group = make_command_parser("profile", "Where the time goes, scheduler against device, per process. With "
                                        "--url: of a running server (--seconds, --api-key); with --steps FILE: before "
                                        "a process failed; else of a load of its own.")
    for field in dataclasses.fields(Load):
        group.add_argument(f"--{field.name.replace('_', '-')}", type=int, default=field.default)
    group.add_argument("--trace", metavar="FILE", help="also write the run as a trace for ui.perfetto.dev")
    group.add_argument("--torch-profiler", action="store_true", default=False,
                       help="with the worker's operators in the trace")
    model, options, own = parse_command(parser, argv)
    trace, is_with_operators = own.pop("trace", None), own.pop("torch_profiler")
    check_trace(trace, is_with_operators)
    load = Load(**own)
    screen = Screen()
    config = engine_config(model or "smollm2-135m", options, screen)
    return asyncio.run(_run(config, screen, load, trace, is_with_operators))


async def _run(config: Any, screen: Screen, load: Load, trace: str | None, is_with_operators: bool) -> int:
    from frontend import AsyncLLM

    async with AsyncLLM(config=config, on_phase=lambda phase: screen.phase(phase.role, phase)) as llm:
        if is_with_operators:
            await llm.start_profile()
        measured = await run_load(llm, load)
        operators = await llm.stop_profile() if is_with_operators else None
        if trace:
            write_trace(trace, chrome_trace(measured.rows, list(llm.request_log.ended), operators, llm.num_blocks))
    show(dataclasses.asdict(analyse(measured.rows)), measured.processes, console())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
