"""Short forms of the benches that kill, cut, hold and guess. Figures are for full runs; here the findings count."""
from __future__ import annotations

import json
from typing import Any

import pytest

from bench import disconnects, overload, salts, survive

pytestmark = pytest.mark.timeout(240)


def last_json(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return dict(json.loads(capsys.readouterr().out.splitlines()[-1]))


def test_streams_survive_a_kill_of_core_and_worker_token_for_token(capsys: pytest.CaptureFixture[str]) -> None:
    survive.main(["--core", "2", "--worker", "1", "--stop", "0", "--host", "2"])
    result = last_json(capsys)
    for name in ("kill core", "kill worker"):
        assert result[name]["wrong"] == [] and result[name]["streams_ended"] >= 2 * survive.NUM_STREAMS
    core = result["kill core"]
    assert core["computed_again"] < core["replayed_tokens"] / 4     # the worker had kept nearly all
    assert [line for line in result["kill host"]["left"] if "shared memory" in line] == []


def test_disconnects_leave_no_block_and_restart_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    disconnects.main(["--count", "300", "--warm-up", "64"])
    result = last_json(capsys)
    assert result["running_and_cache_in_use"] == [0, 0] and result["restarts"] == 0


def test_slow_and_idle_clients_are_held_and_measured(capsys: pytest.CaptureFixture[str]) -> None:
    overload.main(["--slow", "5", "--idle", "50", "--readers", "4", "--seconds", "1"])
    result = last_json(capsys)
    assert result["gaps"] > 20 and result["longer"] > 0 and result["grown_mb"] < overload.MAX_MB


def test_the_area_under_the_curve_counts_pairs() -> None:
    assert salts.auc([1.0, 2.0], [3.0, 4.0]) == 1.0 and salts.auc([3.0, 4.0], [1.0, 2.0]) == 0.0
    assert salts.auc([1.0, 4.0], [2.0, 3.0]) == 0.5


def test_the_guesser_is_timed_under_both_salts(capsys: pytest.CaptureFixture[str]) -> None:
    salts.main(["--pairs", "10"])
    result = last_json(capsys)
    assert 0 <= result["auc_across_salts"] <= 1 and 0 <= result["auc_within_a_salt"] <= 1


@pytest.mark.parametrize("main, argv", [
    (survive.main, ["--core", "-1"]), (disconnects.main, ["--count", "1"]), (overload.main, ["--readers", "0"]),
    (salts.main, ["--pairs", "1"])])
def test_counts_that_make_no_sense_are_refused(main: Any, argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(argv)
    assert end.value.code == 2 and argv[0] in capsys.readouterr().err
