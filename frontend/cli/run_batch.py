"""`launch.py run-batch`: answer an OpenAI batch file with an engine of this program, or with a running server.

    python launch.py run-batch -i requests.jsonl -o answers.jsonl --model qwen3-0.6b
    python launch.py run-batch -i requests.jsonl -o answers.jsonl --url http://127.0.0.1:8000

An engine is called through the application that also serves HTTP, so a line gets the answer, or the error, that the
same call to a server would get. Interrupted or ended for whatever reason, the same command goes on where it was: ids
that the output file answers are skipped. A request that only failed because the engine ended is not answered.
"""
from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, BinaryIO

from tqdm import tqdm

from frontend.async_llm import AsyncLLM
from frontend.cli.batch_file import BatchRequest, Output, check_input, error_body, error_object, open_input, requests
from frontend.cli.batch_server import ServerCalls
from frontend.cli.common import (StartError, UsageError, engine_config, make_command_parser,
                                 parse_command, run_command, say, server_api_key)
from frontend.cli.source import ServerSource
from frontend.openai.app import build_app
from ipc.aliases import DEMO_ALIAS
from ipc.config import EngineConfig
from ipc.errors import EngineDeadError
from ipc.screen import Screen

Application = Callable[[dict[str, Any], Any, Any], Awaitable[None]]
Call = Callable[[BatchRequest], Awaitable[tuple[int, str, bytes]]]      # -> status, request id, body

RETRY_S = 0.5                                    # after "too many requests", which is our own load
RETRIED = (429, 502, 503, 504)
MOST_IN_FLIGHT = 1024
DEFAULT_IN_FLIGHT = 64                           # on a server, whose number of rows we do not know


class Totals:
    """What a run did."""

    def __init__(self) -> None:
        self.num_ok = self.num_failed = self.num_skipped = 0


async def call_application(app: Application, request: BatchRequest) -> tuple[int, str, bytes]:
    """(status, request id, body) of one call of the application, as an HTTP server would make it."""
    status, request_id, parts = 500, "", [b""]
    messages = iter([{"type": "http.request", "body": bytes(request.body), "more_body": False}])
    forever = asyncio.Event()

    async def receive() -> dict[str, Any]:
        message = next(messages, None)
        if message is None:
            await forever.wait()                 # the client stays
        return message or {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        nonlocal status, request_id
        if message["type"] == "http.response.start":
            status = message["status"]
            request_id = next((value.decode("latin-1") for name, value in message["headers"]
                               if name.lower() == b"x-request-id"), "")
        else:
            parts.append(message.get("body", b""))

    path, _, query = request.url.partition("?")
    await app({"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": request.method.upper(),
               "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": query.encode(),
               "root_path": "", "headers": [(b"content-type", b"application/json"), (b"host", b"batch")],
               "client": ("batch", 0),
               "server": ("batch", 0)}, receive, send)
    return status, request_id, b"".join(parts)


def refusal(request: BatchRequest) -> tuple[int, bytes] | None:
    """Status and body for what a batch cannot do, whatever the application could."""
    if request.method.upper() != "POST":
        text = f"method is {request.method[:20]!r}; a batch request is a POST"
        return 400, error_body(400, "BadRequestError", text, "method")
    if not request.url.startswith("/v1/") or not all("!" <= char <= "~" for char in request.url):
        text = f"url is {request.url[:80]!r}; a batch request goes to a path under /v1, as /v1/chat/completions"
        return 404, error_body(404, "NotFoundError", text, "url")
    if not bytes(request.body).lstrip().startswith(b"{"):
        return 400, error_body(400, "BadRequestError", "body must be a JSON object", "body")
    return None


async def answer(call: Call, is_dead: Callable[[], bool], request: BatchRequest, output: Output,
                 totals: Totals) -> None:
    """One line of the output. Raises EngineDeadError, and writes nothing, when the engine has ended."""
    refused = refusal(request)
    if refused is not None:
        output.write(request.custom_id, refused[0], "", refused[1])
        totals.num_failed += 1
        return
    while True:
        status, request_id, body = await call(request)
        if status in RETRIED[1:] and is_dead():
            raise EngineDeadError(error_object(status, body)["message"])
        if status not in RETRIED:
            break
        await asyncio.sleep(RETRY_S)             # a bounded queue (it is our own load), or a process that is restarted
    if not body.lstrip().startswith(b"{"):       # a stream has no place in a line
        status = 400
        body = error_body(400, "BadRequestError", "stream is true; a batch has no streams, leave it out", "stream")
    output.write(request.custom_id, status, request_id, body)
    totals.num_ok += status < 400
    totals.num_failed += status >= 400


async def run_all(call: Call, is_dead: Callable[[], bool], lines: Iterator[tuple[int, BatchRequest]],
                  output: Output, totals: Totals, max_concurrency: int, on_done: Callable[[], object]) -> None:
    """All requests that the output does not answer yet, `max_concurrency` at once, in the order of the file."""
    running: set[asyncio.Task[None]] = set()

    async def settle(limit: int) -> None:
        nonlocal running
        while len(running) > limit:
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
                on_done()

    try:
        for _, request in lines:
            if request.custom_id in output.done:
                totals.num_skipped += 1
                on_done()
                continue
            running.add(asyncio.create_task(answer(call, is_dead, request, output, totals)))
            await settle(max_concurrency - 1)
        await settle(0)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def run_file(call: Call, is_dead: Callable[[], bool], file: BinaryIO, output: Output, num_requests: int,
                   max_concurrency: int, totals: Totals) -> None:
    """Answer the file, with a progress bar."""
    file.seek(0)
    with tqdm(total=num_requests, desc="requests", disable=None) as bar:    # none off a terminal
        await run_all(call, is_dead, requests(file), output, totals, max_concurrency, bar.update)


async def run_on_server(source: ServerSource, file: BinaryIO, output: Output, num_requests: int, max_concurrency: int,
                        totals: Totals) -> None:
    """Answer the file with a running server."""
    calls = ServerCalls(source, max_concurrency)
    try:
        await run_file(calls, calls.is_dead, file, output, num_requests, max_concurrency, totals)
    finally:
        calls.close()


async def run_on_engine(config: EngineConfig, file: BinaryIO, output: Output, num_requests: int, max_concurrency: int,
                        screen: Screen, totals: Totals) -> None:
    """Start the engine, answer the file."""
    llm = AsyncLLM(config=config, on_phase=lambda phase: screen.phase(phase.role, phase))
    try:
        await llm.start()
    except EngineDeadError as error:
        raise StartError(str(error)) from None
    try:
        await run_file(functools.partial(call_application, build_app(llm)), lambda: bool(llm.status()["dead"]), file,
                       output, num_requests, max_concurrency, totals)
    finally:
        await llm.close()


def main(argv: list[str]) -> int:
    parser, group = make_command_parser("run-batch", "Answer an OpenAI batch file.")
    group.add_argument("-i", "--input-file", metavar="FILE", help="requests, one JSON object a line; -: standard input")
    group.add_argument("-o", "--output-file", metavar="FILE", help="answers; those it has are kept; -: standard output")
    group.add_argument("--overwrite", action="store_true", default=False, help="start anew instead of going on")
    group.add_argument("--max-concurrency", type=int, metavar="N",
                       help="requests given out at once (default: twice --max-num-seqs; with --url "
                       f"{DEFAULT_IN_FLIGHT})")
    group.add_argument("--url", help="use this server, which runs, instead of starting an engine")
    group.add_argument("--api-key", default="", metavar="KEY", help="of the server (default: THREEFOLD_API_KEY)")

    def command() -> int:
        model, engine, own = parse_command(parser, argv)
        for name in ("input_file", "output_file"):
            if name not in own:
                raise UsageError(f"--{name.replace('_', '-')} is missing; try -i requests.jsonl -o answers.jsonl")
        url, most = own.get("url"), own.get("max_concurrency")
        if url and (model or engine):
            name = "model" if model else next(iter(engine)).replace("_", "-")
            raise UsageError(f"--url uses a server that runs; --{name} is for starting an engine: drop one of them")
        if most is not None and not 1 <= most <= MOST_IN_FLIGHT:
            raise UsageError(f"--max-concurrency is {most}; allowed are 1 to {MOST_IN_FLIGHT}")
        screen, totals = Screen(), Totals()
        with contextlib.ExitStack() as files:
            file = files.enter_context(open_input(own["input_file"]))
            num_requests = check_input(file)
            output = files.enter_context(contextlib.closing(Output(own["output_file"], overwrite=own["overwrite"])))
            if url:
                source = ServerSource(url, api_key=server_api_key(own))
                running = run_on_server(source, file, output, num_requests, most or DEFAULT_IN_FLIGHT, totals)
            else:
                config = engine_config(model or DEMO_ALIAS, {"log_level": "warning", **engine}, screen)
                most = most or min(2 * config.scheduler.max_num_seqs, MOST_IN_FLIGHT)
                running = run_on_engine(config, file, output, num_requests, most, screen, totals)
            try:
                asyncio.run(running)
            except (KeyboardInterrupt, EngineDeadError):
                num_left = num_requests - len(output.done)
                say(f"{num_left} of {num_requests} requests are not answered yet; the same command goes on with them")
                raise
        say(f"{totals.num_ok} answered, {totals.num_failed} refused, {totals.num_skipped} were answered before: "
            f"{own['output_file']}")
        return 0
    return run_command("run-batch", command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
