"""The worker and the core on the GPU at hand: same tokens in every configuration, no waits, and how fast steps are.

    python -m bench.gpu_engine [--json FILE] [--seconds 240] [--only TEXT]
    TRITON_INTERPRET=1 python -m bench.gpu_engine --dry     the same code, tiny shapes, no GPU: times mean nothing

Ceilings are measured first (a copy, a bf16 matrix product). A decode step's ideal time is the bytes of its weights,
keys and values over the copy's bandwidth; a prefill's is its operations over the product's rate; shares are ideal over
measured. Weights are random. Prints one table last, and one JSON object after it. Exit status 1 if a check fails; a
missed target is reported, not an error.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from typing import Any

import numpy as np
import torch

from bench.gpu_bench import (BF16, FP8, Bench, capability_of_device, make_bench, make_parser, measure_ceilings,
                             run_parts)
from bench.gpu_in_process import InProcessEngine, Setup, blocks_for, decoding_rows, make_runner, random_model
from ipc.aliases import ALIASES
from ipc.capacity import weight_count
from ipc.messages import NewRow, SchedulerOutput
from ipc.model_config import ModelConfig, from_hf_config
from ipc.sampling_params import SamplingParams
from worker.attention.base import BatchMeta
from worker.attention.registry import get_backend
from worker.kv_pool import KVPool, kv_bytes_per_block
from worker.kv_quant import FP8_CAPABILITY
from worker.models.flat_model import FlatModel

TINY: dict[str, Any] = dict(vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                            num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=4096)
CHECKED: dict[str, Any] = dict(vocab_size=8192, hidden_size=512, intermediate_size=1536, num_hidden_layers=4,
                               num_attention_heads=8, num_key_value_heads=2, head_dim=64, max_position_embeddings=4096)


def shape(bench: Bench, name: str) -> ModelConfig:
    """The alias's shape; in a dry run a tiny one of the same family."""
    raw = ALIASES[name].hf_config
    return from_hf_config({**raw, **TINY, "eos_token_id": 1, "bos_token_id": 1} if bench.dry else raw, name)


def checked_config(bench: Bench) -> ModelConfig:
    """A model small enough to run many times."""
    raw = {**ALIASES["qwen3-8b"].hf_config, **(TINY if bench.dry else CHECKED), "eos_token_id": 1, "bos_token_id": 1}
    return from_hf_config(raw, "check")


# ------------------------------------------------------------ checks

def check_tokens(bench: Bench) -> None:
    """The same greedy tokens with and without graphs, overlap, chunks, and with a pool so small that it preempts.

    In float32 and with weights that make most logits differ by far more than a rounding; where an output departs at
    two tokens whose logits do not, that is no error.
    """
    if not bench.wants("engine: same tokens"):
        return
    config = checked_config(bench)
    model = random_model(config, torch.float32, bench.device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.mul_(6.0 if not bench.dry else 15.0)
    rng = np.random.default_rng(3)
    count, longest, outputs = (2, 20, 3) if bench.dry else (24, 300, 48)
    shared = rng.integers(2, config.vocab_size, longest // 2).tolist()
    prompts = [rng.integers(2, config.vocab_size, 1 + rng.integers(longest // 2)).tolist() for _ in range(count)]
    prompts = [shared + prompt if i % 3 == 0 else prompt for i, prompt in enumerate(prompts)]
    ample = sum(-(-(len(prompt) + outputs + 1) // 16) for prompt in prompts) + 8
    few = (1 if bench.dry else 3) * -(-(longest + outputs + 1) // 16) + 1
    graphs = "static" if bench.dry else "on"
    seats = 4 if bench.dry else 32
    base: dict[str, Any] = dict(num_blocks=ample, seats=seats, budget=64 if bench.dry else 512, max_model_len=1024)
    setups = {
        "sync": Setup(**base, is_overlapped=False),
        "async": Setup(**base),
        f"async, graphs {graphs}": Setup(**base, graphs=graphs),
        "sync, graphs static": Setup(**base, graphs="static", is_overlapped=False),
        "async, chunks of 7": Setup(**base, graphs=graphs, scheduler=dict(long_prefill_token_threshold=7)),
        "recompute": Setup(**{**base, "num_blocks": few}, graphs=graphs),
        "swap": Setup(**{**base, "num_blocks": few}, num_host_blocks=ample, graphs=graphs,
                      scheduler=dict(preemption_mode="swap")),
    }
    if bench.dry:  # the interpreter is slow
        setups = {name: setups[name] for name in ("sync", "async, graphs static", "swap")}
    wanted: list[list[int]] = []
    for name, setup in setups.items():
        engine = InProcessEngine(model, setup, bench.device)
        tokens = engine.run(prompts, outputs)
        wanted = wanted or tokens
        different = sum(a != b and not is_near_tie(model, prompt, a, b, bench.device)
                        for prompt, a, b in zip(prompts, tokens, wanted, strict=True))
        preempted = engine.core.scheduler.stats.num_preemptions
        is_whole = all(len(row) == outputs for row in tokens) and (bench.dry or setup.num_blocks > few or preempted > 0)
        bench.rows.append({"name": f"check: engine, {name} ({preempted} preemptions)", "error": float(different),
                           "limit": 0.0, "ok": different == 0 and is_whole})


@torch.inference_mode()
def is_near_tie(model: FlatModel, prompt: list[int], ours: list[int], theirs: list[int], device: str) -> bool:
    """Whether two outputs depart from each other at tokens whose logits are one rounding apart."""
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), None)
    if at is None:                              # one is the beginning of the other
        return False
    tokens = [*prompt, *theirs[:at]]
    pool = KVPool(backend := get_backend("reference", device), len(tokens) // 16 + 1, 16, model.kv_spec(),
                  model.embed_tokens.dtype, device)
    positions = torch.arange(len(tokens), device=device)
    table = torch.arange(1, pool.num_blocks + 1, dtype=torch.int32, device=device)[None]
    meta = BatchMeta.of(np.array([0, len(tokens)], np.int32), np.array([len(tokens)], np.int32), table, positions + 16,
                        16)
    hidden = model(torch.tensor(tokens, device=device), positions, pool.caches, meta, backend)
    logits = model.compute_logits(hidden[-1:])[0]
    return bool((logits[ours[at]] - logits[theirs[at]]).abs() < 1e-4 * logits.std())


def check_no_waits(bench: Bench) -> None:
    """A decode step of async scheduling is launched without any synchronisation: torch raises at one."""
    if not bench.wants("engine: no host wait in a decode step"):
        return
    model, rows, steps = random_model(checked_config(bench), BF16, bench.device), 2 if bench.dry else 16, 6
    error = ""
    for graphs in ("off",) if bench.dry else ("off", "on"):
        setup = Setup(blocks_for(rows, 40, steps, 16), seats=rows, budget=rows, max_model_len=128, graphs=graphs)
        runner = make_runner(model, setup, bench.device)
        last = runner.launch(decoding_rows(runner, rows, 40, steps))
        for number in range(2, steps):
            if bench.device != "cpu":
                torch.cuda.set_sync_debug_mode("error")
            try:
                step = runner.launch(SchedulerOutput(number, rows), 0, no_wait_allowed)
            except RuntimeError as raised:
                error = f"graphs {graphs}: {raised}"
                break
            finally:
                if bench.device != "cpu":
                    torch.cuda.set_sync_debug_mode("default")
            runner.finish(last)
            last = step
        runner.finish(last)
    if error:
        print(error, file=sys.stderr)
    bench.rows.append({"name": "check: engine, no host wait in a decode step", "error": float(bool(error)),
                       "limit": 0.0, "ok": not error})


def no_wait_allowed() -> None:
    raise RuntimeError("a pure decode step asked for the result of the step before")


# ------------------------------------------------------------ figures

def time_decode(bench: Bench, name: str, model: FlatModel, rows: int, context: int, target: float | None, *,
                limit_us: float | None = None, gap_us: float | None = None) -> None:
    """Steps of `rows` decoding rows, launched one ahead. Share: bytes of weights, keys and values over bandwidth."""
    if not bench.wants(name):
        return
    warm, steps = (1, 2) if bench.dry else (5, 60)
    num = warm + steps + 2
    setup = Setup(blocks_for(rows, context, num, 16), seats=rows, budget=rows, max_model_len=context + num + 8,
                  graphs="static" if bench.dry else "on")
    collect(bench)
    runner = make_runner(model, setup, bench.device)
    last = runner.launch(decoding_rows(runner, rows, context, num))
    begin, launch_s, device_ns = 0.0, 0.0, 0
    for number in range(2, num):
        if number == 2 + warm:
            synchronize(bench)
            begin, launch_s, device_ns = time.perf_counter(), 0.0, 0
        launched = time.perf_counter()
        step = runner.launch(SchedulerOutput(number, rows))
        launch_s += time.perf_counter() - launched
        device_ns += runner.finish(last).device_ns
        last = step
    runner.finish(last)
    seconds = (time.perf_counter() - begin) / steps
    config = model.config
    kv_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * BF16.itemsize
    weights = weight_count(config) * BF16.itemsize
    if not config.tie_word_embeddings:  # only some rows of the embedding are read
        weights -= config.vocab_size * config.hidden_size * BF16.itemsize
    bench.report(name, seconds, bytes_moved=weights + rows * context * kv_token, target=target)
    gap = max(0.0, seconds - device_ns / 1e9 / steps)
    for what, value, limit in ((f"{name}: host gap", gap * 1e6, gap_us), (f"{name}: step", seconds * 1e6, limit_us),
                               (f"{name}: host launch", launch_s / steps * 1e6, None)):
        bench.rows.append({"name": what, "us": round(value, 1), "at_most": limit})


def collect(bench: Bench) -> None:
    """Give back what earlier runners held: they and their graphs refer to each other."""
    gc.collect()
    if bench.device != "cpu":
        torch.cuda.empty_cache()


def synchronize(bench: Bench) -> None:
    """Wait for the device."""
    if bench.device != "cpu":
        torch.cuda.synchronize()


def time_prefill(bench: Bench, model: FlatModel, num_tokens: int, target: float) -> None:
    """One prompt, computed in one step."""
    if not bench.wants(name := f"prefill {num_tokens}, qwen3-8b"):
        return
    collect(bench)
    setup = Setup(-(-(num_tokens + 1) // 16), seats=1, budget=num_tokens, max_model_len=num_tokens + 8)
    runner = make_runner(model, setup, bench.device)
    tokens = np.arange(num_tokens, dtype=np.int32) % model.config.vocab_size
    blocks = np.arange(1, setup.num_blocks + 1, dtype=np.int32)
    new = NewRow(1, num_tokens, num_tokens, 0, len(blocks), SamplingParams(temperature=0.0, seed=1))
    plan = SchedulerOutput(1, 1, new=[new], new_tokens=tokens.data.cast("B"), new_blocks=blocks.data.cast("B"),
                           reset=True, counts=np.array([0, num_tokens], np.int32).data.cast("B"))
    times = []
    for _ in range(1 if bench.dry else 4):
        begin = time.perf_counter()
        runner.finish(runner.launch(plan))
        times.append(time.perf_counter() - begin)
    bench.report(name, min(times), operations=operations(model.config, [(num_tokens, num_tokens)]), target=target)


def products(config: ModelConfig, tokens: int, rows: int) -> float:
    """Operations of a step's linears, none of them experts, where `rows` of its tokens have logits: in the last layer
    the others stop at their keys and values."""
    heads = (1 if config.tie_word_embeddings else 2) * config.vocab_size * config.hidden_size
    last = config.hidden_size * (config.num_attention_heads * config.head_dim + 3 * config.intermediate_size)
    head = config.vocab_size * config.hidden_size
    return 2.0 * ((weight_count(config) - heads - last) * tokens + (last + head) * rows)


def operations(config: ModelConfig, rows: list[tuple[int, int]]) -> float:
    """Of a step whose rows compute t tokens at the end of n, the last of which has logits: products and attention."""
    layers = config.num_hidden_layers
    pairs = sum((layers - 1) * (t * n - t * (t - 1) // 2) + n for t, n in rows)
    return (products(config, sum(t for t, _ in rows), len(rows))
            + 4.0 * config.head_dim * config.num_attention_heads * pairs)


def measure_throughput(bench: Bench, model: FlatModel) -> None:
    """256 requests, 512 in and 256 out, against the roofline of the very steps that ran."""
    if not bench.wants(name := "throughput: 256 x (512 in, 256 out), qwen3-8b"):
        return
    count, prompt, outputs = (2, 5, 2) if bench.dry else (256, 512, 256)
    setup = Setup(count * -(-(prompt + outputs + 1) // 16) + 8, seats=count, budget=64 if bench.dry else 8192,
                  max_model_len=1024, graphs="static" if bench.dry else "on")
    collect(bench)
    engine = InProcessEngine(model, setup, bench.device)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(2, model.config.vocab_size, prompt).tolist() for _ in range(count)]
    begin = time.perf_counter()
    engine.run(prompts, outputs)
    seconds = time.perf_counter() - begin
    config = model.config
    weights = weight_count(config) * BF16.itemsize
    kv_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * BF16.itemsize
    ideal = sum(max((weights + rows * (prompt + outputs / 2) * kv_token) / bench.copy_rate,
                    products(config, tokens, rows) / bench.matmul_rate) for rows, tokens in engine.plans)
    bench.rows.append({"name": name, "us": round(seconds * 1e6), "rate": f"{count * outputs / seconds:.0f} tok/s",
                       "share": ideal / seconds, "target": 0.6, "tokens_per_s": count * outputs / seconds})


def measure_pool(bench: Bench, config: ModelConfig) -> None:
    """Tokens that a pool of fp8 holds, against bfloat16."""
    if bench.dry or capability_of_device() >= FP8_CAPABILITY:
        backend, spec = get_backend("triton", bench.device), (config.num_hidden_layers, config.num_key_value_heads,
                                                              config.head_dim)
        wide, narrow = (kv_bytes_per_block(backend, spec, 16, dtype) for dtype in (BF16, FP8))
        bench.rows.append({"name": "fp8 KV: tokens of a pool against bfloat16", "times": round(wide / narrow, 3),
                           "at_least": None if bench.dry else 1.95})


class Figures:
    """The figures of whole models, each a part of its own; one model is in memory at a time."""

    def __init__(self, bench: Bench) -> None:
        self._bench, self._name = bench, ""
        self._model: FlatModel | None = None
        self.rows, self.context, self.chunk = (2, 20, 24) if bench.dry else (64, 1024, 8192)

    def model(self, name: str) -> FlatModel:
        """Random weights, made when they are not there."""
        if self._model is None or name != self._name:
            self._model = None
            collect(self._bench)
            self._name, self._model = name, random_model(shape(self._bench, name), BF16, self._bench.device)
        return self._model

    def decode_of_the_small_model(self, bench: Bench) -> None:
        time_decode(bench, "decode 1 row, qwen3-0.6b", self.model("qwen3-0.6b"), 1, self.context, None, limit_us=1300)

    def decode_one_row(self, bench: Bench) -> None:
        time_decode(bench, "decode 1 row, qwen3-8b", self.model("qwen3-8b"), 1, self.context, 0.85)

    def decode_many_rows(self, bench: Bench) -> None:
        time_decode(bench, f"decode {self.rows} rows x {self.context}, qwen3-8b", self.model("qwen3-8b"), self.rows,
                    self.context, 0.75, gap_us=50)

    def prefill(self, bench: Bench) -> None:
        time_prefill(bench, self.model("qwen3-8b"), self.chunk, 0.55)

    def throughput(self, bench: Bench) -> None:
        measure_throughput(bench, self.model("qwen3-8b"))

    def pool(self, bench: Bench) -> None:
        measure_pool(bench, shape(bench, "qwen3-8b"))

    def decode_many_rows_of_the_small_model(self, bench: Bench) -> None:
        time_decode(bench, f"decode {self.rows} rows x {self.context}, qwen3-0.6b", self.model("qwen3-0.6b"), self.rows,
                    self.context, None)


def main() -> None:
    """See the module."""
    args, bench = make_bench(make_parser(__doc__, 240.0))
    head = {"benchmark": "gpu_engine", "chip": "interpreter" if args.dry else torch.cuda.get_device_name(),
            "torch": torch.__version__}
    figures = Figures(bench)
    parts = (measure_ceilings, check_no_waits, check_tokens, figures.pool, figures.decode_of_the_small_model,
             figures.decode_one_row, figures.decode_many_rows, figures.prefill, figures.throughput,
             figures.decode_many_rows_of_the_small_model)
    result = run_parts(bench, parts, args.json, head)
    print(json.dumps({**result, "rows": len(bench.rows)}))
    sys.exit(1 if result["wrong"] else 0)


if __name__ == "__main__":
    main()
