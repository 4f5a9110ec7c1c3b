"""A FlatModel as one program: every layer of a step in a single call, no torch between the first row and the last.

    embed | norm  qkv  rope+write  attend  merge  o | norm  gate+up+silu  down | norm ...  then the head

It has FlatModel's interface (forward, compute_logits, kv_spec, config), is built from any WeightSource, and is tested
against FlatModel. Rows are independent: the bits of a row do not depend on the batch it is computed in.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ipc.errors import ConfigError
from ipc.model_config import ModelConfig
from worker.attention.base import AttentionBackend, BatchMeta, LastRows
from worker.jit import attend, embed, matmul, norm, rope, silu
from worker.jit import program as pg
from worker.jit import step as st
from worker.jit.choice import ThreadChoice
from worker.jit.team import Team, get_team
from worker.jit.workspace import AttentionWorkspace
from worker.linear.formats import BLOCK, TILE, WIDE_BLOCK, aligned_empty
from worker.linear.kernel import Activations, add_linear, side_bytes
from worker.linear.route import PackedLinear
from worker.linear.source import WeightSource
from worker.models.layers import rope_frequencies

MAX_HEAD_DIM = 512                          # more could overflow the sums over int8 keys (attend_codes.py)
NOTED_ROWS = 9                              # below, one thread reads the logits again in the time that noting takes
_LAYER_PARTS = {"qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "o": ("self_attn.o_proj",),
                "gate_up": ("mlp.gate_proj", "mlp.up_proj"), "down": ("mlp.down_proj",)}


def refusal(config: ModelConfig) -> str | None:
    """None if this model's shape suits the kernels, else why not."""
    if config.num_experts:
        return "mixtures of experts are computed by torch"
    widths = {"hidden size": config.hidden_size, "intermediate size": config.intermediate_size,
              "width of all query heads": config.num_attention_heads * config.head_dim}
    for name, width in widths.items():
        if width % BLOCK:
            return f"{name} {width} is no multiple of {BLOCK}"
    if config.head_dim > MAX_HEAD_DIM:
        return f"head dim {config.head_dim} is above {MAX_HEAD_DIM}"
    return f"head dim {config.head_dim} is odd" if config.head_dim % 2 else None


class Rows:
    """One buffer of `capacity` rows of `width` floats, and its int8 copy when a layer wants it."""

    def __init__(self, capacity: int, width: int, quantized: bool) -> None:
        self.values = aligned_empty((capacity, width), np.float32)
        self.q = aligned_empty((capacity if quantized else 0, width), np.int8)
        self.side = aligned_empty((capacity if quantized else 0, max(1, side_bytes(width) // 4)), np.float32)
        self.activations = Activations(self.values.ctypes.data, 4 * width, self.q.ctypes.data if quantized else 0,
                                       self.side.ctypes.data)
        self.address, self.ld = self.activations.x, self.activations.ldx


class JitModel:
    """The weights, packed; buffers for the largest step seen."""

    def __init__(self, source: WeightSource, *, max_tokens: int = 256, team: Team | None = None) -> None:
        config = source.config
        reason = refusal(config)
        if reason is not None:
            raise ConfigError(f"the compiled kernels cannot run this model: {reason}; use --attention-backend cpu")
        self.config, self.team = config, team or get_team()
        self._choice, self._last_choice, self._head_choice = ThreadChoice(), ThreadChoice(), ThreadChoice()
        # The largest first: packing needs a copy of what is packed, and nothing else is there yet.
        self.embedding = source.linear(["model.embed_tokens.weight"])
        self.head = self.embedding if config.tie_word_embeddings else source.linear(["lm_head.weight"])
        self.layers: list[dict[str, PackedLinear]] = []
        self.norms: list[tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32] | None]] = []
        pair = WIDE_BLOCK if config.intermediate_size % WIDE_BLOCK == 0 else BLOCK
        for index in range(config.num_hidden_layers):
            prefix = f"model.layers.{index}."
            self.layers.append({part: source.linear([f"{prefix}{name}.weight" for name in names],
                                                    pair if part == "gate_up" else 0)
                                for part, names in _LAYER_PARTS.items()})
            head_norm = None
            if config.qk_norm:
                q_norm, k_norm = (source.vector(f"{prefix}self_attn.{x}_norm.weight") for x in "qk")
                head_norm = np.concatenate([np.tile(q_norm, config.num_attention_heads),
                                            np.tile(k_norm, config.num_key_value_heads)])
            self.norms.append((source.vector(prefix + "input_layernorm.weight"),
                               source.vector(prefix + "post_attention_layernorm.weight"), head_norm))
        self.last_norm = source.vector("model.norm.weight")
        self.workspace = AttentionWorkspace(config.num_attention_heads, config.num_key_value_heads, config.head_dim,
                                            self.team.num_threads)
        self._head_step = pg.new_step()
        self._num_logits, self._best_width = 0, config.vocab_size
        frequencies, self._rope_factor = rope_frequencies(config)
        self._frequencies = frequencies.float()
        self._num_positions = 0
        self._caches: Sequence[Any] | None = None
        self._capacity = self._head_capacity = 0
        self._grow(max_tokens)

    # -------------------------------------------------------------- what others ask of a model

    def kv_spec(self) -> tuple[int, int, int]:
        """(layers, Hkv, D) of the pool."""
        return self.config.num_hidden_layers, self.config.num_key_value_heads, self.config.head_dim

    @property
    def linears(self) -> list[PackedLinear]:
        """Every layer with weights, the embedding included."""
        head = [] if self.head is self.embedding else [self.head]
        return [layer for parts in self.layers for layer in parts.values()] + [self.embedding] + head

    def operations(self, codes: Sequence[int], *, of_every_row: bool = False) -> NDArray[np.int64]:
        """The operations of these codes (program.py) of the last step's program, to be timed on their own; only those
        that every row of a prompt goes through, or all."""
        table = self._program.table[:self._num_first if of_every_row else None]
        return np.ascontiguousarray(table[np.isin(table[:, pg.CODE], codes)])

    @property
    def _num_first(self) -> int:
        """Operations up to the last layer's write into the pool."""
        return self._pool_rows[-1] + 1

    @property
    def nbytes(self) -> int:
        """Bytes of all weights as they lie in memory."""
        return sum(layer.nbytes for layer in self.linears)

    def __call__(self, *args: Any) -> Tensor:
        return self.forward(*args)

    # -------------------------------------------------------------- a step

    def forward(self, input_ids: Tensor, positions: Tensor, kv_caches: Sequence[Any], meta: BatchMeta,
                backend: AttentionBackend, last: LastRows | None = None) -> Tensor:
        """input_ids, positions [N] int64 -> hidden [N, E] after the last norm, or [L, E], of the rows of `last`: a view
        that the next step overwrites."""
        if backend.name != "jit":
            raise RuntimeError(f"the compiled model reads pools of the jit backend only, not of {backend.name}")
        num_rows = len(input_ids)
        if num_rows > self._capacity:
            self._grow(num_rows)
        if meta.max_seq_len > self._num_positions:
            self._extend_positions(meta.max_seq_len)
        if kv_caches is not self._caches:
            self._use_pools(kv_caches)
        step = self.workspace.bind(meta, num_rows, kv_caches[0], scale=None, window=self.config.sliding_window)
        ids, places = input_ids.contiguous(), positions.contiguous()
        step[st.IDS], step[st.POSITIONS] = ids.data_ptr(), places.data_ptr()
        program = self._program
        if last is None:
            self.team.run(program.address, program.num_ops, step, self._choice)
            return self._hidden[:num_rows]
        num_first = self._num_first
        self.team.run(program.address, num_first, step, self._choice)
        num_rows = len(last.rows)
        if num_rows:
            for rows in (self._residual.values, self._qkv.values):
                rows[:num_rows] = rows[last.rows.numpy()]
            step = self.workspace.bind(last.meta, num_rows, kv_caches[0], scale=None, window=self.config.sliding_window)
            self.team.run(program.address + num_first * pg.OP_BYTES, program.num_ops - num_first, step,
                          self._last_choice)
        return self._hidden[:num_rows]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [L, E] -> [L, V] float32: a view that the next call overwrites."""
        rows = hidden.float().contiguous()
        if len(rows) > self._head_capacity:
            self._grow_head(len(rows))
        table = self._head_program.table
        for row in table:
            if row[pg.CODE] == pg.QUANTIZE:
                row[pg.X] = rows.data_ptr()
            elif row[pg.CODE] == pg.MATMUL and row[matmul.KIND] < 2:
                row[matmul.X] = rows.data_ptr()
        is_noted = NOTED_ROWS <= len(rows) < matmul.MANY_ROWS and len(self.head.weights) == 1
        table[-1, matmul.BEST] = self._best_values.ctypes.data if is_noted else 0
        table[-1, matmul.BEST_WIDTH] = self._best_width
        self._head_step[st.NUM_ROWS] = len(rows)
        self.team.run(self._head_program.address, self._head_program.num_ops, self._head_step, self._head_choice)
        self._num_logits = len(rows)
        return self._logits[:len(rows), :self.config.vocab_size]

    def best_of(self, logits: Tensor, width: int) -> tuple[NDArray[np.int64], NDArray[np.float32]] | None:
        """(first index of the largest, the largest) of each row of what compute_logits returned last, over the first
        `width` ids; NaN if any is. They were noted while the logits were made. None where they are not known: for other
        logits, for few or many rows, or the first time that a width is asked for."""
        row = self._head_program.table[-1]
        if logits.data_ptr() != self._logits.data_ptr() or len(logits) != self._num_logits or not row[matmul.BEST]:
            return None
        if width != row[matmul.BEST_WIDTH]:
            self._best_width = width
            return None
        largest, numbers = (part[:row[matmul.TILE_UNITS], :len(logits)] for part in (self._best_values, self._best_ids))
        unit, index = largest.argmax(axis=0), np.arange(len(logits))     # NaN counts as largest
        return numbers[unit, index].astype(np.int64), largest[unit, index]

    # -------------------------------------------------------------- buffers and programs

    def _grow(self, capacity: int) -> None:
        """Buffers for `capacity` rows, and the program over them."""
        config, self._capacity = self.config, capacity
        hidden_size, heads, kv_heads, dim = (config.hidden_size, config.num_attention_heads,
                                             config.num_key_value_heads, config.head_dim)
        has_int = any(layer.is_integer for layer in self.linears)
        widest = {part: max(parts[part].padded_out for parts in self.layers) for part in _LAYER_PARTS}
        residual, normed = Rows(capacity, hidden_size, False), Rows(capacity, hidden_size, has_int)
        qkv, attended = Rows(capacity, widest["qkv"], False), Rows(capacity, heads * dim, has_int)
        delta = Rows(capacity, max(widest["o"], widest["down"]), False)
        gate_up, act = self._gates(capacity, widest["gate_up"]), Rows(capacity, config.intermediate_size, has_int)
        scratch = aligned_empty((self.team.num_threads, hidden_size), np.float32)   # rows of norms, whole lines each
        self._hidden, self._residual, self._qkv = torch.from_numpy(normed.values), residual, qkv
        program = self._program = pg.Program()
        program.keep(residual, normed, qkv, attended, delta, gate_up, act, scratch, self.norms, self.last_norm)
        eps = pg.float_bits(config.rms_norm_eps)

        def add_norm(weight: NDArray[np.float32], reader: PackedLinear | None, *, first: bool = False) -> None:
            quantized = reader is not None and reader.is_integer
            row = program.add(pg.NORM, {
                norm.RESIDUAL: residual.address, norm.DELTA: 0 if first else delta.address, norm.LD_DELTA: delta.ld,
                norm.WEIGHT: weight.ctypes.data, norm.SIZE: hidden_size, norm.EPS_BITS: eps,
                norm.OUT: normed.address, norm.LD_OUT: normed.ld,
                norm.Q: normed.activations.q if quantized else 0, norm.SIDE: normed.activations.side,
                norm.LD_SIDE: 0 if reader is None else side_bytes(hidden_size, reader.block)})
            if reader is not None and all(layer.is_integer for layer in reader.weights):
                row[norm.OUT], row[norm.LD_OUT], row[norm.THREAD_BYTES] = scratch.ctypes.data, 0, scratch.strides[0]

        table = self.embedding.weights[0]
        program.add(pg.EMBED, {embed.KIND: table.kind, embed.W: table.data.ctypes.data, embed.SIZE: hidden_size,
                               embed.SCALES: table.scales.ctypes.data, embed.MINIMA: table.minima.ctypes.data,
                               embed.OUT: residual.address})
        self._pool_rows: list[int] = []
        for index, (parts, (first_norm, second_norm, head_norm)) in enumerate(zip(self.layers, self.norms)):
            add_norm(first_norm, parts["qkv"], first=index == 0)
            add_linear(program, parts["qkv"], normed.activations, qkv.address, qkv.ld)
            self._pool_rows.append(program.num_ops)
            program.add(pg.ROPE, {
                rope.Q: qkv.address, rope.K: qkv.address + 4 * heads * dim,
                rope.V: qkv.address + 4 * (heads + kv_heads) * dim, rope.LD_Q: qkv.ld, rope.LD_KV: qkv.ld,
                rope.NORM: 0 if head_norm is None else head_norm.ctypes.data, rope.EPS_BITS: eps, rope.ROTATE: 1})
            program.add(pg.ATTEND, {attend.Q: qkv.address, attend.LD_Q: qkv.ld, attend.OUT: attended.address,
                                    attend.LD_OUT: attended.ld})
            quantized = parts["o"].is_integer
            program.add(pg.MERGE, {
                attend.OUT: attended.address, attend.LD_OUT: attended.ld,
                attend.OUT_Q: attended.activations.q if quantized else 0, attend.SIDE: attended.activations.side,
                attend.LD_SIDE: side_bytes(heads * dim, parts["o"].block)})
            add_linear(program, parts["o"], attended.activations, delta.address, delta.ld)
            add_norm(second_norm, parts["gate_up"])
            self._add_gates(program, parts, normed.activations, gate_up, act)
            add_linear(program, parts["down"], act.activations, delta.address, delta.ld)
        add_norm(self.last_norm, None)
        self._caches = None

    def _is_gated(self, layer: PackedLinear) -> bool:
        """Whether the product makes the activations itself: gates and ups lie in turn, and there are enough of them for
        all threads."""
        return layer.pair > 0 and layer.num_out >= 2 * layer.pair * matmul.UNITS_PER_THREAD * self.team.num_threads

    def _gates(self, capacity: int, width: int) -> Rows:
        """Where gates and ups stay until they are activations: a few rows of every thread, or all of a step."""
        layers = [parts["gate_up"] for parts in self.layers]
        num_rows = 0 if all(map(self._is_gated, layers)) else capacity
        if any(map(self._is_gated, layers)):
            pair = max(layer.pair for layer in layers)
            self._pairs = aligned_empty((self.team.num_threads, matmul.GATED_ROWS, 2 * pair), np.float32)
        return Rows(num_rows, width, False)

    def _add_gates(self, program: pg.Program, parts: dict[str, PackedLinear], source: Activations, gate_up: Rows,
                   act: Rows) -> None:
        """Append act = silu(gates) * ups."""
        layer, down, size = parts["gate_up"], parts["down"], self.config.intermediate_size
        codes = act.activations.q if down.is_integer else 0
        ld_side = side_bytes(size, down.block)
        if self._is_gated(layer):
            add_linear(program, layer, source, self._pairs.ctypes.data, 8 * layer.pair, {
                matmul.GATE: layer.pair // TILE, matmul.THREAD_BYTES: self._pairs.strides[0], matmul.ACT_SIZE: size,
                matmul.ACT: act.address, matmul.ACT_Q: codes, matmul.ACT_SIDE: act.activations.side,
                matmul.ACT_LD_SIDE: ld_side})
            return
        add_linear(program, layer, source, gate_up.address, gate_up.ld)
        program.add(pg.SILU, {
            silu.GATE_UP: gate_up.address, silu.LD_GATE_UP: gate_up.ld, silu.SIZE: size, silu.PAIR: layer.pair or size,
            silu.OUT: act.address, silu.Q: codes, silu.SIDE: act.activations.side, silu.LD_SIDE: ld_side})

    def _grow_head(self, capacity: int) -> None:
        """Logits and activations for `capacity` sampled rows."""
        size = self._head_capacity = max(capacity, min(2 * self._head_capacity, 64))
        hidden_size = self.config.hidden_size
        self._logits = torch.from_numpy(aligned_empty((size, self.head.padded_out), np.float32))
        entries = np.empty((self.head.padded_out // TILE, size, 2), np.int32)  # of each unit of tiles and row
        self._best_values, self._best_ids = entries[..., 0].view(np.float32), entries[..., 1]
        buffer = Rows(size, hidden_size, True)
        program = self._head_program = pg.Program()
        program.keep(buffer)
        if self.head.is_integer:
            program.add(pg.QUANTIZE, {pg.LDX: 4 * hidden_size, pg.SIZE: hidden_size, pg.Q: buffer.activations.q,
                                      pg.SIDE: buffer.activations.side,
                                      pg.LD_SIDE: side_bytes(hidden_size, self.head.block)})
        add_linear(program, self.head, buffer.activations, self._logits.data_ptr(), 4 * self.head.padded_out,
                   {matmul.LD_BEST: entries.strides[0]})

    def _use_pools(self, kv_caches: Sequence[Any]) -> None:
        table = self._program.table
        for at, cache in zip(self._pool_rows, kv_caches, strict=True):
            for tensor, write_field, read_field in zip(cache, rope.POOL_FIELDS, attend.POOL_FIELDS):
                table[at, write_field] = table[at + 1, read_field] = tensor.data_ptr()
        self._caches = kv_caches

    def _extend_positions(self, length: int) -> None:
        """cos and sin [P, D / 2] of all positions so far; doubled, so that growing ends soon."""
        self._num_positions = min(max(length, 2 * self._num_positions, 256),
                                  max(length, self.config.max_position_embeddings))
        angles = torch.arange(self._num_positions)[:, None] * self._frequencies
        self._cos, self._sin = angles.cos() * self._rope_factor, angles.sin() * self._rope_factor
        self.workspace.step[st.COS], self.workspace.step[st.SIN] = self._cos.data_ptr(), self._sin.data_ptr()
