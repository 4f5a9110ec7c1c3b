"""FlatModel: a decoder-only transformer over the rows of one step.

It runs on [N, E] and does not know which row belongs to which request: only attention reads the batch metadata, through
a backend. A family overrides the class attributes below; a different block overrides `make_layer`.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from ipc.model_config import ModelConfig
from worker.attention.base import AttentionBackend, BatchMeta, LastRows
from worker.models.checkpoint import Slot
from worker.models.layers import GatedMLP, HeadNorm, Linear, RMSNorm, RotaryTables, SparseMLP, empty_weight


class Attention(nn.Module):
    """Projections, head norms and rotary positions around a backend's attention.

    The fused projection has the heads in the order  q 0..H-1 | k 0..Hkv-1 | v 0..Hkv-1,  so that q and k are one slice
    (normed and rotated in one call) and no row is copied to part them.
    """

    def __init__(self, config: ModelConfig, *, output_bias: bool, dtype: torch.dtype,
                 device: torch.device | str) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim, self.window = config.head_dim, config.sliding_window
        self.num_rotated = self.num_heads + self.num_kv_heads
        self.num_all = self.num_rotated + self.num_kv_heads
        self.qkv_proj = Linear(config.hidden_size, self.num_all * self.head_dim, bias=config.attention_bias,
                               dtype=dtype, device=device)
        self.o_proj = Linear(self.num_heads * self.head_dim, config.hidden_size, bias=output_bias, dtype=dtype,
                             device=device)
        self.qk_norm = HeadNorm(self.num_rotated, self.head_dim, config.rms_norm_eps, dtype=dtype,
                                device=device) if config.qk_norm else None

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], cache: Any, meta: BatchMeta, backend: AttentionBackend,
                last: LastRows | None = None) -> Tensor:
        """x [N, E] -> [N, E], of `last` [L, E]. Keys are written after rotation, then attended to: also this step's
        own."""
        qkv = self.qkv_proj(x).view(-1, self.num_all, self.head_dim)
        q = backend.ops.rotate_and_write(qkv, self.qk_norm, rope, self.num_heads, self.num_kv_heads, cache, meta,
                                         backend)
        if last is not None:
            q, meta = q.index_select(0, last.rows), last.meta
            if not len(q):
                return x[:0]
        out = backend.forward(q, cache, meta, scale=None, window=self.window)
        return self.o_proj(out.reshape(-1, self.num_heads * self.head_dim))


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP; the residual adds are part of the norms (`add_norm` of the backend's ops)."""

    def __init__(self, config: ModelConfig, index: int, *, output_bias: bool, dtype: torch.dtype,
                 device: torch.device | str) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.self_attn = Attention(config, output_bias=output_bias, dtype=dtype, device=device)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        kind = SparseMLP if config.has_experts(index) else GatedMLP
        self.mlp: GatedMLP | SparseMLP = kind(config, dtype=dtype, device=device)

    def forward(self, residual: Tensor, delta: Tensor | None, rope: tuple[Tensor, Tensor], cache: Any, meta: BatchMeta,
                backend: AttentionBackend, last: LastRows | None = None) -> tuple[Tensor, Tensor]:
        """(residual stream, what the MLP adds to it), of `last` where it is given: the add is done by the next norm."""
        ops = backend.ops
        hidden, residual = ops.add_norm(self.input_layernorm, residual, delta)
        delta = self.self_attn(hidden, rope, cache, meta, backend, last)
        if last is not None:
            residual = residual.index_select(0, last.rows)
            if not len(residual):
                return residual, delta
        hidden, residual = ops.add_norm(self.post_attention_layernorm, residual, delta)
        return residual, self.mlp(hidden, ops)


class FlatModel(nn.Module):
    """The model every family is a small variation of. Weights are uninitialised until a loader has run."""

    # Converters of llama.cpp reorder the rows of q and k in this family; the GGUF loader undoes it.
    gguf_permutes_qk: ClassVar[bool] = False
    # Whether `attention_bias` also gives the output projection a bias.
    output_has_bias: ClassVar[bool] = True

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = empty_weight(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.layers = nn.ModuleList(self.make_layer(i, dtype, device) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.lm_head = Linear(config.hidden_size, 0 if config.tie_word_embeddings else config.vocab_size, bias=False,
                              dtype=dtype, device=device)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens
        self.rope = RotaryTables(config, device)

    def make_layer(self, index: int, dtype: torch.dtype, device: torch.device | str) -> DecoderLayer:
        return DecoderLayer(self.config, index, output_bias=self.config.attention_bias and self.output_has_bias,
                            dtype=dtype, device=device)

    def kv_spec(self) -> tuple[int, int, int]:
        """(layers, Hkv, D) of the pool."""
        return self.config.num_hidden_layers, self.config.num_key_value_heads, self.config.head_dim

    def forward(self, input_ids: Tensor, positions: Tensor, kv_caches: Sequence[Any], meta: BatchMeta,
                backend: AttentionBackend, last: LastRows | None = None) -> Tensor:
        """input_ids, positions [N] int64 -> hidden [N, E] after the last norm, or [L, E], of the rows of `last`. One
        cache per layer."""
        residual = backend.ops.embed(input_ids, self.embed_tokens)
        rope = self.rope(positions, residual.dtype)
        delta = None
        for index, (layer, cache) in enumerate(zip(self.layers, kv_caches, strict=True), 1):
            residual, delta = layer(residual, delta, rope, cache, meta, backend,
                                    last if index == len(self.layers) else None)
        if not len(residual):
            return residual
        return backend.ops.add_norm(self.norm, residual, delta)[0]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [L, E] -> [L, V] float32. The caller passes only the rows it samples: for a long prompt that is one
        row of the largest matmul instead of thousands."""
        return self.lm_head(hidden).float()

    def checkpoint_slots(self) -> dict[str, Slot]:
        """Every tensor the checkpoint must have, by its Hugging Face name. Together they cover every parameter.
        A `weight_scale` is that of narrow weights."""
        slots: dict[str, Slot] = {}

        def add(name: str, target: Tensor, shape: tuple[int, ...] | None = None) -> None:
            slots[name] = Slot(tuple(target.shape) if shape is None else shape, target)

        def add_rows(fused: Linear, names: Sequence[str], sizes: Sequence[int]) -> None:
            for kind, parts in fused.stored(sizes):
                for name, rows in zip(names, parts, strict=True):
                    add(f"{name}.{kind}", rows)

        add("model.embed_tokens.weight", self.embed_tokens)
        for index, layer in enumerate(cast("Iterable[DecoderLayer]", self.layers)):
            prefix, attn = f"model.layers.{index}", layer.self_attn
            dim, num_heads, num_kv_heads = attn.head_dim, attn.num_heads, attn.num_kv_heads
            add(f"{prefix}.input_layernorm.weight", layer.input_layernorm.weight)
            add(f"{prefix}.post_attention_layernorm.weight", layer.post_attention_layernorm.weight)
            add_rows(attn.qkv_proj, [f"{prefix}.self_attn.{part}_proj" for part in "qkv"],
                     [num_heads * dim, num_kv_heads * dim, num_kv_heads * dim])
            add_rows(attn.o_proj, [f"{prefix}.self_attn.o_proj"], [self.config.hidden_size])
            if attn.qk_norm is not None:
                add(f"{prefix}.self_attn.q_norm.weight", attn.qk_norm.weight[:num_heads], (dim,))
                add(f"{prefix}.self_attn.k_norm.weight", attn.qk_norm.weight[num_heads:], (dim,))
            for name, target in layer.mlp.checkpoint_parts():
                add(f"{prefix}.mlp.{name}", target)
        add("model.norm.weight", self.norm.weight)
        if not self.config.tie_word_embeddings:
            add("lm_head.weight", self.lm_head.weight)
        return slots
