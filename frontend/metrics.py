"""Prometheus metrics of one frontend and its engine, in the names that dashboards for vLLM know.

One registry in one process: the engine's totals arrive as messages. Request times are observed when a request ends,
sums over steps are taken when a page is read. Knows no HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from frontend.outputs import RequestMetrics
from frontend.processes import process_use, siblings
from frontend.step_report import StepTotals, analyse

if TYPE_CHECKING:
    from frontend.async_llm import AsyncLLM
    from frontend.request_stream import RequestStream

TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
ITL = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20, 80)
LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
CHOICES = (1, 2, 5, 10, 20)


class _Collector(CollectorRegistry):
    """A page of given families."""

    def __init__(self, families: Iterable[Metric]) -> None:
        super().__init__(auto_describe=False)
        self._given = list(families)

    def collect(self) -> Iterator[Metric]:
        yield from self._given


def summed(pages: Sequence[bytes]) -> bytes:
    """One page with the sums of the samples of several; for counters and histograms."""
    found: dict[str, Metric] = {}
    totals: dict[tuple[str, str, tuple[tuple[str, str], ...]], float] = {}
    for page in pages:
        for family in text_string_to_metric_families(page.decode()):
            found.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                if sample.name.endswith("_created"):
                    continue
                key = (family.name, sample.name, tuple(sorted(sample.labels.items())))
                totals[key] = totals.get(key, 0.0) + sample.value
    for (name, sample_name, labels), value in totals.items():
        found[name].add_sample(sample_name, dict(labels), value)
    return generate_latest(_Collector(found.values()))


class Metrics:
    """Histograms of requests, and the engine's totals at the time of reading. `prefix` is the namespace."""

    def __init__(self, model_name: str, prefix: str = "vllm") -> None:
        self.prefix, self.model_name = prefix, model_name
        self.registry = CollectorRegistry(auto_describe=False)
        self._families: list[Metric] = []
        self.registry.register(self)
        self.finished: dict[str, int] = {}
        self.num_prompt_tokens = self.num_generation_tokens = 0
        self._itl_counts, self._itl_sum = np.zeros(len(ITL) + 1, np.int64), 0.0

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(f"{prefix}:{name}", text, ["model_name"], registry=self.registry, buckets=buckets)
            return made.labels(model_name)

        self._ttft = histogram("time_to_first_token_seconds", "Arrival to first token.", TTFT)
        self._tpot = histogram("request_time_per_output_token_seconds", "(end - first token) / (tokens - 1).", ITL)
        self._e2e = histogram("e2e_request_latency_seconds", "Arrival to end.", LATENCY)
        self._queue = histogram("request_queue_time_seconds", "Arrival to first scheduled.", LATENCY)
        self._prefill = histogram("request_prefill_time_seconds", "First scheduled to first token.", LATENCY)
        self._decode = histogram("request_decode_time_seconds", "First token to end.", LATENCY)
        self._inference = histogram("request_inference_time_seconds", "First scheduled to end.", LATENCY)
        self._prompt = histogram("request_prompt_tokens", "Prompt tokens of a request.", TOKENS)
        self._computed = histogram("request_prefill_kv_computed_tokens", "Of them, not found in the cache.", TOKENS)
        self._generated = histogram("request_generation_tokens", "Output tokens of a request.", TOKENS)
        self._max_tokens = histogram("request_params_max_tokens", "max_tokens of a request.", TOKENS)
        self._n = histogram("request_params_n", "Choices of a request.", CHOICES)

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
            gaps = np.diff(np.array(choice.token_ns, np.int64)) / 1e9
            self._itl_counts += np.bincount(np.searchsorted(ITL, gaps), minlength=len(self._itl_counts))
            self._itl_sum += float(gaps.sum())
        self.num_prompt_tokens += prompt
        self.num_generation_tokens += generated
        self._prompt.observe(prompt)
        self._computed.observe(prompt - stream.num_cached_tokens)
        self._generated.observe(generated)
        self._n.observe(len(stream.choices))
        if stream.max_tokens is not None:
            self._max_tokens.observe(stream.max_tokens)
        self._e2e.observe(end - times.arrival_time)
        if times.first_scheduled_time is not None:
            self._queue.observe(max(0.0, times.first_scheduled_time - times.arrival_time))
            self._inference.observe(max(0.0, end - times.first_scheduled_time))
        if times.first_token_time is not None:
            self._ttft.observe(times.first_token_time - times.arrival_time)
            self._decode.observe(max(0.0, end - times.first_token_time))
            if times.first_scheduled_time is not None:
                self._prefill.observe(max(0.0, times.first_token_time - times.first_scheduled_time))
            if generated > len(stream.choices):
                self._tpot.observe((end - times.first_token_time) / max(1, generated - len(stream.choices)))

    async def text(self, llm: AsyncLLM, others: Sequence[bytes] = ()) -> bytes:
        """The page. Asks the core for its totals; without an answer it shows what this process knows. `others`: the
        `own_text` of the other API servers, which is added to this one's."""
        stats: dict[str, Any] = await llm.stats() if llm.status()["ready"] else {}
        families = list(self._process_families())
        if stats:
            families += self._core_families(stats)
            families += self._step_families(llm)
        own = self.own_text()
        return (summed([own, *others]) if others else own) + generate_latest(_Collector(families))

    def own_text(self) -> bytes:
        """What the requests of this process were: all of it are sums, which may be added over processes."""
        self._families = list(self._frontend_families())
        return generate_latest(self.registry)

    # ------------------------------------------------------------ families

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"{self.prefix}:{name}", text, labels=["model_name"])
        family.add_metric([self.model_name], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"{self.prefix}:{name}", text, labels=["model_name"])
        family.add_metric([self.model_name], value)
        return family

    def _labelled(
        self, kind: type[CounterMetricFamily | GaugeMetricFamily], name: str, text: str, label: str,
        values: Mapping[str, float],
    ) -> Metric:
        family = kind(f"{self.prefix}:{name}", text, labels=["model_name", label])
        for key, value in sorted(values.items()):
            family.add_metric([self.model_name, key], value)
        return family

    def _histogram(self, name: str, text: str, bounds: Iterable[float], counts: np.ndarray, total: float) -> Metric:
        family = HistogramMetricFamily(f"{self.prefix}:{name}", text, labels=["model_name"])
        names = [*(str(float(bound)) for bound in bounds), "+Inf"]
        family.add_metric([self.model_name], list(zip(names, np.cumsum(counts).tolist(), strict=True)), total)
        return family

    def _frontend_families(self) -> Iterator[Metric]:
        yield self._counter("prompt_tokens", "Prompt tokens of ended requests.", self.num_prompt_tokens)
        yield self._counter("generation_tokens", "Output tokens of ended requests.", self.num_generation_tokens)
        yield self._labelled(CounterMetricFamily, "request_success", "Ended requests.", "finished_reason",
                             self.finished)
        yield self._histogram("inter_token_latency_seconds", "Between tokens of a request.", ITL, self._itl_counts,
                              self._itl_sum)

    def _process_families(self) -> Iterator[Metric]:
        labels = ["model_name", "process", "pid"]
        rss = GaugeMetricFamily(f"{self.prefix}:process_rss_bytes", "Resident memory.", labels=labels)
        cpu = CounterMetricFamily(f"{self.prefix}:process_cpu_use_seconds", "CPU time used.", labels=labels)
        for use in process_use(siblings()):
            values = [self.model_name, use.role, str(use.pid)]
            rss.add_metric(values, use.rss_bytes)
            cpu.add_metric(values, use.cpu_s)
        yield rss
        yield cpu

    def _core_families(self, stats: dict[str, Any]) -> Iterator[Metric]:
        blocks, size = stats["num_blocks"], stats["block_size"]
        yield self._gauge("num_requests_running", "Requests in the running batch.", stats["num_running"])
        yield self._gauge("num_requests_waiting", "Requests in the queue.", stats["num_waiting"])
        yield self._gauge(
            "kv_cache_usage_perc", "Share of blocks in use, 0 to 1.", 1 - stats["num_free_blocks"] / max(1, blocks)
        )
        info = GaugeMetricFamily(
            f"{self.prefix}:cache_config_info", "The pool.", labels=["model_name", "block_size", "num_gpu_blocks"]
        )
        info.add_metric([self.model_name, str(size), str(blocks)], 1)
        yield info
        yield self._counter("prefix_cache_queries", "Tokens looked up at first admission.", stats["num_queried_tokens"])
        yield self._counter("prefix_cache_hits", "Of those, found.", stats["num_hit_tokens"])
        yield self._counter("num_preemptions", "Preemptions.", stats["num_preemptions"])
        swapped = stats["num_swap_preemptions"]
        yield self._labelled(
            CounterMetricFamily, "preemptions_by_kind", "By how the request returns.", "kind",
            {"swap": swapped, "recompute": stats["num_preemptions"] - swapped},
        )
        yield self._labelled(CounterMetricFamily, "cache_tokens", "Tokens the prefix cache gave or gave up.", "kind", {
            "hit": stats["num_hit_tokens"], "adopted": stats["num_adopted_tokens"],
            "resumed": stats["num_resumed_hit_tokens"], "copied": stats["num_copied_tokens"],
            "evicted": stats["num_evicted_blocks"] * size,
        })
        for name in ("computed", "wasted", "recomputed", "copied"):
            yield self._counter(f"tokens_{name}", f"Tokens {name}.", stats[f"num_{name}_tokens"])
        yield self._counter("failed_steps", "Steps that failed and were undone.", stats["num_failed_steps"])
        yield self._counter("spec_decode_num_draft_tokens", "Drafts that were verified.", stats["num_draft_tokens"])
        yield self._counter("spec_decode_num_accepted_tokens", "Of those, right.", stats["num_accepted_tokens"])

    def _step_families(self, llm: AsyncLLM) -> Iterator[Metric]:
        totals: StepTotals = llm.totals
        totals.update()
        yield self._counter("scheduler_seconds", "Planning, encoding, committing.", totals.scheduler_s)
        yield self._counter("device_seconds", "Forward passes and sampling.", totals.device_s)
        yield self._counter("wire_seconds", "Messages on their way between processes.", totals.wire_s)
        yield self._labelled(CounterMetricFamily, "device_idle_seconds", "Between steps, by what it waited for.",
                             "cause", totals.idle_s)
        yield self._labelled(CounterMetricFamily, "process_busy_seconds", "Working on steps.", "process",
                             totals.busy_s)
        yield self._histogram("iteration_tokens_total", "Tokens of a step.", StepTotals.TOKEN_BUCKETS,
                              totals.token_counts, totals.num_tokens)
        yield self._counter("prefill_tokens_computed", "Of the computed tokens, those of prompts.",
                            totals.num_prefill_tokens)
        now_ns = time.monotonic_ns()
        since_ns = llm.timeline.known_since(now_ns - 60_000_000_000)
        report = analyse(llm.timeline.window(since_ns), window_ns=(since_ns, now_ns))
        yield self._gauge("step_schedule_seconds", "Scheduler time per step, median of the last minute.",
                          report.scheduler_us.get("p50", 0.0) / 1e6)
        yield self._gauge("step_execute_seconds", "Device time per step, median of the last minute.",
                          report.device_ms.get("p50", 0.0) / 1e3)
        yield self._gauge("device_busy_ratio", "Share of the last minute in which the device computed.",
                          report.device_busy)
        yield self._labelled(GaugeMetricFamily, "device_idle_ratio", "Share in which it waited, by cause.", "cause",
                             report.idle)
