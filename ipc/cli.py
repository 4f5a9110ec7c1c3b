"""The one table of serving options: its rows make the command line, its targets fill EngineConfig.

launch.py parses argv with it; AsyncLLM(**options) takes the same names with underscores. Spellings are those of vLLM
where it has the option. A value may also come from a file or the environment (option_sources.py). Knows no processes;
the values are checked by the structs of config.py.
"""
from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from ipc.config import (CUDA_GRAPHS, DTYPES, KV_CACHE_DTYPES, LOG_LEVELS, POLICIES, PREEMPTION_MODES, QUANTIZATIONS,
                        CacheConfig, EngineConfig, FrontendSection, ModelSection, SchedulerConfig)
from ipc.errors import ConfigError
from ipc.launch_setup import has_nvidia_driver
from ipc.model_source import LOAD_FORMATS, Report, resolve_model
from ipc.option_help import MAIN, OptionParser, unknown_option
from ipc.option_sources import read_config_file, read_environment

_NUMBER = re.compile(r"(\d+(?:\.\d+)?)\s*([kKmMgGtT]?)(i?)([bB]?)")
_SMALLEST_SIZE = 1 << 16
GPU_BATCHED_TOKENS = 8192                       # a step of fewer leaves a GPU idle in prefill


def parse_count(text: str | int) -> int:
    """Tokens or requests: 8192, 32k = 32,000, 32K = 32Ki = 32,768."""
    return _number(text, is_size=False)


def parse_size(text: str | int) -> int:
    """Bytes: 512MiB, 1GiB = 1G, 1GB = 1g = 10**9. A bare small number is refused: elsewhere it would have meant GiB."""
    size = _number(text, is_size=True)
    if 0 < size < _SMALLEST_SIZE:
        raise ConfigError(f"size {text} is {size} bytes; " + (
            f"write the unit, for example {text}GiB" if str(text).strip().isdigit() else "at least 64KiB, or 0"))
    return size


def _number(text: str | int, is_size: bool) -> int:
    match = _NUMBER.fullmatch(str(text).strip())
    if match is None or (match[4] and not is_size) or (match[3] and not match[2]):
        example = "size; write it like 512MiB or 1GiB" if is_size else "count; write it like 4096 or 32k"
        raise ConfigError(f"{text!r} is no {example}")
    power = "kmgt".find(match[2].lower()) + 1 if match[2] else 0
    is_binary = bool(match[3]) or (match[2].isupper() and not match[4])
    value = float(match[1]) * (1024 if is_binary else 1000) ** power
    if value != int(value):
        raise ConfigError(f"{text!r} is no whole number")
    return int(value)


class Option(NamedTuple):
    """One row. `target` is where its value goes; "": build_config itself uses it."""
    flag: str
    target: str
    parse: Callable[[Any], Any]                  # bool: --flag and --no-flag
    help: str
    choices: tuple[str, ...] | None = None
    aliases: tuple[str, ...] = ()
    is_list: bool = False                        # may be given several times; parse: of one item
    is_secret: bool = False                      # its value is never shown

    @property
    def name(self) -> str:
        return self.flag[2:].replace("-", "_")


GROUPS: dict[str, tuple[Option, ...]] = {
    "model": (
        Option("--load-format", "", str, "auto; dummy: random weights at the model's true shape", LOAD_FORMATS),
        Option("--dtype", "model.dtype", str, "of weights and computation", DTYPES),
        Option("--max-model-len", "model.max_model_len", parse_count, "longest prompt plus output, for example 32k"),
        Option("--quantization", "model.quantization", str, "of weights; auto: what a GGUF file or, on GPUs from "
               "compute capability 8.9 on, an fp8 checkpoint holds, else none; fp8, fp8_per_block: GPUs only",
               QUANTIZATIONS),
        Option("--batch-invariant", "model.batch_invariant", bool, "only kernels whose rows are independent"),
        Option("--logits-processor", "model.logits_processors", str, "NAME=MODULE:FUNCTION, called for requests that "
               "name it; may be given several times", is_list=True),
        Option("--seed", "model.seed", int, "of dummy weights"),
        Option("--download-dir", "", str, "folder for what is downloaded here (default ~/.cache/threefold)"),
        Option("--offline", "", bool, "use the network for nothing"),
    ),
    "cache": (
        Option("--block-size", "cache.block_size", int, "tokens per block"),
        Option("--num-gpu-blocks-override", "cache.num_gpu_blocks_override", int, "usable blocks, on any device"),
        Option("--kv-cache-memory", "cache.kv_cache_memory", parse_size, "size of the pool, for example 4GiB",
               aliases=("--kv-cache-memory-bytes",)),
        Option("--gpu-memory-utilization", "cache.gpu_memory_utilization", float, "CUDA: share of the device to use"),
        Option("--cpu-memory-share", "cache.cpu_memory_share", float, "CPU: share of free memory for the pool"),
        Option("--kv-cache-dtype", "cache.kv_cache_dtype", str, "of keys and values; int8 and fp8 (e4m3) hold twice "
               "the tokens of bfloat16; auto: as computed, or on a CPU int8 with int8 and 4-bit weights "
               "(bfloat16 with those of a Q8_0 file)",
               KV_CACHE_DTYPES),
        Option("--enable-prefix-caching", "cache.enable_prefix_caching", bool, "share blocks of equal prefixes"),
        Option("--enable-partial-reuse", "cache.enable_partial_reuse", bool, "reuse part of a cached block, by copy"),
        Option("--swap-space", "cache.swap_space", parse_size, "host memory for swapped-out blocks, for example 1GiB"),
    ),
    "scheduler": (
        Option("--max-num-seqs", "scheduler.max_num_seqs", parse_count, "requests running at once"),
        Option("--max-num-batched-tokens", "scheduler.max_num_batched_tokens", parse_count,
               "tokens of one step; on a GPU 8192 unless given"),
        Option("--enable-chunked-prefill", "scheduler.enable_chunked_prefill", bool, "split long prompts over steps"),
        Option("--long-prefill-token-threshold", "scheduler.long_prefill_token_threshold", parse_count,
               "longest prefill chunk; 0: the whole budget"),
        Option("--scheduling-policy", "scheduler.policy", str, "order of the waiting queue", POLICIES),
        Option("--preemption-mode", "scheduler.preemption_mode", str, "what happens when the pool is full",
               PREEMPTION_MODES),
        Option("--async-scheduling", "scheduler.async_scheduling", bool, "plan a step before the last one's results",
               aliases=("--sync-scheduling",)),
        Option("--max-plans-in-flight", "scheduler.max_plans_in_flight", int,
               "async scheduling: steps planned before their results are in"),
        Option("--num-speculative-tokens", "scheduler.num_speculative_tokens", int,
               "verify up to so many drafts a step, taken from the request's own text; 0: none"),
        Option("--prompt-lookup-max", "model.prompt_lookup_max", int,
               "drafts: newest tokens that are looked up, at most"),
        Option("--prompt-lookup-min", "model.prompt_lookup_min", int,
               "drafts: newest tokens that must have occurred before"),
        Option("--priority-aging-steps", "scheduler.priority_aging_steps", parse_count,
               "priority policy: steps of waiting that are worth one level"),
        Option("--lpm-max-overtakes", "scheduler.lpm_max_overtakes", parse_count,
               "lpm policy: a request that so many others overtook goes first"),
        Option("--max-num-queued-reqs", "scheduler.max_num_queued_reqs", parse_count,
               "waiting requests beyond which new ones are refused with 429; 0: no bound"),
        Option("--max-num-queued-tokens", "scheduler.max_num_queued_tokens", parse_count,
               "the same for the sum of their tokens"),
    ),
    "engine": (
        Option("--device", "engine.device", str, "cpu, cuda or auto", ("auto", "cpu", "cuda")),
        Option("--attention-backend", "engine.attention_backend", str, "auto, or a backend by name"),
        Option("--cuda-graphs", "engine.cuda_graphs", str, "of decode steps; auto: captured while idle; on: at start; "
               "static: padded steps without capture, on any device", CUDA_GRAPHS),
        Option("--num-threads", "engine.num_threads", int, "compute threads on a CPU; 0: one per core"),
        Option("--restart", "engine.restart", bool, "restart a process that ends, and go on; else end with it"),
        Option("--flight-recorder", "engine.flight_recorder", bool, "keep the core's last messages for a replay"),
        Option("--flight-recorder-dir", "engine.flight_recorder_dir", str, "of recordings (default: temporary)"),
        Option("--log-level", "engine.log_level", str, "of all processes; libraries stay at warning", LOG_LEVELS),
    ),
    "server": (
        Option("--host", "frontend.host", str, "address to listen on"),
        Option("--port", "frontend.port", int, "TCP port; 0: any free one"),
        Option("--served-model-name", "frontend.served_model_name", str, "the name that clients use"),
        Option("--drain-timeout", "frontend.drain_timeout", float,
               "seconds that running streams get after SIGTERM; a second signal ends them",
               aliases=("--shutdown-timeout",)),
        Option("--metrics-prefix", "frontend.metrics_prefix", str, "namespace of the names on /metrics"),
        Option("--otlp-traces-endpoint", "frontend.otlp_traces_endpoint", str,
               "send a span of each request there, OTLP over HTTP; needs the extra otel"),
        Option("--return-timings", "frontend.return_timings", bool,
               "tell each request its own queue, prefill and decode time (per request: return_timings)"),
        Option("--api-key", "frontend.api_keys", str, "a key that clients must send; repeatable", is_list=True,
               is_secret=True),
        Option("--admin-api-key", "frontend.admin_api_keys", str, "a key for the control routes, which are off without "
               "one; repeatable", is_list=True, is_secret=True),
        Option("--share-prefix-cache", "frontend.share_prefix_cache", bool,
               "let clients with different keys reuse each other's prefixes; hits show by their timing"),
        Option("--api-servers", "frontend.api_servers", int, "processes that serve the port, all on one engine core",
               aliases=("--api-server-count",)),
        Option("--max-connections", "frontend.max_connections", parse_count,
               "open at once; idle ones make room for new ones, else 503"),
        Option("--ssl-certfile", "frontend.ssl_certfile", str, "serve HTTPS with this certificate (PEM)"),
        Option("--ssl-keyfile", "frontend.ssl_keyfile", str, "its private key, if that is another file"),
        Option("--allowed-origins", "frontend.allowed_origins", str, "web pages elsewhere that may call this server; "
               "*: all; repeatable", is_list=True),
        Option("--allowed-methods", "frontend.allowed_methods", str, "methods they may use; repeatable", is_list=True),
        Option("--allowed-headers", "frontend.allowed_headers", str, "headers they may send; repeatable", is_list=True),
        Option("--allow-credentials", "frontend.allow_credentials", bool, "let them send cookies"),
    ),
}
OPTIONS: dict[str, Option] = {option.name: option for group in GROUPS.values() for option in group}
_SECTIONS: dict[str, type] = {"model": ModelSection, "cache": CacheConfig, "scheduler": SchedulerConfig,
                              "frontend": FrontendSection, "engine": EngineConfig}


def make_parser(prog: str = "launch.py", *, is_server: bool = True, takes_model: bool = True,
                description: str | None = None) -> OptionParser:
    """The command line of an engine. Options not given are absent from the result: config.py has the defaults.

    is_server=False leaves out what only an HTTP server has; takes_model=False leaves the positional argument to others.
    """
    parser = OptionParser(prog=prog, argument_default=argparse.SUPPRESS, main=MAIN, description=description)
    if takes_model:
        parser.add_argument("model_name", nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument("--model", metavar="MODEL", help="alias, folder in Hugging Face layout, .gguf file or hub id")
    parser.add_argument("--config", metavar="FILE", help="options from a .yaml, .toml or .json file. Each option also "
                        "has a variable, THREEFOLD_PORT for --port; the command line wins, then the environment")
    for title, options in GROUPS.items():
        options = tuple(option for option in options if is_server or not is_server_option(option))
        if not options:
            continue
        parser.engine_options.update(option.name for option in options)
        group = parser.add_argument_group(title)
        for option in options:
            text = (option.help + default_text(option)).replace("%", "%%")
            if option.parse is bool:
                group.add_argument(option.flag, action=argparse.BooleanOptionalAction, help=text)
                for alias in option.aliases:
                    group.add_argument(alias, dest=option.name, action="store_false", default=argparse.SUPPRESS,
                                       help=f"the same as --no-{option.flag[2:]}")
            else:
                group.add_argument(option.flag, *option.aliases, dest=option.name, type=_argument(option.parse),
                                   choices=option.choices, help=text, action="append" if option.is_list else "store",
                                   metavar=None if option.choices else option.name.split("_")[-1].upper())
    return parser


def is_server_option(option: Option) -> bool:
    """It concerns the HTTP server only."""
    return option.target.startswith("frontend.")


def _argument(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """argparse prints the text of an ArgumentTypeError, and only a guess for other errors."""
    if parse in (int, float, str):
        return parse

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return convert


def default_text(option: Option) -> str:
    """" (default: 16)", for help; nothing where the default is found at start."""
    if not option.target:
        return ""
    section, name = option.target.split(".")
    value = next(field.default for field in msgspec.structs.fields(_SECTIONS[section]) if field.name == name)
    if isinstance(value, bool):
        return " (default: on)" if value else " (default: off)"
    if isinstance(value, tuple):
        value = ", ".join(value)
    return "" if value in (None, "") else f" (default: {value})"


def config_from_argv(argv: list[str], report: Report | None = None,
                     environ: Mapping[str, str] | None = None) -> EngineConfig:
    """The configuration that this command line asks for. Raises ConfigError; argparse exits with status 2."""
    parser = make_parser()
    model, options = read_options(parser, argv, report, environ)
    if model is None:
        parser.error("name one model: --model qwen3-0.6b (an alias, a folder, a .gguf file or a hub id)")
    return build_config(model, options, report=report)


def read_options(parser: OptionParser, argv: list[str], report: Report | None = None,
                 environ: Mapping[str, str] | None = None) -> tuple[str | None, dict[str, Any]]:
    """(model, the other options) from the command line, the environment and --config, in that order of precedence; what
    `parser` has besides OPTIONS is among the options too. Raises ConfigError; argparse exits with status 2."""
    given = vars(parser.parse_args(argv))
    names = [given.pop(key) for key in ("model_name", "model") if key in given]
    if len(names) > 1:
        parser.error(f"two models are named, {names[0]!r} and {names[1]!r}; name one")
    sources: list[dict[str, Any]] = []
    if "config" in given:
        path = given.pop("config")
        aliases = {alias[2:].replace("-", "_"): option for option in OPTIONS.values() for alias in option.aliases}
        found = read_config_file(path, {"model", *OPTIONS, *aliases}, GROUPS)
        sources.append({aliases[name].name if name in aliases else name: value for name, value in found.items()})
    is_bool = {"model": False, **{name: option.parse is bool for name, option in OPTIONS.items()}}
    sources.append(read_environment(os.environ if environ is None else environ, is_bool, report or (lambda line: None)))
    options: dict[str, Any] = {}
    for name, value in {key: value for source in sources for key, value in source.items()}.items():
        if name == "model":
            names = names or [str(value)]
        elif name in parser.engine_options and value is not None:
            options[name] = _convert(OPTIONS[name], value)
    return (names[0] if names else None), options | given


def build_config(model: str, options: Mapping[str, Any], *, serve: bool = True,
                 report: Report | None = None) -> EngineConfig:
    """EngineConfig for a model and options named as in OPTIONS. Finds, and if needed downloads, the model's files.

    Raises ConfigError: an unknown option, a value out of range, or a model that is not to be had.
    """
    sections: dict[str, dict[str, Any]] = {name: {} for name in _SECTIONS}
    for name, value in options.items():
        option = OPTIONS.get(name)
        if option is None:
            raise ConfigError(unknown_option(name, OPTIONS))
        if option.target and value is not None:
            section, field = option.target.split(".")
            sections[section][field] = _convert(option, value)
    device = sections["engine"].get("device", "auto")
    if device == "cuda" or (device == "auto" and has_nvidia_driver()):
        sections["scheduler"].setdefault("max_num_batched_tokens", GPU_BATCHED_TOKENS)
    made = {name: _SECTIONS[name](**values) for name, values in sections.items() if name not in ("model", "engine")}
    offline = bool(options.get("offline")) or _offline_mode()
    files = resolve_model(model, cache_dir=options.get("download_dir"), offline=offline,
                          load_format=options.get("load_format") or "auto", report=report)
    return EngineConfig(model=ModelSection(files=files, **sections["model"]), serve=serve, **sections["engine"], **made)


def _convert(option: Option, value: Any) -> Any:
    """From Python callers values come as anything; what argparse made passes unchanged."""
    if option.is_list:
        return tuple(_items(option, value))
    expected: dict[Any, tuple[type, ...]] = {bool: (bool,), float: (int, float, str), str: (str,)}
    if type(value) not in expected.get(option.parse, (int, str)):
        raise ConfigError(f"option {option.name} is {value!r}; it takes {option.parse.__name__}")
    try:
        return option.parse(value)
    except ConfigError as error:
        raise ConfigError(f"option {option.name}: {error}") from None
    except ValueError:
        raise ConfigError(f"option {option.name} is {value!r}; it takes {option.parse.__name__}") from None


def _items(option: Option, value: Any) -> list[str]:
    """Texts of a repeatable option. A JSON list, which is how vLLM spells it, counts as its items."""
    if isinstance(value, (list, tuple)):
        return [item for one in value for item in _items(option, one)]
    if not isinstance(value, str):
        shown = "hidden" if option.is_secret else repr(value)
        raise ConfigError(f"option {option.name} is {shown}; it takes text or a list of texts")
    if not value.startswith("["):
        return [value]
    try:
        return msgspec.json.decode(value, type=list[str])
    except (msgspec.DecodeError, UnicodeEncodeError):
        raise ConfigError(f"option {option.name} begins with [ and is no JSON list of texts") from None


def _offline_mode() -> bool:
    """The hub library's own switch."""
    return any(os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")
               for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
