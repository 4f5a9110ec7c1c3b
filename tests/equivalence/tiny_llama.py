"""A Llama of two layers with grouped queries and random weights, large enough for attention to matter."""
from __future__ import annotations

import torch

from bench.simulation import VOCAB
from ipc.model_config import ModelConfig
from ipc.model_source import ModelFiles
from worker.models.flat_model import FlatModel
from worker.models.loader import load_model


def make_tiny_llama(max_model_len: int, *, seed: int, hidden_size: int = 32, intermediate_size: int = 48,
                    num_heads: int = 4, head_dim: int = 8, scale: float = 15.0) -> FlatModel:
    """`scale`: of all weights but the norms'."""
    config = ModelConfig(
        architecture="LlamaForCausalLM", vocab_size=VOCAB, hidden_size=hidden_size, intermediate_size=intermediate_size,
        num_hidden_layers=2, num_attention_heads=num_heads, num_key_value_heads=2, head_dim=head_dim, rms_norm_eps=1e-5,
        rope_theta=10000.0, rope_scaling=None, max_position_embeddings=max_model_len, tie_word_embeddings=False,
        attention_bias=False, qk_norm=False, eos_token_ids=[], bos_token_id=None, dtype="float32")
    model = load_model(ModelFiles(kind="dummy", path="", config=config, served_name="tiny"), dtype="float32",
                       device="cpu", seed=seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.mul_(scale)
    return model
