"""The CPU worker without processes and wires: steps of the real model, each beside the limit of this machine.

    python launch.py bench cpu [--model NAME] [--quantization auto int8 none] [--threads T] [--growth] [--accuracy]
                               [--kv] [--kv-cache-dtype NAME]

For every route: milliseconds of a decode step at 1, 8 and 32 rows and of a 256-token prefill, the share of the limit
(decode: bytes of weights and of keys and values read, over the bandwidth of reads or of copies, whichever is higher;
prefill: operations of the layers over the measured peak of the route's own kernel in cache), and where the time goes;
then the five loads of the comparison with peers, served by core and worker in this process (cpu_rows.py). `torch` is
the plain torch model, in the same run. Times are the shortest of several: another process only ever adds. The last line
is one JSON object.
"""
from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from bench.cpu_kv import DTYPES, measure_kv, print_kv
from bench.cpu_rows import Costs, Limits, Rig, measure_rows, prompt_weights
from ipc.model_source import ModelFiles, resolve_model
from ipc.option_help import OptionParser
from worker.attention.base import BatchMeta, LastRows
from worker.attention.jit import JitBackend
from worker.attention.registry import get_backend
from worker.jit import features
from worker.jit import program as pg
from worker.jit.build import GGUF_MODES, OTHER_MODES
from worker.jit.model import JitModel
from worker.jit.team import get_team, usable_cores
from worker.kv_pool import KVPool
from worker.linear.accuracy import compare
from worker.linear.formats import FLOAT32, INT4, INT4_MIN, INT8, INT8_WIDE
from worker.linear.kernel import KernelLinear
from worker.linear.route import PackedLinear, describe
from worker.linear.source import GGUFSource, ModelSource, WeightSource
from worker.linear.tune import make_weight
from worker.models.loader import load_model
from worker.models.registry import get_model_class

BLOCK_SIZE = 16
CONTEXT, PROMPT = 384, 256
PEAK_ROWS = 480
STEPS = ("decode 1", "decode 8", "decode 32", "prefill 256")
LOADS = ("c1", "c8", "c32", "prefill", "shared")
STAGES = {"embed": (pg.EMBED,), "norm": (pg.NORM,), "matmul": (pg.MATMUL,), "attention": (pg.ATTEND, pg.MERGE),
          "rope and write": (pg.ROPE,), "silu": (pg.SILU,)}


def best_s(run: Callable[[], object], repeats: int) -> float:
    run()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)


def read_bandwidth(threads: int) -> float:
    """Bytes a second that the team streams from memory: a one-row matmul over weights that no cache holds."""
    weights = [PackedLinear([make_weight(1, 16384, 2048)]) for _ in range(4)]
    kernels = [KernelLinear(layer, get_team(threads)) for layer in weights]
    x, out = torch.randn(1, 2048), torch.empty(1, 16384)
    return sum(layer.nbytes for layer in weights) / best_s(lambda: [kernel(x, out) for kernel in kernels], 10)


def copy_bandwidth(threads: int) -> float:
    """Bytes a second, read and written, of copies that no cache holds, one a thread."""
    size = 64 << 20
    pairs = [(np.zeros(size, np.uint8), np.ones(size, np.uint8)) for _ in range(threads)]
    with ThreadPoolExecutor(threads) as pool:   # numpy copies without the interpreter's lock
        return 2 * size * threads / best_s(lambda: list(pool.map(lambda pair: np.copyto(*pair), pairs)), 10)


def peak(kind: int, threads: int) -> float:
    """Operations a second of the format's kernel where everything is in cache and calls are long."""
    layer = PackedLinear([make_weight(kind, 512, 576)])
    kernel, x, out = KernelLinear(layer, get_team(threads)), torch.randn(PEAK_ROWS, 576), torch.empty(PEAK_ROWS, 512)
    seconds = best_s(lambda: kernel(x, out), 100)
    codes = kernel.table[:, pg.CODE] == pg.QUANTIZE
    if codes.any():                             # not part of the product
        first = np.ascontiguousarray(kernel.table[codes])
        seconds -= best_s(lambda: kernel.team.run(first.ctypes.data, len(first), kernel.step), 100)
    return 2 * PEAK_ROWS * 512 * 576 / seconds


class Bench:
    """One model over a pool of its own, at any number of rows and any context."""

    def __init__(self, model: Any, backend: Any, dtype: torch.dtype, max_rows: int, max_context: int) -> None:
        self.model, self.backend = model, backend
        self.width = -(-max_context // BLOCK_SIZE)
        self.pool = KVPool(backend, max_rows * self.width, BLOCK_SIZE, model.kv_spec(), dtype)
        order = np.random.default_rng(0).permutation(max_rows * self.width) + 1
        self.table = order.astype(np.int32).reshape(max_rows, self.width)
        for cache in self.pool.caches:
            for tensor in cache:
                tensor.fill_(1 if tensor.dtype == torch.int8 else 0.01)

    def step(self, rows: int, context: int, tokens: int = 1, *, is_parted: bool = True) -> Callable[[], object]:
        """A step of `rows` requests that each compute their last `tokens` of `context`, with logits for each. As served
        the last layer goes on with the rows that have logits; not is_parted: with all of them."""
        starts = (np.arange(rows + 1) * tokens).astype(np.int32)
        lengths = np.full(rows, context, np.int32)
        positions = np.tile(np.arange(context - tokens, context), rows)
        row = np.repeat(np.arange(rows), tokens)
        slots = self.table[row, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
        meta = BatchMeta.of(starts, lengths, torch.from_numpy(self.table[:rows]), torch.from_numpy(slots), BLOCK_SIZE)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, self.model.config.vocab_size, (rows * tokens,), generator=generator)
        places, last = torch.from_numpy(positions), None
        if tokens > 1 and is_parted:
            index = torch.from_numpy(starts[1:].astype(np.int64) - 1)
            last = LastRows(index, BatchMeta.of(np.arange(rows + 1, dtype=np.int32), lengths, meta.block_table,
                                                meta.slot_mapping[index], BLOCK_SIZE))

        def run() -> object:
            meta.cache.clear()
            if last is not None:
                last.meta.cache.clear()
            with torch.inference_mode():
                hidden = self.model(ids, places, self.pool.caches, meta, self.backend, last)
                return self.model.compute_logits(hidden)
        return run

    def stages(self, rows: int, context: int, tokens: int, repeats: int) -> dict[str, float]:
        """Milliseconds of each kind of operation in such a step, run on its own, and of the head."""
        whole = self.step(rows, context, tokens, is_parted=False)   # kept: the step record points into its tensors
        whole()
        model, step, result = self.model, self.model.workspace.step, {}
        for name, codes in STAGES.items():
            part = model.operations(codes, of_every_row=tokens > 1)
            if not len(part):                   # SiLU, where the product before does it
                continue

            def run(part: np.ndarray = part) -> None:
                model.team.run(part.ctypes.data, len(part), step)

            result[name] = 1e3 * best_s(run, repeats)
        hidden = torch.randn(rows, model.config.hidden_size)
        result["head"] = 1e3 * best_s(lambda: model.compute_logits(hidden), repeats)
        return {name: round(value, 3) for name, value in result.items()}


def served_dtype(model: Any, asked: str = "auto") -> torch.dtype:
    """Of keys and values of a compiled route; auto: when nobody asks for another. The torch model's are its own."""
    if isinstance(model, JitModel) and asked != "auto":
        return DTYPES[asked]
    kinds = {w.kind for layer in model.linears for w in layer.weights} if isinstance(model, JitModel) else {FLOAT32}
    if kinds & {INT4, INT4_MIN, INT8_WIDE}:
        return torch.int8
    return torch.bfloat16 if INT8 in kinds else torch.float32


def measure(bench: Bench, args: argparse.Namespace, limits: dict[str, Any]) -> dict[str, Any]:
    """Figures of one route; shares where the limit is known."""
    result: dict[str, Any] = {}
    model, repeats = bench.model, 5 if args.quick else 15
    is_jit = isinstance(model, JitModel)
    layers, kv_heads, dim = model.kv_spec()
    for rows in (1, 8, 32):
        seconds = best_s(bench.step(rows, CONTEXT), repeats)
        entry: dict[str, Any] = {"ms": round(1e3 * seconds, 2), "tok_s": round(rows / seconds, 1)}
        if is_jit:
            read = model.nbytes + rows * CONTEXT * layers * kv_heads * dim * 2 * bench.pool.caches[0][0].element_size()
            entry["share_of_limit"] = round(read / limits["bytes_s"] / seconds, 3)
            entry["stages_ms"] = bench.stages(rows, CONTEXT, 1, repeats)
        result[f"decode {rows}"] = entry
    seconds = best_s(bench.step(1, PROMPT, PROMPT), max(3, repeats // 3))
    result["prefill 256"] = {"ms": round(1e3 * seconds, 1), "tok_s": round(PROMPT / seconds)}
    if is_jit:
        kind = model.layers[0]["qkv"].weights[0].kind
        if kind not in limits["ops_s"]:
            limits["ops_s"][kind] = peak(kind, args.threads)
        operations = 2 * PROMPT * prompt_weights(model)[0]
        result["prefill 256"]["share_of_limit"] = round(operations / limits["ops_s"][kind] / seconds, 3)
        result["prefill 256"]["stages_ms"] = bench.stages(1, PROMPT, PROMPT, max(3, repeats // 3))
    return result


def served(model: JitModel, backend: Any, dtype: torch.dtype, steps: dict[str, Any], limits: dict[str, Any],
           args: argparse.Namespace) -> dict[str, Any]:
    """The five loads. `steps`: what `measure` found, whose stages share out the time of the layers."""
    costs = Costs.of(model, dtype.itemsize)
    bounds = Limits(limits["bytes_s"], limits["ops_s"][model.layers[0]["qkv"].weights[0].kind])
    stages = {key: steps[case]["stages_ms"] for key, case in zip(("1", "8", "32", "prompt"), STEPS)}
    return measure_rows(Rig(model, backend, dtype), costs, bounds, 1 if args.quick else 3, stages)


def growth(bench: Bench, limits: dict[str, Any]) -> dict[str, list[list[float]]]:
    """[what, ms, ms of the model: bytes / bandwidth] over context and over rows."""
    model = bench.model
    layers, kv_heads, dim = model.kv_spec()
    per_token = layers * kv_heads * dim * 2 * bench.pool.caches[0][0].element_size()
    result: dict[str, list[list[float]]] = {"context": [], "rows": []}
    for kind, cases in (("context", [(1, c) for c in (256, 512, 1024, 2048, 4096, 8192)]),
                        ("rows", [(r, 256) for r in (1, 2, 4, 8, 16, 32, 64)])):
        for rows, context in cases:
            if context <= bench.width * BLOCK_SIZE and rows <= len(bench.table):
                line = 1e3 * (model.nbytes + rows * context * per_token) / limits["bytes_s"]
                ms = 1e3 * best_s(bench.step(rows, context), 7)
                result[kind].append([context if kind == "context" else rows, round(ms, 2), round(line, 2)])
    return result


def text_tokens(files: ModelFiles, count: int) -> list[int]:
    """Ordinary English: the language reference that comes with Python."""
    import pydoc_data.topics as topics

    from frontend.tokenizer import Tokenizer
    text = "".join(topics.topics[name] for name in ("objects", "exceptions", "import", "naming"))
    return Tokenizer.from_files(files).encode_ids(text, False)[:count + 1]


def main(argv: list[str]) -> int:
    parser = OptionParser(prog="launch.py bench cpu", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="alias, folder, .gguf file or hub id")
    parser.add_argument("--load-format", default="auto", help="dummy: random weights at the model's true shape")
    parser.add_argument("--quantization", nargs="+", default=["auto", "int8", "none"], choices=tuple(GGUF_MODES))
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--torch", action=argparse.BooleanOptionalAction, default=True, help="the torch model, too")
    parser.add_argument("--loads", action=argparse.BooleanOptionalAction, default=True,
                        help="the five loads, on compiled routes")
    parser.add_argument("--growth", action="store_true", help="step time against context and rows, first route")
    parser.add_argument("--kv", action="store_true", help="pools of float32, bfloat16, int8 and fp8, first route")
    parser.add_argument("--kv-cache-dtype", choices=("auto", *DTYPES), default="auto",
                        help="of keys and values on compiled routes")
    parser.add_argument("--accuracy", action="store_true",
                        help="divergence from float32 over 2,000 tokens of text, keys and values as served")
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    args = parser.parse_args(argv)
    missing = features.missing()
    if missing is not None:
        print(f"bench cpu: {missing}", file=sys.stderr)
        return 1
    files = resolve_model(args.model, load_format=args.load_format)
    torch.set_num_threads(args.threads)
    get_team(args.threads).start()
    read, copied = read_bandwidth(args.threads), copy_bandwidth(args.threads)
    limits: dict[str, Any] = {"bytes_s": max(read, copied), "ops_s": {}}
    print(f"{features.describe()}; {args.threads} threads, reads {read / 1e9:.1f} GB/s, copies {copied / 1e9:.1f} GB/s",
          flush=True)
    report: dict[str, Any] = {"model": files.served_name, "threads": args.threads, "machine": features.describe(),
                              "read_gb_s": round(read / 1e9, 1), "copy_gb_s": round(copied / 1e9, 1), "routes": {}}
    is_gguf = files.kind == "gguf"
    flat = None
    if args.torch or args.accuracy or not is_gguf:
        flat = load_model(files, dtype="float32", device="cpu")
    models: dict[str, tuple[Any, Any]] = {}
    if args.torch and flat is not None:
        models["torch float32"] = (flat, get_backend("cpu"))
    for quantization in args.quantization:
        mode = (GGUF_MODES if is_gguf else OTHER_MODES)[quantization]
        source: WeightSource
        if is_gguf or flat is None:
            family = get_model_class(files.config.architecture)
            source = GGUFSource(family(files.config, dtype=torch.float32, device="meta"), files.path, mode)
        else:
            source = ModelSource(flat, mode)
        models[quantization] = (JitModel(source, team=get_team(args.threads)), JitBackend(get_team(args.threads)))
    for name, (model, backend) in models.items():
        dtype = served_dtype(model, args.kv_cache_dtype)
        bench = Bench(model, backend, dtype, 64, 8192 if args.growth and name == args.quantization[0] else CONTEXT)
        entry = report["routes"][name] = measure(bench, args, limits)
        if isinstance(model, JitModel):
            entry["weights"] = describe(model.linears)
            print(f"{name}: {entry['weights']}")
        if args.loads and isinstance(model, JitModel):
            entry.update(served(model, backend, dtype, entry, limits, args))
        for case in (case for case in (*STEPS, *LOADS) if case in entry):
            figures = {key: value for key, value in entry[case].items() if key != "stages_ms"}
            print(f"  {name:14} {case:12} {figures} {entry[case].get('stages_ms', '')}", flush=True)
        if args.growth and name == args.quantization[0]:
            entry["growth"] = growth(bench, limits)
            for kind, rows in entry["growth"].items():
                shown = ", ".join(f"{x:.0f}: {ms} ms (model {line})" for x, ms, line in rows)
                print(f"  {name} against {kind}: {shown}")
    if args.kv:
        name = args.quantization[0]
        model, backend = models[name]
        exact = next(route for route in ("none", "torch float32", name) if route in models)
        report["kv"] = measure_kv(
            model, backend, lambda dtype, context: Bench(model, backend, dtype, 1, context), best_s,
            text_tokens(files, 2000), 5 if args.quick else 15, models[exact])
        report["kv_reference"] = exact
        print_kv(name, report["kv"], exact)
    report["ops_s"] = {str(kind): value for kind, value in limits["ops_s"].items()}
    if args.accuracy and flat is not None:
        tokens = text_tokens(files, 2000)
        for name, (model, backend) in models.items():
            pool = served_dtype(model, args.kv_cache_dtype)
            accuracy = compare((flat, get_backend("cpu")), (model, backend), tokens, pool=pool)
            report["routes"][name]["accuracy"] = {"mean_kl": accuracy.mean_kl,
                                                  "perplexity_ratio": accuracy.perplexity_ratio}
            print(f"  {name}: {accuracy}", flush=True)
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
