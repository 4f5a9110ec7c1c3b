"""Memory that goes back to the system."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from worker.process_memory import discard, forget_code, release_device_memory, release_memory


def resident() -> int:
    if not Path("/proc/self/statm").exists():
        pytest.skip("no /proc here")
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_discarded_pages_are_given_back_and_what_lies_beside_them_stays() -> None:
    array = np.full(64 << 20, 7, np.uint8)
    before = resident()
    discard(array.ctypes.data + 100, array.size - 5000)
    assert before - resident() > 60 << 20
    assert array[:100].tolist() == [7] * 100 and array[-4900:].tolist() == [7] * 4900
    assert array[1 << 20] == 0
    discard(array.ctypes.data + 1, 10)          # less than a page: nothing happens
    assert array[5] == 7


def test_released_memory_of_a_cycle_goes_back() -> None:
    array = np.full(64 << 20, 7, np.uint8)
    cycle: list[object] = [array]
    cycle.append(cycle)
    before = resident()
    del array, cycle
    release_memory()
    assert before - resident() > 60 << 20


def file_backed() -> int:
    lines = Path("/proc/self/status").read_text().splitlines() if Path("/proc/self/status").exists() else []
    found = [int(line.split()[1]) << 10 for line in lines if line.startswith("RssFile:")]
    return found[0] if found else pytest.skip("this system does not tell file-backed memory")


def test_code_that_is_forgotten_runs_again() -> None:
    x = torch.randn((64, 64), generator=torch.Generator().manual_seed(0))
    expected, before = torch.linalg.svdvals(x), file_backed()
    forget_code()
    assert before - file_backed() > 4 << 20
    assert torch.equal(torch.linalg.svdvals(x), expected)


@pytest.mark.parametrize("is_old_torch", [False, True])
def test_pinned_host_memory_is_given_back_with_the_gpus(monkeypatch: pytest.MonkeyPatch, is_old_torch: bool) -> None:
    """torch keeps freed pinned memory for later, which no other process can use then."""
    called: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: called.append("device"))
    if is_old_torch:
        monkeypatch.delattr(torch.accelerator, "empty_host_cache", raising=False)
        monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: called.append("host"), raising=False)
    else:
        monkeypatch.setattr(torch.accelerator, "empty_host_cache", lambda: called.append("host"), raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    release_device_memory()
    assert called == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    release_device_memory()
    assert called == ["device", "host"]
