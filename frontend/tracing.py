"""OpenTelemetry spans of requests, exported when --otlp-traces-endpoint names a collector.

A request that ends becomes one span, `llm_request`, with a child for each of its parts; names of attributes are vLLM's
and OpenTelemetry's for generative models. A caller's W3C traceparent makes it part of the caller's trace, and a caller
that does not sample is not traced. Spans are made when a request ends and sent by the library's own thread: no step
waits. The packages are the extra `otel`; without the option nothing of them is imported.
"""
from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from frontend.request_log import parts
from ipc.errors import ConfigError

if TYPE_CHECKING:
    from frontend.request_stream import RequestStream


class RequestTracer:
    """Add `observe` to AsyncLLM.observers, and `close` at the end. `processor`: a span processor, for tests."""

    def __init__(self, endpoint: str, model_name: str, processor: Any = None) -> None:
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
            if processor is None:
                from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
                processor = BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint))
        except ImportError as error:
            raise ConfigError(f"--otlp-traces-endpoint needs packages that are not here ({error.name}); run: python "
                              "launch.py setup --extra otel") from None
        self._model_name = model_name
        self._provider = TracerProvider(resource=Resource.create({"service.name": "threefold"}), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("threefold")
        self._propagator = TraceContextTextMapPropagator()

    def observe(self, stream: RequestStream) -> None:
        """A request has ended."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        context = stream.context
        carrier = {} if context is None else {"traceparent": context.traceparent, "tracestate": context.tracestate}
        parent = self._propagator.extract({name: text for name, text in carrier.items() if text})
        metrics = stream.metrics
        shift = time.time_ns() - time.monotonic_ns()            # from our clock to the world's

        def unix_ns(moment: float) -> int:
            return int(moment * 1e9) + shift

        ended = metrics.delivered_time or time.monotonic()
        span = self._tracer.start_span("llm_request", parent, SpanKind.SERVER, self._attributes(stream, ended),
                                       start_time=unix_ns(metrics.arrival_time))
        if stream.error is not None:
            span.set_status(Status(StatusCode.ERROR, str(stream.error)))
        inside = set_span_in_context(span)
        for name, (begin, end) in parts(metrics).items():
            self._tracer.start_span(name, inside, start_time=unix_ns(begin)).end(unix_ns(end))
        span.end(unix_ns(ended))

    def _attributes(self, stream: RequestStream, ended: float) -> dict[str, Any]:
        metrics, params = stream.metrics, stream.params
        found: dict[str, Any] = {
            "gen_ai.response.model": self._model_name,
            "gen_ai.request.id": stream.request_id,
            "gen_ai.request.n": len(stream.choices),
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.usage.prompt_tokens": len(stream.prompt_token_ids) // 4,
            "gen_ai.usage.completion_tokens": sum(len(choice.token_ids) for choice in stream.choices),
            "gen_ai.usage.cached_tokens": stream.num_cached_tokens,
            "gen_ai.response.finish_reasons": [choice.finish_reason or "abort" for choice in stream.choices],
            "gen_ai.latency.e2e": ended - metrics.arrival_time,
            "threefold.num_preemptions": stream.num_preemptions,
        }
        if stream.max_tokens is not None:
            found["gen_ai.request.max_tokens"] = stream.max_tokens
        if metrics.first_token_time is not None:
            found["gen_ai.latency.time_to_first_token"] = metrics.first_token_time - metrics.arrival_time
        for name, part in (("queue", "time_in_queue"), ("prefill", "time_in_model_prefill"),
                           ("decode", "time_in_model_decode")):
            if name in (spans := parts(metrics)):
                found[f"gen_ai.latency.{part}"] = spans[name][1] - spans[name][0]
        return found

    def close(self) -> None:
        """Send what is left; waits a few seconds for a collector that answers."""
        self._provider.shutdown()
