"""A client of an OpenAI-compatible server that times every chunk: what `bench serve` sends its load with.

The client does as little as possible while it measures, for it usually shares a small machine with the server: a body
is encoded before the clock starts, the receive callback only keeps (time, bytes), and a stream is parsed once, after
its end. Token counts come from `usage`, since one chunk may hold several tokens. Each request has its own connection,
made after the clock of its TTFT started. Knows no load and no figures.
"""

import argparse
import asyncio
import ssl
import time
from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from typing import Any
from urllib.parse import urlsplit

import msgspec

from bench.stats import RequestRecord

WORDS = (  # common enough to be one token each in most vocabularies
    *("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state"),
    *("family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company"),
    *("system", "program", "question", "work", "number", "night", "point", "home", "water", "room", "mother", "area"),
)
FORM_REFUSED = (400, 415, 422)  # answers that may mean "I do not take this form of request"
SAMPLING_FIELDS = (
    *("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"),
)
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
    parts: list[str] = []
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
            parts.append(choice.text or delta.content or "")
            is_finished = is_finished or is_end
    record.text = "".join(parts)
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
        if self.ssl and args.insecure:
            self.ssl.check_hostname, self.ssl.verify_mode = False, ssl.CERT_NONE
        self.server_root = url.path.removesuffix("/v1")
        self.root = self.server_root + "/v1"
        headers = {"host": url.netloc, "connection": "close", "accept": "*/*", "content-type": "application/json"}
        if args.api_key:
            headers["authorization"] = f"Bearer {args.api_key}"
        headers |= args.header
        self.headers = "".join(f"{name.title()}: {value}\r\n" for name, value in headers.items())
        self.model, self.timeout_s = args.model, args.timeout
        self.is_chat = args.endpoint == "chat"
        self.prompt_form = "text" if self.is_chat else args.prompt_form
        self.id_prefix = args.request_id_prefix
        self.has_extras = args.ignore_eos  # an extension; a server that refuses it is asked without
        self.fields = request_fields(args)

    def encode(self, prompt: list[int] | str, max_tokens: int, number: int | None = None) -> bytes:
        """The whole HTTP request. Where ids have to be sent as text each picks a word, so a prompt has about as many
        tokens as asked. `number`: of a measured request."""
        if self.prompt_form == "text" and not isinstance(prompt, str):
            prompt = " ".join(WORDS[token_id % len(WORDS)] for token_id in prompt)
        body: dict[str, Any] = {"model": self.model, "max_tokens": max_tokens, "stream": True}
        body["stream_options"] = {"include_usage": True}
        if self.has_extras:
            body["ignore_eos"] = True
        if self.is_chat:
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        path = f"{self.root}/chat/completions" if self.is_chat else f"{self.root}/completions"
        name = "" if number is None or self.id_prefix is None else f"X-Request-Id: {self.id_prefix}{number}\r\n"
        return self.post(path, body | self.fields, name)

    def post(self, path: str, body: dict[str, Any], more_headers: str = "") -> bytes:
        """A POST of JSON as bytes."""
        payload = msgspec.json.encode(body)
        head = f"POST {path} HTTP/1.1\r\n{self.headers}{more_headers}"
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

    async def call(self, path: str, body: dict[str, Any]) -> bytes:
        """One POST besides the load; `path` is below the server's root. Raises Refused, OSError."""
        status, answer, _, _ = split_response(await self.exchange(self.post(self.server_root + path, body)))
        if status != 200:
            raise Refused(status, answer.decode("utf-8", "replace").strip())
        return answer

    async def tokenize(self, **fields: Any) -> list[int]:
        """Ids by the server's /tokenize: of `prompt`, or of `messages` through its chat template. Raises Refused,
        ValueError where it has none."""
        try:
            return list(msgspec.json.decode(await self.call("/tokenize", {"model": self.model, **fields}))["tokens"])
        except (KeyError, TypeError, msgspec.DecodeError):
            raise ValueError("what /tokenize answers has no tokens") from None

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
        extras = (True, False) if self.has_extras else (False,)
        forms = dict.fromkeys((form, has_extras) for has_extras in extras for form in (self.prompt_form, "text"))
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
        self.prompt_form, self.has_extras = next(iter(forms))
        raise refusals[0]


def request_fields(args: argparse.Namespace) -> dict[str, Any]:
    """What the options add to each request's body; --extra-body wins."""
    fields = {name: getattr(args, name) for name in SAMPLING_FIELDS if getattr(args, name) is not None}
    if args.logprobs is not None:
        chat = {"logprobs": True, "top_logprobs": args.logprobs}
        fields |= chat if args.endpoint == "chat" else {"logprobs": args.logprobs}
    if args.chat_template_kwargs is not None and args.endpoint == "chat":
        fields["chat_template_kwargs"] = args.chat_template_kwargs
    return fields | (args.extra_body or {})
