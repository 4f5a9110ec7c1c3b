"""SIGTERM with a drain time: running streams end in their own time, then the server ends with status 0."""
from __future__ import annotations

import os
import signal
import time
from http.client import HTTPConnection, HTTPResponse

import pytest

from tests.processes.test_lifetimes import open_stream
from tests.processes.tools import FLAGS, ServerProcess, assert_nothing_left


def ends_whole(server: ServerProcess, connection: HTTPConnection, response: HTTPResponse, temp: str) -> None:
    """The stream gets all of its tokens, then the server ends as it should."""
    rest = response.read().decode()
    connection.close()
    assert '"finish_reason":"length"' in rest and rest.rstrip().endswith("data: [DONE]")
    assert server.wait() == 0
    assert_nothing_left(temp, 2.0)


def test_a_stream_that_runs_at_sigterm_ends_whole(tiny_model: str, temp: str) -> None:
    server = ServerProcess(tiny_model, temp, "--drain-timeout", "30", *FLAGS).wait_ready()
    try:
        connection, response = open_stream(server)
        server.process.send_signal(signal.SIGTERM)
        ends_whole(server, connection, response, temp)
    finally:
        server.kill()


@pytest.mark.parametrize("name, is_first", [("worker", True), ("worker", False), ("engine_core", True),
                                            ("engine_core", False)])
def test_a_stream_ends_whole_although_what_it_needs_is_killed_around_sigterm(tiny_model: str, temp: str, name: str,
                                                                             is_first: bool) -> None:
    server = ServerProcess(tiny_model, temp, "--drain-timeout", "30", *FLAGS).wait_ready()
    try:
        connection, response = open_stream(server)
        if is_first:
            os.kill(server.pids[name], signal.SIGKILL)
        server.process.send_signal(signal.SIGTERM)
        if not is_first:
            os.kill(server.pids[name], signal.SIGKILL)
        ends_whole(server, connection, response, temp)
    finally:
        server.kill()


def test_a_second_signal_does_not_wait(tiny_model: str, temp: str) -> None:
    server = ServerProcess(tiny_model, temp, "--drain-timeout", "60", *FLAGS).wait_ready()
    try:
        connection, _ = open_stream(server)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        server.process.send_signal(signal.SIGTERM)
        server.wait()
        connection.close()
        assert_nothing_left(temp, 2.0)
    finally:
        server.kill()
