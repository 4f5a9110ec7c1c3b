"""The first start on a machine: real processes, nothing compiled yet."""
from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba")

from tests.processes.tools import ServerProcess, assert_nothing_left, survivors, wait_until  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
PATIENCE_S = 300.0                              # of each wait: compilation takes a core, and others may want it too


def complete(server: ServerProcess, count: int) -> list[str]:
    body = dict(model="tiny", prompt="Once upon a time", max_tokens=count, temperature=0, logprobs=0)
    request = urllib.request.Request(f"{server.url}/v1/completions", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        reply: dict[str, Any] = json.load(response)
    tokens: list[str] = reply["choices"][0]["logprobs"]["tokens"]
    return tokens


def test_torch_serves_until_the_kernels_are_compiled(tiny_model: str, temp: str,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens before, across and after the change; a stop during the compilation leaves no process."""
    home = Path(temp) / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    options = ("--served-model-name", "tiny", "--num-gpu-blocks-override", "512", "--num-threads", "1")
    early = ServerProcess(tiny_model, temp, *options)
    try:
        early.wait_ready(PATIENCE_S)
        assert any("worker.jit.compiler" in command for command in survivors(temp).values())
        assert early.end() == 0
    finally:
        early.kill()
    wait_until(lambda: not survivors(temp), PATIENCE_S)
    server = ServerProcess(tiny_model, temp, *options)
    try:
        server.wait_ready(PATIENCE_S)
        assert "compiled kernels serve" not in server.screen
        expected = complete(server, 24)
        while "compiled kernels serve from now on" not in server.screen:
            assert complete(server, 24) == expected
        assert complete(server, 24) == expected
        assert server.end() == 0 and "Traceback" not in server.screen
    finally:
        server.kill()
    again = ServerProcess(tiny_model, temp, *options)
    try:
        again.wait_ready(PATIENCE_S)
        assert "torch serves meanwhile" not in again.screen and complete(again, 24) == expected
        assert again.end() == 0
    finally:
        again.kill()
    assert_nothing_left(temp)
