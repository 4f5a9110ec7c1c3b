"""Time of one sampling step on this CPU, per stage, beside a straightforward torch version and the memory floor.

    python launch.py bench sampler [--rows 1,32,256] [--threads 2] [--repeats 60]

The floor is a greedy step whose kernel only adds the logits up: memory is read once, by the same threads and through
the same calls (which take 3 us of Python, half of it at one row; `read_us` is the kernel alone, of one thread and out
of the cache at one row). It runs before and after each call of a stage, on the same buffer, so that both find the
caches alike. A stage's ratio is the median over the repeats of its time against the mean of the two floors beside it.
Prints a line per stage and one JSON object last; status 1 if a stage takes more than its limit.
"""
from __future__ import annotations

import argparse
import functools
import json
import sys
import time
import types
from collections.abc import Callable

import numpy as np
import torch
from numba import njit

from worker.sampling import jit_threads
from worker.sampling.logprobs import compute_logprobs
from worker.sampling.penalties import PenaltyCounts
from worker.sampling.sampler import Sampler, SamplingColumns

VOCAB = 151_936
WARM_UP = 3                                     # turns
HISTORY = 600                                   # tokens of prompt and output that penalties count
STAGES: dict[str, dict[str, float]] = {
    "greedy": {}, "temperature": {"temperature": 1.0}, "top-k+top-p": {"temperature": 1.0, "top_k": 50, "top_p": 0.9},
    "top-p": {"temperature": 1.0, "top_p": 0.9}, "penalties": {}, "logprobs 5": {}, "grammar mask": {}}
# At most so many times the floor; the mask: times greedy.
LIMITS = {"greedy": 1.3, "top-k+top-p": 6.0, "top-p": 6.0, "grammar mask": 1.2}


Calls = dict[str, Callable[[], object]]


def timed(calls: Calls, repeats: int) -> dict[str, np.ndarray]:
    """Seconds of each call of each, taken in turns; the first turns, which warm up, are left out."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(WARM_UP + repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: np.array(values[WARM_UP:]) for name, values in times.items()}


@njit(fastmath={"reassoc"}, nogil=True)
def sum_of(x):  # type: ignore[no-untyped-def]
    total = np.float32(0.0)
    for i in range(x.size):
        total += x[i]
    return total


@njit(nogil=True)
def read_rows(x, stride, width, begin, end, words, index, scratch, tokens, bad, empty):  # type: ignore[no-untyped-def]
    """In place of greedy_rows."""
    for r in range(begin, end):
        total = sum_of(x[stride * r:stride * r + width])
        tokens[r], bad[r], empty[r] = 0, not np.isfinite(total), False


def reading_sampler(kernels: jit_threads.RowKernels) -> Sampler:
    """A Sampler that only reads."""
    sampler, reader = Sampler(), jit_threads.RowKernels()
    reader.kernels = types.SimpleNamespace(greedy_rows=read_rows, scratch_floats=kernels.kernels.scratch_floats)
    sampler.kernels = reader
    return sampler


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


def measure(rows: int, repeats: int, kernels: jit_threads.RowKernels) -> dict[str, dict[str, float]]:
    draw = np.random.default_rng(rows)
    original = torch.from_numpy(draw.standard_normal((rows, VOCAB), dtype=np.float32) * np.float32(2.5))
    sampler = Sampler()
    special = {"penalties": penalty_step, "logprobs 5": logprob_step, "grammar mask": mask_step}
    reader = reading_sampler(kernels)
    flat, none = original.numpy().reshape(-1), (jit_threads.NO_WORDS, jit_threads.NO_INDEX, np.empty(0, np.float32))
    told = np.empty(rows, np.int32), np.empty(rows, bool), np.empty(rows, bool)
    alone = timed({"read": lambda: read_rows(flat, VOCAB, VOCAB, 0, rows, *none, *told)}, repeats)["read"]
    results: dict[str, dict[str, float]] = {"read": {"read_us": round(1e6 * float(np.median(alone)), 1)}}
    for name, values in STAGES.items():
        logits = original.clone()
        floor = functools.partial(reader.sample, logits, columns(rows))
        if name in special:
            ours, plain = special[name](logits, draw)
        else:
            ours = functools.partial(sampler.sample, logits, columns(rows, **values))
            plain = functools.partial(torch_sample, logits, values)
        calls: Calls = {"floor": floor, "ours": ours, "floor behind": floor}
        if name == "grammar mask":
            calls["greedy"] = functools.partial(sampler.sample, logits, columns(rows))
        found = timed(calls, repeats)
        found["floor"] = (found["floor"] + found.pop("floor behind")) / 2
        found |= timed({"torch": plain}, max(3, repeats // 10))
        row = results[name] = {f"{key}_us": round(1e6 * float(np.median(values)), 1) for key, values in found.items()}
        row["times_floor"] = round(float(np.median(found["ours"] / found["floor"])), 2)
        row["times_faster_than_torch"] = round(float(np.median(found["torch"]) / np.median(found["ours"])), 2)
        measured, limit = row["times_floor"], LIMITS.get(name)
        if name == "grammar mask":
            measured = row["times_greedy"] = round(float(np.median(found["ours"] / found["greedy"])), 2)
        if limit is not None:
            row["is_within_limit"] = measured <= limit
        note = "" if limit is None else f"   limit {limit}: {'met' if measured <= limit else 'MISSED'} ({measured})"
        print(f"{rows:4} rows  {name:14} floor {row['floor_us']:9.1f} us  ours {row['ours_us']:9.1f} us "
              f"({row['times_floor']:6.2f} x)  torch {row['torch_us']:11.1f} us{note}", flush=True)
    return results


def main(argv: list[str] | None = None) -> int:
    """Run all sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,32,256")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=60)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    jit_threads.set_num_threads(args.threads)
    jit_threads.warm_up(VOCAB)
    kernels = jit_threads.load()
    if kernels is None:
        print("the compiled row kernels are not available here", file=sys.stderr)
        return 1
    with torch.inference_mode():
        sizes = {rows: measure(rows, args.repeats, kernels) for rows in map(int, args.rows.split(","))}
    print(json.dumps({"benchmark": "sampler", "vocab": VOCAB, "threads": args.threads, "rows": sizes}))
    return int(not all(row.get("is_within_limit", True) for found in sizes.values() for row in found.values()))


if __name__ == "__main__":
    raise SystemExit(main())
