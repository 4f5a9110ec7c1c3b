"""From options to a runner: device, threads, dtype, weights, backend, pool. Each "auto" is resolved here."""
from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ipc.capacity import capacity_text, flag_size, weights_warning
from ipc.config import WorkerProcess
from ipc.errors import ConfigError
from ipc.messages import NewRow, SchedulerOutput, WorkerReady
from ipc.sampling_params import SamplingParams
from worker.attention.base import AttentionBackend
from worker.attention.jit_layout import LayoutBackend
from worker.attention.registry import get_backend, resolve_backend
from worker.batch import BatchBuilder
from worker.decode_graphs import resolve_mode
from worker.jit import build, compiler
from worker.jit.upgrade import Upgrade, reason_to_wait
from worker.kv_pool import (RESERVED_BLOCKS, KVPool, check_host_memory, cpu_num_blocks, free_memory,
                            kv_bytes_per_block, measure_block_swap_ns, profile_num_blocks)
from worker.kv_quant import FP8_CAPABILITY, resolve_kv_dtype
from worker.model_runner import ModelRunner
from worker.models.flat_model import FlatModel
from worker.models.loader import load_model
from worker.models.quant_linear import Codes, quantize_linears
from worker.process_memory import forget_code
from worker.request_state import RequestState
from worker.sampling import jit_threads, processors
from worker.sampling.step import PROMPT_SLICE
from worker.sampling.vocabulary import num_valid_tokens
from worker.spec_decode.ngram import NgramDrafter
from worker.swap_stream import mover_of
from worker.warm_up import warm_up

if TYPE_CHECKING:
    from worker.main import Starting

logger = logging.getLogger("worker")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(option: str) -> str:
    if option == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if option == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: this torch build or machine has no CUDA device; use --device cpu")
    return option


def resolve_dtype(option: str, device: str, model_dtype: str) -> tuple[str, str]:
    """(dtype, reason)."""
    if option != "auto":
        return option, "as asked"
    if device == "cpu":
        return "float32", "the fastest exact matmul of CPUs"
    return model_dtype, "as in the model's config"


def compute_capability(device: str) -> int | None:
    """80 for compute capability 8.0; None: no GPU."""
    if device.split(":")[0] != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def largest_step(model: FlatModel, backend: AttentionBackend, block_size: int, dtype: torch.dtype, num_tokens: int,
                 num_logits: int, device: str) -> tuple[Callable[[], object], int]:
    """The step that needs most memory: one prompt of the whole budget, logits for every seat and its drafts
    or for a slice of prompt log-probabilities, in a pool of its own; and that pool's bytes."""
    pool = KVPool(backend, -(-num_tokens // block_size), block_size, model.kv_spec(), dtype, device)
    state = RequestState(1, num_tokens, block_size)
    plan = SchedulerOutput(1, 1, new=[NewRow(1, num_tokens, num_tokens, 0, pool.num_blocks, SamplingParams())],
                           new_tokens=memoryview(bytes(4 * num_tokens)),
                           new_blocks=np.arange(1, pool.num_blocks + 1, dtype=np.int32).data.cast("B"),
                           counts=np.array([0, num_tokens], np.int32).data.cast("B"))
    state.apply(plan)
    batch = BatchBuilder(state, num_tokens, device).build(plan)

    def run() -> object:
        if batch is None:
            raise RuntimeError("the largest step has no tokens")
        hidden = model(batch.input_ids, batch.positions, pool.caches, batch.meta, backend)
        return model.compute_logits(hidden[:max(num_logits, PROMPT_SLICE)])
    return run, sum(tensor.nbytes for cache in pool.caches for tensor in cache)


def count_bytes(model: FlatModel) -> int:
    """Of all weights, shared ones once."""
    return sum(p.numel() * p.element_size() for p in {id(p): p for p in model.parameters()}.values())


def quantize_weights(config: WorkerProcess, model: FlatModel, backend: AttentionBackend, device: str,
                     starting: Starting) -> tuple[int, str]:
    """(bytes of the weights, a line about them) once the linears are narrow. Raises ConfigError if they cannot be."""
    kind, capability = config.model.quantization, compute_capability(device)
    if kind.startswith("fp8") and capability is not None and capability < FP8_CAPABILITY:
        raise ConfigError(f"--quantization {kind} needs compute capability {FP8_CAPABILITY / 10}; this GPU has "
                          f"{capability / 10}; use int8")
    starting.begin("quantize weights")
    num_matrices = quantize_linears(model, kind, backend.ops, lambda fraction: starting.advance(0.999 * fraction))
    if device != "cpu":
        torch.cuda.empty_cache()
    num_bytes = count_bytes(model)
    text = f"{num_bytes / 2**20:.0f} MiB, {num_matrices} matrices as {kind}"
    starting.end(text)
    return num_bytes, text


def keeps_fp8(config: WorkerProcess, device: str) -> bool:
    """Whether the matrices of an fp8 checkpoint stay as they are stored."""
    capability = compute_capability(device)
    if config.model.files.config.fp8_block is None or config.model.quantization != "auto":
        return False
    is_able = capability is not None and capability >= FP8_CAPABILITY
    logger.info("the checkpoint's fp8 weights %s", "stay as they are" if is_able else
                f"are widened: only GPUs from compute capability {FP8_CAPABILITY / 10} on compute with them")
    return is_able


def make_drafter(config: WorkerProcess) -> NgramDrafter | None:
    """None: no drafts are asked for."""
    if config.num_speculative_tokens == 0:
        return None
    model = config.model
    logger.info("drafts: at most %d tokens after the last occurrence of the newest %d to %d",
                config.num_speculative_tokens, model.prompt_lookup_min, model.prompt_lookup_max)
    return NgramDrafter(config.num_speculative_tokens, model.prompt_lookup_max, model.prompt_lookup_min)


def prepare_device(runner: ModelRunner, max_tokens: int, starting: Starting, between: Callable[[], None]) -> None:
    """On CUDA: launch once what steps will launch, so that no request waits for a compiler; capture graphs, if they
    shall be there from the start. Each is a phase."""
    if runner.device == "cpu":
        return
    starting.begin("warm up kernels")
    between()
    largest = warm_up(runner, max_tokens, starting.advance)
    starting.end(f"steps of up to {largest} tokens")
    graphs = runner.graphs
    if graphs is not None and graphs.mode == "on":
        starting.begin("capture graphs")
        between()
        while runner.has_capture:
            runner.capture_next()
            starting.advance(0.999 - graphs.num_left / len(graphs.sizes))
        starting.end(f"{len(graphs.sizes)} sizes up to {graphs.sizes[-1]} rows")


def choose_model(config: WorkerProcess, device: str) -> build.Choice | None:
    """What the compiled model is built as; None: torch's runs. Raises ConfigError."""
    choice, why = build.choose(config, device)
    logger.info("%s model (%s)", "torch" if choice is None else "compiled", why if choice is None else choice.reason)
    return choice


def _out_of_memory(config: WorkerProcess, dtype: str, device: str) -> str:
    """What would fit instead."""
    if device == "cuda":
        torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0] if device == "cuda" else free_memory()[0]
    fix = weights_warning(config.model.files.config, dtype, free) or "free some memory, or take a smaller model"
    return f"out of memory while loading the weights; {fix}"


class Weights(NamedTuple):
    """What a sleeping worker keeps."""
    model: Any                                  # FlatModel, or JitModel, which has its interface
    backend: AttentionBackend                   # the compiled model's own; else made anew
    device: str
    upgrade: Upgrade | None                     # goes on meanwhile

    @staticmethod
    def of(runner: ModelRunner) -> Weights:
        """Those of a runner, in host memory."""
        if isinstance(runner.model, torch.nn.Module):
            runner.model.to("cpu")
        return Weights(runner.model, runner.backend, runner.device, runner.upgrade)


def build_runner(config: WorkerProcess, starting: Starting, between: Callable[[], None],
                 kept: Weights | None = None) -> tuple[ModelRunner, WorkerReady]:
    """Load everything; `kept`: all but these weights. `between` is called between phases. Raises ConfigError with what
    to change."""
    device = resolve_device(config.device)
    threads = max(1, config.num_threads)
    torch.set_num_threads(threads)
    model_config = config.model.files.config
    limit = model_config.max_position_embeddings
    max_model_len = config.model.max_model_len or limit
    if max_model_len > limit:
        raise ConfigError(f"--max-model-len is {max_model_len}; the model's limit is {limit}")
    processors.load(config.model.logits_processors)
    dtype_name, why = resolve_dtype(config.model.dtype, device, model_config.dtype)
    logger.info("device %s, dtype %s (%s), %d compute threads", device, dtype_name, why, threads)
    dtype = DTYPES[dtype_name]
    upgrade = kept.upgrade if kept is not None else None
    choice = upgrade.choice if upgrade is not None else choose_model(config, device)
    if choice is not None and kept is None and not compiler.is_compiled():
        reason = reason_to_wait(config, free_memory()[0])
        upgrade = Upgrade(config, choice) if reason is None else None
        logger.info("the kernels were not compiled on this machine yet: %s",
                    "torch serves meanwhile" if reason is None else f"the start waits ({reason})")
    if choice is not None and upgrade is None:
        starting.begin(Upgrade.phase)
        between()
        compilation = compiler.begin(model_config.vocab_size, "all") if kept is None else None
        if compilation is not None and compilation.wait(starting.advance, between) is not None:
            choice = choose_model(config, device)       # anew: without kernels
        else:
            torch.set_num_threads(1)            # one pool of threads computes: the kernels' own
            build.start_kernels(threads)
            forget_code()                       # before the weights, which then lie in its room
        starting.end()
    compilation = None                          # of what the torch model's rows are sampled with, beside what follows
    if choice is None:
        compilation = compiler.begin(model_config.vocab_size, "sampling" if device == "cpu" else "counts")

    narrow_ops = ahead = None
    valid_tokens = num_valid_tokens(config.model.files)
    if choice is None:
        backend_name, reason = resolve_backend(config.attention_backend, device)
        backend = get_backend(backend_name, device)
        narrow_ops = backend.ops if keeps_fp8(config, device) else None
        if device == "cuda" and backend_name == "triton" and kept is None:
            from worker.compile_ahead import compile_ahead
            ahead = compile_ahead(config, dtype_name, max_model_len, narrow_ops is not None, valid_tokens)
    starting.begin("load weights")
    between()
    model: Any                                  # FlatModel, or JitModel, which has its interface
    try:
        if kept is not None:
            is_torch = isinstance(kept.model, torch.nn.Module)
            model = kept.model.to(kept.device) if is_torch else kept.model
            num_bytes = count_bytes(model) if is_torch else model.nbytes
            stored = f"{num_bytes / 2**20:.0f} MiB, kept"
        elif choice is None or upgrade is not None:
            model = load_model(config.model.files, dtype=dtype_name, device=device, seed=config.model.seed,
                               progress=lambda fraction: starting.advance(min(fraction, 0.999)), narrow_ops=narrow_ops)
            num_bytes, is_narrow = count_bytes(model), any(isinstance(part, Codes) for part in model.modules())
            stored = f"{num_bytes / 2**20:.0f} MiB, {dtype_name}{' and fp8 as stored' if is_narrow else ''}"
        else:
            model, backend, stored = build.build(config, choice, lambda f: starting.advance(min(f, 0.999)))
            num_bytes = model.nbytes
    except (MemoryError, RuntimeError) as error:
        if not (isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in str(error)):
            raise
        raise ConfigError(_out_of_memory(config, dtype_name, device)) from error
    starting.end(stored)

    between()
    if choice is not None and upgrade is not None:
        backend, dtype = LayoutBackend(), choice.kv_dtype
        backend_name, reason = backend.name, "until the kernels are compiled"
    elif choice is None and kept is None and config.model.quantization not in ("auto", "none"):
        num_bytes, stored = quantize_weights(config, model, backend, device, starting)
    if ahead is not None:
        starting.begin(ahead.phase)
        between()
        starting.end(ahead.wait(starting.advance))
    if compilation is not None:
        starting.begin(Upgrade.phase)
        between()
        compilation.wait(starting.advance, between)
        starting.end("of the sampler")
    starting.begin("size the KV pool")
    if choice is None:
        dtype, why = resolve_kv_dtype(config.cache.kv_cache_dtype, dtype, compute_capability(device))
        logger.info("keys and values %s (%s)", str(dtype).removeprefix("torch."), why)
    else:
        backend, dtype = kept.backend if kept is not None else backend, choice.kv_dtype
        backend_name, reason = backend.name, "the compiled model's own"
    logger.info("attention backend %s (%s)", backend_name, reason)
    cache, size = config.cache, config.cache.block_size
    seats = min(config.max_num_seqs, config.max_num_batched_tokens)
    kv_spec: tuple[int, int, int] = model.kv_spec()
    block_bytes = kv_bytes_per_block(backend, kv_spec, size, dtype)
    useful = seats * -(-max_model_len // size)
    if cache.num_gpu_blocks_override is not None:
        num_blocks, text = cache.num_gpu_blocks_override, f"{cache.num_gpu_blocks_override} blocks, as asked"
    elif device == "cuda" and cache.kv_cache_memory is None:
        longest = min(config.max_num_batched_tokens, max_model_len)
        logits = min(seats * (1 + config.num_speculative_tokens), config.max_num_batched_tokens)
        step, dummy_bytes = largest_step(model, backend, size, dtype, longest, logits, device)
        num_blocks, text = profile_num_blocks(step, block_bytes, device=device, dummy_bytes=dummy_bytes,
                                              utilization=cache.gpu_memory_utilization)
        del step                                # and its pool
        num_blocks = min(num_blocks, useful)
    else:
        if device == "cpu" and cache.kv_cache_memory is not None:
            check_host_memory(cache.kv_cache_memory)
        try:
            num_blocks, text = cpu_num_blocks(block_bytes, kv_cache_memory=cache.kv_cache_memory,
                                              share=cache.cpu_memory_share, max_useful_blocks=useful)
        except ConfigError as error:
            whole = (-(-max_model_len // size) + RESERVED_BLOCKS) * block_bytes
            raise ConfigError(f"{error}; --kv-cache-memory {flag_size(whole)} holds one request of {max_model_len} "
                              "tokens, a smaller --max-model-len needs less") from None
    pool = KVPool(backend, num_blocks, size, kv_spec, dtype, device)
    num_host_blocks = cache.swap_space // block_bytes
    swap_block_ns = measure_block_swap_ns(pool, num_host_blocks, mover_of(pool))
    if swap_block_ns:
        logger.info("swap space of %d blocks; one out and back takes %d us", num_host_blocks, swap_block_ns // 1000)
    starting.end(text)
    try:
        graphs, reason = resolve_mode(config.cuda_graphs, device, backend_name)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    is_resident = backend_name == "triton"
    logger.info("CUDA graphs %s (%s); batches are made on the %s", graphs, reason,
                "device" if is_resident or graphs != "off" else "host")
    runner = ModelRunner(model, backend, pool, num_host_blocks, seats=seats, max_tokens=config.max_num_batched_tokens,
                         max_model_len=max_model_len, eos_token_ids=model_config.eos_token_ids, device=device,
                         num_valid_tokens=valid_tokens, files=config.model.files,
                         drafter=make_drafter(config), graphs=graphs, is_resident=is_resident,
                         upgrade=upgrade)
    prepare_device(runner, config.max_num_batched_tokens, starting, between)
    if ahead is not None:
        ahead.mark()
    if device == "cpu":
        jit_threads.set_num_threads(threads)
    if device == "cpu" and upgrade is None:
        jit_threads.warm_up(model_config.vocab_size)
    words = capacity_text(num_bytes, block_bytes, num_blocks, size, max_model_len)
    detail = (f"{config.model.files.served_name}: {model_config.architecture}, {stored} on {device}, attention "
              f"{backend_name}; {words} ({num_blocks} blocks of {size})")
    return runner, WorkerReady(num_blocks, num_host_blocks, max_model_len, model_config.vocab_size,
                               model_config.eos_token_ids, dtype_name, detail, swap_block_ns)
