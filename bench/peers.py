"""This engine beside llama.cpp, vLLM and transformers: one load after another against each, on this machine.

    python launch.py bench peers [--only NAME ...] [--rows c1 c8 ...] [--into FILE.json] [--report]
    bash bench/peers.sh                 the same; bash bench/peers.sh install llama.cpp gets a peer

Starts each server in turn, takes the time to its first token, runs `bench serve` against it (each row REPEATS times
with other prompts, medians count), weighs its processes and ends it. What is absent is skipped, with the way to get it.
Results of several calls gather in one file, so a long comparison can be made in slices. Ratios within one run count:
absolute figures belong to a machine and an hour. The last line is one JSON object.
"""
from __future__ import annotations

import argparse
import datetime
import functools
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.peer_process import Server, free_port, memory_mb
from bench.peer_report import print_table, write_markdown, write_plot
from bench.peer_servers import GET, ROOT, Peer, all_peers, find, threads, version
from bench.stats import median
from ipc.option_help import OptionParser

REPEATS = 3
Keep = Callable[[dict[str, Any]], None]


def load(tokens: str, output: str, at_once: int, *more: str) -> list[str]:
    """A row's options of `bench serve`: everything at once."""
    return ["--prompt-tokens", tokens, "--output-tokens", output, "--concurrency", str(at_once), "--num-requests",
            str(at_once), *more]


# row: (options of bench serve, figure that counts)
ROWS: dict[str, tuple[list[str], str]] = {
    "c1": (load("256", "128", 1), "output_tok_s"),
    "c8": (load("256", "128", 8), "output_tok_s"),
    "c32": (load("256", "128", 32), "output_tok_s"),
    "prefill": (load("256", "1", 8), "total_tok_s"),
    "shared": (load("8-48", "8-40", 16, "--shared-prefix", "192"), "output_tok_s"),
    "shape c1": (load("256", "32", 1), "decode_tok_s"),
    "shape c8": (load("256", "32", 8), "decode_tok_s"),
}


def run_load(url: str, row: str, repeat: int, timeout_s: float) -> dict[str, Any]:
    """One run of `bench serve` in a process of its own: its JSON. Raises RuntimeError when requests failed."""
    options, _ = ROWS[row]
    seed = 100 * list(ROWS).index(row) + repeat
    command = [sys.executable, str(ROOT / "launch.py"), "bench", "serve", "--base-url", url, "--seed", str(seed),
               "--timeout", str(timeout_s), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1]) if done.stdout else {}
    if done.returncode or result.get("failed_requests", 1) or result.get("short_outputs"):
        raise RuntimeError(f"{row}: {result.get('first_error') or done.stderr[-300:] or 'outputs shorter than asked'}")
    return result


def run_server(peer: Peer, rows: list[str], repeats: int, log: Path, keep: Keep) -> None:
    """All rows against one start of a server; each is kept as soon as it is there."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    entry: dict[str, Any] = {"rows": {}}
    with Server(peer.command(port), peer.env, log) as server:
        entry["first_token_s"] = round(server.first_token_s(url, peer.timeout_s), 2)
        print(f"{peer.name}: first token after {entry['first_token_s']} s", flush=True)
        for row in rows:
            runs = [run_load(url, row, repeat, peer.timeout_s) for repeat in range(repeats)]
            figure = ROWS[row][1]
            entry["rows"][row] = {"value": [run[figure] for run in runs if run[figure] is not None],
                                  "decode": [run["decode_tok_s"] for run in runs if run["decode_tok_s"]],
                                  "ttft_s": [run["ttft_s"]["p50"] for run in runs]}
            values = entry["rows"][row]["value"]
            print(f"  {row:9} {median(values) if values else 0:9.1f} tok/s {sorted(values)}", flush=True)
            entry["peak_mb"], entry["pss_mb"] = (round(mb) for mb in memory_mb(server.process.pid))
            keep(entry)


def run_library(peer: Peer, rows: list[str], repeats: int, log: Path, keep: Keep) -> None:
    """A program that measures itself and prints JSON last."""
    with log.open("wb") as errors:
        done = subprocess.run([*peer.command(0), "--rows", ",".join(rows), "--repeats", str(repeats)],
                              stdout=subprocess.PIPE, stderr=errors, timeout=2 * peer.timeout_s)
    if done.returncode:
        raise RuntimeError(f"ended with status {done.returncode}: {log.read_text(errors='replace')[-400:]}")
    entry: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    for row, figures in entry["rows"].items():
        print(f"  {row:9} {median(figures['value']):9.1f} tok/s", flush=True)
    keep(entry)


def rows_of(peer: Peer, wanted: list[str]) -> list[str]:
    is_shape = peer.model != "smollm2-135m"
    return [row for row in wanted if row.startswith("shape") == is_shape]


def machine() -> str:
    """Processor and cores, fit for a file name."""
    import llvmlite.binding as llvm
    return f"{llvm.get_host_cpu_name()}-{threads()}cores"


def run_all(peers: list[Peer], args: argparse.Namespace, result: dict[str, Any], logs: Path, into: Path) -> None:
    """Measure and keep each; one that fails is reported and costs nobody else."""
    for peer in peers:
        rows = rows_of(peer, args.rows)
        if not rows:
            continue
        if find(peer.engine) is None:
            print(f"{peer.name}: skipped, {peer.engine} is not here: {GET[peer.engine]}", flush=True)
            continue
        result["versions"].setdefault(peer.engine, version(peer.engine))
        print(f"{peer.name}: {peer.engine}, {peer.weights}", flush=True)
        run = run_server if peer.kind == "server" else run_library
        try:
            run(peer, rows, args.repeats, logs / f"{peer.name}.log", functools.partial(keep, result, peer, into))
        except (RuntimeError, OSError, ValueError, subprocess.TimeoutExpired) as error:
            print(f"{peer.name}: failed: {error}", file=sys.stderr, flush=True)


def keep(result: dict[str, Any], peer: Peer, into: Path, entry: dict[str, Any]) -> None:
    """Enter what is known of a peer, beside rows of an earlier call, and write the file."""
    old = result["peers"].get(peer.name, {"rows": {}})
    peak = max(old.get("peak_mb", 0), entry["peak_mb"])
    result["peers"][peer.name] = {"engine": peer.engine, "weights": peer.weights, "like": peer.like,
                                  "time": time.strftime("%H:%M", time.gmtime()), **entry,
                                  "peak_mb": peak, "rows": {**old["rows"], **entry["rows"]}}
    into.write_text(json.dumps(result, indent=1) + "\n")


def main(argv: list[str]) -> int:
    parser = OptionParser(prog="launch.py bench peers", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these peers; --list names all")
    parser.add_argument("--list", action="store_true", help="what is known and what is here")
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=tuple(ROWS))
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--into", type=Path, help="JSON file that gathers results (default: bench/results/DATE_...)")
    parser.add_argument("--report", action="store_true", help="measure nothing: table, Markdown and chart of the file")
    args = parser.parse_args(argv)
    peers = all_peers()
    if args.list:
        for peer in peers:
            print(f"{peer.name:22} {peer.weights:20} {find(peer.engine) or 'absent: ' + GET[peer.engine]}")
        return 0
    unknown = set(args.only or []) - {peer.name for peer in peers}
    if unknown or args.repeats < 1:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; --list names all" if unknown else
                     f"--repeats is {args.repeats}; it must be at least 1")
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    into = args.into or ROOT / "bench" / "results" / f"{date}_peers_{machine()}.json"
    result: dict[str, Any] = {"date": date, "machine": machine(), "repeats": args.repeats, "versions": {}, "peers": {}}
    if into.exists():
        result = json.loads(into.read_text())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))     # ends the server that runs, too
    if not args.report:
        with tempfile.TemporaryDirectory(prefix="peers-") as logs:
            run_all([p for p in peers if not args.only or p.name in args.only], args, result, Path(logs), into)
    print_table(result)
    if args.report:
        write_markdown(result, into.with_suffix(".md"))
        write_plot(result, into.with_suffix(".png"))
    print(json.dumps(result))
    return 0 if result["peers"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
