"""Percentiles, the figures of streamed requests, and the last output line that every benchmark shares.

Knows nothing about how the measurements were taken: it works on plain numbers and on RequestRecords. A benchmark prints
for people first and ends with one JSON object, so that a script takes the last line of its output and nothing else.
"""

import argparse
import json
import os
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PERCENTILES = (50, 90, 99)
MIN_DECODE_SHARE = 0.05  # of the run; a shorter window in which all requests decode gives no figure


def percentile(values: Iterable[float], percent: float) -> float:
    """Linear interpolation between the two closest ranks (numpy's default), so p50 is the usual median.

    Raises ValueError on an empty input: a missing figure must be visible as missing, not as 0.
    """
    ordered = sorted(values)
    if not ordered:
        raise ValueError("percentile of no values; check that at least one measurement succeeded")
    if not 0 <= percent <= 100:
        raise ValueError(f"percentile {percent} is outside 0..100")
    rank = (len(ordered) - 1) * percent / 100
    below = int(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


def median(values: Iterable[float]) -> float:
    """The 50th percentile; the figure to quote for repeated runs, because one disturbed run does not move it."""
    return percentile(values, 50)


def summary(values: Sequence[float]) -> dict[str, float | None]:
    """mean, p50, p90 and p99 of the values; all None when there are none."""
    if not values:
        return {"mean": None, **{f"p{percent}": None for percent in PERCENTILES}}
    ranks = {f"p{percent}": round(percentile(values, percent), 6) for percent in PERCENTILES}
    return {"mean": round(sum(values) / len(values), 6), **ranks}


def output_file(text: str) -> str:
    """The type of an option that names a file to write: whether that can be is known before anything is measured."""
    file = Path(text)
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written")
    return text


def print_json(result: dict[str, Any], file: str | None = None) -> None:
    """Print the result as one JSON line (the benchmark's last) and write it to `file` too when one is named."""
    text = json.dumps(result)
    if file:
        Path(file).write_text(text + "\n", encoding="utf-8")
    print(text, flush=True)


@dataclass
class RequestRecord:
    """What the client saw of one streamed request. Times are time.monotonic() seconds."""

    num_wanted_tokens: int
    start: float = 0.0  # just before the connection is made
    end: float = 0.0  # the last event that carried a choice
    token_times: list[float] = field(default_factory=list)  # arrival of each chunk that carried tokens
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0  # from usage; a chunk may hold several tokens
    has_usage: bool = False
    text: str = ""  # what was said, reasoning and tool calls left out
    queue_s: float = 0.0  # since it was due, because of the limit of requests in flight
    error: str = ""

    @property
    def ttft_s(self) -> float:
        return self.token_times[0] - self.start

    @property
    def tokens_per_gap(self) -> float:
        """Tokens that one chunk after the first stands for."""
        return (self.num_output_tokens - 1) / max(1, len(self.token_times) - 1)


def decode_rate(records: Sequence[RequestRecord], concurrency: int) -> tuple[float | None, float]:
    """Tokens per second while as many requests as can run at once are all past their first token, and that time.

    The sum of such intervals is the window; a token counts when it arrives in (begin, end] of one of them. With fewer
    than MIN_DECODE_SHARE of the run in the window there is no figure: the few tokens in it would say nothing.
    """
    decoding = [r for r in records if len(r.token_times) > 1]
    edges = sorted([(r.token_times[0], 1) for r in decoding] + [(r.token_times[-1], -1) for r in decoding])
    full = min(concurrency, len(records))
    level, begin, window, tokens = 0, 0.0, 0.0, 0.0
    for moment, change in edges:
        if level == full and change < 0:
            window += moment - begin
            for r in decoding:
                arrived = bisect_right(r.token_times, moment) - bisect_right(r.token_times, begin)
                tokens += arrived * r.tokens_per_gap
        level += change
        begin = moment
    duration = max(r.end for r in records) - min(r.start for r in records)
    if window <= MIN_DECODE_SHARE * duration or not tokens:
        return None, window
    return tokens / window, window


def prefill_rate(records: Sequence[RequestRecord], concurrency: int, has_arrival_rate: bool) -> float:
    """Prompt tokens per second until the first token, an estimate from outside (cached prompt tokens count too).

    One request at a time, or requests at their own times: the median of prompt / TTFT. Otherwise the first wave: all
    its prompts over the time until each of them had its first token, a lower bound, since servers mix in decodes.
    """
    if concurrency == 1 or has_arrival_rate:
        return median(r.num_prompt_tokens / max(r.ttft_s, 1e-9) for r in records)
    wave = sorted(records, key=lambda r: r.start)[:concurrency]
    elapsed = max(r.token_times[0] for r in wave) - min(r.start for r in wave)
    return sum(r.num_prompt_tokens for r in wave) / max(elapsed, 1e-9)


def serving_figures(records: Sequence[RequestRecord], concurrency: int, has_arrival_rate: bool) -> dict[str, Any]:
    """All figures of a run, in seconds and tokens; only requests that succeeded enter the rates and percentiles."""
    good = [r for r in records if not r.error]
    errors = [r.error for r in records if r.error]
    figures: dict[str, Any] = {"successful_requests": len(good), "failed_requests": len(errors)}
    figures["first_error"] = errors[0] if errors else None
    if not good:
        return figures
    duration = max(r.end for r in good) - min(r.start for r in records)
    prompt_tokens, output_tokens = sum(r.num_prompt_tokens for r in good), sum(r.num_output_tokens for r in good)
    gaps = [b - a for r in good for a, b in zip(r.token_times, r.token_times[1:], strict=False)]
    tpot = [(r.token_times[-1] - r.token_times[0]) / (r.num_output_tokens - 1) for r in good if r.num_output_tokens > 1]
    decode_tok_s, decode_window_s = decode_rate(good, concurrency)
    return figures | {
        "duration_s": round(duration, 4),
        "prompt_tokens": prompt_tokens,
        "cached_tokens": sum(r.num_cached_tokens for r in good),
        "output_tokens": output_tokens,
        "token_counts_from": "usage" if all(r.has_usage for r in good) else "chunks",
        "tokens_per_chunk": round(output_tokens / sum(len(r.token_times) for r in good), 3),
        "short_outputs": sum(r.num_output_tokens < r.num_wanted_tokens for r in good),
        "request_s": round(len(good) / duration, 4),
        "output_tok_s": round(output_tokens / duration, 2),
        "total_tok_s": round((prompt_tokens + output_tokens) / duration, 2),
        "prefill_tok_s": round(prefill_rate(good, concurrency, has_arrival_rate), 1),
        "decode_tok_s": None if decode_tok_s is None else round(decode_tok_s, 2),
        "decode_window_s": round(decode_window_s, 4),
        "ttft_s": summary([r.ttft_s for r in good]),
        "tpot_s": summary(tpot),
        "itl_s": summary(gaps),
        "e2e_s": summary([r.end - r.start for r in good]),
    }
