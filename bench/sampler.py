"""Time of one sampling step on this CPU, per stage, beside a straightforward torch version and the memory floor.

    python launch.py bench sampler [--rows 1,32,256] [--threads 2] [--repeats 15]

The floor is the time to read the logits once: their bytes over the bandwidth measured in this run by summing as many
bytes with the same number of threads (for one row: out of the cache). Prints a line per stage and one JSON object last.
"""
from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from worker.sampling import jit_threads
from worker.sampling.logprobs import compute_logprobs
from worker.sampling.penalties import PenaltyCounts
from worker.sampling.sampler import Sampler, SamplingColumns

VOCAB = 151_936
HISTORY = 600                                   # tokens of prompt and output that penalties count
STAGES: dict[str, dict[str, float]] = {
    "greedy": {}, "temperature": {"temperature": 1.0}, "top-k+top-p": {"temperature": 1.0, "top_k": 50, "top_p": 0.9},
    "top-p": {"temperature": 1.0, "top_p": 0.9}, "penalties": {}, "logprobs 5": {}, "grammar mask": {}}
# At most so many times the floor; the mask: times greedy.
LIMITS = {"greedy": 1.3, "top-k+top-p": 6.0, "top-p": 6.0, "grammar mask": 1.2}


def timed(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Least seconds of each, taken in turns: what the machine's other work does not disturb."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: min(values) for name, values in times.items()}


class Reader:
    """Reads every logit once, with as many threads as the sampler: the floor."""

    def __init__(self, x: np.ndarray, threads: int) -> None:
        self.threads = max(1, min(threads, len(x)))
        self.parts = np.array_split(x, self.threads)
        self.pool = ThreadPoolExecutor(max(1, self.threads - 1))

    def __call__(self) -> None:
        waiting = [self.pool.submit(np.max, part) for part in self.parts[1:]]
        np.max(self.parts[0])
        for future in waiting:
            future.result()


def columns(rows: int, **values: float) -> SamplingColumns:
    params = SamplingColumns.greedy(rows)
    params.seed = np.arange(rows, dtype=np.uint64)
    for name, value in values.items():
        column = getattr(params, name)
        setattr(params, name, np.full(rows, value, column.dtype))
    return params


def torch_sample(logits: torch.Tensor, values: dict[str, float]) -> torch.Tensor:
    """As one would write it first: sort for the filters, softmax, multinomial."""
    if not values:
        return logits.argmax(dim=1)
    logits = logits / values["temperature"]
    if "top_k" in values:
        logits = logits.masked_fill(logits < torch.topk(logits, int(values["top_k"]), dim=1).values[:, -1:], -torch.inf)
    if "top_p" in values:
        ordered, index = torch.sort(logits, dim=1, descending=True)
        shares = torch.softmax(ordered, dim=1)
        drop = shares.cumsum(dim=1) - shares > values["top_p"]
        logits = torch.full_like(logits, -torch.inf).scatter(1, index, ordered.masked_fill(drop, -torch.inf))
    return torch.multinomial(torch.softmax(logits, dim=1), 1)


def torch_penalties(logits: torch.Tensor, used: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Dense, over the whole vocabulary."""
    logits = torch.where(used, torch.where(logits > 0, logits / 1.2, logits * 1.2), logits)
    return (logits - 0.5 * counts - 0.5 * (counts > 0)).argmax(dim=1)


def penalty_step(logits: torch.Tensor, draw: np.random.Generator) -> tuple[Callable[[], object], Callable[[], object]]:
    rows = len(logits)
    tokens = draw.integers(0, VOCAB, (rows, HISTORY)).astype(np.int32)
    index, known = np.arange(rows), np.full(rows, HISTORY)
    num_prompt = np.full(rows, HISTORY // 2)
    penalties, kernels, sampler, greedy = PenaltyCounts(), jit_threads.load(), Sampler(), columns(rows)
    for _ in range(rows):
        penalties.take(1.2, 0.5, 0.5)

    def ours() -> object:
        penalties.num_counted[:rows] = np.maximum(penalties.num_counted[:rows], HISTORY - 1)    # one token is new
        penalties.apply(logits, index, index, index, tokens, known, num_prompt, kernels)
        return sampler.sample(logits, greedy)
    penalties.apply(logits.clone(), index, index, index, tokens, known, num_prompt, kernels)
    used, counts = torch.zeros_like(logits, dtype=torch.bool), torch.zeros_like(logits)
    used.scatter_(1, torch.from_numpy(tokens.astype(np.int64)), True)
    return ours, lambda: torch_penalties(logits, used, counts)


def logprob_step(logits: torch.Tensor, draw: np.random.Generator) -> tuple[Callable[[], object], Callable[[], object]]:
    rows, kernels = len(logits), jit_threads.load()
    targets, five = draw.integers(0, VOCAB, rows), np.full(rows, 5)
    index = torch.from_numpy(targets)[:, None]

    def plain() -> object:
        values = torch.log_softmax(logits, dim=1)
        own = values.gather(1, index)
        return torch.topk(values, 5, dim=1), (values > own).sum(dim=1)
    return lambda: compute_logprobs(logits, targets, five, kernels), plain


def mask_step(logits: torch.Tensor, draw: np.random.Generator) -> tuple[Callable[[], object], Callable[[], object]]:
    """A greedy step in which every row has a mask that allows about one token in eight, in runs, as a grammar's do."""
    rows, sampler, params = len(logits), Sampler(), columns(len(logits))
    words = draw.integers(-(1 << 31), 1 << 31, (rows, -(-VOCAB // 32))).astype(np.int32)
    words[draw.random(words.shape) < 0.75] = 0
    params.words, params.word_index = words, np.arange(rows, dtype=np.int32)
    allowed = torch.from_numpy(np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, :VOCAB].astype(bool))
    return lambda: sampler.sample(logits, params), lambda: logits.masked_fill(~allowed, -torch.inf).argmax(dim=1)


def measure(rows: int, threads: int, repeats: int) -> dict[str, Any]:
    draw = np.random.default_rng(rows)
    original = torch.from_numpy(draw.standard_normal((rows, VOCAB), dtype=np.float32) * np.float32(2.5))
    sampler = Sampler()
    special = {"penalties": penalty_step, "logprobs 5": logprob_step, "grammar mask": mask_step}
    results = {}
    for name, values in STAGES.items():
        logits = original.clone()
        reader = Reader(logits.numpy(), threads)
        if name in special:
            ours, plain = special[name](logits, draw)
        else:
            ours = functools.partial(sampler.sample, logits, columns(rows, **values))
            plain = functools.partial(torch_sample, logits, values)
        calls: dict[str, Callable[[], object]] = {"floor": reader, "ours": ours}
        if name == "grammar mask":
            calls["greedy"] = functools.partial(sampler.sample, logits, columns(rows))
        found = timed(calls, repeats)
        found |= timed({"torch": plain}, max(3, repeats // 5))
        results[name] = {f"{key}_us": round(1e6 * value, 1) for key, value in found.items()}
        results[name]["times_floor"] = round(found["ours"] / found["floor"], 2)
        results[name]["times_faster_than_torch"] = round(found["torch"] / found["ours"], 2)
        row = results[name]
        measured, limit = row["times_floor"], LIMITS.get(name)
        if name == "grammar mask":
            measured = row["times_greedy"] = round(found["ours"] / found["greedy"], 2)
        note = "" if limit is None else f"   limit {limit}: {'met' if measured <= limit else 'MISSED'} ({measured})"
        print(f"{rows:4} rows  {name:14} floor {row['floor_us']:9.1f} us  ours {row['ours_us']:9.1f} us "
              f"({row['times_floor']:6.2f} x)  torch {row['torch_us']:11.1f} us{note}", flush=True)
    return results


def main(argv: list[str] | None = None) -> int:
    """Run all sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,32,256")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    jit_threads.set_num_threads(args.threads)
    jit_threads.warm_up(VOCAB)
    with torch.inference_mode():
        sizes = {rows: measure(rows, args.threads, args.repeats) for rows in map(int, args.rows.split(","))}
    print(json.dumps({"benchmark": "sampler", "vocab": VOCAB, "threads": args.threads,
                      "compiled": jit_threads.load() is not None, "rows": sizes}))
    return 0


if __name__ == "__main__":
    main()
