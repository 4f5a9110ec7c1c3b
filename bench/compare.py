"""Is this run better than an older one, or is it noise? For `--compare old.json` of the serving benchmarks.

Each result carries, beside its figures, how far each one moves by chance (`noise`, relative): a 95 % half-width by a
bootstrap over requests (Efron 1979), or, where the load was repeated, half the spread of the repeats if that is wider.
What a machine does between runs, no single run can see of itself: without repeats on both sides a change below
SINGLE_RUN_BOUND says nothing. Two figures differ when they are further apart than both noises together and than that
floor. Knows no server.
"""

import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.stats import RequestRecord, percentile

MIN_BOUND = 0.03  # with repeats
SINGLE_RUN_BOUND = 0.2  # without: two runs of the same thing on a shared machine are that far apart
MIN_REPEATS = 3  # fewer show no spread
RESAMPLES = 200
RATES = ("output_tok_s", "total_tok_s", "request_s", "prefill_tok_s", "decode_tok_s")  # more is better
TIMES = ("ttft_s", "tpot_s", "itl_s", "e2e_s")  # less is better
SHOWN = ("mean", "p50", "p99")
TITLES = {
    "output_tok_s": "Output token throughput (tok/s)",
    "total_tok_s": "Total token throughput (tok/s)",
    "request_s": "Request throughput (req/s)",
    "prefill_tok_s": "Prefill estimate (tok/s)",
    "decode_tok_s": "Decode, all decoding (tok/s)",
}


def noise(records: Sequence[RequestRecord], seed: int = 0) -> dict[str, float]:
    """Figure name ("output_tok_s", "ttft_s.p50") -> relative half-width. Figures of fewer than three requests have
    none."""
    good = [record for record in records if not record.error and record.token_times]
    if len(good) < 3:
        return {}
    found = {}
    rate = rate_noise(good, seed)
    if rate is not None:
        found.update(dict.fromkeys(RATES, round(rate, 4)))
    samples: dict[str, Callable[[RequestRecord], list[float]]] = {
        "ttft_s": lambda r: [r.ttft_s],
        "tpot_s": lambda r: [(r.token_times[-1] - r.token_times[0]) / max(1, r.num_output_tokens - 1)],
        "itl_s": lambda r: [b - a for a, b in zip(r.token_times, r.token_times[1:], strict=False)],
        "e2e_s": lambda r: [r.end - r.start],
    }
    for name, values_of in samples.items():
        widths = bootstrap([values_of(record) for record in good], seed)
        found.update({f"{name}.{figure}": round(width, 4) for figure, width in widths.items()})
    return found


def bootstrap(groups: Sequence[Sequence[float]], seed: int = 0) -> dict[str, float]:
    """Relative half-width of each figure of SHOWN over values in groups (the requests): whole groups are drawn again,
    since the gaps of one stream are not independent. Empty when there is nothing to draw."""
    arrays = [np.asarray(group) for group in groups if len(group)]
    if not arrays:
        return {}
    generator = np.random.default_rng(seed)
    results = []
    for _ in range(RESAMPLES):
        values = np.concatenate([arrays[index] for index in generator.integers(0, len(arrays), len(arrays))])
        results.append([values.mean(), *np.percentile(values, [float(figure[1:]) for figure in SHOWN[1:]])])
    low, middle, high = np.percentile(results, [2.5, 50, 97.5], axis=0)
    return {figure: float((high[i] - low[i]) / 2 / middle[i]) for i, figure in enumerate(SHOWN) if middle[i] > 0}


def rate_noise(records: Sequence[RequestRecord], seed: int = 0) -> float | None:
    """Of a throughput. With a bounded number of requests in flight it is that number times tokens over seconds of the
    average request, so the requests are drawn again here too."""
    generator = random.Random(seed)
    rates = []
    for _ in range(RESAMPLES):
        drawn = generator.choices(records, k=len(records))
        rates.append(sum(r.num_output_tokens for r in drawn) / max(1e-9, sum(r.end - r.start for r in drawn)))
    middle = percentile(rates, 50)
    return (percentile(rates, 97.5) - percentile(rates, 2.5)) / 2 / middle if middle else None


def join_repeats(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One result of several runs of one load: medians of the compared figures, counts summed, noise from their spread.
    The rest is of the run with the median throughput."""
    if len(runs) == 1:
        return {**runs[0], "num_repeats": 1}
    ordered = sorted(runs, key=lambda run: run.get("output_tok_s") or 0.0)
    joined: dict[str, Any] = json.loads(json.dumps(ordered[len(ordered) // 2]))
    joined["num_repeats"] = len(runs)
    for name in ("successful_requests", "failed_requests"):
        joined[name] = sum(run[name] for run in runs)
    joined["first_error"] = next((run["first_error"] for run in runs if run["first_error"]), None)
    for name in figure_names():
        values = [value for run in runs if (value := _look_up(run, name)) is not None]
        if len(values) < len(runs) or percentile(values, 50) <= 0:
            continue
        middle = percentile(values, 50)
        own = percentile([float((run.get("noise") or {}).get(name, 0.0)) for run in runs], 50)
        joined.setdefault("noise", {})[name] = round(max(own, (max(values) - min(values)) / 2 / middle), 4)
        head, _, tail = name.partition(".")
        if tail:
            joined[head][tail] = middle
        else:
            joined[head] = middle
    return joined


# ------------------------------------------------------------ two results


def figure_names() -> list[str]:
    """Of all figures that are compared."""
    return [*RATES, *(f"{name}.{figure}" for name in TIMES for figure in SHOWN)]


def runs_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs of a result: several when several concurrencies were measured."""
    return list(result["runs"]) if "runs" in result else [result]


def read_result(file: str) -> dict[str, Any]:
    """The last line of a file that is a JSON object. Raises ValueError."""
    try:
        lines = [line for line in Path(file).read_text(encoding="utf-8").splitlines() if line.startswith("{")]
        result = json.loads(lines[-1])
    except (OSError, IndexError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "no line of it is a JSON object"
        raise ValueError(f"--compare {file}: {reason}; name the output of an earlier run") from None
    return dict(result)


def compare(old: dict[str, Any], new: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for each figure that both runs have: old, new, change, bound, and "better", "worse" or "same"."""
    rows = []
    floor = MIN_BOUND if are_repeated(old, new) else SINGLE_RUN_BOUND
    for name in figure_names():
        is_more_better = name in RATES
        before, after = _look_up(old, name), _look_up(new, name)
        if not before or after is None:
            continue
        widths = [float((run.get("noise") or {}).get(name, 0.0)) for run in (old, new)]
        bound = max(floor, math.hypot(*widths))
        change = after / before - 1
        verdict = "same" if abs(change) <= bound else "better" if (change > 0) == is_more_better else "worse"
        rows.append({"figure": name, "old": before, "new": after, "change": round(change, 4), "bound": round(bound, 4),
                     "verdict": verdict})
    return rows


def are_repeated(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Both have seen what the machine does between runs."""
    return min(int(run.get("num_repeats") or 1) for run in (old, new)) >= MIN_REPEATS


def _look_up(run: dict[str, Any], name: str) -> float | None:
    head, _, tail = name.partition(".")
    value = run.get(head)
    if tail:
        value = value.get(tail) if isinstance(value, dict) else None
    return float(value) if isinstance(value, (int, float)) else None


def compare_results(
    old: dict[str, Any], new: dict[str, Any], how_to_repeat: str = f"--repeats {MIN_REPEATS}"
) -> list[dict[str, Any]]:
    """Rows of all runs of the same concurrency, printed and returned; each names its concurrency. `how_to_repeat`: the
    benchmark's option for it; "": it has none."""
    before = {_concurrency(run): run for run in runs_of(old)}
    all_rows = []
    for run in runs_of(new):
        concurrency = _concurrency(run)
        is_only_pair = len(before) == len(runs_of(new)) == 1
        other = before.get(concurrency) or (next(iter(before.values())) if is_only_pair else None)
        if other is None:
            print(f"nothing to compare at concurrency {concurrency}: the old file has {sorted(before)}")
            continue
        differences = different_load(other, run)
        if differences:
            print(f"the loads differ, so the figures say little: {', '.join(differences)}")
        rows = compare(other, run)
        print_rows(rows, concurrency)
        if not are_repeated(other, run):
            fix = f": run both with {how_to_repeat}" if how_to_repeat else ""
            print(f"below {SINGLE_RUN_BOUND:.0%} nothing is told from noise{fix}")
        all_rows += [{"concurrency": concurrency, **row} for row in rows]
    return all_rows


def _concurrency(run: dict[str, Any]) -> int:
    return int((run.get("load") or {}).get("concurrency", 0))


def different_load(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What was asked for differently."""
    before, after = old.get("load") or {}, new.get("load") or {}
    before, after = (json.loads(json.dumps(load)) for load in (before, after))  # a file has lists for tuples
    changed = [name for name in before if name in after and before[name] != after[name]]
    return [f"{name} {before[name]} -> {after[name]}" for name in changed]


def print_rows(rows: list[dict[str, Any]], concurrency: int) -> None:
    """A table for people; times in milliseconds."""
    print(f" Compared, concurrency {concurrency} ".center(78, "="))
    print(f"{'':<34} {'old':>10} {'new':>10} {'change':>8} {'noise':>7}")
    for row in rows:
        name, scale = TITLES.get(row["figure"], row["figure"]), 1.0
        if "." in row["figure"]:
            head, figure = row["figure"].split(".")
            name, scale = f"{head[:-2].upper()} {figure} (ms)", 1000.0
        mark = {"same": "", "better": "better", "worse": "WORSE"}[row["verdict"]]
        print(f"{name:<34} {row['old'] * scale:>10.2f} {row['new'] * scale:>10.2f} {row['change']:>+8.1%} "
              f"{row['bound']:>6.1%}  {mark}")
    print("=" * 78)
