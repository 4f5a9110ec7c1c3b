"""Options from a file and from the environment: the same values, the same refusals, and who wins."""
from __future__ import annotations

from pathlib import Path

import pytest

from ipc.cli import config_from_argv, make_parser, read_options
from ipc.errors import ConfigError
from ipc.option_sources import read_config_file, read_environment

YAML = "model: qwen3-0.6b\nload-format: dummy\nmax_model_len: 4k\nenable-prefix-caching: false\nport: 0\n"
TOML = 'model = "qwen3-0.6b"\nload-format = "dummy"\n[scheduler]\nmax-num-seqs = 7\n[cache]\nswap-space = "1GiB"\n'
JSON = '{"model": "qwen3-0.6b", "load_format": "dummy", "kv-cache-memory-bytes": "1GiB", "port": null}'


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_a_yaml_file_fills_the_configuration(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    config = config_from_argv(["--config", write(tmp_path, "a.yaml", YAML)], environ={})
    assert (config.model.max_model_len, config.cache.enable_prefix_caching, config.frontend.port) == (4000, False, 0)
    assert config.model.files.served_name == "qwen3-0.6b"


def test_toml_tables_named_as_the_groups_are_read(tmp_path: Path) -> None:
    config = config_from_argv(["--config", write(tmp_path, "a.toml", TOML)], environ={})
    assert (config.scheduler.max_num_seqs, config.cache.swap_space) == (7, 1 << 30)


def test_second_names_of_options_and_null_are_taken(tmp_path: Path) -> None:
    config = config_from_argv(["--config", write(tmp_path, "a.json", JSON)], environ={})
    assert config.cache.kv_cache_memory == 1 << 30 and config.frontend.port == 8000


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    text = 'model = "qwen3-0.6b"\nload-format = "dummy"\nport = 1\nblock-size = 8\nseed = 1\n'
    file = write(tmp_path, "a.toml", text)
    environ = {"THREEFOLD_PORT": "2", "THREEFOLD_BLOCK_SIZE": "32", "THREEFOLD_OFFLINE": "yes"}
    config = config_from_argv(["--config", file, "--port", "3"], environ=environ)
    assert (config.frontend.port, config.cache.block_size, config.model.seed) == (3, 32, 1)


def test_the_model_may_come_from_the_environment() -> None:
    model, options = read_options(make_parser(), [], environ={"THREEFOLD_MODEL": "m", "THREEFOLD_NUM_THREADS": "2"})
    assert (model, options) == ("m", {"num_threads": 2})


def test_a_client_takes_no_options_of_the_server_from_the_environment(tmp_path: Path) -> None:
    """One file, or one set of variables, serves both; what a command does not have is not for it."""
    parser = make_parser("launch.py chat", is_server=False)
    file = write(tmp_path, "a.json", '{"host": "0.0.0.0", "seed": 4}')
    assert read_options(parser, ["--config", file], environ={"THREEFOLD_PORT": "1"}) == (None, {"seed": 4})


@pytest.mark.parametrize(("name", "text", "error"), [
    ("a.ini", "", "must end in .json, .toml, .yaml, .yml"),
    ("a.json", "[]", "expected names and values, found list"),
    ("a.json", "{", "truncated"),
    ("a.toml", "max-num-seq = 3", "unknown option 'max-num-seq'; did you mean max_num_seqs?"),
    ("a.json", '{"port": 1, "--port": 2}', "is there twice"),
    ("a.json", '{"block-size": "many"}', "option block_size is 'many'; it takes int"),
    ("a.json", '{"offline": "no"}', "option offline is 'no'; it takes bool")])
def test_a_file_with_a_mistake_is_refused_by_name(tmp_path: Path, name: str, text: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        read_options(make_parser(), ["m", "--config", write(tmp_path, name, text)], environ={})


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="--config nowhere.toml: No such file"):
        read_config_file("nowhere.toml", [], [])


def test_a_variable_that_is_nearly_an_option_is_told_and_others_are_not_ours() -> None:
    told: list[str] = []
    environ = {"THREEFOLD_MAX_SEQS": "3", "THREEFOLD_STARTED": "1", "THREEFOLD_XYZZY": "1", "OTHER": "1",
               "THREEFOLD_SEED": ""}
    assert read_environment(environ, {"max_num_seqs": False, "seed": False}, told.append) == {}
    assert told == ["THREEFOLD_MAX_SEQS in the environment is no option; did you mean THREEFOLD_MAX_NUM_SEQS?"]
    with pytest.raises(ConfigError, match="THREEFOLD_OFFLINE is 'maybe'; write 1 or 0"):
        read_environment({"THREEFOLD_OFFLINE": "maybe"}, {"offline": True}, told.append)
