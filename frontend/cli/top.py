"""`python launch.py top`: a running server at a glance, refreshed each second; printed once where there is no terminal.

Draws what the page at /timeline draws, from the same route. Knows no engine.
"""
from __future__ import annotations

import contextlib
import sys
import time
from typing import Any

from rich.box import SIMPLE
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from frontend.cli.common import StartError, UsageError, run_command, server_api_key
from frontend.cli.profile import Server
from frontend.cli.profile_view import CAUSES, STYLES, shares, table
from ipc.option_help import OptionParser

DEFAULT_URL = "http://127.0.0.1:8000"
RATE_S = 5.0                                    # over which rates are taken
SHOWN = 8
PART_STYLES = {"tokenize": "cyan", "queue": "yellow", "prefill": "green", "decode": "magenta", "write": "blue"}


def main(argv: list[str] | None = None) -> int:
    return run_command("top", lambda: top(list(sys.argv[1:] if argv is None else argv)))


def top(argv: list[str]) -> int:
    """Until Ctrl-C, or once."""
    parser = OptionParser(prog="launch.py top",
                          description="A running server at a glance: processes, steps, KV, queue, requests.")
    parser.add_argument("--url", default=DEFAULT_URL, help=f"of the server (default: {DEFAULT_URL})")
    parser.add_argument("--api-key", help="of the server")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between two looks (default: 1)")
    parser.add_argument("--once", action="store_true", help="print once; the default where output is no terminal")
    args = parser.parse_args(argv)
    if not 0.1 <= args.interval <= 60:
        raise UsageError(f"--interval is {args.interval:g}; allowed is 0.1 to 60")
    source = Source(Server(args.url, server_api_key(vars(args))))
    if args.once or not sys.stdout.isatty():
        source.look()
        time.sleep(args.interval)               # CPU shares need two looks
        Console(width=None if sys.stdout.isatty() else 110).print(view(source.look()))
        return 0
    with contextlib.suppress(KeyboardInterrupt), Live(view(source.look()), screen=True, auto_refresh=False) as screen:
        while True:
            time.sleep(args.interval)
            screen.update(view(source.look()), refresh=True)
    return 0


class Source:
    """Answers of /debug/live, with the CPU shares and rates that two of them in a row give."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._count = -1
        self._before: dict[str, Any] | None = None
        self._steps: list[tuple[int, int, int]] = []        # moment in us, tokens, prompt tokens

    def look(self) -> dict[str, Any]:
        """Raises StartError when the server cannot be asked."""
        now = self._server.call(f"/debug/live?after={self._count}")
        if "steps" not in now:
            raise StartError(f"{self._server.url}: not ready: {now['status']['reason']}")
        place = {name: index for index, name in enumerate(now["fields"])}
        if now["count"] < self._count:
            self._steps.clear()                 # the server was restarted
        self._count = now["count"]
        self._steps += [(row[0], row[place["num_tokens"]], row[place["num_prefill_tokens"]]) for row in now["steps"]]
        recent = [step for step in self._steps if step[0] > now["now_us"] - RATE_S * 1e6]
        self._steps = recent
        now["rates"] = {"steps": len(recent) / RATE_S, "tokens": sum(step[1] for step in recent) / RATE_S,
                        "prefill": sum(step[2] for step in recent) / RATE_S}
        before, self._before = self._before, now
        seconds = (now["now_us"] - before["now_us"]) / 1e6 if before else 1.0
        now["processes"] = shares(before["processes"] if before else now["processes"], now["processes"], seconds)
        return now


def view(now: dict[str, Any]) -> RenderableType:
    """One screen."""
    queue, pool, report = now["queue"], now["pool"], now["report"]
    used = pool["num_blocks"] - pool["num_free"]
    rates, latency = now["rates"], now["latency"]
    head = Text.assemble(
        (now["model"], "bold"), f"   {rates['steps']:.0f} steps/s   {rates['tokens']:.0f} tokens/s, "
        f"{rates['prefill']:.0f} of prompts   running {queue['num_running']} of {queue['num_seats']}   waiting "
        f"{queue['num_waiting']}\nTTFT {_newest(latency['ttft_p50'])}   ITL {_newest(latency['itl_p50'])}")
    kv = Text.assemble("KV pool ", *meter(used / pool["num_blocks"], 40, "magenta"),
                       f" {used:,} of {pool['num_blocks']:,} blocks of {pool['block_size']} tokens")
    parts: list[RenderableType] = [head, kv, Text(report["verdict"], style="bold"), _processes(now)]
    if report["stages"]:
        parts.append(_device(report))
    parts.append(_requests(now["requests"]))
    parts.append(_queue(queue))
    return Group(*parts)


def meter(share: float, cells: int, style: str) -> list[tuple[str, str]]:
    """A bar of so many cells."""
    full = round(min(max(share, 0.0), 1.0) * cells)
    return [("█" * full, style), ("░" * (cells - full), "bright_black")]


def _newest(series: list[float | None]) -> str:
    value = next((value for value in reversed(series) if value is not None), None)
    return "-" if value is None else f"{value:.1f} ms" if value < 1000 else f"{value / 1000:.2f} s"


def _processes(now: dict[str, Any]) -> Table:
    made = table("process", "pid", "busy with steps", "CPU", "memory")
    for use in sorted(now["processes"], key=lambda use: (*STYLES, use["role"]).index(use["role"])):
        busy = now["report"]["busy"].get(use["role"], 0.0)
        made.add_row(Text(use["role"], STYLES.get(use["role"], "")), str(use["pid"]), f"{busy:.0%}",
                     f"{use['cpu']:.0%} of a core", f"{use['rss_bytes'] / 2**20:.0f} MiB")
    return made


def _device(report: dict[str, Any]) -> Table:
    made = table("the device", "", f"of the last {report['seconds']:.2g} s")
    made.columns[1].justify = "left"
    busy = report["device_busy"]
    made.add_row("computes", Text.assemble(*meter(busy, 24, "magenta")), f"{busy:.0%}")
    for cause, text in CAUSES.items():
        share = report["idle"][cause]
        if share >= 0.005:
            made.add_row(text, Text.assemble(*meter(share, 24, "yellow")), f"{share:.0%}")
    return made


def _requests(requests: list[dict[str, Any]]) -> RenderableType:
    slowest = sorted(requests, key=lambda one: -one["wall_s"])[:SHOWN]
    if not slowest:
        return Text("nothing runs", style="bright_black")
    made = table("slowest request", "so far", "parts", "cached", "prompt", "output")
    made.columns[2].justify = "left"
    longest = max(slowest[0]["wall_s"], 1e-9)
    for one in slowest:
        bar = [("█" * round(24 * one["parts"].get(part, 0.0) / longest), style) for part, style in PART_STYLES.items()]
        made.add_row(one["id"][-28:], f"{one['wall_s']:.2f} s", Text.assemble(*bar), str(one["cached"]),
                     str(one["prompt"]), str(one["output"]))
    made.caption = Text.assemble(*[(f"█ {part}  ", style) for part, style in PART_STYLES.items()])
    made.caption_justify = "left"
    return made


def _queue(queue: dict[str, Any]) -> RenderableType:
    if not queue["num_waiting"]:
        return Text("nobody waits", style="bright_black")
    made = Table(box=SIMPLE, pad_edge=False, show_edge=False)
    for column, justify in (("waiting request", "left"), ("waits", "right"), ("because", "left")):
        made.add_column(column, justify="right" if justify == "right" else "left", overflow="fold")
    for one in queue["waiting"][:SHOWN]:
        waits = "" if one["waits_s"] is None else f"{one['waits_s']:.2f} s"
        made.add_row(one["name"][-28:], waits, one["reason"])
    if queue["num_waiting"] > SHOWN:
        made.add_row(f"and {queue['num_waiting'] - SHOWN:,} more", "", "")
    return made


if __name__ == "__main__":
    raise SystemExit(main())
