"""Streams of the Messages and the Responses API when core and worker are killed: comments while nothing comes, then the
rest, with every token once."""
from __future__ import annotations

import http.client
import json
import os
import signal
from typing import Any

import pytest

from tests.processes.planting import Plant
from tests.processes.test_restarts import NUM_TOKENS
from tests.processes.tools import (HARD_TIMEOUT_S, REFERENCE_FLAGS, ServerProcess, assert_nothing_left, survivors,
                                   wait_until)

pytestmark = pytest.mark.timeout(90)

BODIES: dict[str, dict[str, Any]] = {
    "/v1/messages": {"messages": [{"role": "user", "content": "Count on"}], "max_tokens": NUM_TOKENS},
    "/v1/responses": {"input": "Count on", "max_output_tokens": NUM_TOKENS},
}


class Stream:
    """One request; its connection stays open until `read`."""

    def __init__(self, port: int, path: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HARD_TIMEOUT_S)
        body = {**BODIES[path], "stream": True, "temperature": 0, "ignore_eos": True}
        self._connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        self._response = self._connection.getresponse()
        assert self._response.status == 200, self._response.read()
        self._lines: list[str] = []

    def until_text(self) -> None:
        """Some of the answer has come."""
        while not any("delta" in line and line.startswith("data: ") for line in self._lines):
            self._lines.append(self._response.readline().decode().strip())

    def read(self) -> tuple[str, int, int]:
        """(text, number of tokens that its end tells, comments) of the whole stream."""
        self._lines += self._response.read().decode().splitlines()
        self._connection.close()
        events = [json.loads(line[6:]) for line in self._lines if line.startswith("data: ")]
        deltas = [event["delta"] for event in events if event["type"] in ("content_block_delta",
                                                                          "response.output_text.delta")]
        text = "".join(delta if isinstance(delta, str) else delta["text"] for delta in deltas)
        ends = [event for event in events if event["type"] in ("message_delta", "response.incomplete")]
        assert len(ends) == 1 and events[-1]["type"] in ("message_stop", "response.incomplete")
        usage = ends[0].get("usage") or ends[0]["response"]["usage"]
        return text, usage["output_tokens"], self._lines.count(": keep-alive")


def test_streams_of_either_api_survive_a_killed_core_and_a_killed_worker(tiny_model: str, temp: str,
                                                                         plant: Plant) -> None:
    plant("frontend.openai.exchange", "Exchange", "_until_gone",
          before="object.__setattr__(arguments[0].limits, 'keep_alive_s', 0.1)")
    server = ServerProcess(tiny_model, temp, *REFERENCE_FLAGS)
    try:
        server.wait_ready()
        whole = {path: Stream(server.port, path).read() for path in BODIES}
        assert all(text and count == NUM_TOKENS for text, count, _ in whole.values())
        for name in ("engine_core", "worker"):
            streams = {path: Stream(server.port, path) for path in BODIES}
            for stream in streams.values():
                stream.until_text()
            os.kill(server.pids[name], signal.SIGKILL)
            for path, stream in streams.items():
                text, count, num_comments = stream.read()
                assert (text, count) == whole[path][:2], (name, path)
                assert num_comments > 0, (name, path)
            wait_until(lambda: len(survivors(temp)) == 4)
        assert server.process.poll() is None and "Traceback" not in server.screen
        assert server.end() == 0
        assert_nothing_left(temp)
    finally:
        server.kill()
