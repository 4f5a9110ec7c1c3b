"""What an HTTP request knows before its engine request exists: when it came, and whose trace it belongs to.

A context variable, as OpenTelemetry's own: every endpoint, in whatever dialect, would otherwise hand two values through
to the engine that it never looks at. Empty outside the HTTP server. Source of the headers: W3C Trace Context.
"""
from __future__ import annotations

import contextvars
from typing import NamedTuple


class RequestContext(NamedTuple):
    """Of the HTTP request that this task serves."""
    arrival_time: float                         # seconds of time.monotonic()
    traceparent: str = ""                       # the headers as sent; "": none
    tracestate: str = ""


CURRENT: contextvars.ContextVar[RequestContext | None] = contextvars.ContextVar("request", default=None)
