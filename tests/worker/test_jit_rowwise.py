"""The operations around the matmuls, each as a program of one operation, against torch."""
from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("numba")

from worker.jit import embed, norm, rope, silu  # noqa: E402
from worker.jit import program as pg  # noqa: E402
from worker.jit import step as st  # noqa: E402
from worker.jit.team import get_team  # noqa: E402
from worker.linear import pack  # noqa: E402
from worker.linear.kernel import side_bytes  # noqa: E402
from worker.linear.route import quantize_activations  # noqa: E402

ROWS = [1, 2, 9, 70]


def run(code: int, fields: dict[int, int], rows: int, **step_fields: int) -> None:
    program, step = pg.Program(), pg.new_step()
    program.add(code, fields)
    step[st.NUM_ROWS] = rows
    for name, value in step_fields.items():
        step[getattr(st, name)] = value
    get_team().run(program.address, 1, step)


def at(tensor: torch.Tensor) -> int:
    return tensor.data_ptr()


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Quantized:
    """Buffers for an operation's int8 output."""

    def __init__(self, rows: int, width: int, block: int = 32) -> None:
        self.block = block
        self.q = torch.zeros((rows, width), dtype=torch.int8)
        self.side = torch.zeros((rows, 4, width // block))

    def check(self, x: torch.Tensor) -> None:
        """Exactly the reference formula applied to what the operation wrote as float32, and the right sums."""
        q, scale = quantize_activations(x, self.block)
        assert torch.equal(self.q.float(), q) and torch.equal(self.side[:, 0], scale)
        sums = q.view(*scale.shape, self.block).sum(-1)
        assert torch.equal(self.side[:, 1].contiguous().view(torch.int32), (-128 * sums).int())
        if self.block == 64:                    # the other columns are for blocks of 32
            return
        assert torch.equal(self.side[:, 2].contiguous().view(torch.int32), (-8 * sums).int())
        assert torch.equal(self.side[:, 3], scale * sums)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("has_delta", [False, True])
@pytest.mark.parametrize("width, block", [(96, 32), (576, 32), (64, 64), (576, 64), (1088, 64)])
def test_add_norm_and_quantization(rows: int, has_delta: bool, width: int, block: int) -> None:
    residual, delta, weight = normal(rows, width), normal(rows, 1152, seed=1), normal(width, seed=2)
    out = torch.zeros(rows, width)
    before, quantized = residual.clone(), Quantized(rows, width, block)
    run(pg.NORM, {norm.RESIDUAL: at(residual), norm.DELTA: at(delta) if has_delta else 0, norm.LD_DELTA: 4 * 1152,
                  norm.WEIGHT: at(weight), norm.SIZE: width, norm.EPS_BITS: pg.float_bits(1e-5), norm.OUT: at(out),
                  norm.LD_OUT: 4 * width, norm.Q: at(quantized.q), norm.SIDE: at(quantized.side),
                  norm.LD_SIDE: side_bytes(width, block)}, rows)
    total = before + delta[:, :width] if has_delta else before
    assert torch.equal(residual, total)
    torch.testing.assert_close(out, F.rms_norm(total, (width,), weight, 1e-5), atol=1e-6, rtol=1e-5)
    quantized.check(out)


@pytest.mark.parametrize("rows", ROWS)
def test_silu_times_up_and_quantization(rows: int) -> None:
    width = 64
    both, out, quantized = normal(rows, 160) * 5, torch.zeros(rows, width), Quantized(rows, width)
    both[0, :4] = torch.tensor([-200.0, 200.0, 0.0, -88.0])
    run(pg.SILU, {silu.GATE_UP: at(both), silu.LD_GATE_UP: 4 * 160, silu.SIZE: width, silu.PAIR: width,
                  silu.OUT: at(out), silu.Q: at(quantized.q), silu.SIDE: at(quantized.side),
                  silu.LD_SIDE: side_bytes(width)}, rows)
    torch.testing.assert_close(out, F.silu(both[:, :width]) * both[:, width:2 * width], atol=1e-6, rtol=1e-5)
    quantized.check(out)
    both[0, 0] = float("nan")
    run(pg.SILU, {silu.GATE_UP: at(both), silu.LD_GATE_UP: 4 * 160, silu.SIZE: width, silu.PAIR: width,
                  silu.OUT: at(out)}, rows)
    assert out[0, 0].isnan() and torch.isfinite(out[0, 1:]).all()


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("dim", [6, 16, 64])
def test_head_norm_rotation_and_write(has_norm: bool, dim: int) -> None:
    rows, heads, kv_heads, size = 5, 4, 2, 16
    qkv = normal(rows, heads + 2 * kv_heads, dim)
    before, weight = qkv.clone(), normal(heads + kv_heads, dim, seed=1)
    angles = torch.arange(40)[:, None] * (1.0 / 10000 ** (torch.arange(0, dim, 2) / dim))
    cos, sin = angles.cos().contiguous(), angles.sin().contiguous()
    positions, slots = torch.tensor([0, 7, 33, 1, 2]), torch.tensor([17, 40, -1, 32, 16])
    width = -(-dim // 16) * 16
    keys, values = torch.zeros(4, kv_heads, dim, size), torch.zeros(4, kv_heads, size, width)
    bytes_of = 4 * dim
    run(pg.ROPE, {rope.Q: at(qkv), rope.K: at(qkv) + heads * bytes_of, rope.V: at(qkv) + (heads + kv_heads) * bytes_of,
                  rope.LD_Q: qkv.stride(0) * 4, rope.LD_KV: qkv.stride(0) * 4, rope.NORM: at(weight) if has_norm else 0,
                  rope.EPS_BITS: pg.float_bits(1e-6), rope.ROTATE: 1, rope.K_POOL: at(keys), rope.V_POOL: at(values)},
        rows, HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=dim, BLOCK_SIZE=size, NUM_SLOTS=4 * size,
        POSITIONS=at(positions), SLOTS=at(slots), COS=at(cos), SIN=at(sin))
    x = before[:, :heads + kv_heads]
    if has_norm:
        x = F.rms_norm(x, (dim,), None, 1e-6) * weight
    first, second = x[..., :dim // 2], x[..., dim // 2:]
    c, s = cos[positions][:, None], sin[positions][:, None]
    expected = torch.cat((first * c - second * s, second * c + first * s), -1)
    torch.testing.assert_close(qkv[:, :heads + kv_heads], expected, atol=2e-6, rtol=1e-5)
    for n, slot in enumerate([17, 40, 63, 32, 16]):
        block, offset = divmod(slot, size)
        assert torch.equal(keys[block, :, :, offset], qkv[n, heads:heads + kv_heads])
        assert torch.equal(values[block, :, offset, :dim], before[n, heads + kv_heads:])
    assert int((keys != 0).any(2).sum()) == 5 * kv_heads     # nothing else was written


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int8_wide", "int4", "int4_min"])
def test_embedding_rows_are_those_of_the_packed_weight(kind: str) -> None:
    rng = np.random.default_rng(0)
    table = rng.standard_normal((70, 64)).astype(np.float32)
    if kind == "bfloat16":
        packed = pack.pack_bfloat16(torch.from_numpy(table).bfloat16().view(torch.int16).numpy().view(np.uint16))
    elif kind == "int4":
        raw = rng.integers(0, 256, (70, 2, 18), dtype=np.uint8)
        raw[..., :2] = rng.random((70, 2)).astype(np.float16)[..., None].view(np.uint8)
        packed = pack.pack_gguf(raw.reshape(70, -1), "Q4_0", 64)
    else:
        packed = {"float32": pack.pack_float32, "int8": functools.partial(pack.quantize_int8, wide=False),
                  "int8_wide": pack.quantize_int8, "int4_min": pack.quantize_int4}[kind](table)
    ids, out = torch.tensor([0, 69, 31, 32, 15, 16, 47, 0]), torch.zeros(8, 64)
    run(pg.EMBED, {embed.KIND: packed.kind, embed.W: packed.data.ctypes.data, embed.SIZE: 64, embed.OUT: at(out),
                   embed.SCALES: packed.scales.ctypes.data, embed.MINIMA: packed.minima.ctypes.data}, 8, IDS=at(ids))
    torch.testing.assert_close(out, torch.from_numpy(pack.unpack(packed)[ids.numpy()]), atol=1e-6, rtol=1e-6)
