"""Short model names: alias -> hub id and the facts of its config.json.

The facts are what `ModelConfig` needs, so `--load-format dummy` starts at true shape with no file and no network; with
real weights the model's own config.json decides and this table is only a name. Only families that the worker can run
are listed. A short name means the chat-tuned model: `qwen2.5-7b` and `qwen2.5-7b-instruct` are the same; a base model
is reached by its hub id. Knows nothing of files, caches or downloads.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Alias(msgspec.Struct, frozen=True):
    """One row: where the model lives and what its config.json says."""

    hub_id: str
    hf_config: dict[str, Any]        # the subset of config.json that defines the shape
    is_gated: bool = False           # the hub asks for a licence click and a token


DEMO_ALIAS = "smollm2-135m"          # also embedded: fetched as a wheel, see ipc/model_source.py


def _qwen3(size: str, hidden: int, mlp: int, layers: int, heads: int, tied: bool) -> Alias:
    return Alias(f"Qwen/Qwen3-{size}", {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151_936,
        "hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 128,
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0, "rope_scaling": None,
        "max_position_embeddings": 40_960, "tie_word_embeddings": tied, "attention_bias": False,
        "use_sliding_window": False, "sliding_window": None,
        "eos_token_id": [151_645, 151_643], "bos_token_id": 151_643, "torch_dtype": "bfloat16",
    })


def _qwen3_moe(size: str, hidden: int, mlp: int, expert: int, layers: int, heads: int, kv_heads: int) -> Alias:
    dense = _qwen3(size, hidden, mlp, layers, heads, False)
    return Alias(dense.hub_id, {
        **dense.hf_config, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
        "num_key_value_heads": kv_heads, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": expert,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    })


def _qwen2(size: str, hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, tied: bool) -> Alias:
    return Alias(f"Qwen/Qwen2.5-{size}-Instruct", {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 151_936 if tied else 152_064,
        "hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0,
        "max_position_embeddings": 32_768, "tie_word_embeddings": tied,
        "use_sliding_window": False, "sliding_window": None,
        "eos_token_id": [151_645, 151_643], "bos_token_id": 151_643, "torch_dtype": "bfloat16",
    })


def _llama3(
    name: str, hidden: int, mlp: int, layers: int, heads: int, head_dim: int, factor: float, tied: bool
) -> Alias:
    return Alias(f"meta-llama/Llama-{name}-Instruct", {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128_256,
        "hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": head_dim,
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 500_000.0,
        "rope_scaling": {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 8_192},
        "max_position_embeddings": 131_072, "tie_word_embeddings": tied, "attention_bias": False,
        "eos_token_id": [128_001, 128_008, 128_009], "bos_token_id": 128_000, "torch_dtype": "bfloat16",
    }, is_gated=True)


_SMOLLM2_135M = Alias("HuggingFaceTB/SmolLM2-135M-Instruct", {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49_152,
    "hidden_size": 576, "intermediate_size": 1_536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3,
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 100_000.0, "rope_scaling": None,
    "max_position_embeddings": 8_192, "tie_word_embeddings": True, "attention_bias": False,
    "eos_token_id": 2, "bos_token_id": 1, "torch_dtype": "bfloat16",
})

_CHAT_ONLY: dict[str, Alias] = {     # families whose plain hub name is already the chat model
    "qwen3-0.6b": _qwen3("0.6B", 1_024, 3_072, 28, 16, True),
    "qwen3-1.7b": _qwen3("1.7B", 2_048, 6_144, 28, 16, True),
    "qwen3-4b": _qwen3("4B", 2_560, 9_728, 36, 32, True),
    "qwen3-8b": _qwen3("8B", 4_096, 12_288, 36, 32, False),
    "qwen3-14b": _qwen3("14B", 5_120, 17_408, 40, 40, False),
    "qwen3-32b": _qwen3("32B", 5_120, 25_600, 64, 64, False),
    "qwen3-30b-a3b": _qwen3_moe("30B-A3B", 2_048, 6_144, 768, 48, 32, 4),
    "qwen3-235b-a22b": _qwen3_moe("235B-A22B", 4_096, 12_288, 1_536, 94, 64, 4),
}
_WITH_INSTRUCT: dict[str, Alias] = {  # also known with "-instruct" at the end
    "qwen2.5-0.5b": _qwen2("0.5B", 896, 4_864, 24, 14, 2, True),
    "qwen2.5-1.5b": _qwen2("1.5B", 1_536, 8_960, 28, 12, 2, True),
    "qwen2.5-3b": _qwen2("3B", 2_048, 11_008, 36, 16, 2, True),
    "qwen2.5-7b": _qwen2("7B", 3_584, 18_944, 28, 28, 4, False),
    "qwen2.5-14b": _qwen2("14B", 5_120, 13_824, 48, 40, 8, False),
    "qwen2.5-32b": _qwen2("32B", 5_120, 27_648, 64, 40, 8, False),
    "qwen2.5-72b": _qwen2("72B", 8_192, 29_568, 80, 64, 8, False),
    "llama-3.1-8b": _llama3("3.1-8B", 4_096, 14_336, 32, 32, 128, 8.0, False),
    "llama-3.1-70b": _llama3("3.1-70B", 8_192, 28_672, 80, 64, 128, 8.0, False),
    "llama-3.2-1b": _llama3("3.2-1B", 2_048, 8_192, 16, 32, 64, 32.0, True),
    "llama-3.2-3b": _llama3("3.2-3B", 3_072, 8_192, 28, 24, 128, 32.0, True),
    DEMO_ALIAS: _SMOLLM2_135M,
}

ALIASES: dict[str, Alias] = {
    **_CHAT_ONLY,
    **_WITH_INSTRUCT,
    **{f"{name}-instruct": alias for name, alias in _WITH_INSTRUCT.items()},
}


def find_alias(name: str) -> Alias | None:
    """The row for `name`, whatever its case; None when it is not an alias."""
    return ALIASES.get(name.lower())


def alias_names() -> list[str]:
    """The short names, for help and error texts; the `-instruct` twins are left out."""
    return [*_CHAT_ONLY, *_WITH_INSTRUCT]
