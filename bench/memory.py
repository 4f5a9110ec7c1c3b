"""What a running engine weighs: each process's memory, after its start and after requests, as Linux counts it.

    python launch.py bench memory [MODEL] [--requests N] [serving options]

resident: pages in memory, those shared with other processes too; proportional: shared pages divided among who shares
them; private: anonymous pages, which nothing but this process accounts for; peak: the most that was ever resident.
Reserved blocks of the KV pool that no request used yet weigh nothing. The last line is one JSON object.
"""
from __future__ import annotations

import concurrent.futures
import json
import re
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from bench.server_process import ServerProcess
from bench.stats import print_json
from ipc.option_help import OptionParser

FIELDS = {"resident": ("smaps_rollup", "Rss"), "proportional": ("smaps_rollup", "Pss"),
          "private": ("smaps_rollup", "Anonymous"), "peak": ("status", "VmHWM")}
PROMPT_WORDS, MAX_TOKENS = 250, 64


def weigh(pid: int) -> dict[str, float]:
    """MB of each of FIELDS."""
    result = {}
    for name, (file, field) in FIELDS.items():
        found = re.search(rf"^{field}:\s+(\d+) kB", Path(f"/proc/{pid}/{file}").read_text(), re.M)
        result[name] = int(found[1]) * 1024 / 1e6 if found else 0.0
    return result


def weigh_all(server: ServerProcess) -> dict[str, dict[str, float]]:
    """Of each process, and their sum."""
    result = {name: weigh(pid) for name, pid in server.pids.items()}
    result["all"] = {field: sum(entry[field] for entry in result.values()) for field in FIELDS}
    return {name: {field: round(value, 1) for field, value in entry.items()} for name, entry in result.items()}


def ask(url: str, model: str, number: int) -> None:
    """One completion of a prompt of its own."""
    body = dict(model=model, prompt=f"{number} " + "and on " * PROMPT_WORDS, max_tokens=MAX_TOKENS, temperature=0,
                ignore_eos=True)
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as response:
        response.read()


def show(title: str, weights: dict[str, dict[str, float]]) -> None:
    print(f"{title:24}" + "".join(f"{field + ' MB':>18}" for field in FIELDS))
    for name, entry in weights.items():
        print(f"  {name:22}" + "".join(f"{entry[field]:18.1f}" for field in FIELDS), flush=True)


def main(argv: list[str]) -> int:
    parser = OptionParser(prog="launch.py bench memory", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m", help="alias, folder, .gguf file or hub id")
    parser.add_argument("--requests", type=int, default=8, help="at once, of about 500 tokens each")
    args, options = parser.parse_known_args(argv)
    if not Path("/proc/self/smaps_rollup").exists():
        print("bench memory: this system does not tell what processes weigh (no /proc/PID/smaps_rollup)",
              file=sys.stderr)
        return 1
    report: dict[str, Any] = {"model": args.model, "requests": args.requests, "options": options}
    with tempfile.TemporaryDirectory(prefix="tf", dir="/tmp") as folder:
        server = ServerProcess(args.model, folder, "--served-model-name", "weighed", *options)
        try:
            server.wait_ready(300.0)            # nothing may be compiled yet
            report["ready"] = weigh_all(server)
            show("ready", report["ready"])
            with concurrent.futures.ThreadPoolExecutor(args.requests) as pool:
                list(pool.map(lambda number: ask(server.url, "weighed", number), range(args.requests)))
            report["after"] = weigh_all(server)
            show(f"after {args.requests} requests", report["after"])
            server.end()
        finally:
            server.kill()
    print_json(report)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
