"""The option table: every field has a flag, and every flag lands in its field."""
from __future__ import annotations

import msgspec
import pytest

from ipc.cli import OPTIONS, build_config, config_from_argv, make_parser, parse_count, parse_size
from ipc.config import CacheConfig, EngineConfig, FrontendSection, ModelSection, SchedulerConfig
from ipc.errors import ConfigError

DUMMY = ["--model", "qwen3-0.6b", "--load-format", "dummy"]


def test_every_field_of_the_configuration_has_exactly_one_option() -> None:
    sections = {"cache": CacheConfig, "scheduler": SchedulerConfig, "frontend": FrontendSection, "model": ModelSection,
                "engine": EngineConfig}
    fields = {f"{name}.{field}" for name, section in sections.items() for field in section.__struct_fields__}
    made_elsewhere = {"model.files", "engine.serve", *(f"engine.{name}" for name in sections)}
    targets = [option.target for option in OPTIONS.values() if option.target]
    assert sorted(targets) == sorted(fields - made_elsewhere)


def test_without_options_the_defaults_are_those_of_the_structs() -> None:
    config = config_from_argv([*DUMMY, "--device", "cpu"])
    assert config.cache == CacheConfig() and config.scheduler == SchedulerConfig()
    assert config.frontend == FrontendSection() and config.serve
    assert config.model.files.served_name == "qwen3-0.6b"


def test_options_land_in_their_sections() -> None:
    config = config_from_argv([
        "qwen3-0.6b", "--load-format=dummy", "--max-model-len", "32k", "--block-size", "32", "--kv-cache-memory-bytes",
        "1GiB", "--no-enable-prefix-caching", "--swap-space", "2G", "--preemption-mode", "swap", "--max-num-seqs", "7",
        "--scheduling-policy", "priority", "--async-scheduling", "--port", "0", "--host", "0.0.0.0",
        "--served-model-name", "q", "--num-threads", "3", "--device", "cpu", "--dtype", "float32"])
    assert config.model.max_model_len == 32_000 and config.model.dtype == "float32"
    assert config.cache == CacheConfig(block_size=32, kv_cache_memory=1 << 30, enable_prefix_caching=False,
                                       swap_space=2 << 30)
    assert config.scheduler == SchedulerConfig(preemption_mode="swap", max_num_seqs=7, policy="priority",
                                               async_scheduling=True)
    assert config.frontend == FrontendSection(port=0, host="0.0.0.0", served_model_name="q")
    assert (config.num_threads, config.device) == (3, "cpu")


def test_a_configuration_survives_the_wire() -> None:
    config = build_config("qwen3-0.6b", {"load_format": "dummy", "swap_space": "1GiB"}, serve=False)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=EngineConfig) == config


def test_python_callers_use_the_same_names() -> None:
    config = build_config("qwen3-0.6b", {"load_format": "dummy", "max_num_seqs": 4, "gpu_memory_utilization": 0.5,
                                         "enable_chunked_prefill": False, "max_model_len": None}, serve=False)
    assert config.scheduler.max_num_seqs == 4 and not config.scheduler.enable_chunked_prefill
    assert config.cache.gpu_memory_utilization == 0.5 and not config.serve


@pytest.mark.parametrize(("options", "text"), [
    ({"max_seqs": 4}, "unknown option max_seqs; did you mean max_num_seqs?"),
    ({"zzz": 4}, "unknown option zzz; known are load_format, "),
    ({"tensor_parallel_size": 2}, "unknown option tensor_parallel_size: a server has one device"),
    ({"enforce_eager": True}, "did you mean cuda_graphs off?"),
    ({"block_size": 0}, "--block-size is 0; allowed is 1 to 1024"),
    ({"block_size": 16.5}, "option block_size is 16.5; it takes int"),
    ({"block_size": "many"}, "option block_size is 'many'; it takes int"),
    ({"enable_prefix_caching": "no"}, "option enable_prefix_caching is 'no'; it takes bool"),
    ({"max_num_seqs": True}, "option max_num_seqs is True"),
    ({"swap_space": 4}, "option swap_space: size 4 is 4 bytes; write the unit, for example 4GiB"),
    ({"preemption_mode": "swap"}, "--swap-space 1GiB"),
])
def test_a_bad_option_is_refused_by_name(options: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        build_config("qwen3-0.6b", {"load_format": "dummy", **options})
    assert text in str(error.value)


@pytest.mark.parametrize(("text", "value"), [
    ("4096", 4096), ("32k", 32_000), ("32K", 32_768), ("32Ki", 32_768), ("1.5k", 1500)])
def test_counts(text: str, value: int) -> None:
    assert parse_count(text) == value


@pytest.mark.parametrize(("text", "value"), [
    ("0", 0), ("1GiB", 1 << 30), ("512MiB", 512 << 20), ("1.5GiB", 3 << 29), ("1G", 1 << 30), ("1GB", 10**9),
    ("1g", 10**9), ("2 TiB", 2 << 40), ("1073741824", 1 << 30)])
def test_sizes(text: str, value: int) -> None:
    assert parse_size(text) == value


@pytest.mark.parametrize("text", ["", "much", "-1", "1e3", "1.5", "4Q", "iB", "32kB"])
def test_what_is_no_count(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_count(text)


@pytest.mark.parametrize("argv", [[], ["a", "--model", "b"], [*DUMMY, "--port", "x"], [*DUMMY, "--swap-space", "4"],
                                  [*DUMMY, "--max-num", "4"]])
def test_a_command_line_that_is_wrong_exits_with_two(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Abbreviations are refused too: they would change their meaning when an option is added."""
    with pytest.raises(SystemExit) as error:
        config_from_argv(argv)
    assert error.value.code == 2
    assert "launch.py: error:" in capsys.readouterr().err


def test_help_names_every_flag_and_its_default() -> None:
    text = make_parser().format_help()
    for option in OPTIONS.values():
        assert option.flag in text
    assert "tokens per block (default: 16)" in " ".join(text.split())
    assert "share blocks of equal prefixes (default: on)" in " ".join(text.split())


def test_the_hub_librarys_offline_switch_is_honoured(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="offline"):
        build_config("smollm2-135m", {"download_dir": str(tmp_path)})


@pytest.mark.parametrize("has_driver, options, tokens", [
    (True, {}, 8192), (False, {}, 256), (True, {"device": "cpu"}, 256), (False, {"device": "cuda"}, 8192),
    (True, {"max_num_batched_tokens": 512}, 512)])
def test_a_gpu_gets_larger_steps_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch, has_driver: bool,
                                                       options: dict[str, object], tokens: int) -> None:
    monkeypatch.setattr("ipc.cli.has_nvidia_driver", lambda: has_driver)
    config = build_config("qwen3-0.6b", {"load_format": "dummy", **options})
    assert config.scheduler.max_num_batched_tokens == tokens
