"""Load generator for any OpenAI-compatible server: `python -m bench.serve --base-url ... --concurrency 8`.

Streams completions (or chat completions), times every chunk, and reports TTFT, ITL, TPOT, end-to-end time and
throughput; its last output line is one JSON object. It exits with 1 when a request failed. Several concurrencies
(`--concurrency 1,4,16`) are run one after another; `--compare old.json` says what changed beyond noise, `--plot` draws.
Options go by the names of vLLM's benchmark too.

It knows nothing of the server's inside: no metrics endpoint, no process ids. Client and server usually share a small
machine, so the client does as little as possible while it measures: bodies are encoded before the clock starts, the
receive callback only keeps (time, bytes), and a stream is parsed once, after its end. Token counts come from `usage`,
since one chunk may hold several tokens. Each request has its own connection, made after the clock of its TTFT started.
"""

import argparse
import asyncio
import random
import ssl
import sys
import time
from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from typing import Any
from urllib.parse import urlsplit

import msgspec

from bench.compare import compare_results, join_repeats, noise, read_result, runs_of
from bench.load_options import parse_args
from bench.plot import plot_load
from bench.stats import RequestRecord, print_json, print_serving_report, serving_figures

WORDS = (  # common enough to be one token each in most vocabularies
    *("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state"),
    *("family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company"),
    *("system", "program", "question", "work", "number", "night", "point", "home", "water", "room", "mother", "area"),
)
FORM_REFUSED = (400, 415, 422)  # answers that may mean "I do not take this form of request"
PROBE_TOKENS = 8
LAST_CHUNK = b"\r\n0\r\n\r\n"  # of a chunked body, with the end of the chunk before it


class Refused(Exception):
    """The server answered with a status other than 200."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"HTTP {status}: {body[:300]}")
        self.status = status


class Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: Any = None


class Choice(msgspec.Struct):
    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None


class PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None


class Chunk(msgspec.Struct):
    """One SSE event of either endpoint; fields that no figure needs are skipped by the decoder."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


CHUNK_DECODER = msgspec.json.Decoder(Chunk)


class Exchange(asyncio.Protocol):
    """One request and its response: writes when connected, then keeps what arrives with its time.

    The response ends at EOF, at its Content-Length, or at the last chunk of a chunked body (a server may ignore
    `Connection: close`). No event text can imitate that last chunk: JSON strings hold no raw line ends.
    """

    def __init__(self, request: bytes) -> None:
        self.request = request
        self.arrivals: list[tuple[float, bytes]] = []
        self.num_missing: int | None = None  # body bytes still to come, where Content-Length says so
        self.has_headers = False
        self.tail = b""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        transport.write(self.request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self.arrivals.append((time.monotonic(), data))
        if not self.has_headers:
            head, found, body = b"".join(data for _, data in self.arrivals).partition(b"\r\n\r\n")
            if not found:
                return
            self.has_headers = True
            length = parse_headers(head)[1].get("content-length")
            self.num_missing = int(length) - len(body) if length else None
        elif self.num_missing is not None:
            self.num_missing -= len(data)
        self.tail = (self.tail + data)[-len(LAST_CHUNK) :]
        if self.tail == LAST_CHUNK or self.num_missing == 0:
            self.finish()

    def connection_lost(self, exc: Exception | None) -> None:
        self.finish(exc)

    def finish(self, error: Exception | None = None) -> None:
        self.transport.close()
        if not self.done.done():
            if error:
                self.done.set_exception(error)
            else:
                self.done.set_result(None)


def parse_headers(head: bytes) -> tuple[int, dict[str, str]]:
    """Status and headers (names in lower case) of a response's head."""
    first, *lines = head.decode("latin-1").split("\r\n")
    parts = first.split(" ", 2)
    if len(parts) < 2 or not parts[0].startswith("HTTP/1") or not parts[1].isdigit():
        raise ValueError(f"not an HTTP/1 answer: {first[:80]!r}; check --base-url")
    fields = (entry.partition(":") for entry in lines)
    return int(parts[1]), {name.strip().lower(): value.strip() for name, _, value in fields}


def split_response(arrivals: list[tuple[float, bytes]]) -> tuple[int, bytes, list[int], list[float]]:
    """(status, body, ends, times): the body's bytes before ends[i] had arrived at times[i]."""
    raw = b"".join(data for _, data in arrivals)
    raw_ends = list(accumulate(len(data) for _, data in arrivals))
    raw_times = [moment for moment, _ in arrivals]
    head, found, _ = raw.partition(b"\r\n\r\n")
    if not found:
        raise ValueError("the server closed the connection before it answered")
    status, headers = parse_headers(head)
    offset = len(head) + 4
    if headers.get("transfer-encoding", "").lower() != "chunked":
        return status, raw[offset:], [end - offset for end in raw_ends], raw_times
    pieces: list[bytes] = []
    times: list[float] = []
    while (line_end := raw.find(b"\r\n", offset)) > 0:
        size = int(raw[offset:line_end].split(b";")[0], 16)
        begin, end = line_end + 2, line_end + 2 + size
        if size == 0 or end > len(raw):
            break
        pieces.append(raw[begin:end])
        times.append(raw_times[bisect_left(raw_ends, end)])
        offset = end + 2
    return status, b"".join(pieces), list(accumulate(map(len, pieces))), times


def sse_events(body: bytes, ends: list[int], times: list[float]) -> Iterator[tuple[float, bytes]]:
    """(arrival, data) of each `data:` line. Comment lines keep a connection alive and carry nothing."""
    offset = 0
    for line in body.splitlines(keepends=True):
        offset += len(line)
        if line.startswith(b"data:"):
            yield times[min(bisect_left(ends, offset), len(times) - 1)], line[5:].strip()


def read_stream(arrivals: list[tuple[float, bytes]], record: RequestRecord, is_chat: bool) -> None:
    """Fill the record from a finished response.

    A chunk counts as an arrival of tokens when it carries text. On the completions endpoint one without text counts too
    unless it only closes the stream: a token may decode to nothing (half a character). Chat streams open with an empty
    role chunk, so there only text counts.

    Raises Refused for another status, ValueError for a stream that is malformed, cut short or empty.
    """
    status, body, ends, times = split_response(arrivals)
    if status != 200:
        raise Refused(status, body.decode("utf-8", "replace").strip())
    is_finished = False
    for moment, data in sse_events(body, ends, times):
        if data == b"[DONE]":
            break
        chunk = CHUNK_DECODER.decode(data)
        if chunk.error is not None:
            raise ValueError(f"error in the stream: {str(chunk.error)[:300]}")
        if chunk.usage is not None:
            record.has_usage = True
            record.num_prompt_tokens = chunk.usage.prompt_tokens
            record.num_output_tokens = chunk.usage.completion_tokens
            details = chunk.usage.prompt_tokens_details
            record.num_cached_tokens = (details.cached_tokens or 0) if details else 0
        for choice in chunk.choices:
            delta = choice.delta or Delta()
            is_end = choice.finish_reason is not None
            has_text = bool(choice.text or delta.content or delta.reasoning_content or delta.tool_calls)
            if has_text or not (is_chat or is_end) or (is_end and not record.token_times):
                record.token_times.append(moment)
            record.end = moment
            is_finished = is_finished or is_end
    if not is_finished:
        raise ValueError(f"the stream ended after {len(record.token_times)} chunks without a finish_reason")
    if not record.has_usage:
        record.num_output_tokens = len(record.token_times)


class Client:
    """Sends requests to one server and turns each into a RequestRecord."""

    def __init__(self, args: argparse.Namespace) -> None:
        url = urlsplit(args.base_url.rstrip("/"))
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"--base-url is {args.base_url!r}; expected http://host:port")
        self.host, self.port = url.hostname, url.port or (443 if url.scheme == "https" else 80)
        self.ssl = ssl.create_default_context() if url.scheme == "https" else None
        self.root = url.path.removesuffix("/v1") + "/v1"
        self.headers = f"Host: {url.netloc}\r\nConnection: close\r\nAccept: */*\r\n"
        if args.api_key:
            self.headers += f"Authorization: Bearer {args.api_key}\r\n"
        self.model, self.timeout_s = args.model, args.timeout
        self.is_chat = args.endpoint == "chat"
        self.prompt_form = "text" if self.is_chat else args.prompt_form
        self.has_extras = True  # ignore_eos is an extension; a server that refuses it is asked without

    def encode(self, prompt_token_ids: list[int], max_tokens: int) -> bytes:
        """The whole HTTP request. In text form each id picks a word, so a prompt has about as many tokens as asked."""
        prompt: Any = prompt_token_ids
        if self.prompt_form == "text":
            prompt = " ".join(WORDS[token_id % len(WORDS)] for token_id in prompt_token_ids)
        body: dict[str, Any] = {"model": self.model, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        body["stream_options"] = {"include_usage": True}
        if self.has_extras:
            body["ignore_eos"] = True
        if self.is_chat:
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        payload = msgspec.json.encode(body)
        path = f"{self.root}/chat/completions" if self.is_chat else f"{self.root}/completions"
        head = f"POST {path} HTTP/1.1\r\n{self.headers}Content-Type: application/json\r\n"
        return f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload

    async def exchange(self, request: bytes) -> list[tuple[float, bytes]]:
        """Send one request on its own connection; everything that came back."""
        async with asyncio.timeout(self.timeout_s):
            loop = asyncio.get_running_loop()
            transport, protocol = await loop.create_connection(
                lambda: Exchange(request), self.host, self.port, ssl=self.ssl
            )
            try:
                await protocol.done
            finally:
                transport.abort()
        return protocol.arrivals

    async def run(self, request: bytes, num_prompt_tokens: int, max_tokens: int) -> RequestRecord:
        """One timed request; a failure of any kind ends up as the record's error."""
        record = RequestRecord(num_wanted_tokens=max_tokens, num_prompt_tokens=num_prompt_tokens)
        record.start = time.monotonic()
        try:
            read_stream(await self.exchange(request), record, self.is_chat)
        except TimeoutError:
            record.error = f"no complete answer in {self.timeout_s:g} s; raise --timeout"
        except (OSError, ValueError, Refused) as error:
            record.error = str(error) or type(error).__name__
        return record

    async def find_model(self) -> str:
        """The first model the server lists; "default" where it lists none."""
        try:
            arrivals = await self.exchange(f"GET {self.root}/models HTTP/1.1\r\n{self.headers}\r\n".encode())
            status, body, _, _ = split_response(arrivals)
            return str(msgspec.json.decode(body)["data"][0]["id"]) if status == 200 else "default"
        except (KeyError, IndexError, TypeError, ValueError):
            return "default"

    async def probe(self, prompt_token_ids: list[int]) -> None:
        """Settle the form of the requests with a tiny one: ids, else text, then both without extensions.

        Raises Refused or ValueError when no form is taken, OSError when there is no server.
        """
        forms = dict.fromkeys((form, extras) for extras in (True, False) for form in (self.prompt_form, "text"))
        refusals: list[Refused] = []
        for form, has_extras in forms:
            self.prompt_form, self.has_extras = form, has_extras
            try:
                answer = await self.exchange(self.encode(prompt_token_ids, 1))
                return read_stream(answer, RequestRecord(num_wanted_tokens=1), self.is_chat)
            except Refused as refusal:
                refusals.append(refusal)
                if refusal.status not in FORM_REFUSED:
                    break
        raise refusals[0]


def make_prompts(args: argparse.Namespace, seed: int | None = None) -> list[tuple[list[int], int]]:
    """(token ids, max_tokens) of the measured requests; the same for every server given the same options."""
    generator = random.Random(args.seed if seed is None else seed)
    low, high = args.token_ids

    def tokens(count: int) -> list[int]:
        return [generator.randint(low, high) for _ in range(count)]

    shared = tokens(args.shared_prefix)
    return [
        (shared + tokens(generator.randint(*args.prompt_tokens)), generator.randint(*args.output_tokens))
        for _ in range(args.num_requests)
    ]


async def run_load(
    client: Client, prompts: list[tuple[list[int], int]], concurrency: int, request_rate: float = 0.0, seed: int = 0
) -> list[RequestRecord]:
    """All requests, at most `concurrency` at once; with a request rate they become due at exponential intervals."""
    arrivals = random.Random(seed)
    requests = [(client.encode(ids, max_tokens), len(ids), max_tokens) for ids, max_tokens in prompts]
    seats = asyncio.Semaphore(concurrency)

    async def send(request: tuple[bytes, int, int]) -> RequestRecord:
        try:
            return await client.run(*request)
        finally:
            seats.release()

    tasks: list[asyncio.Task[RequestRecord]] = []
    for request in requests:
        if request_rate and tasks:
            await asyncio.sleep(arrivals.expovariate(request_rate))
        await seats.acquire()
        tasks.append(asyncio.create_task(send(request)))
    return await asyncio.gather(*tasks)


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Probe, warm up, run each concurrency, report: the JSON result."""
    client = Client(args)
    generator = random.Random(args.seed + 2)
    spare = [generator.randint(*args.token_ids) for _ in range(max(PROBE_TOKENS, args.prompt_tokens[1]))]
    if not client.model:
        client.model = await client.find_model()
    wanted_form = client.prompt_form
    await client.probe(spare[:PROBE_TOKENS])
    if client.prompt_form != wanted_form:
        print("the server refuses token ids; sending words, so prompt lengths are approximate")
    if not client.has_extras:
        print("the server refuses ignore_eos; outputs may be shorter than asked")
    runs = []
    for number, concurrency in enumerate(args.concurrency):
        seeds = [args.seed + 1000 * number + 100 * repeat for repeat in range(args.repeats)]
        runs.append(join_repeats([await measure_one(client, args, concurrency, spare, seed) for seed in seeds]))
    if len(runs) == 1:
        return runs[0]
    sums = {name: sum(run[name] for run in runs) for name in ("successful_requests", "failed_requests")}
    first_error = next((run["first_error"] for run in runs if run["first_error"]), None)
    return {"base_url": args.base_url, "model": client.model, **sums, "first_error": first_error, "runs": runs}


async def measure_one(
    client: Client, args: argparse.Namespace, concurrency: int, spare: list[int], seed: int
) -> dict[str, Any]:
    """One load: its report, and its part of the result. A later load has a seed of its own: prompts of the one before
    would be in the server's prefix cache."""
    num_warm_tokens = min(PROBE_TOKENS, args.output_tokens[1])
    generator = random.Random(seed + 3)
    warm_up = [(generator.sample(spare, len(spare)), num_warm_tokens) for _ in range(args.warmup)]
    await run_load(client, warm_up, concurrency)
    cpu = time.process_time()
    prompts = make_prompts(args, seed)
    records = await run_load(client, prompts, concurrency, args.request_rate, seed + 1)
    cpu = time.process_time() - cpu
    figures = serving_figures(records, concurrency, bool(args.request_rate))
    print_serving_report(figures, concurrency, args.request_rate)
    shown = ("num_requests", "prompt_tokens", "output_tokens", "shared_prefix", "request_rate", "seed")
    load = {"concurrency": concurrency} | {name: getattr(args, name) for name in shown}
    form = {"endpoint": args.endpoint, "prompt_form": client.prompt_form, "ignore_eos": client.has_extras}
    head = {"base_url": args.base_url, "model": client.model, "load": load | form, "client_cpu_s": round(cpu, 3)}
    return head | figures | {"noise": noise(records)}


def main(argv: list[str] | None = None) -> int:
    """Run the load and print the report; 0 when every request succeeded, else 1."""
    args = parse_args(argv)
    try:
        old = read_result(args.compare) if args.compare else None    # before minutes of load
    except ValueError as error:
        print(f"bench serve: {error}", file=sys.stderr)
        return 2
    try:
        result = asyncio.run(measure(args))
    except (OSError, ValueError, Refused) as error:
        text = f"{args.base_url}: {str(error) or type(error).__name__}"
        print(f"no load was sent: {text}", file=sys.stderr)
        result = {"base_url": args.base_url, "successful_requests": 0, "failed_requests": 0, "first_error": text}
    if old is not None and result["successful_requests"]:
        result["compare"] = {"file": args.compare, "rows": compare_results(old, result)}
    if args.plot and result["successful_requests"]:
        try:
            plot_load(runs_of(result), args.plot)
            print(f"plot: {args.plot}")
        except ValueError as error:
            print(f"bench serve: {error}", file=sys.stderr)
    print_json(result, args.json)
    return 0 if result["successful_requests"] and not result["failed_requests"] else 1


if __name__ == "__main__":
    sys.exit(main())
