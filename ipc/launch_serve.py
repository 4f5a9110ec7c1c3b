"""Serving from the command line: run the supervisor, show its start, print how to use what serves, and the demo.

Runs in launch.py's process. The demo talks HTTP, as any client would. Knows nothing of how the project was installed.
"""
from __future__ import annotations

import http.client
import json
import os
import signal
import ssl
import sys
import threading
import time
from typing import Any, NamedTuple

from ipc.aliases import DEMO_ALIAS
from ipc.capacity import weights_warning
from ipc.cli import config_from_argv, make_parser
from ipc.config import EngineConfig
from ipc.errors import ConfigError
from ipc.machine import gpus, memory
from ipc.messages import EngineUp, Failure, Phase, Ready
from ipc.screen import Screen, Stopwatch
from ipc.supervisor import EXIT_START_FAILED, Supervisor

_ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}
_DEMO_PROMPT = "What is the capital of France? Answer in one sentence."
_DEMO_MAX_TOKENS = 48


def main(argv: list[str], *, is_demo: bool = False, started: float | None = None) -> int:
    """Serve until a signal or a fault; the exit status. `started`: time.monotonic() when the user's command began."""
    started = time.monotonic() if started is None else started
    once = is_demo and "--once" in argv
    if is_demo:
        argv = _demo_argv([word for word in argv if word != "--once"])
    make_parser().parse_args(argv)               # --help and a wrong option end here, before anything is said
    screen = Screen()
    screen.phase("launch", Phase("launch", "set-up", 1.0, max(time.monotonic() - started, 1e-3)))
    try:
        with Stopwatch(screen, "launch", "find model") as phase:
            config = config_from_argv(argv, report=screen.line)
            phase.detail = config.model.files.path or "random weights"
        if warning := memory_warning(config):
            screen.line(f"launch.py: {warning}")
        session = _Session(config, screen, started, is_demo, once)
        return session.run()
    except (ConfigError, OSError) as error:
        screen.line(f"launch.py: {error}")
        return EXIT_START_FAILED
    except KeyboardInterrupt:                    # before the supervisor listens to signals
        screen.line("launch.py: stopped")
        return 0


def _demo_argv(argv: list[str]) -> list[str]:
    has_model = any(word == "--model" or word.startswith("--model=") for word in argv) or (
        argv[:1] and not argv[0].startswith("-"))
    return argv if has_model else ["--model", DEMO_ALIAS, *argv]


def memory_warning(config: EngineConfig) -> str:
    """One line when the weights will hardly fit into this machine's memory: the kernel would end the worker without a
    word. Only a warning: what a worker keeps of the weights is its own affair. "" on GPUs, and for GGUF files."""
    if config.model.files.kind == "gguf" or config.device == "cuda":
        return ""
    dtype = "float32" if config.model.dtype == "auto" else config.model.dtype
    warning = weights_warning(config.model.files.config, dtype, memory()[0])
    return "" if warning and config.device == "auto" and gpus()[0] else warning    # asking for GPUs takes a moment


class _Session:
    """One run of the engine and what is said about it."""

    def __init__(self, config: EngineConfig, screen: Screen, started: float, is_demo: bool, once: bool) -> None:
        self.config, self.screen, self.started = config, screen, started
        self.is_demo, self.once = is_demo, once
        self.details: dict[str, str] = {}        # what a process said when it was ready -> its name
        self.num_starts = 0
        self.demo_error = ""
        self.supervisor = Supervisor(config, self.report)

    def run(self) -> int:
        status = self.supervisor.run()
        if status == 0:
            self.screen.line("launch.py: stopped")
        return EXIT_START_FAILED if self.demo_error else status

    def report(self, name: str, event: Any) -> None:
        """What the supervisor tells, in its thread."""
        if isinstance(event, Phase):
            self.screen.phase(name, event)
        elif isinstance(event, Ready):
            if event.detail:
                self.details.setdefault(event.detail, name)     # core and worker describe the same pool
        elif isinstance(event, Failure):
            self.screen.line(f"{event.traceback}launch.py: {event.reason}")
        elif isinstance(event, EngineUp) and self.num_starts:
            self.screen.line(f"launch.py: serving again; PIDs {', '.join(map(str, event.pids))}")
        elif isinstance(event, EngineUp):
            self.num_starts += 1
            self._print_block(event)
            if self.is_demo:
                threading.Thread(target=self._demo, name="demo", daemon=True).start()

    @property
    def model_name(self) -> str:
        return self.config.frontend.served_model_name or self.config.model.files.served_name

    @property
    def address(self) -> tuple[str, int]:
        host = self.config.frontend.host
        return _ANYWHERE.get(host, host), self.supervisor.port

    @property
    def url(self) -> str:
        host, port = self.address
        scheme = "https" if self.config.frontend.ssl_certfile else "http"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    def _print_block(self, up: EngineUp) -> None:
        names = ["supervisor", *(child.name for child in self.supervisor.children)]
        body = json.dumps({"model": self.model_name, "messages": [{"role": "user", "content": "Hello!"}]})
        key = "-H 'Authorization: Bearer YOUR_KEY' " if self.config.frontend.api_keys else ""
        rows = [("URL", f"{self.url}/v1"), ("model", self.model_name),
                *(row for detail, name in self.details.items() for row in _detail_rows(name, detail)),
                ("run dir", up.run_dir),
                ("PIDs", ", ".join(f"{name} {pid}" for name, pid in zip(names, up.pids))),
                ("ready after", f"{time.monotonic() - self.started:.1f} s"),
                ("chat", f"{self.url}/"),
                ("try", f"curl {self.url}/v1/chat/completions -H 'Content-Type: application/json' {key}-d '{body}'")]
        self.screen.line()
        for title, text in rows:
            self.screen.line(f"  {title:<12} {text}")
        self.screen.line()

    # ------------------------------------------------------------ the demo

    def _demo(self) -> None:
        """One chat request, as a client sends it; then where the time went. Ends the engine when it fails."""
        try:
            section = self.config.frontend
            self._print_answer(ask(self.address, self.model_name, _DEMO_PROMPT, _DEMO_MAX_TOKENS,
                                   api_key=section.api_keys[0] if section.api_keys else "",
                                   is_tls=bool(section.ssl_certfile)))
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.demo_error = str(error)
            self.screen.line(f"launch.py: the demo request failed: {error}")
        if self.demo_error or self.once:
            os.kill(os.getpid(), signal.SIGTERM)

    def _print_answer(self, answer: Answer) -> None:
        say = self.screen.line
        say(f"  question     {_DEMO_PROMPT}")
        say("  answer")
        print(answer.text.strip(), flush=True)
        say("\n  where the time went")
        for phase in self.screen.finished:
            say(f"    {phase.who:<13} {phase.name:<22} {phase.seconds:7.2f} s")
        say(f"    {'request':<13} {'first token (TTFT)':<22} {answer.ttft_s:7.2f} s")
        say(f"    {'request':<13} {'further tokens':<22} {answer.end_s - answer.ttft_s:7.2f} s  "
            f"{answer.num_tokens} tokens, {answer.tokens_per_s:.1f} tok/s")
        say(f"    from the command to the first token {answer.first_token_at - self.started:.1f} s")
        if not self.once:
            say("\n  Serving. Ctrl-C stops it.")


def _detail_rows(name: str, detail: str) -> list[tuple[str, str]]:
    """What a process says of itself; of a worker, the part behind "; " is how much fits."""
    text, found, capacity = detail.partition("; weights ")
    return [(name, text), *([("capacity", f"weights {capacity}")] if found else [])]


class Answer(NamedTuple):
    text: str
    num_tokens: int
    ttft_s: float
    end_s: float                                 # request to last token
    first_token_at: float                        # time.monotonic()

    @property
    def tokens_per_s(self) -> float:
        """1 / TPOT."""
        return (self.num_tokens - 1) / max(self.end_s - self.ttft_s, 1e-9) if self.num_tokens > 1 else 0.0


def ask(address: tuple[str, int], model: str, prompt: str, max_tokens: int, timeout_s: float = 300.0, *,
        api_key: str = "", is_tls: bool = False) -> Answer:
    """Stream one greedy chat completion. Raises OSError, HTTPException, or ValueError with the server's error text.

    With TLS the certificate is not checked: the server is a child of this process, on this machine.
    """
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
    body = {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens,
            "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    connection = http.client.HTTPConnection(*address, timeout=timeout_s)
    if is_tls:
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        connection = http.client.HTTPSConnection(*address, timeout=timeout_s, context=context)
    try:
        began = time.monotonic()
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise ValueError(f"HTTP {response.status}: {response.read(2000).decode(errors='replace')}")
        text, num_tokens, first, last = "", 0, 0.0, 0.0
        for line in response:
            data = line.strip().removeprefix(b"data: ")
            if data == line.strip() or data == b"[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise ValueError(f"stream ended with {event['error']}")
            num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
            piece = "".join((choice.get("delta") or {}).get("content") or "" for choice in event.get("choices", ()))
            if piece:
                last = time.monotonic()
                first = first or last
                text += piece
        if not first:
            raise ValueError("the stream had no text")
        return Answer(text, num_tokens, first - began, last - began, first)
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
