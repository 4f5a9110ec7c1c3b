"""Prometheus metrics of one frontend and its engine, in the names that dashboards for vLLM know.

One registry in one process: the engine's totals arrive as messages. Request times are observed when a request ends,
step times when a page is read. Knows no HTTP.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from frontend.outputs import RequestMetrics
from frontend.timeline import analyse

if TYPE_CHECKING:
    from collections.abc import Iterator

    from frontend.async_llm import AsyncLLM
    from frontend.request_stream import RequestStream

TTFT = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class Metrics:
    """Histograms of requests, and the engine's totals at the time of reading. `prefix` is the namespace."""

    def __init__(self, model_name: str, prefix: str = "vllm") -> None:
        self.prefix, self.model_name = prefix, model_name
        self.registry = CollectorRegistry(auto_describe=False)
        self._families: list[Metric] = []
        self.registry.register(self)
        self.finished: dict[str, int] = {}
        self.num_prompt_tokens = self.num_generation_tokens = 0

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(f"{prefix}:{name}", text, ["model_name"], registry=self.registry, buckets=buckets)
            return made.labels(model_name)

        self._ttft = histogram("time_to_first_token_seconds", "Arrival to first token.", TTFT)
        self._tpot = histogram("request_time_per_output_token_seconds", "(end - first token) / (tokens - 1).", ITL)
        self._e2e = histogram("e2e_request_latency_seconds", "Arrival to end.", LATENCY)
        self._queue = histogram("request_queue_time_seconds", "Arrival to first scheduled.", LATENCY)
        self._prefill = histogram("request_prefill_time_seconds", "First scheduled to first token.", LATENCY)
        self._decode = histogram("request_decode_time_seconds", "First token to end.", LATENCY)
        self._prompt = histogram("request_prompt_tokens", "Prompt tokens of a request.", TOKENS)
        self._generated = histogram("request_generation_tokens", "Output tokens of a request.", TOKENS)

    def describe(self) -> list[Metric]:
        """Nothing: what `collect` gives is known only at the time of reading."""
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._families

    def observe(self, stream: RequestStream) -> None:
        """A request has ended."""
        times: RequestMetrics = stream.metrics
        end = times.finish_time or time.monotonic()
        generated = sum(len(choice.token_ids) for choice in stream.choices)
        prompt = len(stream.prompt_token_ids) // 4
        for choice in stream.choices:
            reason = choice.finish_reason or "abort"
            self.finished[reason] = self.finished.get(reason, 0) + 1
        self.num_prompt_tokens += prompt
        self.num_generation_tokens += generated
        self._prompt.observe(prompt)
        self._generated.observe(generated)
        self._e2e.observe(end - times.arrival_time)
        if times.first_scheduled_time is not None:
            self._queue.observe(max(0.0, times.first_scheduled_time - times.arrival_time))
        if times.first_token_time is not None:
            self._ttft.observe(times.first_token_time - times.arrival_time)
            self._decode.observe(max(0.0, end - times.first_token_time))
            if times.first_scheduled_time is not None:
                self._prefill.observe(max(0.0, times.first_token_time - times.first_scheduled_time))
            if generated > len(stream.choices):
                self._tpot.observe((end - times.first_token_time) / max(1, generated - len(stream.choices)))

    async def text(self, llm: AsyncLLM) -> bytes:
        """The page. Asks the core for its totals; without an answer it shows what this process knows."""
        status = llm.status()
        stats: dict[str, Any] = await llm.stats() if status["ready"] else {}
        self._families = list(self._engine_families(stats, llm))
        return generate_latest(self.registry)

    def _engine_families(self, stats: dict[str, Any], llm: AsyncLLM) -> Iterator[Metric]:
        labels, values = ["model_name"], [self.model_name]

        def gauge(name: str, text: str, value: float) -> Metric:
            family = GaugeMetricFamily(f"{self.prefix}:{name}", text, labels=labels)
            family.add_metric(values, value)
            return family

        def counter(name: str, text: str, value: float, **more: str) -> Metric:
            family = CounterMetricFamily(f"{self.prefix}:{name}", text, labels=[*labels, *more])
            family.add_metric([*values, *more.values()], value)
            return family

        yield counter("prompt_tokens", "Prompt tokens of ended requests.", self.num_prompt_tokens)
        yield counter("generation_tokens", "Output tokens of ended requests.", self.num_generation_tokens)
        success = CounterMetricFamily(
            f"{self.prefix}:request_success", "Ended requests.", labels=[*labels, "finished_reason"]
        )
        for reason, count in sorted(self.finished.items()):
            success.add_metric([*values, reason], count)
        yield success
        if not stats:
            return
        blocks = stats["num_blocks"]
        yield gauge("num_requests_running", "Requests in the running batch.", stats["num_running"])
        yield gauge("num_requests_waiting", "Requests in the queue.", stats["num_waiting"])
        yield gauge(
            "kv_cache_usage_perc", "Share of blocks in use, 0 to 1.", 1 - stats["num_free_blocks"] / max(1, blocks)
        )
        yield counter("prefix_cache_queries", "Tokens looked up at first admission.", stats["num_queried_tokens"])
        yield counter("prefix_cache_hits", "Of those, found.", stats["num_hit_tokens"])
        yield counter("num_preemptions", "Preemptions.", stats["num_preemptions"])
        for name, key in (
            ("computed", "num_computed_tokens"),
            ("wasted", "num_wasted_tokens"),
            ("recomputed", "num_recomputed_tokens"),
            ("copied", "num_copied_tokens"),
        ):
            yield counter(f"tokens_{name}", f"Tokens {name}.", stats[key])
        yield counter("failed_steps", "Steps that failed and were undone.", stats["num_failed_steps"])
        report = analyse(llm.timeline.window(time.monotonic_ns() - 60_000_000_000))
        yield gauge(
            "step_schedule_seconds",
            "Scheduler time per step, median of the last minute.",
            report.scheduler_us.get("p50", 0.0) / 1e6,
        )
        yield gauge(
            "step_execute_seconds",
            "Device time per step, median of the last minute.",
            report.device_ms.get("p50", 0.0) / 1e3,
        )
        yield gauge(
            "device_busy_ratio", "Share of the last minute's steps in which the device computed.", report.device_busy
        )
        idle = GaugeMetricFamily(
            f"{self.prefix}:device_idle_ratio", "Share in which it waited, by cause.", labels=[*labels, "cause"]
        )
        for cause, share in report.idle.items():
            idle.add_metric([*values, cause], share)
        yield idle
