"""A first start on a machine where the compiler of the kernels crashes: real processes."""
from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("numba")

from tests.processes.tools import ServerProcess, assert_nothing_left, wait_until  # noqa: E402

ABORT = """
import os, sys
if "worker.jit.compiler" in sys.orig_argv:
    print("python: Lowering.cpp:1: Assertion `Known' failed.", file=sys.stderr, flush=True)
    os.abort()
"""
REASON = "the compiler ended with SIGABRT: python: Lowering.cpp:1: Assertion `Known' failed."
OPTIONS = ("--served-model-name", "tiny", "--num-gpu-blocks-override", "512", "--num-threads", "1")


@pytest.fixture
def crashing(temp: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(temp) / "home"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(ABORT)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setenv("HOME", str(folder))


def test_torch_serves_and_no_worker_ends(tiny_model: str, temp: str, crashing: None) -> None:
    server = ServerProcess(tiny_model, temp, *OPTIONS)
    try:
        server.wait_ready()
        wait_until(lambda: f"no compiled kernels ({REASON}); torch goes on serving" in server.screen)
        body = dict(model="tiny", prompt="Once", max_tokens=8, temperature=0.9, logprobs=1, presence_penalty=0.5)
        request = urllib.request.Request(f"{server.url}/v1/completions", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=20) as response:
            assert json.load(response)["usage"]["completion_tokens"] > 0
        assert server.num_restarts == 0 and server.end() == 0
    finally:
        server.kill()
    assert_nothing_left(temp)


def test_a_start_that_needs_the_kernels_says_why_there_are_none(tiny_model: str, temp: str, crashing: None) -> None:
    server = ServerProcess(tiny_model, temp, *OPTIONS, "--attention-backend", "jit")
    try:
        assert server.wait() != 0
        assert f"--attention-backend jit needs the compiled CPU kernels, which do not run here: {REASON}" \
            in server.screen
        assert server.num_restarts == 0 and "Traceback" not in server.screen
    finally:
        server.kill()
