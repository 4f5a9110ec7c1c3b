"""What fits, in words: "weights 0.5 GiB + cache 5.6 GiB = 130k tokens = 16 requests of 8k", or the nearest setting.

Arithmetic on the model's shape; measures nothing, reads no files and knows no devices.
"""
from __future__ import annotations

from ipc.aliases import ALIASES, alias_names
from ipc.model_config import ModelConfig, from_hf_config

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def size_text(num_bytes: float) -> str:
    """15.3 GiB, 180 MiB, 12 KiB."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            value = num_bytes / size
            return f"{value:.1f} {unit}" if value < 100 and unit in ("GiB", "TiB") else f"{value:.0f} {unit}"
    return f"{num_bytes:.0f} bytes"


def count_text(count: int) -> str:
    """512, 8k (for 8192 too), 130k, 1.3M: how people say numbers of tokens."""
    if count < 1000:
        return str(count)
    if count < 1_000_000:
        binary = count % 1024 == 0 and count // 1024 < 1000
        thousands = count // 1024 if binary else count / 1000
        return f"{thousands:.0f}k" if binary or thousands >= 10 or thousands == int(thousands) else f"{thousands:.1f}k"
    return f"{count / 1e6:.1f}M"


def flag_size(num_bytes: int) -> str:
    """A value for an option that takes a size, rounded up: 181MiB."""
    return f"{-(-num_bytes // (1 << 20))}MiB"


def capacity_text(weight_bytes: int, block_bytes: int, num_blocks: int, block_size: int, max_model_len: int) -> str:
    """The pool in words; when not even one request of full length fits, also the two settings that change it."""
    num_tokens = num_blocks * block_size
    cache = size_text(num_blocks * block_bytes)
    head = f"weights {size_text(weight_bytes)} + cache {cache} = {count_text(num_tokens)} tokens"
    requests = num_tokens / max_model_len
    if requests >= 1:
        shown = f"{requests:.1f}" if requests < 3 and requests != int(requests) else f"{int(requests)}"
        return f"{head} = {shown} request{'' if shown == '1' else 's'} of {count_text(max_model_len)}"
    needed = (-(-max_model_len // block_size) + 2) * block_bytes
    return (f"{head}: less than one request of {count_text(max_model_len)}, longer ones are cut or refused; "
            f"--max-model-len {num_tokens} says so to clients, --kv-cache-memory {flag_size(needed)} holds one")


def weight_count(config: ModelConfig) -> int:
    """Numbers in the weight matrices; norms and biases are too few to matter."""
    hidden, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    attention = hidden * config.head_dim * (2 * heads + 2 * kv_heads)
    dense = 3 * hidden * config.intermediate_size
    sparse = config.num_experts * (3 * hidden * config.moe_intermediate_size + hidden)
    num_sparse = sum(config.has_experts(layer) for layer in range(config.num_hidden_layers))
    layers = config.num_hidden_layers * (attention + dense) + num_sparse * (sparse - dense)
    return layers + (1 if config.tie_word_embeddings else 2) * config.vocab_size * hidden


def nearest_fit(config: ModelConfig, item_bytes: int, free_bytes: int) -> str:
    """What to start instead when the weights need more than `free_bytes`: half the precision, or the largest alias, of
    the same family if there is one."""
    if item_bytes > 2 and weight_count(config) * 2 < free_bytes:
        return f"--dtype bfloat16 ({size_text(weight_count(config) * 2)})"
    fitting: list[tuple[bool, int, str]] = []
    for name in alias_names():
        other = from_hf_config(ALIASES[name].hf_config, name)
        if weight_count(other) * 2 < free_bytes:
            fitting.append((other.architecture == config.architecture, weight_count(other), name))
    if not fitting:
        return "a machine with more memory"
    _, count, name = max(fitting)
    return f"--model {name} --dtype bfloat16 ({size_text(count * 2)})"


def weights_warning(config: ModelConfig, dtype: str, free_bytes: int) -> str:
    """One sentence when the weights will not fit into what is free; "" when they will."""
    item_bytes = ITEM_BYTES[dtype]
    needed = weight_count(config) * item_bytes
    if needed <= free_bytes:
        return ""
    return (f"weights need about {size_text(needed)} as {dtype}, {size_text(free_bytes)} are free; the nearest that "
            f"fits: {nearest_fit(config, item_bytes, free_bytes)}")
