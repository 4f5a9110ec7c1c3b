"""A step that fails on a device that still works is reported; one that has taken the device with it ends the worker."""
from __future__ import annotations

import types

import pytest
import torch

from ipc.messages import SchedulerOutput, StepFailed
from worker.main import DeviceLost, WorkerLoop
from worker.model_runner import ModelRunner


class FailingRunner:
    needs_reset = False
    is_device_lost = ModelRunner.is_device_lost

    def __init__(self, device: str) -> None:
        self.device = device

    def launch(self, plan, received_ns, before_wait):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def loop() -> tuple[WorkerLoop, list]:
    made, sent = WorkerLoop.__new__(WorkerLoop), []
    made.link = types.SimpleNamespace(send=sent.append)
    made.profiler = types.SimpleNamespace(is_recording=False)
    made.in_flight = None
    return made, sent


def fake_synchronize(error: Exception | None):
    def synchronize(device):
        if error is not None:
            raise error
    return synchronize


@pytest.mark.parametrize("device, error", [("cpu", None), ("cuda", None)])
def test_a_failed_step_on_a_working_device_is_reported(device, error, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", fake_synchronize(error))
    worker, sent = loop()
    worker._execute(FailingRunner(device), SchedulerOutput(3, 1), 0)
    (failed,) = sent
    assert isinstance(failed, StepFailed) and failed.step == 3 and "illegal memory access" in failed.reason


def test_a_lost_device_ends_the_worker_with_the_first_error(monkeypatch):
    """Otherwise every request would fail in turn, in a worker that looks alive."""
    monkeypatch.setattr(torch.cuda, "synchronize", fake_synchronize(RuntimeError("CUDA error")))
    worker, sent = loop()
    with pytest.raises(DeviceLost, match="step 3: RuntimeError: CUDA error: an illegal memory access"):
        worker._execute(FailingRunner("cuda"), SchedulerOutput(3, 1), 0)
    assert sent == []
