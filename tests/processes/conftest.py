"""Fixtures of tests on real processes."""
from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes.planting import Plant


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plant:
    return Plant(tmp_path, monkeypatch)
