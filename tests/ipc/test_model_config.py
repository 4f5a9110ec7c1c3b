"""ModelConfig from config.json and from GGUF metadata: defaults, both spellings of rotary scaling, refusals by name."""
from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from ipc.errors import ConfigError
from ipc.gguf import GGUFFile, GGUFTensor
from ipc.model_config import ModelConfig, from_gguf, from_hf_config

LLAMA: dict[str, Any] = dict(
    architectures=["LlamaForCausalLM"], vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, rms_norm_eps=1e-5, rope_theta=500000.0,
    bos_token_id=1, eos_token_id=2, torch_dtype="bfloat16")
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def hf(**changes: Any) -> ModelConfig:
    raw = {key: value for key, value in {**LLAMA, **changes}.items() if value is not ...}
    return from_hf_config(raw, "m/config.json")


def test_a_llama_config_is_read_whole() -> None:
    assert hf() == ModelConfig(
        architecture="LlamaForCausalLM", vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-5, rope_theta=500000.0,
        rope_scaling=None, max_position_embeddings=512, tie_word_embeddings=False, attention_bias=False, qk_norm=False,
        sliding_window=0, eos_token_ids=[2], bos_token_id=1, dtype="bfloat16")


def test_families_differ_where_their_authors_code_differs() -> None:
    qwen2 = hf(architectures=["Qwen2ForCausalLM"])
    qwen3 = hf(architectures=["Qwen3ForCausalLM"])
    assert (qwen2.attention_bias, qwen2.qk_norm, qwen2.head_dim) == (True, False, 16)
    assert (qwen3.attention_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 128)
    assert hf(attention_bias=True).attention_bias


def test_absent_numbers_get_the_formats_defaults() -> None:
    config = hf(num_key_value_heads=..., rms_norm_eps=..., rope_theta=..., bos_token_id=None, eos_token_id=None,
                torch_dtype=..., head_dim=None)
    assert (config.num_key_value_heads, config.rms_norm_eps, config.rope_theta) == (4, 1e-6, 10000.0)
    assert (config.bos_token_id, config.eos_token_ids, config.dtype, config.head_dim) == (None, [], "float32", 16)


def test_end_ids_come_as_one_or_many_and_from_both_files() -> None:
    assert hf(eos_token_id=[7, 9]).eos_token_ids == [7, 9]
    assert from_hf_config(LLAMA, "c", {"eos_token_id": [5, 2, 6]}).eos_token_ids == [2, 5, 6]
    assert from_hf_config(LLAMA, "c", {}).eos_token_ids == [2]


def test_the_newer_dtype_key_is_read_too() -> None:
    assert hf(torch_dtype=..., dtype="float16").dtype == "float16"
    assert hf(torch_dtype="torch.float32").dtype == "float32"


@pytest.mark.parametrize("spelling", [
    {"rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    {"rope_scaling": {"type": "llama3", **LLAMA3}},
    {"rope_theta": ..., "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3}},
])
def test_every_spelling_of_rotary_scaling_means_the_same(spelling: dict[str, Any]) -> None:
    config = hf(**spelling)
    assert config.rope_theta == 500000.0
    assert config.rope_scaling == {"rope_type": "llama3", **LLAMA3}


def test_scaling_is_normalised_to_the_numbers_it_needs() -> None:
    assert hf(rope_scaling={"type": "linear", "factor": 2}).rope_scaling == {"rope_type": "linear", "factor": 2.0}
    assert hf(rope_scaling={"rope_type": "default"}).rope_scaling is None
    assert hf(rope_parameters={"rope_type": "default", "rope_theta": 7.0}).rope_theta == 7.0
    yarn = hf(rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}).rope_scaling
    assert yarn is not None
    assert yarn.pop("attention_factor") == pytest.approx(1.1386294)
    assert yarn == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 32.0,
                    "beta_slow": 1.0, "truncate": True}


def test_a_window_counts_only_where_it_is_switched_on() -> None:
    qwen = dict(architectures=["Qwen2ForCausalLM"], sliding_window=100)
    assert hf(**qwen, use_sliding_window=False).sliding_window == 0
    assert hf(**qwen, use_sliding_window=True, max_window_layers=0).sliding_window == 100
    assert hf(**qwen, use_sliding_window=True, max_window_layers=2).sliding_window == 0
    assert hf(**qwen, use_sliding_window=True, layer_types=["sliding_attention"] * 2).sliding_window == 100


MOE = dict(architectures=["Qwen3MoeForCausalLM"], num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24)
BLOCKED: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}


def compressed(*weights: dict[str, Any]) -> dict[str, Any]:
    """A quantization_config of compressed-tensors, a group for each."""
    return {"quant_method": "compressed-tensors", "format": "float-quantized",
            "config_groups": {f"group_{i}": {"targets": ["Linear"], "weights": w} for i, w in enumerate(weights)}}


REFUSED = {
    "architecture": (dict(architectures=["GPT2LMHeadModel"]), "['GPT2LMHeadModel'] is not supported; supported: "
                     "LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM"),
    "no-architecture": (dict(architectures=...), "architectures None is not supported"),
    "rope-dynamic": (dict(rope_scaling={"type": "dynamic", "factor": 2.0}), "rope_type 'dynamic' is not supported; "
                     "supported: default, linear, llama3, yarn"),
    "rope-mrope": (dict(rope_parameters={"rope_type": "mrope"}), "rope_parameters: rope_type 'mrope' is not supported"),
    "rope-per-layer": (dict(rope_parameters={"full_attention": {"rope_type": "default"}}), "per kind of layer"),
    "rope-no-factor": (dict(rope_scaling={"type": "linear"}), "rope_scaling: factor: expected a positive number "
                       "under 1e+30, found nothing"),
    "rope-factors": (dict(rope_scaling={"type": "llama3", **LLAMA3, "high_freq_factor": 1.0}),
                     "more than low_freq_factor"),
    "rope-partial": (dict(partial_rotary_factor=0.5), "partial_rotary_factor: expected 1.0"),
    "rope-text": (dict(rope_scaling="linear"), "rope_scaling: expected a JSON object, found str"),
    "missing": (dict(hidden_size=...), "hidden_size: expected an integer from 0 to 2147483647, found nothing"),
    "text": (dict(vocab_size="1000"), "vocab_size: expected an integer from 0 to 2147483647, found '1000'"),
    "fraction": (dict(num_hidden_layers=2.5), "num_hidden_layers: expected an integer"),
    "truth": (dict(num_attention_heads=True), "num_attention_heads: expected an integer"),
    "negative": (dict(intermediate_size=-1), "intermediate_size: expected an integer"),
    "zero": (dict(vocab_size=0), "vocab_size is 0, must be 1 to"),
    "layers": (dict(num_hidden_layers=10**6), "num_hidden_layers is 1000000, must be 1 to 1024"),
    "infinite": (dict(rms_norm_eps=float("inf")), "rms_norm_eps: expected a positive number under 1e+30, found inf"),
    "groups": (dict(num_key_value_heads=3), "num_attention_heads is 4, must be a multiple of num_key_value_heads (3)"),
    "theta": (dict(rope_theta=1.0), "rope_theta is 1.0, must be more than 1 and"),
    "no-kv-heads": (dict(num_key_value_heads=0), "num_key_value_heads is 0, must be 1"),
    "head-dim": (dict(hidden_size=66), "head_dim is not given and hidden_size (66) is not a multiple"),
    "odd-head-dim": (dict(head_dim=15), "head_dim is 15, must be even"),
    "tied": (dict(tie_word_embeddings="yes"), "tie_word_embeddings: expected true or false, found 'yes'"),
    "end-id": (dict(eos_token_id="</s>"), "eos_token_id: expected a token id or a list of token ids, found '</s>'"),
    "end-id-range": (dict(eos_token_id=1000), "special token id 1000 is outside the vocabulary of 1000"),
    "activation": (dict(hidden_act="gelu"), "hidden_act is 'gelu'; only silu is supported"),
    "mlp-bias": (dict(mlp_bias=True), "mlp_bias is True; biases in the MLP are not supported"),
    "gptq": (dict(quantization_config={"quant_method": "gptq", "bits": 4}),
             "weights stored by 'gptq' (quantization_config.quant_method) are not supported; supported are fp8"),
    "awq": (dict(quantization_config={"quant_method": "awq"}), "weights stored by 'awq'"),
    "unnamed": (dict(quantization_config={"bits": 4}), "weights stored by None"),
    "quantised-text": (dict(quantization_config="bitsandbytes"), "weights stored by 'bitsandbytes'"),
    "fp8-other": (dict(quantization_config={"quant_method": "fp8", "fmt": "e5m2"}),
                  "quantization_config.fmt is 'e5m2'; only e4m3 is supported"),
    "fp8-block": (dict(quantization_config={"quant_method": "fp8", "weight_block_size": [128]}),
                  "weight_block_size: expected two whole numbers, found [128]"),
    "packed": (dict(quantization_config={"quant_method": "compressed-tensors", "format": "pack-quantized"}),
               "compressed-tensors of format 'pack-quantized' are not supported"),
    "ungrouped": (dict(quantization_config={"quant_method": "compressed-tensors"}),
                  "config_groups: expected an object of groups, found None"),
    "int8": (dict(quantization_config=compressed({"num_bits": 8, "type": "int"})),
             "compressed-tensors of 8 bits, type 'int' are not supported"),
    "asymmetric": (dict(quantization_config=compressed({"num_bits": 8, "type": "float", "symmetric": False})),
                   "type 'float', asymmetric, are not"),
    "by-token": (dict(quantization_config=compressed({"num_bits": 8, "type": "float", "strategy": "token"})),
                 "compressed-tensors with scales by 'token' are not"),
    "two-blocks": (dict(quantization_config=compressed(BLOCKED, BLOCKED | {"block_structure": [64, 64]})),
                   "compressed-tensors with blocks of several sizes are not"),
    "dtype": (dict(torch_dtype="float8_e4m3fn"), "dtype 'float8_e4m3fn' is not supported"),
    "mixed-window": (dict(architectures=["Qwen2ForCausalLM"], use_sliding_window=True, sliding_window=8,
                          max_window_layers=1), "a sliding window in some layers only"),
    "experts-missing": (dict(architectures=["Qwen3MoeForCausalLM"]), "num_local_experts: expected an integer"),
    "experts-per-token": (dict(MOE, num_experts_per_tok=9), "num_experts_per_tok is 9, must be 1 to 8"),
    "experts-width": (dict(MOE, moe_intermediate_size=0), "moe_intermediate_size is 0, must be 1 to"),
    "experts-step": (dict(MOE, decoder_sparse_step=0), "decoder_sparse_step is 0, must be 1 to"),
    "experts-dense": (dict(MOE, mlp_only_layers="0"), "mlp_only_layers: expected a list of layer numbers"),
}


@pytest.mark.parametrize("found, block", [
    (None, None),
    ({"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
     [128, 128]),
    ({"quant_method": "fp8", "activation_scheme": "static"}, []),
    (compressed({"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}), []),
    (compressed(BLOCKED, BLOCKED), [128, 128]),
])
def test_how_fp8_checkpoints_say_what_a_scale_covers(found: Any, block: list[int] | None) -> None:
    assert hf(quantization_config=found).fp8_block == block


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_exact_is_refused_by_name(name: str) -> None:
    changes, message = REFUSED[name]
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        hf(**changes)
    assert str(error.value).startswith("m/config.json: ") and "\n" not in str(error.value)


def test_the_layers_with_experts_follow_from_step_and_exceptions() -> None:
    config = hf(**dict(MOE, num_hidden_layers=7, decoder_sparse_step=2, mlp_only_layers=[3]))
    assert [layer for layer in range(7) if config.has_experts(layer)] == [1, 5]
    assert not any(hf().has_experts(layer) for layer in range(4))
    assert hf(**dict(MOE, num_experts=None, num_local_experts=8)).num_experts == 8


JUNK = [None, True, -1, 0, 1 << 70, 10**400, 0.5, 1e-300, float("nan"), "x", [], [1, "a"], {}, {"a": {}}]


@pytest.mark.parametrize("junk", JUNK, ids=lambda junk: repr(junk)[:20])
def test_junk_under_any_key_is_a_config_error_or_a_config(junk: Any) -> None:
    keys = [*LLAMA, "rope_scaling", "rope_parameters", "head_dim", "layer_types", "use_sliding_window",
            "sliding_window", "max_window_layers", "partial_rotary_factor", "hidden_act", "attention_bias"]
    rope_keys = ["type", "factor", "rope_theta", "attention_factor", "mscale", "beta_fast", "truncate",
                 "original_max_position_embeddings"]
    changes: list[dict[str, Any]] = [{key: junk} for key in keys]
    changes += [{"rope_scaling": {"type": "yarn", "factor": 2.0, key: junk}} for key in rope_keys]
    for raw in changes:
        try:
            assert isinstance(hf(**{"architectures": ["Qwen2ForCausalLM"], **raw}), ModelConfig)
        except ConfigError as error:
            assert "\n" not in str(error)
    for key in [*gguf().metadata, "llama.rope.scaling.type", "llama.attention.key_length"]:
        file = gguf()
        try:
            assert isinstance(from_gguf(file._replace(metadata={**file.metadata, key: junk})), ModelConfig)
        except ConfigError as error:
            assert "\n" not in str(error)


def test_a_config_that_is_no_object_is_refused() -> None:
    with pytest.raises(ConfigError, match="c: expected a JSON object, found list"):
        from_hf_config([], "c")  # type: ignore[arg-type]


def test_a_config_survives_the_wire() -> None:
    config = hf(rope_scaling={"rope_type": "llama3", **LLAMA3})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=ModelConfig) == config


def gguf(arch: str = "llama", tensors: dict[str, tuple[tuple[int, ...], str]] | None = None,
         **changes: Any) -> GGUFFile:
    values = {"block_count": 2, "context_length": 512, "embedding_length": 64, "feed_forward_length": 128,
              "attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5,
              "rope.freq_base": 10000.0, **{key.replace("__", "."): value for key, value in changes.items()}}
    metadata = {f"{arch}.{key}": value for key, value in values.items() if value is not ...}
    metadata |= {"general.architecture": arch, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.bos_token_id": 1,
                 "tokenizer.ggml.eot_token_id": 9}
    shapes = {"token_embd.weight": ((1000, 64), "Q8_0"), **(tensors or {})}
    return GGUFFile("m.gguf", 3, metadata, {name: GGUFTensor(name, shape, kind, 0, 0)
                                            for name, (shape, kind) in shapes.items()}, 0)


def test_gguf_metadata_gives_the_same_config() -> None:
    assert from_gguf(gguf()) == ModelConfig(
        architecture="LlamaForCausalLM", vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-5, rope_theta=10000.0,
        max_position_embeddings=512, tie_word_embeddings=True, eos_token_ids=[2, 9], bos_token_id=1, dtype="bfloat16",
        ggml_type="Q8_0")


def test_gguf_families_and_heads() -> None:
    assert not from_gguf(gguf(tensors={"output.weight": ((1000, 64), "F16")})).tie_word_embeddings
    assert from_gguf(gguf("qwen2", {"blk.0.attn_q.bias": ((64,), "F32")})).attention_bias
    qwen3 = from_gguf(gguf("qwen3", attention__key_length=32, attention__value_length=32))
    assert (qwen3.architecture, qwen3.qk_norm, qwen3.head_dim) == ("Qwen3ForCausalLM", True, 32)
    assert from_gguf(gguf(attention__head_count_kv=...)).num_key_value_heads == 4
    assert from_gguf(gguf(attention__head_count_kv=[2, 2])).num_key_value_heads == 2


def test_gguf_rotary_scaling() -> None:
    assert from_gguf(gguf(rope__scaling__type="linear", rope__scaling__factor=4.0)).rope_scaling == {
        "rope_type": "linear", "factor": 4.0}
    assert from_gguf(gguf(rope__scale_linear=2.0)).rope_scaling == {"rope_type": "linear", "factor": 2.0}
    yarn = from_gguf(gguf(rope__scaling__type="yarn", rope__scaling__factor=4.0,
                          rope__scaling__original_context_length=128)).rope_scaling
    same = hf(rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128})
    assert yarn == same.rope_scaling


GGUF_REFUSED = {
    "architecture": (gguf("mamba"), "general.architecture 'mamba' is not supported; supported: llama, qwen2, qwen3"),
    "experts": (gguf(expert_count=8), "llama.expert_count is 8; mixtures of experts are not supported"),
    "heads-per-layer": (gguf(attention__head_count_kv=[2, 4]), "expected one number, the same in every layer"),
    "rotated-part": (gguf(rope__dimension_count=8), "dimension_count: expected 16 (the head dimension), found 8"),
    "scaling": (gguf(rope__scaling__type="longrope"), "expected one of 'none', 'linear', 'yarn', found 'longrope'"),
    "yarn-extra": (gguf(rope__scaling__type="yarn", rope__scaling__yarn_beta_fast=8.0), "yarn_beta_fast is 8.0; this"),
    "missing": (gguf(block_count=...), "llama.block_count: expected an integer from 0 to 2147483647, found nothing"),
    "embedding": (gguf(tensors={"token_embd.weight": ((64,), "F32")}), "weight: expected a matrix, found [64]"),
}


@pytest.mark.parametrize("name", GGUF_REFUSED)
def test_gguf_metadata_that_cannot_be_exact_is_refused_by_name(name: str) -> None:
    file, message = GGUF_REFUSED[name]
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        from_gguf(file)
    assert str(error.value).startswith("m.gguf: ")
