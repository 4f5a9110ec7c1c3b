"""The compiled model against FlatModel: logits, families, formats, and rows that do not depend on the batch."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from ipc.errors import ConfigError  # noqa: E402
from ipc.model_config import ModelConfig  # noqa: E402
from worker.attention.base import BatchMeta, LastRows  # noqa: E402
from worker.attention.jit import JitBackend  # noqa: E402
from worker.attention.reference import ReferenceBackend  # noqa: E402
from worker.jit.model import JitModel, refusal  # noqa: E402
from worker.kv_pool import KVPool  # noqa: E402
from worker.linear.accuracy import compare  # noqa: E402
from worker.linear.route import PackedLinear  # noqa: E402
from worker.linear.source import ModelSource, dequantized  # noqa: E402
from worker.models.registry import get_model_class  # noqa: E402

SIZE, WIDTH = 16, 30
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": dict(tie_word_embeddings=True),
    "llama-groups-of-three": dict(num_attention_heads=6, num_key_value_heads=2, hidden_size=96),
    "llama-scaled-rope": dict(rope_scaling={"rope_type": "linear", "factor": 2.5}),
    "qwen2": dict(architecture="Qwen2ForCausalLM", attention_bias=True),
    "qwen2-window": dict(architecture="Qwen2ForCausalLM", attention_bias=True, sliding_window=20),
    "qwen3": dict(architecture="Qwen3ForCausalLM", qk_norm=True, head_dim=32),
}


def make_config(**changes: Any) -> ModelConfig:
    fields: dict[str, Any] = dict(
        architecture="LlamaForCausalLM", vocab_size=131, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-5, rope_theta=10000.0,
        rope_scaling=None, max_position_embeddings=512, tie_word_embeddings=False, attention_bias=False, qk_norm=False,
        sliding_window=0, eos_token_ids=[2], bos_token_id=1, dtype="float32")
    return ModelConfig(**{**fields, **changes})


def make_flat(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Any:
    model = get_model_class(config.architecture)(config, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        parameter.normal_(1.0 if "norm" in name else 0.0, 0.1, generator=generator)
        if "qk_norm" in name:                   # one row per head in the model, one per kind in a checkpoint
            parameter[:config.num_attention_heads] = parameter[0].clone()
            parameter[config.num_attention_heads:] = parameter[-1].clone()
    return model.eval()


class Running:
    """A model over its own pool; rows are requests with their own blocks."""

    def __init__(self, model: Any, backend: Any, num_requests: int = 24) -> None:
        self.model, self.backend = model, backend
        self.pool = KVPool(backend, num_requests * WIDTH, SIZE, model.kv_spec(), torch.float32)
        self.table = np.arange(1, num_requests * WIDTH + 1, dtype=np.int32).reshape(num_requests, WIDTH)

    def step(self, requests: list[int], tokens: list[list[int]], computed: list[int],
             index: list[int] | None = None) -> torch.Tensor:
        """Logits of every token of the step, or of those with these numbers, parted from the others."""
        counts = [len(part) for part in tokens]
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        lengths = (np.array(computed) + counts).astype(np.int32)
        positions = np.concatenate([np.arange(n, n + t) for n, t in zip(computed, counts, strict=True)])
        table = np.ascontiguousarray(self.table[requests])
        row = np.repeat(np.arange(len(requests)), counts)
        slots = table[row, positions // SIZE].astype(np.int64) * SIZE + positions % SIZE
        meta = BatchMeta.of(starts, lengths, torch.from_numpy(table), torch.from_numpy(slots), SIZE)
        last = None
        if index is not None:
            last = LastRows(torch.tensor(index, dtype=torch.int64), BatchMeta(
                torch.arange(len(index) + 1).int(), torch.from_numpy(positions[index] + 1).int(),
                meta.block_table[row[index]], meta.slot_mapping[index], SIZE,
                np.arange(len(index) + 1, dtype=np.int32), (positions[index] + 1).astype(np.int32), 1,
                int(lengths.max())))
        with torch.inference_mode():
            hidden = self.model(torch.tensor(sum(tokens, [])), torch.from_numpy(positions), self.pool.caches, meta,
                                self.backend, last)
            return self.model.compute_logits(hidden).clone()


def some_tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 131, count).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_logits_equal_those_of_the_torch_model(family: str) -> None:
    flat = make_flat(make_config(**FAMILIES[family]))
    slow, fast = Running(flat, ReferenceBackend()), Running(JitModel(ModelSource(flat), max_tokens=8), JitBackend())
    plan = [([0, 1], [some_tokens(40), some_tokens(3, 1)], [0, 0]),             # more rows than max_tokens: it grows
            ([1, 0, 2], [[5], [9], some_tokens(17, 2)], [3, 40, 0]),
            ([0, 1, 2], [[1], [2], [3]], [41, 4, 17])]
    for requests, tokens, computed in plan:
        expected, logits = slow.step(requests, tokens, computed), fast.step(requests, tokens, computed)
        assert logits.dtype == torch.float32 and logits.shape == expected.shape
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("mode", ["none", "int8", "int4"])
@pytest.mark.parametrize("family", ["llama-groups-of-three", "qwen2-window", "qwen3"])
def test_rows_that_are_read_may_leave_the_others_behind_in_the_last_layer(family: str, mode: str) -> None:
    """Bit for bit what they are among all rows; the pool holds the same afterwards; there may be none."""
    flat = make_flat(make_config(**FAMILIES[family]))
    model = JitModel(ModelSource(flat, mode))
    whole, parted = (Running(model, JitBackend()) for _ in range(2))
    torchs = Running(flat, ReferenceBackend())
    plan = [([0, 1], [some_tokens(40), some_tokens(3, 1)], [0, 0], [42]),
            ([0, 2, 1], [some_tokens(30, 3), some_tokens(17, 2), [5]], [40, 0, 3], [29, 46, 47]),
            ([0, 3], [some_tokens(9, 4), some_tokens(8, 5)], [70, 0], []),
            ([2, 1, 0], [[1], [2], some_tokens(5, 6)], [17, 4, 79], [0, 1, 4, 6])]
    for requests, tokens, computed, index in plan:
        expected = whole.step(requests, tokens, computed)[index]
        assert torch.equal(parted.step(requests, tokens, computed, index), expected)
        if mode == "none":
            torch.testing.assert_close(torchs.step(requests, tokens, computed, index), expected, atol=1e-4, rtol=1e-4)


def test_a_bfloat16_checkpoint_is_kept_exactly_and_computed_in_float32() -> None:
    config = make_config()
    half = make_flat(config, torch.bfloat16)
    wide = make_flat(config)
    wide.load_state_dict({name: tensor.float() for name, tensor in half.state_dict().items()})
    model = JitModel(ModelSource(half))
    assert {weight.name for layer in model.linears for weight in layer.weights} == {"bfloat16"}
    expected = Running(wide, ReferenceBackend()).step([0], [some_tokens(30)], [0])
    logits = Running(model, JitBackend()).step([0], [some_tokens(30)], [0])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_integer_routes_differ_from_the_weights_they_stand_for_by_activation_rounding_only(mode: str) -> None:
    flat = make_flat(make_config())
    model = JitModel(ModelSource(flat, mode))
    stand_in = make_flat(make_config())
    for index, parts in enumerate(model.layers):
        layer = stand_in.layers[index]
        for target, part in ((layer.self_attn.qkv_proj, "qkv"), (layer.self_attn.o_proj, "o"),
                             (layer.mlp.gate_up_proj, "gate_up"), (layer.mlp.down_proj, "down")):
            target.weight.copy_(torch.from_numpy(dequantized(parts[part])))
    stand_in.embed_tokens.copy_(torch.from_numpy(dequantized(model.embedding)))
    stand_in.lm_head.weight.copy_(torch.from_numpy(dequantized(model.head)))
    accuracy = compare((stand_in, ReferenceBackend()), (model, JitBackend()), some_tokens(300))
    assert accuracy.mean_kl < 0.002 and accuracy.num_tokens == 299
    assert {weight.name for weight in model.head.weights} == {"int8_wide"}           # the head is kept finer


@pytest.mark.parametrize("mode", ["none", "int8", "int4"])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(mode: str) -> None:
    """Twenty requests prefilled in random chunks beside each other, then decoded together; each again on its own."""
    model = JitModel(ModelSource(make_flat(make_config(num_attention_heads=6, hidden_size=96)), mode))
    together, alone = Running(model, JitBackend()), Running(model, JitBackend())
    rng = np.random.default_rng(1)
    prompts = [some_tokens(int(rng.integers(1, 300)), seed) for seed in range(20)]
    done, last = [0] * 20, {}
    while any(done[r] < len(prompts[r]) for r in range(20)):
        open_rows = [r for r in range(20) if done[r] < len(prompts[r])]
        rows = sorted(rng.choice(open_rows, min(len(open_rows), int(rng.integers(1, 9))), replace=False).tolist())
        parts = [prompts[r][done[r]:done[r] + int(rng.integers(1, 90))] for r in rows]
        logits = together.step(rows, parts, [done[r] for r in rows])
        end = 0
        for r, part in zip(rows, parts, strict=True):
            end, done[r] = end + len(part), done[r] + len(part)
            last[r] = logits[end - 1]
    for r in range(20):
        assert torch.equal(alone.step([r], [prompts[r]], [0])[-1], last[r])
    batch = together.step(list(range(20)), [[7]] * 20, done)
    for r in (0, 7, 19):
        assert torch.equal(alone.step([r], [[7]], [done[r]])[0], batch[r])


def test_a_model_of_unsuitable_widths_is_refused_with_the_number() -> None:
    config = make_config(intermediate_size=48)
    assert refusal(config) == "intermediate size 48 is no multiple of 32" and refusal(make_config()) is None
    assert refusal(make_config(head_dim=544)) == "head dim 544 is above 512"
    with pytest.raises(ConfigError, match="intermediate size 48 is no multiple of 32; use --attention-backend cpu"):
        JitModel(ModelSource(make_flat(config)))


def test_only_the_pools_of_the_jit_backend_are_read() -> None:
    with pytest.raises(RuntimeError, match="pools of the jit backend only, not of reference"):
        Running(JitModel(ModelSource(make_flat(make_config()))), ReferenceBackend()).step([0], [[1]], [0])


def test_bytes_are_counted_once_for_tied_embeddings() -> None:
    tied = JitModel(ModelSource(make_flat(make_config(tie_word_embeddings=True)), "int8"))
    assert tied.head is tied.embedding and isinstance(tied.head, PackedLinear)
    assert tied.nbytes == sum(layer.nbytes for layer in tied.linears) and len(tied.linears) == 3 * 4 + 1
