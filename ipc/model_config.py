"""The shape of a model, from a Hugging Face config.json or from GGUF metadata, checked once.

Knows numbers, not tensors. Everything a family cannot do exactly is refused here by name: a model that loads gives the
logits of its authors' code. A checkpoint that disagrees with these numbers is refused by the worker's loader.
"""
from __future__ import annotations

import math
from typing import Any

import msgspec

from ipc.errors import ConfigError
from ipc.gguf import GGUFFile
from ipc.weight_format import read_fp8_block

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
GGUF_ARCHITECTURES = dict(zip(("llama", "qwen2", "qwen3", "qwen3moe"), SUPPORTED_ARCHITECTURES))
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
DTYPES = ("float32", "bfloat16", "float16")
MAX_LAYERS = 1024
MAX_EXPERTS = 4096
MAX_COUNT = (1 << 31) - 1
MAX_NUMBER = 1e30


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the engine must know of a model. Made by `from_hf_config` or `from_gguf`; travels in CONFIG."""
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: dict[str, Any] | None = None   # None: plain rotary; else {"rope_type": ..., every number it needs}
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    attention_bias: bool = False                 # of q, k and v; Llama and Qwen3 then have one on the output too
    qk_norm: bool = False
    sliding_window: int = 0                      # keys a query sees, itself included; 0 = all
    eos_token_ids: list[int] = []
    bos_token_id: int | None = None
    dtype: str = "float32"                       # the checkpoint's own; what "auto" starts from
    fp8_block: list[int] | None = None           # stored as e4m3: outputs x inputs of a scale, []: see weight_format.py
    ggml_type: str | None = None                 # what most bytes of a GGUF file are stored as
    num_experts: int = 0                         # of a mixture of experts; 0: every MLP is dense
    num_experts_per_tok: int = 0                 # experts that compute each token
    moe_intermediate_size: int = 0               # width inside one expert
    norm_topk_prob: bool = False                 # the chosen experts' weights are divided by their sum
    decoder_sparse_step: int = 1                 # layers step-1, 2 step-1, ... have experts, the others a dense MLP
    mlp_only_layers: list[int] = []              # layers that have a dense MLP all the same

    def __post_init__(self) -> None:
        if self.architecture not in SUPPORTED_ARCHITECTURES:
            raise ConfigError(f"architecture {self.architecture!r} is not supported; "
                              f"supported: {', '.join(SUPPORTED_ARCHITECTURES)}")
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                     "num_key_value_heads", "head_dim", "max_position_embeddings"):
            limit = MAX_LAYERS if name == "num_hidden_layers" else MAX_COUNT
            if not 1 <= getattr(self, name) <= limit:
                raise ConfigError(f"{name} is {getattr(self, name)}, must be 1 to {limit}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(f"num_attention_heads is {self.num_attention_heads}, must be a multiple of "
                              f"num_key_value_heads ({self.num_key_value_heads})")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim is {self.head_dim}, must be even: rotary positions turn pairs")
        if not 0 < self.rms_norm_eps < MAX_NUMBER:
            raise ConfigError(f"rms_norm_eps is {self.rms_norm_eps}, must be a positive number")
        if not 1 < self.rope_theta < MAX_NUMBER:
            raise ConfigError(f"rope_theta is {self.rope_theta}, must be more than 1 and under {MAX_NUMBER:g}")
        if not 0 <= self.sliding_window <= MAX_COUNT:
            raise ConfigError(f"sliding_window is {self.sliding_window}, must be 0 (off) to {MAX_COUNT}")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype {self.dtype!r} is not supported; supported: {', '.join(DTYPES)}")
        if self.num_experts:
            for name, high in (("num_experts", MAX_EXPERTS), ("num_experts_per_tok", self.num_experts),
                               ("moe_intermediate_size", MAX_COUNT), ("decoder_sparse_step", MAX_LAYERS)):
                if not 1 <= getattr(self, name) <= high:
                    raise ConfigError(f"{name} is {getattr(self, name)}, must be 1 to {high}")
        for token in (*self.eos_token_ids, *(() if self.bos_token_id is None else (self.bos_token_id,))):
            if not 0 <= token < self.vocab_size:
                raise ConfigError(f"special token id {token} is outside the vocabulary of {self.vocab_size}")

    def has_experts(self, layer: int) -> bool:
        """Whether this layer is a mixture of experts."""
        return (self.num_experts > 0 and layer not in self.mlp_only_layers
                and (layer + 1) % self.decoder_sparse_step == 0)


class _Fields:
    """Typed access to one JSON object or to metadata under a prefix; every error says where and which key."""

    def __init__(self, raw: dict[str, Any], where: str, prefix: str = "") -> None:
        if not isinstance(raw, dict):
            raise ConfigError(f"{where}: expected a JSON object, found {type(raw).__name__}")
        self.raw, self.where, self.prefix = raw, where, prefix

    def get(self, key: str) -> Any:
        return self.raw.get(self.prefix + key)

    def fail(self, key: str, expected: str) -> ConfigError:
        found = "nothing" if self.get(key) is None else repr(self.get(key))[:120]
        return ConfigError(f"{self.where}: {self.prefix}{key}: expected {expected}, found {found}")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or not 0 <= value <= MAX_COUNT:
            raise self.fail(key, f"an integer from 0 to {MAX_COUNT}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if type(value) not in (int, float) or not 0 < value < MAX_NUMBER:
            raise self.fail(key, f"a positive number under {MAX_NUMBER:g}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if type(value) is not bool:
            raise self.fail(key, "true or false")
        return value

    def token_ids(self, key: str) -> list[int]:
        """One id, a list of ids, or nothing: all three occur."""
        value = self.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if any(type(token) is not int or token < 0 for token in ids):
            raise self.fail(key, "a token id or a list of token ids")
        return ids

    def refuse_unless(self, key: str, accepted: tuple[Any, ...], why: str) -> None:
        if self.get(key) not in accepted:
            raise ConfigError(f"{self.where}: {self.prefix}{key} is {self.get(key)!r}; {why}")


def from_hf_config(raw: dict[str, Any], where: str, generation: dict[str, Any] | None = None) -> ModelConfig:
    """`raw` is config.json, `where` names it in errors, `generation` is generation_config.json if there is one: its
    end-of-text ids are added, because for many chat models only that file lists the end of a turn.

    Raises ConfigError.
    """
    fields = _Fields(raw, where)
    names = raw.get("architectures")
    if not isinstance(names, list) or not names or names[0] not in SUPPORTED_ARCHITECTURES:
        raise ConfigError(f"{where}: architectures {names!r} is not supported; "
                          f"supported: {', '.join(SUPPORTED_ARCHITECTURES)}")
    architecture = names[0]
    fp8_block = read_fp8_block(raw, where)
    fields.refuse_unless("hidden_act", (None, "silu", "swish"), "only silu is supported")
    fields.refuse_unless("mlp_bias", (None, False), "biases in the MLP are not supported")
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    is_qwen3 = architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
    has_own_default = architecture == "Qwen3ForCausalLM" and "head_dim" not in raw
    head_dim = 128 if has_own_default else _default_head_dim(fields, hidden_size, num_heads)
    max_positions = fields.integer("max_position_embeddings")
    theta, scaling = _hf_rope(fields, max_positions)
    eos = fields.token_ids("eos_token_id")
    if generation is not None:
        eos = list(dict.fromkeys(eos + _Fields(generation, f"generation config of {where}").token_ids("eos_token_id")))
    dtype = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    return _build(
        where, architecture=architecture, vocab_size=fields.integer("vocab_size"), hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"), num_hidden_layers=fields.integer("num_hidden_layers"),
        num_attention_heads=num_heads, num_key_value_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=head_dim, rms_norm_eps=fields.number("rms_norm_eps", 1e-6), rope_theta=theta, rope_scaling=scaling,
        max_position_embeddings=max_positions, tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        attention_bias=architecture == "Qwen2ForCausalLM" or fields.flag("attention_bias", False), qk_norm=is_qwen3,
        sliding_window=_hf_window(fields, architecture), eos_token_ids=eos,
        bos_token_id=next(iter(fields.token_ids("bos_token_id")), None), dtype=str(dtype).removeprefix("torch."),
        fp8_block=fp8_block,
        **(_hf_experts(fields) if architecture == "Qwen3MoeForCausalLM" else {}))


def _hf_experts(fields: _Fields) -> dict[str, Any]:
    """The numbers of a mixture of experts. transformers 5 writes num_local_experts where files have num_experts."""
    key = "num_experts" if fields.get("num_experts") is not None else "num_local_experts"
    dense = fields.get("mlp_only_layers")
    if dense is not None and not (isinstance(dense, list) and all(type(layer) is int for layer in dense)):
        raise fields.fail("mlp_only_layers", "a list of layer numbers")
    return dict(num_experts=fields.integer(key), num_experts_per_tok=fields.integer("num_experts_per_tok"),
                moe_intermediate_size=fields.integer("moe_intermediate_size"),
                norm_topk_prob=fields.flag("norm_topk_prob", False),
                decoder_sparse_step=fields.integer("decoder_sparse_step", 1), mlp_only_layers=dense or [])


def from_gguf(file: GGUFFile) -> ModelConfig:
    """The same from a GGUF header. The vocabulary is as wide as the embedding matrix; no `output.weight` means tied.

    Raises ConfigError.
    """
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in GGUF_ARCHITECTURES:
        raise ConfigError(f"{file.path}: general.architecture {architecture!r} is not supported; "
                          f"supported: {', '.join(GGUF_ARCHITECTURES)}")
    fields = _Fields(file.metadata, file.path, f"{architecture}.")
    tokenizer = _Fields(file.metadata, file.path, "tokenizer.ggml.")
    is_mixture = architecture == "qwen3moe"
    if not is_mixture:
        fields.refuse_unless("expert_count", (None, 0), "mixtures of experts are not supported in this family")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ConfigError(f"{file.path}: tensor token_embd.weight: expected a matrix, "
                          f"found {'nothing' if embedding is None else list(embedding.shape)}")
    hidden_size, num_heads = fields.integer("embedding_length"), _uniform(fields, "attention.head_count")
    num_kv_heads = _uniform(fields, "attention.head_count_kv", num_heads)
    has_key_length = fields.get("attention.key_length") is not None
    head_dim = fields.integer("attention.key_length") if has_key_length else _default_head_dim(
        fields, hidden_size, num_heads)
    stored: dict[str, int] = {}
    for tensor in file.tensors.values():
        stored[tensor.ggml_type] = stored.get(tensor.ggml_type, 0) + tensor.nbytes
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.integer(key, head_dim) != head_dim:
            raise fields.fail(key, f"{head_dim} (the head dimension)")
    max_positions = fields.integer("context_length")
    eos = [token for key in ("eos_token_id", "eot_token_id", "eom_token_id") for token in tokenizer.token_ids(key)]
    return _build(
        file.path, architecture=GGUF_ARCHITECTURES[architecture], vocab_size=embedding.shape[0],
        hidden_size=hidden_size, intermediate_size=_uniform(fields, "feed_forward_length"),
        num_hidden_layers=fields.integer("block_count"), num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads, head_dim=head_dim,
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope_theta=fields.number("rope.freq_base", 10_000.0), rope_scaling=_gguf_rope(file, fields, head_dim),
        max_position_embeddings=max_positions, tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors, qk_norm=architecture in ("qwen3", "qwen3moe"),
        **(_gguf_experts(fields) if is_mixture else {}),
        sliding_window=fields.integer("attention.sliding_window", 0), eos_token_ids=list(dict.fromkeys(eos)),
        bos_token_id=next(iter(tokenizer.token_ids("bos_token_id")), None),
        dtype={"F32": "float32", "F16": "float16"}.get(embedding.ggml_type, "bfloat16"),
        ggml_type=max(stored, key=stored.__getitem__))


def _gguf_experts(fields: _Fields) -> dict[str, Any]:
    """Every layer of these files is a mixture, and the chosen experts' weights sum to one."""
    return dict(num_experts=fields.integer("expert_count"), num_experts_per_tok=fields.integer("expert_used_count"),
                moe_intermediate_size=fields.integer("expert_feed_forward_length"), norm_topk_prob=True)


def _build(where: str, **values: Any) -> ModelConfig:
    try:
        return ModelConfig(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _default_head_dim(fields: _Fields, hidden_size: int, num_heads: int) -> int:
    if fields.get("head_dim") is not None:
        return fields.integer("head_dim")
    if num_heads < 1 or hidden_size % num_heads:
        raise ConfigError(f"{fields.where}: head_dim is not given and hidden_size ({hidden_size}) is not a multiple of "
                          f"the number of attention heads ({num_heads})")
    return hidden_size // num_heads


def _uniform(fields: _Fields, key: str, default: int | None = None) -> int:
    """GGUF may give one number per layer; ours are the same in every layer."""
    value = fields.get(key)
    if isinstance(value, list):
        if not value or any(entry != value[0] for entry in value):
            raise fields.fail(key, "one number, the same in every layer")
        return _Fields({key: value[0]}, fields.where).integer(key)
    return fields.integer(key, default)


def _hf_window(fields: _Fields, architecture: str) -> int:
    """Qwen files carry a window that `use_sliding_window` switches, from layer `max_window_layers` on."""
    if architecture == "LlamaForCausalLM" or not fields.flag("use_sliding_window", False):
        return 0
    window, num_layers = fields.integer("sliding_window", 0), min(fields.integer("num_hidden_layers"), MAX_LAYERS)
    kinds = fields.get("layer_types")
    if kinds is None:
        first = fields.integer("max_window_layers", 28)
        kinds = ["sliding_attention" if index >= first else "full_attention" for index in range(num_layers)]
    if not isinstance(kinds, list) or any(kind != kinds[0] for kind in kinds):
        raise ConfigError(f"{fields.where}: a sliding window in some layers only (layer_types or max_window_layers) "
                          f"is not supported; it must be the same in every layer")
    return window if kinds and kinds[0] == "sliding_attention" else 0


def _hf_rope(fields: _Fields, max_positions: int) -> tuple[float, dict[str, Any] | None]:
    """(theta, scaling). Older files have `rope_theta` beside `rope_scaling`, newer ones both in `rope_parameters`."""
    key = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    rope = _Fields(fields.get(key) or {}, f"{fields.where}: {key}")
    theta = rope.number("rope_theta", fields.number("rope_theta", 10_000.0))
    for partial in (rope, fields):
        if partial.number("partial_rotary_factor", 1.0) != 1.0:
            raise partial.fail("partial_rotary_factor", "1.0 (every dimension is rotated)")
    nested = next((name for name, value in rope.raw.items() if isinstance(value, dict)), None)
    if nested is not None:
        raise ConfigError(f"{rope.where}: {nested}: rotary parameters per kind of layer are not supported")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    original = fields.integer("original_max_position_embeddings", 0) or max_positions
    return theta, _scaling(rope, kind, rope.integer("original_max_position_embeddings", original), max_positions)


def _scaling(rope: _Fields, kind: Any, original: int, max_positions: int) -> dict[str, Any] | None:
    """Normalise one kind of rotary scaling to exactly the numbers the worker needs."""
    if original < 1:
        raise rope.fail("original_max_position_embeddings", "at least 1")
    if kind == "default":
        return None
    if kind == "linear":
        return {"rope_type": kind, "factor": rope.number("factor")}
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if high <= low:
            raise rope.fail("high_freq_factor", f"more than low_freq_factor ({low})")
        return {"rope_type": kind, "factor": rope.number("factor"), "low_freq_factor": low, "high_freq_factor": high,
                "original_max_position_embeddings": original}
    if kind == "yarn":
        factor = rope.number("factor", max_positions / original if original else 0.0)
        return {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original,
                "attention_factor": rope.number("attention_factor", _yarn_attention(rope, factor)),
                "beta_fast": rope.number("beta_fast", 32.0), "beta_slow": rope.number("beta_slow", 1.0),
                "truncate": rope.flag("truncate", True)}
    raise ConfigError(f"{rope.where}: rope_type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}")


def _yarn_attention(rope: _Fields, factor: float) -> float:
    """YaRN's temperature: 0.1 ln(s) + 1 (Peng et al. 2023); with `mscale` keys, the ratio of two of them."""
    def grown(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return grown(rope.number("mscale")) / grown(rope.number("mscale_all_dim"))
    return grown(1.0)


def _gguf_rope(file: GGUFFile, fields: _Fields, head_dim: int) -> dict[str, Any] | None:
    """Converters write Llama 3 scaling as a tensor of divisors, one per frequency, and the others as metadata."""
    kind = fields.get("rope.scaling.type") or "none"
    if "rope_freqs.weight" in file.tensors:
        divisors = file.read_f32("rope_freqs.weight")
        if len(divisors) != head_dim // 2 or not all(math.isfinite(d) and d > 0 for d in divisors):
            raise ConfigError(f"{file.path}: tensor rope_freqs.weight: expected {head_dim // 2} positive numbers, "
                              f"found {len(divisors)}")
        if kind != "none":
            raise fields.fail("rope.scaling.type", "'none' beside the tensor rope_freqs.weight")
        return {"rope_type": "divisors", "divisors": divisors}
    if kind == "none":
        # The oldest files scale without saying so.
        scale = fields.number("rope.scale_linear", 1.0)
        return None if scale == 1.0 else {"rope_type": "linear", "factor": scale}
    if kind == "linear":
        return {"rope_type": kind, "factor": fields.number("rope.scaling.factor")}
    if kind != "yarn":
        raise fields.fail("rope.scaling.type", "one of 'none', 'linear', 'yarn'")
    odd = next((key for key in file.metadata if key.startswith(fields.prefix + "rope.scaling.yarn_")), None)
    if odd is not None:
        raise ConfigError(f"{file.path}: {odd} is {file.metadata[odd]!r}; this key is not supported")
    factor, extra = fields.number("rope.scaling.factor"), fields.number("rope.scaling.attn_factor", 1.0)
    return {"rope_type": kind, "factor": factor,
            "original_max_position_embeddings": fields.integer("rope.scaling.original_context_length"),
            "attention_factor": extra * (0.1 * math.log(max(factor, 1.0)) + 1.0),
            "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
