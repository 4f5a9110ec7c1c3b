"""bench frontend: the null processes serve the real frontend, and every token is one event."""
from __future__ import annotations

import asyncio
import json
import os

import numpy as np

from bench.frontend import spoken, text_path
from bench.frontend_load import call, chat_request, cpu_us, steady_cost
from bench.null_engine import NULL_CORE, NULL_WORKER, NullEngine
from frontend.tokenizer import Tokenizer
from frontend.tokenizer_files import save_tokenizer
from ipc.cli import build_config

LETTERS = np.arange(97, 123, dtype=np.int32)    # of the byte tokenizer: each is text by itself


def test_every_token_of_the_null_core_becomes_one_event(tiny_model: str, temp: str) -> None:
    async def load(engine: NullEngine) -> list[int]:
        request = chat_request(engine.port, "", "Hi", 40)
        calls = [await call(engine.port, request) for _ in range(4)]
        cost = await steady_cost(calls, engine.pids["frontend"], 10, 30)
        assert cost > 0
        await asyncio.gather(*(one.done for one in calls))
        for one in calls:
            one.check()
        return [one.num_events for one in calls]

    with NullEngine(tiny_model, NULL_CORE, tokens=LETTERS, rate=50.0) as engine:
        assert cpu_us(engine.pids["frontend"]) > 0
        assert asyncio.run(load(engine)) == [43] * 4    # the role, 40 tokens, the end, [DONE]


def test_a_null_worker_answers_through_the_real_core(tiny_model: str, temp: str) -> None:
    async def load(engine: NullEngine) -> bytes:
        made = await call(engine.port, chat_request(engine.port, "", "Hi", 3))
        await made.done
        made.check()
        return made.head

    with NullEngine(tiny_model, NULL_WORKER, num_gpu_blocks_override=64) as engine:
        assert b'"content":"M' in asyncio.run(load(engine))     # token 77


def test_text_path_and_spoken_tokens(tiny_model: str) -> None:
    files = build_config(tiny_model, {}).model.files
    tokenizer = Tokenizer.from_files(files)
    tokens = spoken(tokenizer)
    assert all(tokenizer.decode([token]) for token in tokens.tolist())
    assert set(text_path(tokenizer, tokens[:50])) == {"text_us", "text_without_stop_us"}


def test_a_saved_tokenizer_gives_the_same_ids(tiny_model: str, tmp_path: os.PathLike[str]) -> None:
    files = build_config(tiny_model, {}).model.files
    tokenizer = Tokenizer.from_files(files)
    folder = os.path.join(tmp_path, "saved")
    save_tokenizer(tokenizer, files.config, folder)
    from transformers import AutoTokenizer
    loaded = AutoTokenizer.from_pretrained(folder)
    text = "the <|im_end|> in ä"
    assert loaded(text, add_special_tokens=False).input_ids == tokenizer.encode_ids(text, False)
    assert loaded.chat_template == tokenizer.chat_templates["default"]
    with open(os.path.join(folder, "config.json")) as file:
        assert json.load(file)["vocab_size"] == files.config.vocab_size
