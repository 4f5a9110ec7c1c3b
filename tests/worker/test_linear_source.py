"""Weights from a GGUF file, the choice of what a worker runs, and the table of kernel variants."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

pytest.importorskip("numba")
gguf = pytest.importorskip("gguf")

from ipc.config import CacheConfig, ModelSection, WorkerProcess  # noqa: E402
from ipc.errors import ConfigError  # noqa: E402
from ipc.gguf import read_gguf  # noqa: E402
from ipc.model_config import from_gguf  # noqa: E402
from ipc.model_source import ModelFiles  # noqa: E402
from worker.jit import build, features  # noqa: E402
from worker.linear import table  # noqa: E402
from worker.linear.formats import FLOAT32, INT8  # noqa: E402
from worker.linear.pack import unpack  # noqa: E402
from worker.linear.source import GGUFSource, ModelSource, dequantized  # noqa: E402
from worker.linear.tune import choose  # noqa: E402
from worker.models.loader import load_model  # noqa: E402
from worker.models.registry import get_model_class  # noqa: E402

HIDDEN, HEADS, KV_HEADS, INNER, VOCAB = 64, 4, 2, 96, 100


def write_model(path: Path, kinds: dict[str, str]) -> ModelFiles:
    """A one-layer Llama; kinds: tensor name -> type, the rest Q4_1."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([str(i) for i in range(VOCAB)])
    writer.add_eos_token_id(2)
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {"token_embd": (VOCAB, HIDDEN), "output": (VOCAB, HIDDEN), "blk.0.attn_q": (HIDDEN, HIDDEN),
              "blk.0.attn_k": (kv, HIDDEN), "blk.0.attn_v": (kv, HIDDEN), "blk.0.attn_output": (HIDDEN, HIDDEN),
              "blk.0.ffn_gate": (INNER, HIDDEN), "blk.0.ffn_up": (INNER, HIDDEN), "blk.0.ffn_down": (HIDDEN, INNER)}
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", rng.random(HIDDEN).astype(np.float32))
    for name, shape in shapes.items():
        values = (rng.standard_normal(shape) * 0.1).astype(np.float32)
        kind = gguf.GGMLQuantizationType[kinds.get(name, "Q4_1")]
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ModelFiles("gguf", str(path), from_gguf(read_gguf(path)), "tiny")


def sources(files: ModelFiles, mode: str) -> tuple[ModelSource, GGUFSource]:
    flat = load_model(files, dtype="float32", device="cpu")
    shape = get_model_class(files.config.architecture)(files.config, dtype=torch.float32, device="meta")
    return ModelSource(flat, "none"), GGUFSource(shape, files.path, mode)


LINEARS = [["model.embed_tokens.weight"], ["lm_head.weight"], ["model.layers.0.self_attn.o_proj.weight"],
           [f"model.layers.0.self_attn.{x}_proj.weight" for x in "qkv"],
           ["model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"],
           ["model.layers.0.mlp.down_proj.weight"]]
MIXED = {"token_embd": "Q8_0", "output": "Q8_0", "blk.0.attn_v": "Q4_0", "blk.0.ffn_down": "F32",
         "blk.0.attn_output": "BF16"}


@pytest.mark.parametrize("mode", ["keep", "none"])
def test_blocks_of_a_file_are_kept_exactly_also_where_rows_are_permuted(tmp_path: Path, mode: str) -> None:
    plain, packed = sources(write_model(tmp_path / "m.gguf", MIXED), mode)
    for names in LINEARS:
        assert np.array_equal(dequantized(packed.linear(names)), dequantized(plain.linear(names)))
    for name in ("model.norm.weight", "model.layers.0.input_layernorm.weight"):
        assert np.array_equal(packed.vector(name), plain.vector(name))


@pytest.mark.parametrize("mode", ["keep", "none", "int8", "int4"])
def test_gates_and_ups_in_turn_are_the_same_weights(tmp_path: Path, mode: str) -> None:
    names, pair = LINEARS[4], 32
    one_type, two_types = (sources(write_model(tmp_path / f"{kind}.gguf", {**MIXED, "blk.0.ffn_up": kind}), mode)
                           for kind in ("Q4_1", "Q8_0"))
    for source, is_possible in ((one_type[0], True), (one_type[1], True), (two_types[0], True), (two_types[1], False)):
        stacked, in_turn = source.linear(names), source.linear(names, pair)
        assert np.array_equal(dequantized(stacked), dequantized(in_turn))
        assert in_turn.pair == (pair if is_possible else 0)
        if is_possible:
            rows = unpack(in_turn.weights[0])
            size = len(rows) // 2
            assert np.array_equal(rows[:pair], dequantized(stacked)[:pair])
            assert np.array_equal(rows[pair:2 * pair], dequantized(stacked)[size:size + pair])


def test_a_file_is_read_again_where_its_pages_were_given_back(tmp_path: Path) -> None:
    """Tied heads and two models over one source read tensors twice."""
    _, packed = sources(write_model(tmp_path / "m.gguf", MIXED), "keep")
    for names in LINEARS:
        assert np.array_equal(dequantized(packed.linear(names)), dequantized(packed.linear(names)))


def test_a_consumed_model_gives_the_same_weights(tmp_path: Path) -> None:
    files = write_model(tmp_path / "m.gguf", MIXED)
    kept, consumed = (ModelSource(load_model(files, dtype="float32", device="cpu"), consume=way)
                      for way in (False, True))
    for names in LINEARS:
        assert np.array_equal(dequantized(kept.linear(names)), dequantized(consumed.linear(names)))
    assert np.array_equal(kept.vector("model.norm.weight"), consumed.vector("model.norm.weight"))


def test_auto_keeps_the_kinds_of_the_file(tmp_path: Path) -> None:
    _, packed = sources(write_model(tmp_path / "m.gguf", MIXED), "keep")
    assert [packed.linear(names).name for names in LINEARS] == [
        "int8", "int8", "bfloat16", "int4_min+int4", "int4_min", "float32"]
    q_and_k = packed.linear(LINEARS[3]).weights[0]
    assert q_and_k.num_out == HIDDEN + 32       # neighbours of one type are one weight


def test_other_quantized_types_become_int8_and_close(tmp_path: Path) -> None:
    plain, packed = sources(write_model(tmp_path / "m.gguf", {"blk.0.ffn_down": "Q5_1"}), "keep")
    layer = packed.linear(LINEARS[5])
    assert layer.name == "int8"
    exact = dequantized(plain.linear(LINEARS[5]))
    assert np.abs(dequantized(layer) - exact).max() <= np.abs(exact).max() / 127


def test_int8_beside_a_files_blocks_of_32_is_made_in_blocks_of_32(tmp_path: Path) -> None:
    """The layer's activations are quantized once."""
    types = {"blk.0.attn_q": "Q4_0", "blk.0.attn_k": "Q5_1", "blk.0.attn_v": "Q5_1", "blk.0.attn_output": "Q5_1"}
    plain, packed = sources(write_model(tmp_path / "m.gguf", types), "keep")
    layer = packed.linear(LINEARS[3])
    assert layer.name == "int4+int8" and packed.linear(LINEARS[2]).name == "int8_wide"
    exact = dequantized(plain.linear(LINEARS[3]))
    assert np.abs(dequantized(layer) - exact).max() <= np.abs(exact).max() / 127


def test_int8_and_int4_requantize_what_is_larger_only(tmp_path: Path) -> None:
    files = write_model(tmp_path / "m.gguf", MIXED)
    assert sources(files, "int8")[1].linear(LINEARS[3]).name == "int8_wide"
    _, packed = sources(files, "int4")
    assert [packed.linear(names).name for names in LINEARS] == [
        "int8", "int8", "int4_min", "int4_min+int4", "int4_min", "int4_min"]
    eights = {name: "Q8_0" for name in ("token_embd", "output", *(f"blk.0.{part}" for part in (
        "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")))}
    _, packed = sources(write_model(tmp_path / "eights.gguf", eights), "int4")
    assert [packed.linear(names).name for names in LINEARS] == ["int8", "int8", *["int4_min"] * 4]


def test_a_file_that_does_not_match_is_refused(tmp_path: Path) -> None:
    files = write_model(tmp_path / "m.gguf", {})
    other = get_model_class("Qwen3ForCausalLM")
    config = type(files.config)(**{**{f: getattr(files.config, f) for f in files.config.__struct_fields__},
                                   "architecture": "Qwen3ForCausalLM", "qk_norm": True})
    with pytest.raises(ConfigError, match="attn_q_norm.weight: expected shape"):
        GGUFSource(other(config, dtype=torch.float32, device="meta"), files.path)
    with pytest.raises(ValueError, match="mode 'int3' is not known; known: none, int8, int4, keep"):
        sources(files, "int3")


def make_process(files: ModelFiles, backend: str = "auto", cache: dict[str, Any] | None = None,
                 **section: Any) -> WorkerProcess:
    return WorkerProcess(rank=0, listen="", epoch=1, model=ModelSection(files=files, **section), max_num_seqs=4,
                         cache=CacheConfig(**(cache or {})), max_num_batched_tokens=64,
                         num_speculative_tokens=0, device="cpu",
                         attention_backend=backend, cuda_graphs="auto", num_threads=2, run_dir="", log_level="info")


def test_what_a_worker_runs_is_chosen_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = write_model(tmp_path / "m.gguf", {})
    choice, _ = build.choose(make_process(files), "cpu")
    assert choice is not None and (choice.mode, choice.kv_dtype) == ("keep", torch.int8)
    choice, _ = build.choose(make_process(files, quantization="none"), "cpu")
    assert choice is not None and (choice.mode, choice.kv_dtype) == ("none", torch.float32)
    for ggml_type, quantization, kv in (("Q4_1", "auto", torch.int8), ("Q8_0", "auto", torch.bfloat16),
                                        ("Q8_0", "int4", torch.int8), ("Q8_0", "int8", torch.bfloat16),
                                        ("Q4_0", "int8", torch.int8), ("Q6_K", "auto", torch.int8),
                                        ("Q5_1", "int8", torch.int8), ("BF16", "auto", torch.bfloat16),
                                        ("Q4_0", "none", torch.bfloat16), ("Q6_K", "none", torch.bfloat16)):
        stored = msgspec.structs.replace(files, config=msgspec.structs.replace(files.config, ggml_type=ggml_type))
        dtype = "bfloat16" if quantization == "none" else "auto"
        process = make_process(stored, quantization=quantization, dtype=dtype)
        choice, _ = build.choose(process, "cpu")
        assert choice is not None and choice.kv_dtype == kv
    choice, _ = build.choose(make_process(files, cache=dict(kv_cache_dtype="float32")), "cpu")
    assert choice is not None and choice.kv_dtype == torch.float32
    assert build.choose(make_process(files), "cuda") == (None, "the device is cuda")
    assert build.choose(make_process(files, backend="cpu"), "cpu") == (None, "--attention-backend cpu was asked for")
    for process, device in ((make_process(files, quantization="int4"), "cuda"),
                            (make_process(files, backend="triton", quantization="fp8"), "cpu")):
        assert build.choose(process, device)[0] is None
    with pytest.raises(ConfigError, match="--quantization fp8 is for GPUs; on this CPU use int8 or int4"):
        build.choose(make_process(files, quantization="fp8"), "cpu")
    assert build.choose(make_process(files, dtype="float16"), "cpu") == (None, "--dtype float16 is computed by torch")
    for process, device in ((make_process(files, batch_invariant=True, dtype="float16"), "cpu"),
                            (make_process(files, backend="reference", batch_invariant=True), "cpu"),
                            (make_process(files, batch_invariant=True), "cuda")):
        with pytest.raises(ConfigError, match="--batch-invariant needs the compiled CPU kernels"):
            build.choose(process, device)
    monkeypatch.setattr(features, "missing", lambda: "the package numba is not installed")
    assert build.choose(make_process(files), "cpu") == (None, "the package numba is not installed")
    for wanted in (dict(quantization="int8"), dict(batch_invariant=True), dict(backend="jit")):
        with pytest.raises(ConfigError, match="needs the compiled CPU kernels.*numba is not installed"):
            build.choose(make_process(files, **wanted), "cpu")


def test_a_built_model_reads_its_file(tmp_path: Path) -> None:
    files = write_model(tmp_path / "m.gguf", MIXED)
    config = make_process(files)
    choice, _ = build.choose(config, "cpu")
    assert choice is not None
    compiled = build.build(config, choice, lambda fraction: None)
    assert compiled.model.kv_spec() == (1, KV_HEADS, HIDDEN // HEADS) and compiled.backend.name == "jit"
    assert "int4_min" in compiled.text


def test_the_table_of_another_machine_or_with_other_numbers_is_not_used(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "CACHE_ROOT", str(tmp_path))
    table.load.cache_clear()
    try:
        assert table.load()[INT8] == (6, 6, 6, 6) and table.load()[FLOAT32] == (12, 12, 12, 12)
        path = table.save({INT8: (3, 4, 6, 6)}, {})
        assert table.load()[INT8] == (3, 4, 6, 6) and table.packed_rows(INT8) == 3 | 4 << 8 | 6 << 16 | 6 << 24
        good = json.loads(path.read_text())
        for bad in ({**good, "machine": "other"}, {**good, "rows": {"int8": [5, 5, 5, 5]}},
                    {**good, "rows": {"int8": [3.0, 4.0, 6.0, 6.0]}}, {**good, "rows": []}, [1]):
            path.write_text(json.dumps(bad))
            table.load.cache_clear()
            assert table.load()[INT8] == (6, 6, 6, 6)
    finally:
        table.load.cache_clear()


def test_tuning_prefers_the_default_unless_another_variant_is_clearly_faster() -> None:
    assert choose({3: 1.0, 4: 0.99, 6: 1.0}, 6) == 6 and choose({3: 1.0, 4: 0.9, 6: 1.0}, 6) == 4
