"""The workload and the test model of `bench seed`: data only.

Sixteen requests share a 192-token system prompt; each adds its own question and asks for a fixed number of tokens.
Knows nothing about engines: every engine under test gets the same list, and none may stop at an end-of-sequence token,
so all of them owe exactly the same number of tokens.
"""

from typing import Any

import numpy as np

SYSTEM_PROMPT_TOKENS = 192
QUESTION_TOKENS = (8, 48)  # both ends included
OUTPUT_TOKENS = (8, 40)  # both ends included
VOCAB_SIZE = 4096

Workload = list[tuple[np.ndarray, int]]  # (prompt int32 [n], max_tokens)

# The test model, as a Hugging Face config.json. Weights are random at true shape (load format "dummy") and float32:
# this leaves little rounding to blame when two engines disagree. The head is not tied to the embedding: a tied
# random model answers every token with itself, and equal outputs of two engines would then prove nothing.
SEED_MODEL_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "max_position_embeddings": 4096,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": VOCAB_SIZE - 1,
    "torch_dtype": "float32",
}


def seed_workload(num_requests: int = 16, seed: int = 0) -> Workload:
    """The same list for the same arguments, on every platform: numpy's PCG64 stream is part of its contract.

    Lengths are drawn before token ids of each request, so a longer list starts with the shorter one.
    """
    if num_requests < 1:
        raise ValueError(f"num_requests is {num_requests}; at least 1 is needed")
    generator = np.random.default_rng(seed)

    def tokens(count: int) -> np.ndarray:
        return generator.integers(0, VOCAB_SIZE, size=count, dtype=np.int32)

    def between(low: int, high: int) -> int:
        return int(generator.integers(low, high + 1))

    system_prompt = tokens(SYSTEM_PROMPT_TOKENS)
    workload: Workload = []
    for _ in range(num_requests):
        num_question_tokens, max_tokens = between(*QUESTION_TOKENS), between(*OUTPUT_TOKENS)
        workload.append((np.concatenate([system_prompt, tokens(num_question_tokens)]), max_tokens))
    return workload
