"""A checkpoint that does not match its config, or lies about itself, is refused in one line: file, tensor, expected,
found."""
from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ipc.errors import ConfigError
from ipc.gguf import read_gguf
from ipc.model_config import ModelConfig, from_gguf, from_hf_config
from ipc.model_source import ModelFiles
from worker.models import loader
from worker.models.flat_model import FlatModel
from worker.models.loader import load_model
from worker.models.registry import MODELS, get_model_class
from worker.models.safetensors_header import read_safetensors_header

CONFIG: dict[str, Any] = dict(
    architectures=["LlamaForCausalLM"], vocab_size=24, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64, eos_token_id=2,
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)       # read by mixtures of experts only
UP = "model.layers.0.mlp.up_proj.weight"


def config(**changes: Any) -> ModelConfig:
    return from_hf_config({**CONFIG, **changes}, "config.json")


def weights(**changes: Any) -> dict[str, torch.Tensor]:
    """Every tensor the config asks for, with distinct values."""
    model = get_model_class("LlamaForCausalLM")(config(**changes), dtype=torch.float32)
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(slot.shape, generator=generator) for name, slot in model.checkpoint_slots().items()}


def load(folder: Path, **changes: Any) -> FlatModel:
    return load_model(ModelFiles("safetensors", str(folder), config(**changes), "tiny"), dtype="float32", device="cpu")


def refusal(folder: Path, **changes: Any) -> str:
    with pytest.raises(ConfigError) as error:
        load(folder, **changes)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    tensors = weights()
    del tensors[UP]
    save_file(tensors, tmp_path / "model.safetensors")
    assert refusal(tmp_path) == f"{tmp_path}: tensor {UP}: expected shape [32, 16], found nothing"


def test_an_extra_tensor_is_named(tmp_path: Path) -> None:
    bias = "model.layers.0.self_attn.q_proj.bias"
    save_file({**weights(), bias: torch.zeros(16)}, tmp_path / "model.safetensors")
    assert refusal(tmp_path) == (
        f"{tmp_path}/model.safetensors: tensor {bias}: expected no tensor of this name (the config describes another "
        f"model), found shape [16]")


def test_a_wrong_shape_is_named(tmp_path: Path) -> None:
    save_file({**weights(), UP: torch.zeros(16, 32)}, tmp_path / "model.safetensors")
    assert refusal(tmp_path) == f"{tmp_path}/model.safetensors: tensor {UP}: expected shape [32, 16], found [16, 32]"


def test_many_problems_stay_one_line(tmp_path: Path) -> None:
    save_file(weights(), tmp_path / "model.safetensors")
    assert refusal(tmp_path, num_hidden_layers=3).endswith("found nothing (and 17 more tensors)")


def test_a_wrong_dtype_is_named(tmp_path: Path) -> None:
    save_file({**weights(), UP: torch.zeros(32, 16, dtype=torch.int32)}, tmp_path / "model.safetensors")
    assert refusal(tmp_path).endswith(f"tensor {UP}: expected dtype F32, F16, BF16, found I32")


def test_an_untied_model_without_its_head_is_refused(tmp_path: Path) -> None:
    save_file(weights(tie_word_embeddings=True), tmp_path / "model.safetensors")
    assert refusal(tmp_path) == f"{tmp_path}: tensor lm_head.weight: expected shape [24, 16], found nothing"


def test_a_tied_model_with_a_head_uses_the_embedding(tmp_path: Path) -> None:
    tensors = weights()
    save_file(tensors, tmp_path / "model.safetensors")
    model = load(tmp_path, tie_word_embeddings=True)
    assert torch.equal(model.lm_head.weight, tensors["model.embed_tokens.weight"])


def test_rotary_buffers_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    save_file({**weights(), **buffer}, tmp_path / "model.safetensors")
    load(tmp_path)


def test_a_folder_of_pickle_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"anything")
    assert "found only pytorch_model.bin; pickle files can run code and are never loaded" in refusal(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path).endswith("expected model.safetensors or model.safetensors.index.json, found no weights")
    assert "No such file" in refusal(tmp_path / "absent")


# The container itself.
def container(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def entry(shape: list[Any], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


BAD_CONTAINERS = {
    "empty": (b"", "header length: expected 2 to 2 bytes, found 0 in a file of 0 bytes"),
    "short": (b"\x01\x02", "in a file of 2 bytes"),
    "length-past-end": (container({}, length=1 << 20), "header length: expected 2 to 2 bytes, found 1048576"),
    "length-huge": (container({}, length=(1 << 64) - 1), "header length"),
    "not-json": (container(b"{\"a\": "), "header: expected a JSON object with unique names"),
    "not-text": (container(b"\xff\xfe\xfd"), "header: expected a JSON object with unique names"),
    "deep-json": (container(b"[" * 100_000), "header: expected a JSON object with unique names"),
    "list": (container([]), "header: expected a JSON object, found list"),
    "name-twice": (container(b'{"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[],'
                             b'"data_offsets":[0,4]}}', bytes(4)), "found a name occurs twice"),
    "entry-list": (container({"w": []}), "tensor w: expected an object with dtype, shape, data_offsets"),
    "dtype-unknown": (container({"w": entry([1], 0, 4, "F33")}, bytes(4)), "tensor w (dtype): expected one of F64"),
    "dtype-size": (container({"w": entry([4], 0, 16, "BF16")}, bytes(16)), "expected 8 bytes for BF16 [4], found 16"),
    "shape-negative": (container({"w": entry([-1], 0, 4)}, bytes(4)), "tensor w (shape): expected"),
    "shape-fraction": (container({"w": entry([1.0], 0, 4)}, bytes(4)), "tensor w (shape): expected"),
    "shape-truth": (container({"w": entry([True], 0, 4)}, bytes(4)), "tensor w (shape): expected"),
    "shape-huge": (container({"w": entry([1 << 62, 1 << 62], 0, 4)}, bytes(4)), "tensor w: expected 85070591730234615"),
    "offset-past-end": (container({"w": entry([4], 0, 16)}, bytes(15)), "(data_offsets): expected a range inside 15"),
    "offset-reversed": (container({"w": entry([4], 16, 0)}, bytes(16)), "tensor w (data_offsets): expected a range"),
    "offset-one": (container({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}), "expected two whole numbers"),
    "overlap": (container({"a": entry([4], 0, 16), "b": entry([4], 8, 24)}, bytes(24)),
                "tensor b (data_offsets): expected a start at 16, after the tensor before it, found 8"),
    "gap": (container({"a": entry([4], 0, 16), "b": entry([4], 20, 36)}, bytes(36)), "expected a start at 16"),
    "left-over": (container({"a": entry([4], 0, 16)}, bytes(20)), "data: expected 16 bytes, found 20"),
}


@pytest.mark.parametrize("name", BAD_CONTAINERS)
def test_a_lying_safetensors_file_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    content, message = BAD_CONTAINERS[name]
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError) as error:
        read_safetensors_header(str(tmp_path / "model.safetensors"))
    assert message in str(error.value) and "\n" not in str(error.value)
    assert str(error.value).startswith(f"{tmp_path}/model.safetensors: ")


def test_every_cut_of_a_valid_file_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3), "b": torch.ones(2, 2, dtype=torch.bfloat16)}, tmp_path / "whole")
    content = (tmp_path / "whole").read_bytes()
    read_safetensors_header(str(tmp_path / "whole"))
    for length in range(len(content)):
        (tmp_path / "cut").write_bytes(content[:length])
        with pytest.raises(ConfigError):
            read_safetensors_header(str(tmp_path / "cut"))


def test_unaligned_tensors_are_read_right(tmp_path: Path) -> None:
    """The format does not align: a header of odd length puts every float on an odd address."""
    tensors, header, data = weights(), {}, b""
    for name, tensor in tensors.items():
        header[name] = entry(list(tensor.shape), len(data), len(data) + tensor.nbytes)
        data += tensor.numpy().tobytes()
    raw = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(container(raw + b" " * (1 - len(raw) % 2), data))
    model = load(tmp_path)
    for name, slot in model.checkpoint_slots().items():
        assert torch.equal(slot.target, tensors[name]), name


# Shards.
def write_shards(folder: Path, **index: Any) -> None:
    tensors = list(weights().items())
    for number, part in enumerate((tensors[:3], tensors[3:])):
        save_file(dict(part), folder / f"part{number}.safetensors")
    weight_map = {name: f"part{int(position >= 3)}.safetensors" for position, (name, _) in enumerate(tensors)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {**weight_map, **index}}))


def test_shards_load(tmp_path: Path) -> None:
    write_shards(tmp_path)
    assert torch.equal(load(tmp_path).lm_head.weight, weights()["lm_head.weight"])


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / "part1.safetensors").unlink()
    assert refusal(tmp_path) == f"{tmp_path}/part1.safetensors: cannot be read: No such file or directory"


@pytest.mark.parametrize("index, message", [
    ({"w": "../part0.safetensors"}, "expected a safetensors file beside it, found '../part0.safetensors'"),
    ({"w": "part0.bin"}, "expected a safetensors file beside it, found 'part0.bin'"),
    ({"w": "part0.safetensors"}, "tensor w: expected in part0.safetensors, found nothing"),
    ({UP: "part0.safetensors"}, f"tensor {UP}: expected in part0.safetensors, found part1.safetensors"),
    ({"w": 3}, "weight_map: expected an object of tensor to file"),
])
def test_an_index_that_lies_is_refused(index: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_shards(tmp_path, **index)
    assert message in refusal(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path)
    save_file(weights(), tmp_path / "part1.safetensors")
    assert "expected once, found also in" in refusal(tmp_path)


# GGUF.
def write_gguf(path: Path, drop: str = "", **replaced: np.ndarray) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "llama")
    for add, value in ((writer.add_block_count, 1), (writer.add_context_length, 64), (writer.add_embedding_length, 16),
                       (writer.add_feed_forward_length, 32), (writer.add_head_count, 2), (writer.add_head_count_kv, 1)):
        add(value)
    writer.add_layer_norm_rms_eps(1e-5)
    shapes = {"token_embd": (24, 16), "output_norm": (16,), "blk.0.attn_norm": (16,), "blk.0.ffn_norm": (16,),
              "blk.0.attn_q": (16, 16), "blk.0.attn_k": (8, 16), "blk.0.attn_v": (8, 16), "blk.0.attn_output": (16, 16),
              "blk.0.ffn_gate": (32, 16), "blk.0.ffn_up": (32, 16), "blk.0.ffn_down": (16, 32)}
    values = {f"{name}.weight": np.ones(shape, np.float32) for name, shape in shapes.items()}
    for name, value in {**values, **{key.replace("__", "."): value for key, value in replaced.items()}}.items():
        if name != drop:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("changes, message", [
    ({"drop": "blk.0.ffn_up.weight"}, "tensor blk.0.ffn_up.weight: expected shape [32, 16], found nothing"),
    ({"blk__0__attn_q__bias": np.ones(16, np.float32)}, "tensor blk.0.attn_k.bias: expected shape [8], found nothing"),
    ({"blk__0__other__weight": np.ones(16, np.float32)}, "tensor blk.0.other.weight: expected no tensor of this name"),
    ({"blk__0__ffn_up__weight": np.ones((16, 32), np.float32)},
     "tensor blk.0.ffn_up.weight: expected shape [32, 16], found [16, 32]"),
    ({"blk__0__ffn_up__weight": np.ones((32, 16), np.int32)},
     "tensor blk.0.ffn_up.weight: expected type F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K, "
     "found I32"),
])
def test_a_gguf_file_that_does_not_fit_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, **changes)
    with pytest.raises(ConfigError) as error:
        load_model(ModelFiles("gguf", str(path), from_gguf(read_gguf(path)), "m"), dtype="float32", device="cpu")
    assert message in str(error.value) and str(error.value).startswith(f"{path}: ")


def test_a_cut_gguf_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path)
    shape = from_gguf(read_gguf(path))
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ConfigError, match="before the file ends; the download is incomplete"):
        load_model(ModelFiles("gguf", str(path), shape, "m"), dtype="float32", device="cpu")


# The door.
def test_weights_that_do_not_fit_are_refused_before_allocating(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "available_memory", lambda device: 3 << 30)
    big = config(vocab_size=1 << 18, hidden_size=4096, num_attention_heads=32, num_key_value_heads=8,
                 tie_word_embeddings=True)
    with pytest.raises(ConfigError) as error:
        load_model(ModelFiles("dummy", "", big, "big"), dtype="float32", device="cpu")
    assert str(error.value) == ("the weights need 4.2 GiB as float32 and 3.0 GiB of memory is free on cpu: 1.2 GiB are "
                                "missing; use a smaller model or --dtype bfloat16")


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="dtype 'int4' is not supported; supported: float32, bfloat16, float16"):
        load_model(ModelFiles("dummy", "", config(), "m"), dtype="int4", device="cpu")
    with pytest.raises(ConfigError, match="kind 'onnx' is not supported; supported: safetensors, gguf, dummy"):
        load_model(ModelFiles("onnx", "", config(), "m"), dtype="float32", device="cpu")
    with pytest.raises(ConfigError, match="'Bert' is not supported; supported: LlamaForCausalLM, Qwen2ForCausalLM"):
        get_model_class("Bert")


@pytest.mark.parametrize("architecture", MODELS)
def test_the_slots_cover_every_parameter_exactly_once(architecture: str) -> None:
    """Weights are uninitialised memory until loaded, so a parameter without a slot would be noise."""
    shape = config(architectures=[architecture], attention_bias=True)
    model = get_model_class(architecture)(shape, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.zero_()
    for slot in model.checkpoint_slots().values():
        slot.target.add_(1)
    for name, parameter in model.named_parameters():
        assert bool((parameter == 1).all()), name
