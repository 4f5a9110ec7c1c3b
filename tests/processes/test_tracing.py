"""Request spans: at a collector of our own over HTTP, and in the caller's trace."""
from __future__ import annotations

import json
import sys
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from frontend.tracing import RequestTracer
from ipc.config import FrontendSection
from ipc.errors import ConfigError
from tests.processes.tools import FLAGS, ServerProcess, wait_until

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector:
    """Takes OTLP over HTTP and keeps the spans."""

    def __init__(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
        self.spans: list[Any] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    import gzip
                    body = gzip.decompress(body)
                request = ExportTraceServiceRequest.FromString(body)
                for resource in request.resource_spans:
                    for scope in resource.scope_spans:
                        collector.spans += scope.spans
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/traces"

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]


@pytest.fixture
def collector() -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.proto")
    found = Collector()
    yield found
    found.server.shutdown()
    found.server.server_close()


def attributes(span: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


def ask(url: str, **headers: str) -> None:
    body = {"prompt": [1, 2, 3], "max_tokens": 5, "ignore_eos": True}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(),
                                     {"Content-Type": "application/json", **headers})
    with urllib.request.urlopen(request, timeout=30) as answer:
        answer.read()


def test_a_request_is_a_span_of_the_callers_trace_with_its_parts_below(tiny_model: str, temp: str,
                                                                       collector: Collector) -> None:
    server = ServerProcess(tiny_model, temp, *FLAGS, "--otlp-traces-endpoint", collector.url)
    try:
        server.wait_ready()
        ask(server.url, traceparent=f"00-{TRACE}-{PARENT}-01")
        ask(server.url, traceparent=f"00-{TRACE}-{PARENT}-00")      # the caller does not sample: no span
        ask(server.url)
        assert server.end() == 0, server.screen
    finally:
        server.kill()
    wait_until(lambda: len(collector.named("llm_request")) == 2, what="two spans")
    first, own = collector.named("llm_request")
    assert (first.trace_id.hex(), first.parent_span_id.hex()) == (TRACE, PARENT)
    assert own.trace_id.hex() != TRACE and not own.parent_span_id
    found = attributes(first)
    assert (found["gen_ai.usage.prompt_tokens"], found["gen_ai.usage.completion_tokens"]) == (3, 5)
    children = [span for span in collector.spans if span.parent_span_id == first.span_id]
    assert [span.name for span in children] == ["tokenize", "queue", "prefill", "decode", "write"]
    times = [first.start_time_unix_nano, *(span.end_time_unix_nano for span in children)]
    assert [span.start_time_unix_nano for span in children] == times[:-1] and first.end_time_unix_nano == times[-1]


def test_without_the_packages_the_start_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(ConfigError, match="--extra otel"):
        RequestTracer("http://127.0.0.1:4318/v1/traces", "tiny")


@pytest.mark.parametrize("endpoint", ["localhost:4317", "ftp://x", "http://"])
def test_an_endpoint_is_a_url(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="--otlp-traces-endpoint"):
        FrontendSection(otlp_traces_endpoint=endpoint)
