"""An engine without a model: text follows from seed, choice and position, so that tests can state exact answers."""
from __future__ import annotations

import asyncio
import hashlib
import json
import time
from array import array
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import httpx

from frontend.json_text import json_text
from frontend.outputs import CompletionOutput, RequestMetrics, RequestOutput
from frontend.tools.formats import get_format
from ipc.errors import RequestError
from ipc.sampling_params import SamplingParams

MODEL = "org/tiny"
CREATED = 1_700_000_000
SCRIPT_ID = 1000


class ByteTokenizer:
    """One token per byte; `bos` is put in front when the caller asks for special tokens. `script`: tokens from
    SCRIPT_ID on."""

    def __init__(self, bos: int | None = None) -> None:
        self.bos = bos
        self.script: list[str] = []

    special_ids: frozenset[int] = frozenset()

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""

    def encode(self, text: str, add_special_tokens: bool) -> bytes:
        ids = list(text.encode())
        if add_special_tokens and self.bos is not None:
            ids.insert(0, self.bos)
        return array("i", ids).tobytes()

    def decode(self, token_ids: Sequence[int] | bytes, skip_special_tokens: bool = True) -> str:
        if token_ids and min(token_ids) >= SCRIPT_ID:
            return "".join(self.script[token - SCRIPT_ID] for token in token_ids)
        if token_ids and max(token_ids) > 259:
            raise RequestError(f"token ids must be 0 to 259; found {max(token_ids)}")
        return bytes(token for token in token_ids if token < 256).decode("utf-8", "replace")

    def id_to_token(self, token_id: int) -> str | None:
        return f"<{token_id}>"


def letter(seed: int, choice: int, position: int) -> str:
    """The one-character token that the fake samples."""
    digest = hashlib.blake2b(f"{seed}/{choice}/{position}".encode(), digest_size=1).digest()
    return chr(ord("a") + digest[0] % 26)


def answer_text(seed: int, choice: int, length: int) -> str:
    """What a request without stop strings answers."""
    return "".join(letter(seed, choice, position) for position in range(length))


class FakeLLM:
    """Implements EngineLike. Set `error` to refuse, `fail_after` to die in mid-stream, `gate` to hold tokens back."""

    def __init__(self, *, bos: int | None = None) -> None:
        self.served_model_name = MODEL
        self.max_model_len = 64
        self.vocab_size = 260
        self.created = CREATED
        self.tokenizer = ByteTokenizer(bos)
        self.tool_format = get_format("hermes")
        self.has_reasoning = False
        self.has_thinking_switch = False
        self.has_levels = False                 # of reasoning_effort
        self.state: dict[str, Any] = {"ready": True, "dead": False, "phase": "serving", "reason": ""}
        self.error: Exception | None = None
        self.fail_after: tuple[int, Exception] | None = None
        self.gate: asyncio.Event | None = None
        self.token_s = 0.0                      # seconds per token
        self.script: list[str] | None = None    # tokens to answer with, instead of letters
        self.metrics: RequestMetrics | None = None      # of every request
        self.calls: list[dict[str, Any]] = []
        self.chats: list[tuple[list[dict[str, Any]], dict[str, Any]]] = []
        self.num_aborted = self.num_resets = 0
        self.resumed = asyncio.Event()
        self.resumed.set()
        self._drawn_seeds = 1000
        self.sleep_level = 0

    def status(self) -> dict[str, Any]:
        return self.state

    @property
    def is_paused(self) -> bool:
        return not self.resumed.is_set()

    def pause(self) -> None:
        self.resumed.clear()

    def resume(self) -> None:
        self.resumed.set()

    async def sleep(self, level: int = 1) -> None:
        if self.sleep_level:
            raise ValueError("the engine sleeps already")
        self.sleep_level = level

    async def wake_up(self) -> None:
        self.sleep_level = 0

    async def is_sleeping(self) -> bool:
        return self.sleep_level > 0

    async def reset_prefix_cache(self) -> None:
        self.num_resets += 1

    async def dump_recording(self) -> str:
        return "/run/flight.msgpack"

    def default_max_tokens(self, prompt_len: int) -> int:
        return self.max_model_len - prompt_len

    def render_chat(self, messages: list[dict[str, Any]], **options: Any) -> bytes:
        self.chats.append((messages, options))
        if options.get("reasoning_effort") and not self.has_levels:
            raise RequestError("reasoning_effort: the template has no levels", "reasoning_effort")
        text = "".join(f"{m['role'][0]}:{m.get('content') or ''};" for m in messages)
        return self.tokenizer.encode(text, False)

    async def generate(self, prompt: str | list[int] | bytes, sampling_params: SamplingParams, *,
                       request_id: str | None = None, output_kind: str = "cumulative", priority: int = 0,
                       add_special_tokens: bool = True, cache_salt: str = "",
                       sink: Any = None) -> AsyncGenerator[RequestOutput, None]:
        params = sampling_params
        self.calls.append({"prompt": prompt, "params": params, "request_id": request_id, "priority": priority,
                           "cache_salt": cache_salt})
        await self.resumed.wait()
        if self.error is not None:
            raise self.error
        if isinstance(prompt, str):
            prompt = self.tokenizer.encode(prompt, add_special_tokens)
        ids = list(array("i", prompt)) if isinstance(prompt, bytes) else prompt
        if len(ids) > self.max_model_len - 1:
            raise RequestError(f"prompt has {len(ids)} tokens, max_model_len is {self.max_model_len}; shorten it",
                               "prompt")
        params.check_for_model(self.vocab_size)
        seed = params.seed
        if seed is None:
            seed = self._drawn_seeds = self._drawn_seeds + 1
        self.tokenizer.script = self.script or []
        texts, done = [""] * params.n, [False] * params.n
        limit = min(params.max_tokens or self.max_model_len, self.max_model_len - len(ids))
        num_tokens = position = 0
        writers: dict[int, Any] = {}
        is_complete = False
        try:
            while not all(done):
                if self.fail_after is not None and position == self.fail_after[0]:
                    raise self.fail_after[1]
                if self.gate is not None:
                    await self.gate.wait()
                await asyncio.sleep(self.token_s)
                news = []
                for choice in range(params.n):
                    if done[choice]:
                        continue
                    token = letter(seed, choice, position) if self.script is None else self.script[position]
                    num_tokens += 1
                    before, after = texts[choice], texts[choice] + token
                    reason: str | None = "length" if position + 1 >= limit else None
                    stop = next((s for s in params.stop if s in after), None)
                    if stop is not None:
                        after, reason = after[:after.index(stop)], "stop"
                    texts[choice], done[choice] = after, reason is not None
                    text = after[len(before):] if output_kind == "delta" else after
                    if sink is not None and reason is None:
                        writer = writers.get(choice) if len(text) < 1000 else None
                        if writer is not None and writer.write(json_text(text), time.monotonic_ns()):
                            continue
                        if sink(choice, text):
                            writers[choice] = sink.writer(choice)
                            continue
                    told = [] if self.script is None else range(SCRIPT_ID, SCRIPT_ID + position + 1)
                    news.append(CompletionOutput(choice, text, [], reason, stop, all_token_ids=told))
                position += 1
                is_complete = all(done)
                if output_kind != "final" or is_complete or any(item.finish_reason for item in news):
                    if output_kind == "final":
                        news = [item for item in news if item.finish_reason]
                    yield RequestOutput(request_id or "", None, ids, news, is_complete, num_cached_tokens=len(ids) // 4,
                                        usage_prompt_tokens=len(ids), usage_completion_tokens=num_tokens,
                                        metrics=self.metrics)
        finally:
            if not is_complete:
                self.num_aborted += 1


async def post(app: Any, path: str, body: Any, **headers: str) -> httpx.Response:
    """One POST through ASGI, without a socket. `body`: bytes as they are, anything else as JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        return await client.post(path, content=content, headers={
            "content-type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}})


async def get(app: Any, path: str, method: str = "GET") -> httpx.Response:
    """One request without a body."""
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        return await client.request(method, path)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a stream, which must end with [DONE]."""
    blocks = response.text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2] if not block.startswith(":")]


class RawClient:
    """Drives an ASGI app message by message, to leave in the middle."""

    def __init__(self, app: Any, path: str, body: Any) -> None:
        self.scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
                      "root_path": "", "headers": [(b"content-type", b"application/json")], "http_version": "1.1"}
        self.app = app
        self.sent: list[dict[str, Any]] = []
        self.news = asyncio.Event()
        self._messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._messages.put_nowait({"type": "http.request", "body": json.dumps(body).encode(), "more_body": False})

    def leave(self) -> None:
        self._messages.put_nowait({"type": "http.disconnect"})

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    async def run(self) -> None:
        async def send(message: dict[str, Any]) -> None:
            self.sent.append(message)
            self.news.set()

        await self.app(self.scope, self._messages.get, send)
