"""The self-test finds a backend that computes something else, and lives on after one that fails."""
from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from worker.attention import registry, self_test
from worker.attention.reference import ReferenceBackend


class Wrong(ReferenceBackend):
    def forward(self, *args: Any, **options: Any) -> torch.Tensor:
        return super().forward(*args, **options) * 1.01


class Failing(ReferenceBackend):
    def forward(self, *args: Any, **options: Any) -> torch.Tensor:
        raise RuntimeError("illegal instruction")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "TIMED_S", 0.0)


def run(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, dict[str, Any]]]:
    status = self_test.main(["--device", "cpu"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[0]["torch"] == torch.__version__
    return status, {line["backend"]: line for line in lines[1:]}


def test_the_backends_of_this_machine_agree_with_the_reference(capsys: pytest.CaptureFixture[str]) -> None:
    status, found = run(capsys)
    assert status == 0 and found["cpu"]["ok"] and found["reference"]["difference"] == 0.0
    assert all(line.get("ok", True) for line in found.values())


def test_wrong_and_failing_backends_are_found_and_the_others_still_tested(monkeypatch: pytest.MonkeyPatch,
                                                                         capsys: pytest.CaptureFixture[str]) -> None:
    backends = {"wrong": registry.BackendEntry(Wrong, lambda device: None),
                "failing": registry.BackendEntry(Failing, lambda device: None),
                "elsewhere": registry.BackendEntry(Wrong, lambda device: "runs on the moon"),
                "reference": registry.BACKENDS["reference"]}
    monkeypatch.setattr(self_test, "BACKENDS", backends)
    monkeypatch.setattr(registry, "BACKENDS", backends)
    status, found = run(capsys)
    assert status == 1 and not found["wrong"]["ok"] and found["wrong"]["difference"] > 1e-3
    assert found["failing"]["error"] == "RuntimeError: illegal instruction" and found["reference"]["ok"]
    assert found["elsewhere"]["skipped"] == "runs on the moon"
