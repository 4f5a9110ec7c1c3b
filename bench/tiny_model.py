"""A model folder in Hugging Face layout, small enough to be made for each test session: seeded weights, a byte-level
tokenizer, a chat template.

Needs neither torch nor network. The output rows of every id that is not printable ASCII are zero, so that greedy text
is readable and never ends by itself; sampled text may contain anything.
"""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from frontend.tokenizer import BYTE_TO_CHAR

MAX_MODEL_LEN = 4096
IM_START, IM_END = 298, 299
HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, MLP = 64, 2, 4, 2, 16, 128
MERGES = ("t h", "th e", "i n", "a n", "e r", "o n", "r e", "a t", "e n", "o r", "i s", "Ġ t", "Ġt he", "Ġ a", "an d",
          "Ġ and", "in g", "e s", "Ġ o", "Ġo f", "i t", "l e", "Ġ w", "Ġ s", "a l", "a r", "o u", "Ġ i", "Ġi s", "s t",
          "v e", "l l", "o w", "h e", "r o", "c h", "c on", "u n", "q u", "e d", "l o", "w h")
VOCAB = 256 + len(MERGES) + 2
CONFIG: dict[str, Any] = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=VOCAB, hidden_size=HIDDEN,
    intermediate_size=MLP, num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS,
    head_dim=HEAD_DIM, max_position_embeddings=MAX_MODEL_LEN, rms_norm_eps=1e-5, rope_theta=10000.0,
    tie_word_embeddings=False, hidden_act="silu", torch_dtype="float32", eos_token_id=IM_END, bos_token_id=None)
CHAT_TEMPLATE = ("{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
                 "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


def write_tiny_model(folder: Path, seed: int = 7) -> str:
    """Fill `folder`; its path."""
    tokenizer, vocab = _tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    save_file(_weights(seed, vocab), str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer_config.json").write_text(json.dumps(
        {"eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE}))
    return str(folder)


def _tokenizer() -> tuple[tokenizers.Tokenizer, dict[str, int]]:
    vocab = {char: byte for byte, char in BYTE_TO_CHAR.items()}
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in MERGES)]
    for left, right in pairs:
        vocab[left + right] = len(vocab)
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False)
                                  for text in ("<|im_start|>", "<|im_end|>")])
    return tokenizer, vocab


def _weights(seed: int, vocab: dict[str, int]) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, std: float = 0.25) -> np.ndarray:
        return draw.normal(0.0, std, (rows, columns)).astype(np.float32)

    head = matrix(VOCAB, HIDDEN, 0.4)
    readable = [index for text, index in vocab.items() if all(" " <= char <= "~" or char == "Ġ" for char in text)]
    head[[index for index in range(VOCAB) if index not in readable]] = 0.0
    weights = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN, 1.0), "lm_head.weight": head,
               "model.norm.weight": np.ones(HIDDEN, np.float32)}
    for layer in range(LAYERS):
        shapes = {"self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN), "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
                  "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN), "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
                  "mlp.gate_proj": (MLP, HIDDEN), "mlp.up_proj": (MLP, HIDDEN), "mlp.down_proj": (HIDDEN, MLP)}
        for name, shape in shapes.items():
            weights[f"model.layers.{layer}.{name}.weight"] = matrix(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{name}.weight"] = np.ones(HIDDEN, np.float32)
    return weights
