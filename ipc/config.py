"""Every option of the engine as frozen structs, each checked where it is made.

launch.py (or AsyncLLM) builds an `EngineConfig`; the supervisor cuts it into one section per process, so no process
reads an option that is not its own. A value "auto" or None is resolved once, by the process that owns the fact, which
logs the choice with its reason. A test asserts that every field here is read somewhere.
"""
from __future__ import annotations

import re
from typing import Any

import msgspec

from ipc.errors import ConfigError
from ipc.model_source import ModelFiles

DTYPES = ("auto", "float32", "bfloat16", "float16")
POLICIES = ("fcfs", "priority", "lpm")
PREEMPTION_MODES = ("recompute", "swap", "auto")
QUANTIZATIONS = ("auto", "none", "int8", "int4", "fp8", "fp8_per_block")
KV_CACHE_DTYPES = ("auto", "float32", "bfloat16", "float16", "int8", "fp8", "fp8_e4m3")
CUDA_GRAPHS = ("auto", "on", "off", "static")
LOG_LEVELS = ("debug", "info", "warning", "error")


def _range(name: str, value: Any, low: float, high: float | None = None) -> None:
    if value < low or (high is not None and value > high):
        allowed = f"at least {low}" if high is None else f"{low} to {high}"
        raise ConfigError(f"--{name.replace('_', '-')} is {value}; allowed is {allowed}")


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"--{name.replace('_', '-')} is {value!r}; known are {', '.join(known)}")


class CacheConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The KV pool. Sizes are in bytes; None: from memory that is free when the worker starts."""
    block_size: int = 16                        # tokens per block
    num_gpu_blocks_override: int | None = None  # usable blocks, on any device (the field's name for it)
    kv_cache_memory: int | None = None          # bytes of the pool
    gpu_memory_utilization: float = 0.9         # CUDA: share of the device that weights, activations and pool may use
    cpu_memory_share: float = 0.25              # CPU: share of free memory given to the pool when no size is named
    kv_cache_dtype: str = "auto"                # auto: as computed, on a CPU int8 with int8 and 4-bit weights and
                                                # bfloat16 with blocks of a Q8_0 file; fp8 is e4m3
    enable_prefix_caching: bool = True
    enable_partial_reuse: bool = True           # reuse the cached part of a block that matches only in part, by copy
    swap_space: int = 0                         # bytes of host memory for swapped-out blocks; 0: no swapping

    def __post_init__(self) -> None:
        _range("block_size", self.block_size, 1, 1024)
        if self.num_gpu_blocks_override is not None:
            _range("num_gpu_blocks_override", self.num_gpu_blocks_override, 1)
        if self.kv_cache_memory is not None:
            _range("kv_cache_memory", self.kv_cache_memory, 1)
        _range("gpu_memory_utilization", self.gpu_memory_utilization, 0.05, 1.0)
        _range("cpu_memory_share", self.cpu_memory_share, 0.01, 0.95)
        _one_of("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        _range("swap_space", self.swap_space, 0)


class SchedulerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the scheduler may do in one step."""
    max_num_seqs: int = 128                     # requests running at once
    max_num_batched_tokens: int = 256           # tokens of one step
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0       # longest prefill chunk; 0: the whole budget
    policy: str = "fcfs"
    preemption_mode: str = "recompute"
    async_scheduling: bool = True               # plan a step before the results of the last one are read
    max_plans_in_flight: int = 2                # steps planned and not yet committed, with async_scheduling
    num_speculative_tokens: int = 0             # drafts of a row that one step verifies at most; 0: no drafts
    priority_aging_steps: int = 1000            # a request that waits this long ranks one priority level better
    lpm_max_overtakes: int = 16                 # a request that so many others overtook goes first
    max_num_queued_reqs: int = 0                # waiting requests beyond which new ones are refused; 0: no bound
    max_num_queued_tokens: int = 0              # the same for the sum of their tokens

    def __post_init__(self) -> None:
        _range("max_num_seqs", self.max_num_seqs, 1, 65536)
        _range("max_num_batched_tokens", self.max_num_batched_tokens, 1, 1 << 24)
        _range("long_prefill_token_threshold", self.long_prefill_token_threshold, 0)
        _range("priority_aging_steps", self.priority_aging_steps, 1, 1 << 30)
        _range("lpm_max_overtakes", self.lpm_max_overtakes, 1)
        _range("max_plans_in_flight", self.max_plans_in_flight, 1, 8)
        _range("num_speculative_tokens", self.num_speculative_tokens, 0, 16)
        _range("max_num_queued_reqs", self.max_num_queued_reqs, 0)
        _range("max_num_queued_tokens", self.max_num_queued_tokens, 0)
        _one_of("scheduling_policy", self.policy, POLICIES)
        _one_of("preemption_mode", self.preemption_mode, PREEMPTION_MODES)


class ModelSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which weights, and as what."""
    files: ModelFiles
    dtype: str = "auto"                         # compute and weight dtype
    max_model_len: int | None = None            # None: the model's own limit
    seed: int = 0                               # of dummy weights
    quantization: str = "auto"                  # of weights; auto: what the file holds if products take it, else none
    logits_processors: tuple[str, ...] = ()     # name=module:function, registered in the worker
    batch_invariant: bool = False               # refuse to start where a row's result depends on the rows beside it
    prompt_lookup_max: int = 4                  # newest tokens looked up for drafts (scheduler.num_speculative_tokens)
    prompt_lookup_min: int = 2                  # fewest that must have occurred before

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("quantization", self.quantization, QUANTIZATIONS)
        _range("prompt_lookup_max", self.prompt_lookup_max, 1, 32)
        _range("prompt_lookup_min", self.prompt_lookup_min, 1, self.prompt_lookup_max)
        if self.max_model_len is not None:
            _range("max_model_len", self.max_model_len, 1)


SAFE_KEY_CHARS = 8                              # a shorter key is guessed soon


class FrontendSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The HTTP server. None of it concerns AsyncLLM."""
    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str = ""                 # "": the name given as --model
    drain_timeout: float = 0.0                  # seconds that running streams get after SIGTERM; 0: they end at once
    metrics_prefix: str = "vllm"                # namespace of /metrics: dashboards made for vLLM work as they are
    otlp_traces_endpoint: str = ""              # of an OpenTelemetry collector, OTLP over HTTP; "": no traces
    return_timings: bool = False                # tell each request its own times, unless it says otherwise
    api_servers: int = 1                        # processes that serve the port, all on one core
    max_connections: int = 4096                 # open at once per process; idle ones make room for new ones, else 503
    api_keys: tuple[str, ...] = ()              # none: whoever reaches the port may use it
    admin_api_keys: tuple[str, ...] = ()        # none: there are no control routes
    share_prefix_cache: bool = False            # between clients with different keys, who can then time each other
    allowed_origins: tuple[str, ...] = ()       # of web pages elsewhere that may call this server; "*": all
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    ssl_keyfile: str = ""                       # "": the key is in ssl_certfile
    ssl_certfile: str = ""                      # "": plain HTTP

    def __post_init__(self) -> None:
        _range("port", self.port, 0, 65535)
        if self.otlp_traces_endpoint and not re.fullmatch(r"https?://[^/\s]+(/\S*)?", self.otlp_traces_endpoint):
            raise ConfigError(f"--otlp-traces-endpoint is {self.otlp_traces_endpoint!r}; it takes the URL of OTLP over "
                              "HTTP, for example http://localhost:4318/v1/traces")
        if not re.fullmatch("[a-zA-Z_][a-zA-Z0-9_]*", self.metrics_prefix):
            raise ConfigError(f"--metrics-prefix is {self.metrics_prefix!r}; it takes letters, digits and _, for "
                              "example threefold")
        _range("drain_timeout", self.drain_timeout, 0.0, 86_400.0)
        _range("api_servers", self.api_servers, 1, 64)
        _range("max_connections", self.max_connections, 1, 1 << 20)
        for name, least in (("api_key", 1), ("admin_api_key", SAFE_KEY_CHARS)):
            for key in getattr(self, f"{name}s"):
                if not least <= len(key) <= 256 or not all("!" <= char <= "~" for char in key):
                    raise ConfigError(f"--{name.replace('_', '-')} has a key of {len(key)} characters; allowed are "
                                      f"{least} to 256, printable ASCII without spaces")
        if self.ssl_keyfile and not self.ssl_certfile:
            raise ConfigError("--ssl-keyfile needs a certificate: add --ssl-certfile FILE")
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ConfigError("--allow-credentials needs named origins; replace * in --allowed-origins")

    def __repr__(self) -> str:
        """Without the keys, so that no log line or traceback shows one."""
        shown = {name: getattr(self, name) for name in self.__struct_fields__}
        for name in ("api_keys", "admin_api_keys"):
            shown[name] = f"<{len(shown[name])} hidden>"
        return f"FrontendSection({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything. `serve` is False when AsyncLLM is the frontend."""
    model: ModelSection
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    frontend: FrontendSection = FrontendSection()
    device: str = "auto"                        # "cpu", "cuda" or "auto"
    attention_backend: str = "auto"
    cuda_graphs: str = "auto"                   # of decode steps; static: padded like them, not captured, on any device
    num_threads: int = 0                        # compute threads of a CPU worker; 0: one per usable core
    restart: bool = True                        # restart a process that ends; False: end with it
    flight_recorder: bool = True                # keep the core's last messages, to be replayed after a fault
    flight_recorder_dir: str = ""               # where recordings are written; "": the folder for temporary files
    serve: bool = True
    log_level: str = "info"

    def __post_init__(self) -> None:
        _one_of("device", self.device, ("auto", "cpu", "cuda"))
        _one_of("cuda_graphs", self.cuda_graphs, CUDA_GRAPHS)
        _range("num_threads", self.num_threads, 0, 4096)
        _one_of("log_level", self.log_level, LOG_LEVELS)
        if self.scheduler.num_speculative_tokens >= self.cache.block_size:
            raise ConfigError(f"--num-speculative-tokens is {self.scheduler.num_speculative_tokens} and --block-size "
                              f"{self.cache.block_size}; drafts must be fewer than the tokens of a block")
        if self.scheduler.preemption_mode != "recompute" and self.cache.swap_space == 0:
            raise ConfigError(f"--preemption-mode {self.scheduler.preemption_mode} needs host memory: add "
                              "--swap-space, for example --swap-space 1GiB")


class Peer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where another process listens."""
    address: str                                # ZeroMQ endpoint
    epoch: int                                  # its restart counter; messages of an older one are dropped


class WorkerProcess(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The section of one worker."""
    rank: int
    listen: str
    epoch: int
    model: ModelSection
    cache: CacheConfig
    max_num_seqs: int
    max_num_batched_tokens: int
    num_speculative_tokens: int
    device: str
    attention_backend: str
    cuda_graphs: str
    num_threads: int
    run_dir: str
    log_level: str


class CoreProcess(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The section of the engine core."""
    listen: str
    epoch: int
    workers: list[Peer]
    cache: CacheConfig
    scheduler: SchedulerConfig
    hash_key: bytes                             # secret of this run, keys the prefix cache
    flight_recorder: bool
    flight_recorder_dir: str
    run_dir: str
    log_level: str


class FrontendProcess(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The section of one HTTP frontend."""
    rank: int                                   # among the API servers of this engine
    number: int                                 # high bits of its request ids; another one after each restart
    core: Peer
    model: ModelSection
    frontend: FrontendSection
    listen_fd: int                              # the TCP socket, bound by the supervisor
    run_dir: str
    log_level: str
