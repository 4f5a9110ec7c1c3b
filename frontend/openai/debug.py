"""What shows a running engine to its operator: the timeline, the state now, Prometheus text, the operator profiler."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import time

import msgspec

from frontend.async_llm import AsyncLLM
from frontend.live import live
from frontend.metrics import Metrics
from frontend.openai.auth import Access
from frontend.openai.engine import EngineLike
from frontend.openai.exchange import Exchange
from frontend.openai.generation import check_engine
from frontend.openai.routes import Row
from frontend.peers import Peers
from frontend.processes import process_use, siblings
from frontend.step_report import analyse
from frontend.trace import chrome_trace
from ipc.errors import RequestError

_encode = msgspec.json.Encoder().encode


def debug_rows(llm: AsyncLLM, metrics: Metrics, peers: Peers | None = None) -> list[Row]:
    """The routes that show a running engine to its operator. `peers`: the other API servers, whose requests /metrics
    counts too; the timeline knows the requests of this one."""

    async def get_timeline(exchange: Exchange, _: EngineLike) -> None:
        """?seconds=10&format=report|trace"""
        query = exchange.query()
        seconds = _number(query.get("seconds", "10"))
        kind = query.get("format", "report")
        now_ns = time.monotonic_ns()
        window = llm.timeline.known_since(now_ns - int(seconds * 1e9)), now_ns
        rows = llm.timeline.window(window[0])
        if kind == "trace":
            make = functools.partial(
                chrome_trace, rows, [*llm.request_log.ended, *llm.requests()], llm.operator_trace, llm.num_blocks
            )
            await exchange.reply(200, await asyncio.to_thread(lambda: _encode(make())))
        elif kind == "report":
            processes = [use._asdict() for use in process_use(siblings())]
            report = dataclasses.asdict(analyse(rows, window_ns=window))
            await exchange.reply(200, _encode({**report, "processes": processes}))
        else:
            raise RequestError(f"format is {kind[:40]!r}; allowed are report and trace", "format")

    async def get_live(exchange: Exchange, _: EngineLike) -> None:
        """?after=COUNT: the steps since an earlier answer, and the state now."""
        text = exchange.query().get("after", "-1")
        if not text.removeprefix("-").isdecimal() or len(text) > 18:
            raise RequestError(f"after is {text[:40]!r}; it takes the count of an earlier answer, or -1", "after")
        await exchange.reply(200, _encode(await live(llm, int(text), siblings())))

    async def get_metrics(exchange: Exchange, _: EngineLike) -> None:
        others = await peers.ask("metrics") if peers is not None else []
        text = await metrics.text(llm, others)
        await exchange.reply(200, text, content_type=b"text/plain; version=0.0.4; charset=utf-8")

    async def start_profile(exchange: Exchange, engine: EngineLike) -> None:
        """POST: the worker records its operators from now on."""
        check_engine(engine)
        try:
            await llm.start_profile()
        except ValueError as error:
            raise RequestError(str(error)) from None
        await exchange.reply(200, _encode({"status": "profiling"}))

    async def stop_profile(exchange: Exchange, engine: EngineLike) -> None:
        """POST: it stops; /debug/timeline?format=trace has what it recorded, beside the steps."""
        check_engine(engine)
        begin = time.monotonic()
        try:
            trace = await llm.stop_profile()
        except ValueError as error:
            raise RequestError(str(error)) from None
        took = round(time.monotonic() - begin, 3)
        await exchange.reply(200, _encode({"status": "stopped", "events": len(trace["traceEvents"]), "seconds": took}))

    get, post = ("GET",), ("POST",)
    return [
        Row(get, "/debug/timeline", get_timeline, "where the time of the last steps went"),
        Row(get, "/debug/live", get_live, "steps, pool, queue and requests now"),
        Row(get, "/metrics", get_metrics, "Prometheus metrics"),
        Row(post, "/start_profile", start_profile, "record the worker's operators", Access.ADMIN),
        Row(post, "/stop_profile", stop_profile, "stop recording them", Access.ADMIN),
    ]


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 < value <= 3600.0:
        raise RequestError(f"seconds is {text[:40]!r}; allowed is above 0 up to 3600", "seconds")
    return value
