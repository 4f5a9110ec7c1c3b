"""What many tests share: the tiny model folder, a private folder for engines, and one running engine per session."""
from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator

import pytest

from frontend import AsyncLLM
from ipc.cli import build_config
from ipc.config import Peer
from tests.processes.tools import REFERENCE_FLAGS, LoopThread, ServerProcess, assert_nothing_left
from bench.tiny_model import write_tiny_model

ATTACHED_NUMBER = 9                             # frontend number of the tests; the server's own is 1


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of the tiny model."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def temp(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A private, short folder in which engines of this test make their run directories. Nothing of them may be left."""
    with tempfile.TemporaryDirectory(prefix="tf", dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
        yield folder
        assert_nothing_left(folder)


@dataclasses.dataclass
class RunningEngine:
    """The session's engine: an HTTP server of three processes, and an AsyncLLM attached to the same core, whose loop
    runs in a thread: `engine.loop.run(coroutine)`. On the reference backend: the oracle for every other engine."""
    server: ServerProcess
    loop: LoopThread
    llm: AsyncLLM


@pytest.fixture(scope="session")
def engine(tiny_model: str) -> Iterator[RunningEngine]:
    """One engine for all tests that do not end it."""
    with tempfile.TemporaryDirectory(prefix="tf", dir="/tmp") as folder:
        server = ServerProcess(tiny_model, folder, *REFERENCE_FLAGS, "--served-model-name", "tiny")
        loop = LoopThread()
        try:
            server.wait_ready()
            section = build_config(tiny_model, {}, serve=False).model
            llm = loop.run(AsyncLLM.attach(Peer(server.core_address, 1), ATTACHED_NUMBER, section))
            yield RunningEngine(server, loop, llm)
            loop.run(llm.close())
            assert server.end() == 0, server.screen
            assert "Traceback" not in server.screen
            assert_nothing_left(folder)
        finally:
            loop.close()
            server.kill()
