"""The table and the picture of `bench where`, from steps whose times are known."""
from __future__ import annotations

from pathlib import Path

import pytest

from bench import where
from frontend.cli.profile import Measured
from tests.frontend.test_timeline import steps


def test_a_row_tells_the_parts_of_a_mean_step() -> None:
    worker = {"role": "worker", "pid": 1, "cpu": 0.9, "rss_bytes": 1}
    one = where.row(4, Measured(steps(100, forward=1900, sample=100, pause=400), [worker], 1.0))
    assert (one["scheduler_us_p50"], one["device_ms_p50"], one["frontend_us_p50"]) == (120, 2.0, 70)
    assert one["step_ms"]["device"] == pytest.approx(2.0) and one["step_ms"]["no requests"] == pytest.approx(0.396)
    assert one["prefill_share"] == 0.25 and one["cpu"] == {"worker": 0.9}
    assert where.table([one]).splitlines()[-1].startswith("| 4 | ")


def test_the_picture_is_drawn_or_says_why_not(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [where.row(count, Measured(steps(20), [], 1.0)) for count in (1, 16)]
    where.plot(rows, "tiny", str(tmp_path / "x.png"))
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="--plot"):
        where.plot(rows, "tiny", str(tmp_path / "no" / "x.png"))
