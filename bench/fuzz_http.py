"""Hostile HTTP against a running server: the hand corpus, variations of it, raw bytes, and schemathesis on our OpenAPI.

No answer may be 5xx, no process may end, refusals must be quick, and a plain request must be served throughout.
"""

from __future__ import annotations

import http.client
import importlib.util
import re
import socket
import subprocess
import sys
import time
from typing import Any

from bench.http_corpus import COMPLETIONS, Case, Variations, corpus, raw_requests
from bench.stats import percentile

REQUEST_TIMEOUT_S = 20.0
PLAIN = Case("plain", COMPLETIONS, b'{"prompt":"a","max_tokens":2}', frozenset({200}))


class HttpFuzz:
    """Sends cases one by one over one connection, and keeps what was wrong."""

    def __init__(self, port: int, seed: int) -> None:
        self.port, self.seed = port, seed
        self.wrong: list[str] = []
        self.refusals_s: list[float] = []
        self.statuses: dict[int, int] = {}
        self._connection: http.client.HTTPConnection | None = None

    def run(self, count: int) -> None:
        """The corpus first (all of it, or as much as `count` allows), then variations."""
        cases = corpus()[:count]
        for case in cases:
            self.send(case)
        variations = Variations(self.seed)
        for i in range(count - len(cases)):
            self.send(variations.next())
            if i % 200 == 0:
                self.send(PLAIN)
        for name, data in raw_requests(self.port):
            self.send_raw(name, data)
        self.send(PLAIN)

    def send(self, case: Case) -> None:
        begin = time.monotonic()
        try:
            status = self._status(case)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            self.wrong.append(f"{case.name}: {case.method} {case.path}: {type(error).__name__}: {error}")
            return
        seconds = time.monotonic() - begin
        self.statuses[status] = self.statuses.get(status, 0) + 1
        if 400 <= status < 500:
            self.refusals_s.append(seconds)
        if status not in case.expected:
            self.wrong.append(f"{case.name}: {case.method} {case.path} {case.body[:300]!r}: {status}")

    def _status(self, case: Case) -> int:
        if self._connection is None:
            self._connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=REQUEST_TIMEOUT_S)
        connection = self._connection
        try:
            connection.request(case.method, case.path, case.body, {"Content-Type": "application/json", **case.headers})
        except (BrokenPipeError, ConnectionResetError):
            pass  # refused before all of it was read; the answer is there
        response = connection.getresponse()
        response.read()
        if response.getheader("connection", "").lower() == "close":
            self.close()
        return response.status

    def send_raw(self, name: str, data: bytes) -> None:
        """Whatever comes back, or nothing: it must not be a 5xx, and the server goes on."""
        with socket.create_connection(("127.0.0.1", self.port), REQUEST_TIMEOUT_S) as sock:
            sock.settimeout(0.5)
            try:
                sock.sendall(data)
                answer = sock.recv(1 << 16)
            except (TimeoutError, ConnectionError):
                answer = b""
        if re.match(rb"HTTP/1\.. 5", answer):
            self.wrong.append(f"raw {name}: {answer[:200]!r}")

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def schemathesis(self, count: int) -> str:
        """About a tenth of `count` cases from our OpenAPI file, over all operations. Says what was done."""
        if importlib.util.find_spec("schemathesis") is None:
            return "not installed (python launch.py setup --extra fuzz)"
        url = f"http://127.0.0.1:{self.port}/openapi.json"
        command = [sys.executable, "-m", "schemathesis.cli", "run", url, "--checks", "not_a_server_error", "--phases",
                   "fuzzing", "--max-examples", str(max(1, count // 150)), "--seed", str(self.seed), "--no-color",
                   "--request-timeout", str(REQUEST_TIMEOUT_S), "--suppress-health-check", "all",
                   "--exclude-path-regex", "^/(pause|resume|debug.*)$"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=3600)
        if done.returncode:
            self.wrong.append(f"schemathesis: {done.stdout[-3000:]}{done.stderr[-1000:]}")
        cases = re.search(r"(\d[\d,]*) generated", done.stdout)
        return f"{cases[1] if cases else 0} cases"

    def report(self) -> dict[str, Any]:
        refusals = self.refusals_s
        return {"http_cases": sum(self.statuses.values()),
                "statuses": {str(k): v for k, v in sorted(self.statuses.items())},
                "num_5xx": sum(v for k, v in self.statuses.items() if k >= 500),
                "refusal_p50_ms": round(percentile(refusals, 50) * 1e3, 2) if refusals else None,
                "refusal_p99_ms": round(percentile(refusals, 99) * 1e3, 2) if refusals else None,
                "refusal_max_ms": round(max(refusals) * 1e3, 1) if refusals else None,
                "wrong": len(self.wrong)}
