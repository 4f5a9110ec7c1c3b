"""bench clients: a client that is not there is one line and no failure, one that fails is a failure."""
from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from bench import clients
from bench.clients import CLIENTS, SCRIPTS, Client, Target, run_client

HERE = Target("http://127.0.0.1:9", "tiny", "-", "-", "/")


def test_an_absent_client_is_skipped_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CLIENTS, "openai", Client("no_such_module", lambda target: []))
    assert run_client("openai", sys.executable, HERE, []) == f"skipped: {sys.executable} has no no_such_module"
    assert run_client("openai-node", "/no/such/node", HERE, []).startswith("skipped: /no/such/node")


def test_a_client_that_fails_shows_what_it_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
                                                ) -> None:
    monkeypatch.setitem(CLIENTS, "openai", Client("json", lambda target: ["-c", "print('thing 1: ok')"]))
    assert run_client("openai", sys.executable, HERE, []) == "ok (thing 1: ok)"
    monkeypatch.setitem(CLIENTS, "openai", Client("json", lambda target: ["-c", "raise SystemExit('no ' * 2)"]))
    assert run_client("openai", sys.executable, HERE, []) == "failed: exit status 1"
    assert "no no" in capsys.readouterr().err


def test_the_exit_status_is_that_of_the_worst_client(monkeypatch: pytest.MonkeyPatch, tiny_model: str) -> None:
    monkeypatch.setattr(clients, "served_name", lambda url: "tiny")
    for results, options, status in ((["ok", "skipped: none"], [], 0), (["ok", "failed: x"], [], 1),
                                     (["ok", "skipped: none"], ["--no-skip"], 1)):
        found = iter(results)
        monkeypatch.setattr(clients, "run_client", lambda *_, found=found: next(found))
        arguments = ["--url", "http://127.0.0.1:9", "--model", tiny_model, "--only", "openai", "litellm", *options]
        assert clients.main(arguments) == status


def test_every_script_that_is_named_is_there_and_reads_as_python() -> None:
    for client in CLIENTS.values():
        for word in client.command(HERE):
            if word.startswith(SCRIPTS) and word.endswith(".py"):
                ast.parse(Path(word).read_text())
