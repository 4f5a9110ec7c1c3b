"""A tokenizer written as a Hugging Face folder, for clients that count tokens themselves (lm-eval, guidellm, aiperf).

What a GGUF file holds inside becomes tokenizer.json, tokenizer_config.json and a config.json with the model type, which
is all that transformers' AutoTokenizer reads. Knows no server.
"""
from __future__ import annotations

import json
import os
from typing import Any

from frontend.tokenizer import Tokenizer
from ipc.model_config import ModelConfig


def save_tokenizer(tokenizer: Tokenizer, model: ModelConfig, folder: str) -> None:
    """Write the three files; the folder is made. Raises OSError."""
    os.makedirs(folder, exist_ok=True)
    tokenizer.save(os.path.join(folder, "tokenizer.json"))
    template = tokenizer.chat_templates.get("default")
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
                                "model_max_length": model.max_position_embeddings, **tokenizer.special_tokens}
    if template is not None:
        settings["chat_template"] = template
    model_type = model.architecture.removesuffix("ForCausalLM").lower()
    for name, value in (("tokenizer_config.json", settings),
                        ("config.json", {"model_type": model_type, "vocab_size": model.vocab_size})):
        with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
            json.dump(value, file, ensure_ascii=False, indent=1)
