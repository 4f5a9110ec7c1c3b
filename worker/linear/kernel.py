"""A packed linear layer as operations of a program, and as a call of its own.

A model adds its layers to one program (`add_linear`); `KernelLinear` is a program with one layer, for tests, tuning and
models that run their other parts in torch.
"""
from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from worker.jit import matmul as mm
from worker.jit import program as pg
from worker.jit import step as st
from worker.jit.team import Team, get_team
from worker.linear.formats import BLOCK, aligned_empty
from worker.linear.route import PackedLinear
from worker.linear.table import packed_rows


class Activations(NamedTuple):
    """Addresses of one buffer of rows: float32, and its int8 copy with the side table (0 where nobody reads it)."""
    x: int
    ldx: int
    q: int
    side: int


def side_bytes(num_k: int, block: int = BLOCK) -> int:
    """Bytes of a row of the side table. The kernels know the kind of blocks by it."""
    return 4 * 4 * (num_k // block)


def add_linear(program: pg.Program, layer: Any, source: Activations, out: int, ld_out: int,
               more: Mapping[int, int] | None = None) -> None:
    """Append out = layer(source). layer: a PackedLinear, or a weak proxy of one; out: rows of at least
    layer.padded_out floats, ld_out bytes apart; more: other fields of the operation."""
    program.keep(layer)
    for start, weight in zip(layer.starts, layer.weights):
        integer = weight.is_integer
        program.add(pg.MATMUL, {
            mm.KIND: weight.kind, mm.X: source.q if integer else source.x,
            mm.LDX: layer.num_k if integer else source.ldx, mm.SIDE: source.side,
            mm.LD_SIDE: side_bytes(layer.num_k, layer.block),
            mm.W: weight.data.ctypes.data, mm.SCALES: weight.scales.ctypes.data, mm.MINIMA: weight.minima.ctypes.data,
            mm.NUM_K: layer.num_k, mm.NUM_TILES: weight.num_tiles, mm.TILE_BYTES: weight.tile_bytes,
            mm.OUT: out + 4 * start, mm.LD_OUT: ld_out,
            mm.TILE_ROWS: packed_rows(weight.kind),
            mm.BIAS: 0 if layer.bias is None else layer.bias.ctypes.data + 4 * start, **(more or {})})


class KernelLinear:
    """One layer with its own buffers, which grow to the largest number of rows seen."""

    _known: weakref.WeakKeyDictionary[PackedLinear, KernelLinear] = weakref.WeakKeyDictionary()

    def __init__(self, layer: PackedLinear, team: Team | None = None) -> None:
        self.num_k, self.num_out, self.padded_out = layer.num_k, layer.num_out, layer.padded_out
        self.team = team or get_team()
        self.step = pg.new_step()
        # The map from layers to kernels must not keep the layer alive, so the arrays are held instead.
        self._arrays = [(weight.data, weight.scales, weight.minima) for weight in layer.weights] + [layer.bias]
        self._layer = weakref.proxy(layer)
        self._is_integer = layer.is_integer
        self._capacity = 0
        self._program = pg.Program()

    @classmethod
    def of(cls, layer: PackedLinear) -> KernelLinear:
        """The kernel of this layer, made at its first use."""
        found = cls._known.get(layer)
        if found is None:
            found = cls._known[layer] = cls(layer)
        return found

    def _grow(self, rows: int) -> None:
        self._capacity = rows
        self._q = aligned_empty((rows, self.num_k), np.int8)
        stride = side_bytes(self.num_k, self._layer.block)
        self._side = aligned_empty((rows, stride // 4), np.float32)
        self._program = pg.Program()
        if self._is_integer:
            self._program.add(pg.QUANTIZE, {pg.LDX: 4 * self.num_k, pg.SIZE: self.num_k, pg.Q: self._q.ctypes.data,
                                            pg.SIDE: self._side.ctypes.data, pg.LD_SIDE: stride})
        source = Activations(0, 4 * self.num_k, self._q.ctypes.data, self._side.ctypes.data)
        add_linear(self._program, self._layer, source, 0, 4 * self.padded_out)
        self._outs = self._program.table[:, mm.OUT].copy()

    @property
    def table(self) -> np.ndarray:
        """The operations; fields that are not addresses may be changed, for tuning."""
        return self._program.table

    def prepare(self, rows: int) -> None:
        """Make buffers for so many rows."""
        if rows > self._capacity:
            self._grow(rows)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x [M, K] float32 -> [M, num_out]; out: [M, padded_out] to write to instead of a new tensor."""
        x = x.float().contiguous()
        rows = x.shape[0]
        self.prepare(rows)
        if out is None:
            out = torch.empty((rows, self.padded_out), dtype=torch.float32)
        if rows == 0:
            return out[:, :self.num_out]
        table = self._program.table
        for row, start in zip(table, self._outs.tolist()):
            if row[pg.CODE] == pg.QUANTIZE:
                row[pg.X] = x.data_ptr()
                continue
            row[mm.OUT] = out.data_ptr() + start
            if row[mm.KIND] < 2:
                row[mm.X] = x.data_ptr()
        self.step[st.NUM_ROWS] = rows
        self.team.run(self._program.address, self._program.num_ops, self.step)
        return out[:, :self.num_out]
