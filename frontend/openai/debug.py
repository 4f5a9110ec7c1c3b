"""GET /debug/timeline: the last steps of all processes, as a summary or a trace. GET /metrics: Prometheus text."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable

import msgspec

from frontend.async_llm import AsyncLLM
from frontend.metrics import Metrics
from frontend.openai.auth import Access
from frontend.openai.engine import EngineLike
from frontend.openai.exchange import Exchange
from frontend.openai.routes import Row
from frontend.timeline import analyse, chrome_trace
from ipc.errors import RequestError


def debug_rows(llm: AsyncLLM, metrics: Metrics) -> list[Row]:
    """The routes that show a running engine to its operator."""

    async def get_timeline(exchange: Exchange, _: EngineLike) -> None:
        """?seconds=10&format=report|trace"""
        query = dict(pair.partition("=")[::2] for pair in exchange.scope["query_string"].decode("latin-1").split("&"))
        seconds = _number(query.get("seconds", "10"))
        rows = llm.timeline.window(time.monotonic_ns() - int(seconds * 1e9))
        if query.get("format", "report") == "trace":
            await exchange.reply(200, msgspec.json.encode(chrome_trace(rows)))
            return
        await exchange.reply(200, msgspec.json.encode({**dataclasses.asdict(analyse(rows)), "processes": processes()}))

    async def get_metrics(exchange: Exchange, _: EngineLike) -> None:
        await exchange.reply(200, await metrics.text(llm), content_type=b"text/plain; version=0.0.4; charset=utf-8")

    return [
        Row(("GET",), "/debug/timeline", get_timeline, "where the time of the last steps went"),
        Row(("GET",), "/metrics", get_metrics, "Prometheus metrics", Access.KEY),
    ]


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 < value <= 3600.0:
        raise RequestError(f"seconds is {text[:40]!r}; allowed is above 0 up to 3600", "seconds")
    return value


def processes() -> list[dict[str, object]]:
    """The engine's processes: role, pid, CPU seconds used, resident bytes. Siblings of this one, and it."""
    found: list[dict[str, object]] = []
    for pid in _siblings(os.getppid()):
        try:
            with open(f"/proc/{pid}/stat") as file:
                fields = file.read().rsplit(")", 1)[1].split()
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                words = file.read().split(b"\0")
            with open(f"/proc/{pid}/statm") as file:
                resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:  # it has just ended
            continue
        module = next((w for w in words if w.endswith(b".main")), b"")
        if module:
            cpu = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            found.append(
                {"role": module.decode().removesuffix(".main"), "pid": pid, "cpu_s": cpu, "rss_bytes": resident}
            )
    return found


def _siblings(parent: int) -> list[int]:
    read: Callable[[str], str] = lambda path: open(path).read()  # noqa: E731
    try:
        return [int(pid) for pid in read(f"/proc/{parent}/task/{parent}/children").split()]
    except OSError:
        return [os.getpid()]
