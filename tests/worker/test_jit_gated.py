"""A product of gates and ups that makes activations of them at once, against product and activation one after the
other."""
from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from tests.worker.test_jit_model import Running, make_config, make_flat, some_tokens  # noqa: E402
from worker.attention.jit import JitBackend  # noqa: E402
from worker.jit import matmul as mm  # noqa: E402
from worker.jit import program as pg  # noqa: E402
from worker.jit import silu  # noqa: E402
from worker.jit import step as st  # noqa: E402
from worker.jit.model import JitModel  # noqa: E402
from worker.jit.team import Team, get_team  # noqa: E402
from worker.linear.formats import BFLOAT16, FLOAT32, INT4, INT4_MIN, INT8, INT8_WIDE, TILE  # noqa: E402
from worker.linear.kernel import Activations, add_linear, side_bytes  # noqa: E402
from worker.linear.route import PackedLinear  # noqa: E402
from worker.linear.source import ModelSource  # noqa: E402
from worker.linear.tune import make_weight  # noqa: E402

NUM_K = 128


class Gates:
    """A layer of `size` gates and ups over random rows, by one operation or by two."""

    def __init__(self, kind: int, size: int, pair: int, block: int, rows: int, has_bias: bool) -> None:
        rng = np.random.default_rng(0)
        bias = rng.standard_normal(2 * size).astype(np.float32) if has_bias else None
        self.layer = PackedLinear([make_weight(kind, 2 * size, NUM_K)], bias, pair)
        self.rows, self.size, self.pair = rows, size, pair
        self.ld_side = side_bytes(size, block)
        self.x = rng.standard_normal((rows, NUM_K)).astype(np.float32) * 8
        self.x_q, self.x_side = np.zeros((rows, NUM_K), np.int8), np.zeros((rows, NUM_K), np.float32)

    def run(self, team: Team, *, at_once: bool, codes: bool) -> tuple[np.ndarray, ...]:
        rows, size = self.rows, self.size
        out, q = np.full((rows, size), 7, np.float32), np.full((rows, size), 7, np.int8)
        side = np.zeros((rows, self.ld_side // 4), np.float32)
        program, step = pg.Program(), pg.new_step()
        step[st.NUM_ROWS] = rows
        q_at, side_at = self.x_q.ctypes.data, self.x_side.ctypes.data
        program.add(pg.QUANTIZE, {pg.X: self.x.ctypes.data, pg.LDX: 4 * NUM_K, pg.SIZE: NUM_K, pg.Q: q_at,
                                  pg.SIDE: side_at, pg.LD_SIDE: side_bytes(NUM_K, self.layer.block)})
        source = Activations(self.x.ctypes.data, 4 * NUM_K, q_at, side_at)
        codes_at = q.ctypes.data if codes else 0
        if at_once:
            pairs = np.zeros((team.num_threads, mm.GATED_ROWS, 2 * self.pair), np.float32)
            add_linear(program, self.layer, source, pairs.ctypes.data, 8 * self.pair, {
                mm.GATE: self.pair // TILE, mm.THREAD_BYTES: pairs.strides[0], mm.ACT_SIZE: size,
                mm.ACT: out.ctypes.data, mm.ACT_Q: codes_at, mm.ACT_SIDE: side.ctypes.data,
                mm.ACT_LD_SIDE: self.ld_side})
        else:
            both = np.zeros((rows, 2 * size), np.float32)
            add_linear(program, self.layer, source, both.ctypes.data, 8 * size)
            program.add(pg.SILU, {silu.GATE_UP: both.ctypes.data, silu.LD_GATE_UP: 8 * size, silu.SIZE: size,
                                  silu.PAIR: self.pair, silu.OUT: out.ctypes.data, silu.Q: codes_at,
                                  silu.SIDE: side.ctypes.data, silu.LD_SIDE: self.ld_side})
        team.run(program.address, program.num_ops, step)
        return (q, side.view(np.int32)) if codes else (out,)   # some columns are integers


@pytest.mark.parametrize("rows", [1, 2, 5, 8, 9, 31, 48, 131, 133, 270])
@pytest.mark.parametrize("kind, size, pair, block", [
    (INT8_WIDE, 256, 64, 64), (INT8, 192, 64, 32), (INT4_MIN, 192, 64, 64), (INT4, 96, 32, 32), (FLOAT32, 128, 64, 64),
    (BFLOAT16, 96, 32, 32)])
def test_activations_made_at_once_have_the_bits_of_two_operations(kind: int, size: int, pair: int, block: int,
                                                                  rows: int) -> None:
    gates = Gates(kind, size, pair, block, rows, has_bias=rows % 2 == 1)
    for codes in (True, False):
        expected = gates.run(get_team(2), at_once=False, codes=codes)
        assert np.abs(expected[0]).max() > 0
        for num_threads in (1, 2, 3):
            found = gates.run(get_team(num_threads), at_once=True, codes=codes)
            assert all(np.array_equal(x, y) for x, y in zip(expected, found))


def test_a_row_with_a_nan_spoils_its_own_blocks_only() -> None:
    """Rows are quantized in groups; one that holds a NaN is taken out of its group."""
    gates = Gates(INT8_WIDE, 256, 64, 64, 20, has_bias=False)
    clean = gates.run(get_team(2), at_once=True, codes=True)
    gates.x[3, 5] = np.nan
    q, side = gates.run(get_team(2), at_once=True, codes=True)
    assert np.isnan(side[3, :4].view(np.float32)).all() and not q[3].any()
    for row in (*range(3), *range(4, 20)):
        assert np.array_equal(q[row], clean[0][row]) and np.array_equal(side[row], clean[1][row])


@pytest.mark.parametrize("mode", ["none", "int8", "int4"])
def test_a_model_gives_the_same_logits_with_and_without(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    flat = make_flat(make_config(intermediate_size=192))
    plain = JitModel(ModelSource(flat, mode))
    monkeypatch.setattr(mm, "UNITS_PER_THREAD", 0)
    gated = JitModel(ModelSource(flat, mode))
    assert len(gated.operations((pg.SILU,))) == 0 and len(plain.operations((pg.SILU,))) == len(plain.layers)
    for tokens in (1, 30, 300):
        prompt = some_tokens(tokens)
        expected, found = (Running(model, JitBackend()).step([0], [prompt], [0]) for model in (plain, gated))
        assert torch.equal(expected, found)
