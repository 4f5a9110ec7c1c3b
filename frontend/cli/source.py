"""Where a command's answers come from: an OpenAI-compatible server, or an engine of our own. Both give the same pieces.

Calls block, and Ctrl-C (KeyboardInterrupt) may come in any of them: closing the iterator then ends the request and
keeps the source. Knows no terminal.
"""
from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import ssl
import threading
from collections.abc import Coroutine, Iterator
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

from frontend.async_llm import AsyncLLM
from frontend.cli.common import StartError
from frontend.llm import run_on
from frontend.outputs import RequestOutput
from ipc.config import EngineConfig
from ipc.errors import EngineDeadError, RequestError, RequestFailedError
from ipc.messages import Phase
from ipc.sampling_params import SamplingParams
from ipc.screen import Screen

DEFAULT_URL = "http://127.0.0.1:8000"
PROBE_S, ANSWER_S = 0.5, 600.0


class Piece(NamedTuple):
    """News of an answer. Counts are totals so far; -1: the server does not say."""
    text: str = ""
    reasoning: str = ""
    num_prompt_tokens: int = -1
    num_cached_tokens: int = -1
    num_output_tokens: int = -1
    finish_reason: str | None = None


class Source(Protocol):
    """`params` are names and values of SamplingParams."""
    name: str                                    # of the model
    where: str                                   # for people

    def chat(self, messages: list[dict[str, Any]], params: dict[str, Any]) -> Iterator[Piece]: ...

    def complete(self, prompt: str, params: dict[str, Any]) -> Iterator[Piece]: ...

    def close(self) -> None: ...


# ---------------------------------------------------------------- a server

class ServerSource:
    """Any server with /v1. Raises StartError when there is none, RequestError with the server's own text."""

    def __init__(self, url: str, model: str | None = None, api_key: str = "", timeout_s: float = 10.0) -> None:
        try:
            parts = urlsplit(url if "//" in url else f"http://{url}")
            is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:                       # a port out of range, half an IPv6 address
            is_url = False
        if not is_url or not parts.path.isascii():
            raise StartError(f"--url is {url!r}; write it like {DEFAULT_URL}")
        if not (api_key.isascii() and api_key.isprintable()):
            raise StartError("the API key has characters that no header may have; it is printable ASCII")
        self._parts, self.root = parts, parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self.headers = {"Content-Type": "application/json"}
        if api_key:
            self.headers["Authorization"] = f"Bearer {api_key}"
        self.where = f"{parts.scheme}://{parts.netloc}"
        try:
            with contextlib.closing(self.connect(timeout_s)) as connection:
                connection.request("GET", f"{self.root}/models", headers=self.headers)
                response = connection.getresponse()
                data = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise StartError(f"no server answers at {self.where}: {error or type(error).__name__}; start one with "
                             "python launch.py --model MODEL, or leave out --url") from None
        if response.status != 200:
            raise StartError(f"{self.where}{self.root}/models answered {_error_text(response.status, data)}")
        try:
            self.models = [str(card["id"]) for card in json.loads(data)["data"]]
        except (ValueError, KeyError, TypeError):
            raise StartError(f"{self.where}{self.root}/models is no list of models; is this an OpenAI-compatible "
                             "server?") from None
        self.name = model or (self.models[0] if self.models else "default")

    def connect(self, timeout_s: float) -> http.client.HTTPConnection:
        """A new connection; requests go below `root`, with `headers`."""
        host, port = self._parts.hostname or "", self._parts.port
        if self._parts.scheme == "https":
            return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=ssl.create_default_context())
        return http.client.HTTPConnection(host, port, timeout=timeout_s)

    def chat(self, messages: list[dict[str, Any]], params: dict[str, Any]) -> Iterator[Piece]:
        return self._stream("/chat/completions", {"messages": messages, **params})

    def complete(self, prompt: str, params: dict[str, Any]) -> Iterator[Piece]:
        return self._stream("/completions", {"prompt": prompt, **params})

    def _stream(self, path: str, fields: dict[str, Any]) -> Iterator[Piece]:
        """One answer. The connection is closed when the iterator is: the server then aborts the request."""
        body = {"model": self.name, "stream": True, "stream_options": {"include_usage": True}, **fields}
        with contextlib.closing(self.connect(ANSWER_S)) as connection:
            try:
                connection.request("POST", self.root + path, json.dumps(body), self.headers)
                response = connection.getresponse()
                if response.status != 200:
                    data = response.read(20_000)
                    kind = RequestError if response.status < 500 else RequestFailedError
                    raise kind(_error_text(response.status, data))
                num_chunks, has_end = 0, False
                for line in response:
                    data = line.strip().removeprefix(b"data:").strip()
                    if not line.startswith(b"data:") or data == b"[DONE]":
                        continue
                    piece = read_chunk(json.loads(data))
                    num_chunks += bool(piece.text or piece.reasoning)
                    has_end = has_end or piece.finish_reason is not None
                    yield piece if piece.num_output_tokens >= 0 else piece._replace(num_output_tokens=num_chunks)
            except (OSError, http.client.HTTPException, ValueError) as error:
                if isinstance(error, RequestError):
                    raise
                reason = str(error) or type(error).__name__
                raise EngineDeadError(f"the connection to {self.where} broke: {reason}") from None
        if not has_end:
            raise EngineDeadError(f"{self.where} ended the stream before the answer was complete")

    def close(self) -> None:
        """Nothing is held between answers."""


def read_chunk(event: dict[str, Any]) -> Piece:
    """One SSE event of either endpoint. Raises RequestFailedError for an error inside the stream."""
    if event.get("error"):
        error = event["error"]
        raise RequestFailedError(str(error.get("message", error)) if isinstance(error, dict) else str(error))
    choices: list[dict[str, Any]] = event.get("choices") or []
    choice = choices[0] if choices else {}
    delta = choice.get("delta") or {}
    usage = event.get("usage") or {}
    details = usage.get("prompt_tokens_details") or {}
    return Piece(choice.get("text") or delta.get("content") or "",
                 delta.get("reasoning_content") or delta.get("reasoning") or "",
                 usage.get("prompt_tokens", -1), details.get("cached_tokens", -1) if usage else -1,
                 usage.get("completion_tokens", -1), choice.get("finish_reason"))


def _error_text(status: int, data: bytes) -> str:
    """The server's own words, from its error body."""
    try:
        error = json.loads(data)
        error = error.get("error", error) if isinstance(error, dict) else error
        text = str(error.get("message") or error) if isinstance(error, dict) else str(error)
    except ValueError:
        text = data[:300].decode("utf-8", "replace").strip()
    return f"HTTP {status}: {text}"


# ---------------------------------------------------------------- an engine of our own

class EngineSource:
    """Starts an engine, whose loop runs in a thread. Raises ConfigError or EngineDeadError (as StartError)."""

    def __init__(self, config: EngineConfig, screen: Screen) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine", daemon=True)
        self._thread.start()

        def on_phase(phase: Phase) -> None:
            screen.phase(phase.role, phase)

        self.llm = AsyncLLM(config=config, on_phase=on_phase)
        self.where = "an engine of this program"
        try:
            self._run(self.llm.start())
        except EngineDeadError as error:
            self.close()
            raise StartError(str(error)) from None
        except BaseException:
            self.close()
            raise
        self.name = self.llm.served_model_name

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return run_on(self._loop, coroutine)

    def chat(self, messages: list[dict[str, Any]], params: dict[str, Any]) -> Iterator[Piece]:
        return self._stream(self.llm.render_chat(messages), params)

    def complete(self, prompt: str, params: dict[str, Any]) -> Iterator[Piece]:
        return self._stream(prompt, params)

    def _stream(self, prompt: str | bytes, params: dict[str, Any]) -> Iterator[Piece]:
        stream = self.llm.generate(prompt, SamplingParams(**{"max_tokens": None, **params}), output_kind="delta",
                                   add_special_tokens=isinstance(prompt, str))
        try:
            while True:
                output: RequestOutput | None = self._run(_next(stream))
                if output is None:
                    return
                text = "".join(choice.text for choice in output.outputs)
                reason = next((choice.finish_reason for choice in output.outputs if choice.finish_reason), None)
                yield Piece(text, "", output.usage_prompt_tokens, output.num_cached_tokens,
                            output.usage_completion_tokens, reason)
        finally:
            with contextlib.suppress(EngineDeadError):
                self._run(stream.aclose())

    def close(self) -> None:
        """End the engine. Idempotent."""
        if self._loop.is_closed():
            return
        self._run(self.llm.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()


async def _next(stream: Any) -> RequestOutput | None:
    return await anext(stream, None)


def find_server(api_key: str = "") -> ServerSource | None:
    """The server at the default address, if one is there."""
    try:
        return ServerSource(DEFAULT_URL, api_key=api_key, timeout_s=PROBE_S)
    except StartError:
        return None
