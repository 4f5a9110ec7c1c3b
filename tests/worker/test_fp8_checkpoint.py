"""Checkpoints whose matrices are e4m3: kept as they are where products take them, widened elsewhere, same logits."""
from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ipc.config import CacheConfig, ModelSection, WorkerProcess
from ipc.errors import ConfigError
from ipc.model_config import ModelConfig, from_hf_config
from ipc.model_source import ModelFiles
from tests.worker.test_models_parity import PROMPT, TINY, paged_greedy
from worker import startup
from worker.models import parallel_read
from worker.models.flat_model import FlatModel
from worker.models.loader import load_model
from worker.models.ops import TORCH_OPS
from worker.models.quant_linear import Codes, QuantLinear, QuantSparseMLP
from worker.models.registry import get_model_class

E4M3 = torch.float8_e4m3fn
RAW: dict[str, Any] = {**TINY, "hidden_size": 160, "intermediate_size": 256, "num_key_value_heads": 4, "head_dim": 32,
                       "architectures": ["Qwen3ForCausalLM"]}
MOE = {**RAW, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2,
       "moe_intermediate_size": 128, "norm_topk_prob": True}
BLOCK = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
PLAIN = {"quant_method": "compressed-tensors", "format": "float-quantized",
         "config_groups": {"all": {"weights": {"num_bits": 8, "type": "float"}}}}
FORMATS = {"block": (BLOCK, "weight_scale_inv", torch.float32), "tensor": (PLAIN, "weight_scale", torch.bfloat16),
           "channel": (PLAIN, "weight_scale", torch.float32)}


def config_of(raw: dict[str, Any], method: dict[str, Any] | None = None) -> ModelConfig:
    return from_hf_config({**raw, **({} if method is None else {"quantization_config": method})}, "config.json")


def make(raw: dict[str, Any], name: str, folder: Path, keep: tuple[str, ...] = ()) -> tuple[dict[str, torch.Tensor],
                                                                                          dict[str, torch.Tensor]]:
    """(what the fp8 file holds, the float32 weights it stands for). `keep`: parts of names that stay bfloat16."""
    _, suffix, scale_dtype = FORMATS[name]
    config = config_of(raw)
    model = get_model_class(config.architecture)(config, dtype=torch.float32, device="meta")
    generator = torch.Generator().manual_seed(3)
    stored, wide = {}, {}
    for key, slot in model.checkpoint_slots().items():
        is_matrix = key.startswith("model.layers.") and len(slot.shape) == 2 and ".mlp.gate." not in key
        weight = 0.3 * torch.randn(slot.shape, generator=generator) + (0.7 if "norm" in key else 0.0)
        if not is_matrix or any(part in key for part in keep):
            stored[key] = weight.bfloat16()
            wide[key] = stored[key].float()
            continue
        rows, columns = {"block": (128, 128), "channel": (1, slot.shape[1]), "tensor": slot.shape}[name]
        shape = math.ceil(slot.shape[0] / rows), math.ceil(slot.shape[1] / columns)
        scale = (torch.rand(shape, generator=generator) * 0.01 + 0.001).to(scale_dtype)
        stored[key] = (weight * 200).to(E4M3)
        stored[key.removesuffix("weight") + suffix] = scale.reshape(()) if name == "tensor" else scale
        spread = scale.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        wide[key] = stored[key].float() * spread[:slot.shape[0], :slot.shape[1]]
    stored["model.layers.0.self_attn.k_scale"] = torch.ones(1)      # of a cache we scale ourselves
    save_file(stored, folder / "model.safetensors")
    return stored, wide


def load(folder: Path, raw: dict[str, Any], method: dict[str, Any] | None, **options: Any) -> FlatModel:
    return load_model(ModelFiles("safetensors", str(folder), config_of(raw, method), "tiny"), device="cpu",
                      **{"dtype": "float32", **options})


def logits(model: FlatModel) -> torch.Tensor:
    return paged_greedy(model, PROMPT, 3)[1]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("raw", [RAW, MOE], ids=["dense", "experts"])
def test_weights_are_what_the_file_stands_for_kept_or_widened(raw, name, tmp_path, monkeypatch):
    """Widened ones bit for bit, in chunks that end inside blocks."""
    monkeypatch.setattr(parallel_read, "CHUNK_BYTES", 160 * 50)
    (tmp_path / "fp8").mkdir()
    (tmp_path / "wide").mkdir()
    _, wide = make(raw, name, tmp_path / "fp8")
    save_file(wide, tmp_path / "wide" / "model.safetensors")
    method = FORMATS[name][0]
    expected = logits(load(tmp_path / "wide", raw, None))
    assert torch.equal(logits(load(tmp_path / "fp8", raw, method)), expected)
    kept = load(tmp_path / "fp8", raw, method, narrow_ops=TORCH_OPS)
    torch.testing.assert_close(logits(kept), expected, atol=1e-4, rtol=1e-4)
    for layer in kept.layers:
        assert isinstance(layer.self_attn.qkv_proj, QuantLinear) and layer.self_attn.o_proj.codes.dtype == E4M3
        assert isinstance(layer.mlp, QuantSparseMLP) or isinstance(layer.mlp.down_proj, QuantLinear)
    assert not any(parameter.is_meta for parameter in kept.parameters()) and not kept.rope.frequencies.is_meta
    bfloat = load(tmp_path / "fp8", raw, method, dtype="bfloat16")
    assert torch.equal(bfloat.layers[0].self_attn.o_proj.weight, wide["model.layers.0.self_attn.o_proj.weight"]
                       .bfloat16())


def test_a_tied_head_stays_tied(tmp_path):
    raw = {**RAW, "tie_word_embeddings": True}
    stored, _ = make(raw, "block", tmp_path)
    head = {"lm_head.weight": torch.zeros(128, 160).to(E4M3), "lm_head.weight_scale_inv": torch.ones(1, 2)}
    save_file({**stored, **head}, tmp_path / "model.safetensors")   # some files repeat the head
    kept = load(tmp_path, raw, BLOCK, narrow_ops=TORCH_OPS)
    assert kept.lm_head.weight is kept.embed_tokens
    assert torch.equal(logits(kept), logits(load(tmp_path, raw, BLOCK, narrow_ops=TORCH_OPS)))


@pytest.mark.parametrize("raw, keep, method", [
    (RAW, ("layers.1.mlp.up",), BLOCK),                                             # one matrix is not fp8
    ({**RAW, "num_key_value_heads": 1}, (), BLOCK),                                 # a k_proj of 32 outputs
])
def test_what_products_cannot_take_is_widened_and_said(raw, keep, method, tmp_path, caplog):
    make(raw, "block", tmp_path, keep)
    with caplog.at_level("INFO", "worker"):
        model = load(tmp_path, raw, method, narrow_ops=TORCH_OPS)
    assert not any(isinstance(part, Codes) for part in model.modules()) and "fp8 weights are widened: " in caplog.text
    assert torch.equal(logits(model), logits(load(tmp_path, raw, method)))


def test_scales_and_codes_that_do_not_fit_each_other_are_named(tmp_path):
    stored, _ = make(RAW, "block", tmp_path)
    path, name = tmp_path / "model.safetensors", "model.layers.1.mlp.up_proj.weight"

    def refuse(changes: dict[str, torch.Tensor | None], message: str, method: dict[str, Any] = BLOCK) -> None:
        save_file({key: value for key, value in {**stored, **changes}.items() if value is not None}, path)
        with pytest.raises(ConfigError, match=message):
            load(tmp_path, RAW, method)

    refuse({f"{name}_scale_inv": None}, f"tensor {name}: expected its scale beside it .*, found nothing")
    refuse({name: torch.zeros(256, 160).bfloat16()}, f"the scale of {name}: expected F8_E4M3 weights, found BF16")
    refuse({f"{name}_scale_inv": torch.ones(2, 1)}, r"the scale of .*: expected shape \[2, 2\], found \[2, 1\]")
    refuse({f"{name}_scale_inv": torch.ones(2, 2, dtype=torch.int32)}, "the scale of .*: expected dtype F32")
    refuse({}, r"the scale of .*: expected 1 or 160 numbers, found \[2, 2\]", PLAIN)
    save_file(stored, path)
    with pytest.raises(ConfigError, match="expected no tensor of this name|expected dtype F32, F16, BF16"):
        load(tmp_path, RAW, None)


@pytest.mark.parametrize("capability, quantization, method, kept", [
    (90, "auto", BLOCK, True), (89, "auto", PLAIN, True), (80, "auto", BLOCK, False), (None, "auto", BLOCK, False),
    (90, "none", BLOCK, False), (90, "int8", BLOCK, False), (90, "auto", None, False)])
def test_who_keeps_fp8_weights(capability, quantization, method, kept, monkeypatch):
    """GPUs that compute with e4m3, unless something else is asked for."""
    monkeypatch.setattr(startup, "compute_capability", lambda device: capability)
    files = ModelFiles("safetensors", "", config_of(RAW, method), "tiny")
    config = WorkerProcess(rank=0, listen="", epoch=1, model=ModelSection(files=files, quantization=quantization),
                           cache=CacheConfig(), max_num_seqs=4, max_num_batched_tokens=64, num_speculative_tokens=0,
                           device="auto", attention_backend="auto", cuda_graphs="auto", num_threads=1, run_dir="",
                           log_level="warning")
    assert startup.keeps_fp8(config, "cuda" if capability else "cpu") == kept
