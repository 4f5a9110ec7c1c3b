"""Every family against transformers on tiny random models: logits, greedy tokens, and both file formats."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ipc.gguf import read_gguf
from ipc.model_config import ModelConfig, from_gguf, from_hf_config
from ipc.model_source import ModelFiles
from worker.attention.base import BatchMeta
from worker.attention.reference import ReferenceBackend
from worker.models.flat_model import FlatModel
from worker.models.loader import load_model

BLOCK_SIZE, NUM_BLOCKS = 4, 20
PROMPT = [3, 17, 91, 64, 5, 5, 28, 110, 77, 42, 9]

TINY: dict[str, Any] = dict(vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
                            bos_token_id=1, eos_token_id=[2, 7])
LLAMA3 = dict(rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=16)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=32)
MOE = dict(head_dim=16, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24, norm_topk_prob=True)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", dict(tie_word_embeddings=True)),
    "llama-one-kv-head": ("Llama", dict(num_key_value_heads=1)),
    "llama-all-kv-heads": ("Llama", dict(num_key_value_heads=4)),
    "llama-wide-heads": ("Llama", dict(head_dim=16)),
    "llama-biased": ("Llama", dict(attention_bias=True)),
    "llama-rope-llama3": ("Llama", dict(rope_parameters=LLAMA3, head_dim=16)),
    "llama-rope-linear": ("Llama", dict(rope_parameters=dict(rope_type="linear", rope_theta=500.0, factor=2.5))),
    "llama-rope-yarn": ("Llama", dict(rope_parameters=YARN, head_dim=16)),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", dict(tie_word_embeddings=True)),
    "qwen2-window": ("Qwen2", dict(use_sliding_window=True, sliding_window=5, max_window_layers=0)),
    "qwen3": ("Qwen3", dict(head_dim=16)),
    "qwen3-tied": ("Qwen3", dict(head_dim=16, tie_word_embeddings=True, num_key_value_heads=1)),
    "qwen3-biased": ("Qwen3", dict(head_dim=16, attention_bias=True)),
    "qwen3-wide": ("Qwen3", dict(head_dim=16, intermediate_size=64)),
    "qwen3-moe": ("Qwen3Moe", MOE),
    "qwen3-moe-wide": ("Qwen3Moe", dict(MOE, moe_intermediate_size=64, hidden_size=64, intermediate_size=64,
                                        decoder_sparse_step=2)),
    "qwen3-moe-mixed": ("Qwen3Moe", dict(MOE, num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=[3],
                                         norm_topk_prob=False)),
}


def make_hf(name: str) -> Any:
    """The reference model, with biases and norms that are not what an untrained model has."""
    transformers = pytest.importorskip("transformers")
    family, changes = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**{**TINY, **changes}, attn_implementation="eager")
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in key else 0.0, 0.3)
    return model


def load_saved(model: Any, folder: Path, dtype: str = "float32", **save: Any) -> FlatModel:
    model.save_pretrained(folder, **save)
    config = from_hf_config(model.config.to_dict(), "config.json")
    return load_model(ModelFiles("safetensors", str(folder), config, "tiny"), dtype=dtype, device="cpu")


class PagedRun:
    """One request through the paged pool, with its blocks in no order."""

    def __init__(self, model: FlatModel) -> None:
        self.model, self.backend, self.length = model, ReferenceBackend(), 0
        layers, num_kv_heads, dim = model.kv_spec()
        shape = (NUM_BLOCKS + 1, BLOCK_SIZE, num_kv_heads, dim)
        self.caches = [self.backend.allocate(shape, torch.float32, "cpu") for _ in range(layers)]
        self.table = torch.randperm(NUM_BLOCKS - 1, generator=torch.Generator().manual_seed(1)).int() + 1

    def feed(self, tokens: list[int]) -> torch.Tensor:
        start, self.length = self.length, self.length + len(tokens)
        positions = torch.arange(start, self.length)
        slots = self.table[positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
        starts, lengths = np.array([0, len(tokens)], np.int32), np.array([self.length], np.int32)
        meta = BatchMeta.of(starts, lengths, self.table[None], slots, BLOCK_SIZE)
        with torch.inference_mode():
            hidden = self.model(torch.tensor(tokens), positions, self.caches, meta, self.backend)
            return self.model.compute_logits(hidden)


def paged_greedy(model: FlatModel, prompt: list[int], num_tokens: int,
                 chunk: int = 4) -> tuple[list[int], torch.Tensor]:
    """Prefill in chunks, then one token at a time; the tokens, and the logits of every row."""
    run, rows, tokens = PagedRun(model), [], []
    for start in range(0, len(prompt), chunk):
        rows.append(run.feed(prompt[start:start + chunk]))
    while True:
        tokens.append(int(rows[-1][-1].argmax()))
        if len(tokens) == num_tokens:
            return tokens, torch.cat(rows)
        rows.append(run.feed(tokens[-1:]))


def hf_greedy(model: Any, prompt: list[int], num_tokens: int) -> tuple[list[int], torch.Tensor]:
    tokens: list[int] = []
    with torch.no_grad():
        while True:
            logits = model(torch.tensor([prompt + tokens])).logits[0]
            tokens.append(int(logits[-1].argmax()))
            if len(tokens) == num_tokens:
                return tokens, logits


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_greedy_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    hf = make_hf(name)
    model = load_saved(hf, tmp_path)
    expected_tokens, expected = hf_greedy(hf, PROMPT, 32)
    tokens, logits = paged_greedy(model, PROMPT, 32)
    assert logits.dtype == torch.float32
    assert tokens == expected_tokens
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["llama-rope-llama3", "llama-rope-linear", "llama-rope-yarn"])
def test_scaling_changes_the_logits(name: str, tmp_path: Path) -> None:
    """Guards the parity test: with scaling ignored on both sides it would pass too."""
    hf = make_hf(name)
    scaled = load_saved(hf, tmp_path)
    plain = load_model(ModelFiles("safetensors", str(tmp_path), ModelConfig(**{
        **{field: getattr(scaled.config, field) for field in scaled.config.__struct_fields__}, "rope_scaling": None}),
        "tiny"), dtype="float32", device="cpu")
    assert (paged_greedy(scaled, PROMPT, 1)[1] - paged_greedy(plain, PROMPT, 1)[1]).abs().max() > 1e-2


def test_sharded_files_load_as_one(tmp_path: Path) -> None:
    hf = make_hf("qwen3")
    single = load_saved(hf, tmp_path / "single")
    sharded = load_saved(hf, tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    for (name, one), (_, two) in zip(single.named_parameters(), sharded.named_parameters(), strict=True):
        assert torch.equal(one, two), name


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_are_converted_to_the_asked_dtype(stored: torch.dtype, dtype: str, tmp_path: Path) -> None:
    hf = make_hf("qwen2").to(stored)
    model = load_saved(hf, tmp_path, dtype)
    expected = hf.model.layers[1].mlp.up_proj.weight.to(getattr(torch, dtype))
    assert torch.equal(model.layers[1].mlp.gate_up_proj.weight[TINY["intermediate_size"]:], expected)
    assert all(parameter.dtype == getattr(torch, dtype) and not parameter.requires_grad
               for parameter in model.parameters())


def test_half_precision_stays_near_float32(tmp_path: Path) -> None:
    hf = make_hf("qwen3")
    full = paged_greedy(load_saved(hf, tmp_path), PROMPT, 1)[1]
    half = paged_greedy(load_saved(hf, tmp_path, "bfloat16"), PROMPT, 1)[1]
    assert half.dtype == torch.float32
    assert (half - full).abs().max() < 0.06 * full.abs().max()


def test_a_tied_head_shares_its_memory(tmp_path: Path) -> None:
    model = load_saved(make_hf("llama-tied"), tmp_path)
    assert model.lm_head.weight is model.embed_tokens


def test_dummy_weights_follow_the_seed() -> None:
    config = from_hf_config({**TINY, "architectures": ["Qwen3ForCausalLM"], "head_dim": 16}, "here")
    def load(seed: int) -> FlatModel:
        return load_model(ModelFiles("dummy", "", config, "tiny"), dtype="float32", device="cpu", seed=seed)
    one, two, other = load(5), load(5), load(6)
    assert torch.equal(one.lm_head.weight, two.lm_head.weight)
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)
    assert one.norm.weight.tolist() == [1.0] * 32
    assert 0.015 < float(one.lm_head.weight.std()) < 0.025
    assert paged_greedy(one, PROMPT, 4)[0] == paged_greedy(two, PROMPT, 4)[0]


def test_progress_rises_to_one(tmp_path: Path) -> None:
    hf = make_hf("llama")
    hf.save_pretrained(tmp_path)
    seen: list[float] = []
    load_model(ModelFiles("safetensors", str(tmp_path), from_hf_config(hf.config.to_dict(), "config.json"), "tiny"),
               dtype="float32", device="cpu", progress=seen.append)
    assert seen == sorted(seen) and len(seen) > 10 and seen[-1] == 1.0


# GGUF files, written the way llama.cpp's converter writes them.
GGUF_PARTS = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
    "mlp.gate_exps": "ffn_gate_exps", "mlp.up_exps": "ffn_up_exps", "mlp.down_exps": "ffn_down_exps"}


def stacked_experts(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All experts of a layer as one tensor of each kind, whichever way transformers holds them."""
    result: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        stem, _, rest = name.partition(".mlp.experts.")
        if not rest:
            result[name] = value
        elif rest == "gate_up_proj":
            for part, rows in zip(("gate", "up"), value.chunk(2, 1)):
                result[f"{stem}.mlp.{part}_exps.weight"] = rows
        else:
            result[f"{stem}.mlp.down_exps.weight"] = value
    return result


def write_gguf(path: Path, hf: Any, arch: str, quantization: str = "F32") -> dict[str, np.ndarray]:
    """Matrices in `quantization` (rows must be a multiple of 32), vectors in F32. Returns what a reader must decode."""
    gguf = pytest.importorskip("gguf")
    quants = pytest.importorskip("gguf.quants")
    config, kind = hf.config, gguf.GGMLQuantizationType[quantization]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_eos_token_id(2)
    if config.rope_parameters["rope_type"] == "llama3":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
        scaled = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0].numpy()
        base = config.rope_parameters["rope_theta"] ** (np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)
        writer.add_tensor("rope_freqs.weight", (1 / (base * scaled)).astype(np.float32))
    if arch == "qwen3moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    decoded = {}
    for name, value in stacked_experts(hf.state_dict()).items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        data = original = value.float().numpy()
        stem, suffix = name.rsplit(".", 1)
        if stem.startswith("model.layers."):
            _, _, index, part = stem.split(".", 3)
            target = f"blk.{index}.{GGUF_PARTS[part]}.{suffix}"
            if arch == "llama" and part in ("self_attn.q_proj", "self_attn.k_proj"):
                data = data.reshape(-1, 2, head_dim // 2, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)
        else:
            target = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}[stem]
            target += f".{suffix}"
        decoded[name] = original
        if data.ndim == 1:
            writer.add_tensor(target, data)
        else:
            raw = quants.quantize(np.ascontiguousarray(data), kind)
            decoded[name] = quants.dequantize(quants.quantize(original, kind), kind)
            writer.add_tensor(target, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return decoded


def load_gguf_model(path: Path, dtype: str = "float32") -> FlatModel:
    return load_model(ModelFiles("gguf", str(path), from_gguf(read_gguf(path)), "tiny"), dtype=dtype, device="cpu")


@pytest.mark.parametrize("name", ["llama", "llama-tied", "llama-biased", "llama-rope-llama3", "qwen2", "qwen3-tied",
                                  "qwen3-moe"])
def test_a_gguf_file_gives_the_logits_of_the_safetensors_file(name: str, tmp_path: Path) -> None:
    hf = make_hf(name)
    write_gguf(tmp_path / "tiny.gguf", hf, "qwen3moe" if name == "qwen3-moe" else name.split("-")[0])
    model = load_gguf_model(tmp_path / "tiny.gguf")
    expected = load_saved(hf, tmp_path)
    assert model.config.tie_word_embeddings == expected.config.tie_word_embeddings
    for (key, one), (_, two) in zip(model.named_parameters(), expected.named_parameters(), strict=True):
        assert torch.equal(one, two), key
    logits, same = paged_greedy(model, PROMPT, 8)[1], paged_greedy(expected, PROMPT, 8)[1]
    torch.testing.assert_close(logits, same, atol=1e-5, rtol=0)


@pytest.mark.parametrize("quantization", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantised_gguf_weights_land_decoded_in_their_place(quantization: str, dtype: str, tmp_path: Path) -> None:
    changes = dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, vocab_size=96)
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    hf = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**TINY, **changes}))
    decoded = write_gguf(tmp_path / "tiny.gguf", hf, "llama", quantization)
    model = load_gguf_model(tmp_path / "tiny.gguf", dtype)
    slots = model.checkpoint_slots()
    assert slots.keys() == decoded.keys()
    for name, slot in slots.items():
        expected = torch.from_numpy(np.array(decoded[name])).to(getattr(torch, dtype))
        assert torch.equal(slot.target, expected), name
