"""SIGTERM with a drain time: running streams end in their own time, then the server ends with status 0."""
from __future__ import annotations

import signal
import time

from tests.processes.test_lifetimes import open_stream
from tests.processes.tools import FLAGS, ServerProcess, assert_nothing_left


def test_a_stream_that_runs_at_sigterm_ends_whole(tiny_model: str, temp: str) -> None:
    server = ServerProcess(tiny_model, temp, "--drain-timeout", "30", *FLAGS).wait_ready()
    try:
        connection, response = open_stream(server)
        server.process.send_signal(signal.SIGTERM)
        rest = response.read().decode()
        connection.close()
        assert '"finish_reason":"length"' in rest and rest.rstrip().endswith("data: [DONE]")
        assert server.wait() == 0
        assert_nothing_left(temp, 2.0)
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
