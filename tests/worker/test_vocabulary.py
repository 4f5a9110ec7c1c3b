"""How many ids the tokenizer names, from each kind of model file."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ipc.errors import ConfigError
from ipc.model_source import ModelFiles
from tests.ipc.message_samples import MODEL
from worker.sampling.vocabulary import num_valid_tokens


def files(path: str, kind: str = "safetensors") -> ModelFiles:
    return ModelFiles(kind=kind, path=path, config=MODEL, served_name="tiny")


def write(folder: Path, model: Any, added: Any = (), config: Any = None) -> ModelFiles:
    (folder / "tokenizer.json").write_text(json.dumps({"model": model, "added_tokens": added, "version": "1.0"}))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return files(str(folder))


@pytest.mark.parametrize("model, added, config, expected", [
    ({"vocab": {"a": 0, "b": 4}, "merges": []}, [], None, 5),
    ({"vocab": {"a": 0, "b": 4}}, [{"id": 9, "content": "<x>", "special": True}], None, 10),
    ({"vocab": [["a", -1.0], ["b", -2.0]]}, None, None, 2),
    ({"vocab": {"a": 0}}, [], {"added_tokens_decoder": {"12": {"content": "<y>"}}}, 13)])
def test_the_largest_named_id_counts_wherever_it_stands(tmp_path, model, added, config, expected):
    assert num_valid_tokens(write(tmp_path, model, added, config)) == expected


def test_a_model_without_tokenizer_files_has_no_bound(tmp_path):
    assert num_valid_tokens(files("", "dummy")) is None and num_valid_tokens(files(str(tmp_path))) is None


def test_a_broken_file_is_refused_at_the_start(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": 3}}')
    with pytest.raises(ConfigError, match="tokenizer.json"):
        num_valid_tokens(files(str(tmp_path)))


def test_it_agrees_with_the_frontends_tokenizer(tiny_model):
    from frontend.tokenizer import Tokenizer
    source = files(tiny_model)
    assert num_valid_tokens(source) == Tokenizer.from_files(source).num_tokens
