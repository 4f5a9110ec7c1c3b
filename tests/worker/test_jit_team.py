"""The thread team: every unit runs once, in order of operations, also when threads are late or many."""
from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from worker.jit import norm  # noqa: E402
from worker.jit import program as pg  # noqa: E402
from worker.jit import step as st  # noqa: E402
from worker.jit import team as team_module  # noqa: E402
from worker.jit.team import MAX_OPS, MAX_ROWS, Team, get_team  # noqa: E402
from worker.linear.formats import FLOAT32, INT4_MIN, INT8_WIDE  # noqa: E402
from worker.linear.kernel import KernelLinear  # noqa: E402
from worker.linear.route import PackedLinear  # noqa: E402
from worker.linear.tune import make_weight  # noqa: E402

WIDTH = 32


class Adding:
    """A program of n norms over one residual: each adds delta once, so a lost, doubled or early unit shows."""

    def __init__(self, team: Team, num_ops: int, rows: int) -> None:
        self.team, self.num_ops, self.rows = team, num_ops, rows
        self.residual = np.zeros((rows, WIDTH), np.float32)
        self.delta = np.ones((rows, WIDTH), np.float32)
        self.out, weight = np.zeros_like(self.residual), np.ones(WIDTH, np.float32)
        self.program, self.step = pg.Program(), pg.new_step()
        self.program.keep(weight)
        for _ in range(num_ops):
            self.program.add(pg.NORM, {norm.RESIDUAL: self.residual.ctypes.data, norm.DELTA: self.delta.ctypes.data,
                                       norm.LD_DELTA: 4 * WIDTH, norm.WEIGHT: weight.ctypes.data, norm.SIZE: WIDTH,
                                       norm.EPS_BITS: pg.float_bits(1e-6), norm.OUT: self.out.ctypes.data,
                                       norm.LD_OUT: 4 * WIDTH})
        self.step[st.NUM_ROWS] = rows

    def run(self) -> None:
        self.team.run(self.program.address, self.program.num_ops, self.step)


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_every_unit_of_every_operation_runs_once(num_threads: int) -> None:
    team = Team(num_threads)
    adding = Adding(team, num_ops=50, rows=40)
    for times in range(1, 41):
        adding.run()
        assert (adding.residual == 50 * times).all()
    team.stop()
    assert not any(thread.name.startswith("kernel") and thread in team._threads for thread in threading.enumerate())


def test_two_who_start_a_team_at_once_start_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers: list[int] = []
    both = threading.Barrier(2)

    class Code:
        def compile(self, _: object) -> None:
            try:
                both.wait(0.3)                  # passed when both believe that it is theirs to start
            except threading.BrokenBarrierError:
                pass

        def __call__(self, _: int, number: int) -> None:
            numbers.append(number)

    monkeypatch.setattr(team_module, "run_team", Code())
    team = Team(3)
    starters = [threading.Thread(target=team.start) for _ in range(2)]
    for starter in starters:
        starter.start()
    for starter in starters:
        starter.join()
    team.stop()
    assert sorted(number for number in numbers if number) == [1, 2]


def test_programs_of_different_sizes_take_turns() -> None:
    """A thread that came late to a step once took the next program's number of units for its own, and ran one twice;
    it needs more threads than cores to show."""
    team = Team(8)
    programs = [Adding(team, num_ops, rows) for num_ops, rows in ((1, 1), (30, 64), (3, 2), (7, 0))]
    for times in range(1, 101):
        for adding in programs:
            adding.run()
            assert (adding.residual == adding.num_ops * times).all()
        for rows in (1, 50):                    # programs that are gone as soon as they have run
            Adding(team, rows, rows).run()
    team.stop()


def test_busy_neighbours_delay_a_step_but_do_not_break_it() -> None:
    """More spinning processes than cores: late threads find their tickets gone, and the sums still hold."""
    code = "import time\nend = time.monotonic() + 20\nwhile time.monotonic() < end: pass"
    busy = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(len(os.sched_getaffinity(0)) + 1)]
    try:
        adding = Adding(get_team(2), num_ops=20, rows=32)
        for times in range(1, 101):
            adding.run()
            assert (adding.residual == 20 * times).all()
    finally:
        for process in busy:
            process.kill()
            process.wait()


def test_an_idle_team_uses_no_processor_time() -> None:
    adding = Adding(get_team(2), num_ops=2, rows=8)
    adding.run()
    time.sleep(0.1)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1


def test_a_program_that_is_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match=f"the team holds {MAX_OPS}"):
        get_team(2).run(0, MAX_OPS + 1, pg.new_step())
    step = pg.new_step()
    step[st.NUM_ROWS] = MAX_ROWS + 1
    with pytest.raises(ValueError, match="lower --max-num-batched-tokens"):
        get_team(2).run(0, 0, step)


def test_a_process_ends_with_its_threads_still_waiting() -> None:
    code = ("from worker.jit.team import get_team\nfrom worker.jit import program as pg\nteam = get_team(3)\n"
            "team.run(pg.Program().address, 0, pg.new_step())\nprint('done')")
    root = str(Path(__file__).parents[2])
    result = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=120)
    assert (result.stdout, result.returncode) == ("done\n", 0), result.stderr


@pytest.mark.parametrize("kind", [FLOAT32, INT8_WIDE, INT4_MIN])
def test_no_cut_among_threads_changes_a_bit(kind: int) -> None:
    """A part of the rows for each thread, more parts than threads, fewer, none: and one thread that has them all."""
    layer = PackedLinear([make_weight(kind, 160, 192)])
    for rows in (1, 30, 50, 191, 200, 500):
        x = torch.randn(rows, 192, generator=torch.Generator().manual_seed(rows))
        whole = KernelLinear(layer, get_team(1))(x)
        for num_threads in (2, 3, 5):
            assert torch.equal(KernelLinear(layer, get_team(num_threads))(x), whole), (rows, num_threads)


def test_what_a_late_thread_does_not_come_to_is_done_by_the_others() -> None:
    """Its run is taken from the back, to the last unit."""
    team = Team(2)
    team._is_started = True                     # its second thread never comes
    adding = Adding(team, num_ops=3, rows=64)
    adding.run()
    assert (adding.residual == 3).all()
