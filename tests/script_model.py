"""A model folder whose greedy output is written down beforehand: each token of a chain is followed by the next one.

One layer of zeros, so that the last hidden state is the token's own embedding, and output rows that name its successor.
Beside the 256 bytes the vocabulary has the pieces that the chains need.
"""
from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers

from bench.tiny_model import CONFIG
from frontend.tokenizer import BYTE_TO_CHAR

HIDDEN = 64


def write_script_model(folder: Path, chains: Sequence[Sequence[str]]) -> str:
    """Fill `folder`; its path. Pieces are in the byte alphabet of BYTE_TO_CHAR; none may stand in two places."""
    vocab = {char: byte for byte, char in BYTE_TO_CHAR.items()}
    merges: list[tuple[str, str]] = []
    for piece in sorted({piece for chain in chains for piece in chain}):
        for end in range(2, len(piece) + 1):
            if piece[:end] not in vocab:
                vocab[piece[:end]] = len(vocab)
                merges.append((piece[:end - 1], piece[end - 1]))
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    embed, head = np.zeros((len(vocab), HIDDEN), np.float32), np.zeros((len(vocab), HIDDEN), np.float32)
    place = 0
    for chain in chains:
        for piece, successor in zip(chain, [*chain[1:], chain[-1]]):
            embed[vocab[piece], place] = 1.0
            head[vocab[successor], place] = 1.0
            place += 1
    weights = {"model.embed_tokens.weight": embed, "lm_head.weight": head,
               "model.norm.weight": np.ones(HIDDEN, np.float32)}
    for name, rows, columns in (("self_attn.q_proj", 64, 64), ("self_attn.k_proj", 32, 64),
                                ("self_attn.v_proj", 32, 64), ("self_attn.o_proj", 64, 64),
                                ("mlp.gate_proj", 128, 64), ("mlp.up_proj", 128, 64), ("mlp.down_proj", 64, 128)):
        weights[f"model.layers.0.{name}.weight"] = np.zeros((rows, columns), np.float32)
    for name in ("input_layernorm", "post_attention_layernorm"):
        weights[f"model.layers.0.{name}.weight"] = np.ones(HIDDEN, np.float32)
    save_file(weights, str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(
        {**CONFIG, "vocab_size": len(vocab), "num_hidden_layers": 1, "eos_token_id": None}))
    (folder / "tokenizer_config.json").write_text("{}")
    return str(folder)
