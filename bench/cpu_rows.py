"""The five loads of a CPU server, in one process: the real core plans, the real worker computes, nothing is sent.

For each load: output tok/s (prefill: input tok/s), the share of this machine's limit, and where the time goes. The
limit of a step is the longer of two times: to read what it must read (weights as stored, the head when a token is
sampled, keys and values of all its contexts) at the measured bandwidth, and to compute its products at the measured
peak of the route's kernel. A load's limit is the sum over its steps.
"""
from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np
import torch

from engine_core.core import EngineCore
from ipc.config import CacheConfig, SchedulerConfig
from ipc.messages import AddRequest, WorkerReady
from ipc.sampling_params import SamplingParams
from worker.jit.model import JitModel
from worker.kv_pool import KVPool
from worker.model_runner import ModelRunner

BLOCK_SIZE, NUM_BLOCKS, SEATS, BUDGET, MAX_LEN = 16, 1024, 32, 256, 1024
Workload = list[tuple[np.ndarray, int]]         # (prompt int32, output tokens)


class Limits(NamedTuple):
    """What this machine can do at most."""
    bytes_s: float                              # read from memory
    ops_s: float                                # products and sums of the route's kernel


def prompt_weights(model: JitModel) -> tuple[int, int]:
    """Weights that a prompt token meets, and those that only a row with logits does: in the last layer, all behind keys
    and values."""
    counts = [{part: layer.num_out * layer.num_k for part, layer in parts.items()} for parts in model.layers]
    last = sum(counts[-1].values()) - counts[-1]["qkv"]
    return sum(sum(layer.values()) for layer in counts) - last, last


class Costs(NamedTuple):
    """What a step of a model must read and compute."""
    layer_bytes: int
    head_bytes: int
    layer_weights: int                          # a token of the step meets
    head_weights: int                           # a row with logits meets besides: of the last layer and the head
    kv_token_bytes: int

    @classmethod
    def of(cls, model: JitModel, kv_itemsize: int) -> Costs:
        layers, kv_heads, dim = model.kv_spec()
        parts = [layer for parts in model.layers for layer in parts.values()]
        every, last = prompt_weights(model)
        return cls(sum(p.nbytes for p in parts), model.head.nbytes, every,
                   last + model.head.num_out * model.head.num_k, layers * kv_heads * dim * 2 * kv_itemsize)

    def limit_s(self, limits: Limits, tokens: int, sampled: int, context: int) -> float:
        """Least seconds of a step of `tokens` tokens, of which `sampled` rows have logits, over `context` tokens."""
        read = self.layer_bytes + (self.head_bytes if sampled else 0) + context * self.kv_token_bytes
        operations = 2 * (tokens * self.layer_weights + sampled * self.head_weights)
        return max(read / limits.bytes_s, operations / limits.ops_s)


def loads(vocab_size: int, seed: int = 0) -> dict[str, Workload]:
    """The loads of the comparison with peers: c1, c8, c32, prefill and a shared prefix."""
    rng = np.random.default_rng(seed)

    def tokens(count: int) -> np.ndarray:
        return rng.integers(0, vocab_size, count, dtype=np.int32)

    equal = {name: [(tokens(256), output) for _ in range(count)]
             for name, count, output in (("c1", 1, 128), ("c8", 8, 128), ("c32", 32, 128), ("prefill", 8, 1))}
    prefix = tokens(192)
    shared = [(np.concatenate([prefix, tokens(int(rng.integers(8, 49)))]), int(rng.integers(8, 41)))
              for _ in range(16)]
    return {**equal, "shared": shared}


class Rig:
    """Core and worker of one model, joined by calls."""

    def __init__(self, model: Any, backend: Any, dtype: torch.dtype) -> None:
        pool = KVPool(backend, NUM_BLOCKS, BLOCK_SIZE, model.kv_spec(), dtype)
        self.kv_itemsize = dtype.itemsize
        self.runner = ModelRunner(model, backend, pool, 0, seats=SEATS, max_tokens=BUDGET, max_model_len=MAX_LEN,
                                  eos_token_ids=[])
        self.ready = WorkerReady(NUM_BLOCKS, 0, MAX_LEN, model.config.vocab_size, [], "float32", "")
        self._compute_logits = model.compute_logits
        self.runner.sampler.compute_logits = self._timed_logits
        self._head_s = 0.0

    def _timed_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        begin = time.perf_counter()
        logits: torch.Tensor = self._compute_logits(hidden)
        self._head_s += time.perf_counter() - begin
        return logits

    def run(self, workload: Workload, costs: Costs | None, limits: Limits | None) -> dict[str, float]:
        """Serve a load from an empty cache. Seconds: all, limit, and of all: host, layers in steps with and without
        prompt tokens, head, sampling."""
        core = EngineCore(SchedulerConfig(max_num_seqs=SEATS, max_num_batched_tokens=BUDGET, async_scheduling=False),
                          CacheConfig(block_size=BLOCK_SIZE), self.ready, b"k" * 32)
        runner, spent = self.runner, dict.fromkeys(("prompt layers", "decode layers", "head", "sampling", "limit"), 0.0)
        runner.state.clear()
        self._head_s, steps = 0.0, 0
        begin = time.perf_counter()
        for number, (prompt, output) in enumerate(workload):
            params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, seed=1)
            core.handle(0, AddRequest(number + 1, prompt.data.cast("B"), params))
        while core.requests:
            plan = core.plan()
            if plan is None:
                raise RuntimeError("requests are left and no step can be planned")
            core.plan_sent(0)
            result = runner.execute(plan, 0)
            record = core.scheduler.rows.in_flight[0]
            sampled = int((np.frombuffer(result.tokens, np.int32) >= 0).sum())
            kind = "decode layers" if record.num_tokens == record.num_rows else "prompt layers"
            spent[kind] += (result.launched_ns - result.prepared_ns) / 1e9
            spent["sampling"] += (result.done_ns - result.launched_ns) / 1e9
            if costs is not None and limits is not None:
                context = int(runner.state.computed[:runner.state.n].sum())
                spent["limit"] += costs.limit_s(limits, record.num_tokens, sampled, context)
            core.commit(result)
            steps += 1
        spent["all"] = time.perf_counter() - begin
        spent["head"] = self._head_s
        spent["sampling"] -= self._head_s
        spent["host"] = spent["all"] - sum(spent[name] for name in ("prompt layers", "decode layers", "head",
                                                                    "sampling"))
        spent["steps"] = steps
        return spent


def measure_rows(rig: Rig, costs: Costs | None, limits: Limits | None, repeats: int,
                 stages: dict[str, dict[str, float]]) -> dict[str, dict[str, Any]]:
    """Figures of each load: the shortest of `repeats` runs after one to warm up. `stages`: milliseconds of the parts
    of the layers in a prompt step ("prompt") and in decode steps by rows ("1", "8", "32"), which share out layers."""
    found: dict[str, dict[str, Any]] = {}
    for name, workload in loads(rig.ready.vocab_size).items():
        rig.run(workload[:4], costs, limits)
        spent = min((rig.run(workload, costs, limits) for _ in range(repeats)), key=lambda run: run["all"])
        count = sum(len(prompt) for prompt, _ in workload) if name == "prefill" else sum(o for _, o in workload)
        entry: dict[str, Any] = {"tok_s": round(count / spent["all"], 1), "ms": round(1e3 * spent["all"], 1),
                                 "steps": int(spent["steps"])}
        if costs is not None:
            entry["share_of_limit"] = round(spent["limit"] / spent["all"], 3)
        entry["stages_ms"] = split(spent, len(workload), stages)
        found[name] = entry
    return found


def split(spent: dict[str, float], rows: int, stages: dict[str, dict[str, float]]) -> dict[str, float]:
    """Milliseconds of matmul, attention, ..., sampling, host; layers as a whole where their parts are not known."""
    result: dict[str, float] = {}
    nearest = next((str(size) for size in (1, 8, 32) if rows <= size), "32")
    for kind, key in (("prompt layers", "prompt"), ("decode layers", nearest)):
        parts = {name: ms for name, ms in stages.get(key, {}).items() if name != "head"}
        total = sum(parts.values())
        for name, ms in parts.items():
            result[name] = result.get(name, 0.0) + 1e3 * spent[kind] * ms / total
        if not parts:
            result["layers"] = result.get("layers", 0.0) + 1e3 * spent[kind]
    for name in ("head", "sampling", "host"):
        result[name] = 1e3 * spent[name]
    return {name: round(ms, 1) for name, ms in result.items()}
