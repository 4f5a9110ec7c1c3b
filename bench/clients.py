"""`bench clients`: does the software that people point at an OpenAI server work with this one?

Each client runs as its users run it, in an interpreter that has it (`--python NAME=PATH`; this one by default), against
a server of the demo model, or the one named by --url. A client that is not installed is one line, and no failure.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from bench.stats import print_json
from bench.tiny_model import write_tiny_model
from ipc.child import ROOT
from ipc.option_help import OptionParser

SCRIPTS = os.path.join(ROOT, "bench", "client_scripts")
START_S, CLIENT_S = 300.0, 600.0


class Target(NamedTuple):
    """What a client is pointed at."""

    url: str
    model: str
    tokenizer: str  # a Hugging Face folder
    weights: str  # a Hugging Face folder of the same weights, or "-"
    scratch: str  # a folder for what clients write


class Client(NamedTuple):
    """`module`: what its interpreter must be able to import; "" for Node. `command`: arguments after the program."""

    module: str
    command: Callable[[Target], list[str]]
    program: str = "python"


def script(name: str) -> Callable[[Target], list[str]]:
    return lambda target: [os.path.join(SCRIPTS, name), target.url, target.model, target.tokenizer, target.weights]


def guidellm(target: Target) -> list[str]:
    return ["-m", "guidellm", "run", "--backend", f"kind=openai_http,target={target.url},model={target.model}",
            "--profile", "kind=concurrent,streams=4", "--constraint", "kind=max_requests,count=12",
            "--tokenizer", f"kind=huggingface_auto,model={target.tokenizer}",
            "--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16",
            "--output", f"kind=json,path={target.scratch}/guidellm.json", "--disable-progress"]


def aiperf(target: Target) -> list[str]:
    return ["-m", "aiperf", "profile", "--model", target.model, "--url", target.url, "--endpoint-type", "chat",
            "--streaming", "--tokenizer", target.tokenizer, "--synthetic-input-tokens-mean", "64",
            "--output-tokens-mean", "16", "--concurrency", "4", "--request-count", "12", "--ui", "none",
            "--artifact-dir", f"{target.scratch}/aiperf"]


def schemathesis(target: Target) -> list[str]:
    return ["-m", "schemathesis.cli", "run", f"{target.url}/openapi.json", "--url", target.url, "--checks",
            "not_a_server_error", "--phases", "fuzzing", "--max-examples", "20", "--workers", "2",
            "--request-timeout", "60"]


CLIENTS: dict[str, Client] = {
    "openai": Client("openai", script("openai_chat.py")),
    "anthropic": Client("anthropic", script("anthropic_messages.py")),
    "litellm": Client("litellm", script("litellm_client.py")),
    "langchain": Client("langchain_openai", script("langchain_client.py")),
    "instructor": Client("instructor", script("instructor_client.py")),
    "lm-eval": Client("lm_eval", script("lm_eval_tasks.py")),
    "guidellm": Client("guidellm", guidellm),
    "aiperf": Client("aiperf", aiperf),
    "schemathesis": Client("schemathesis", schemathesis),
    "openai-node": Client("", lambda target: [os.path.join(SCRIPTS, "openai_node.mjs"), target.url, target.model],
                          "node"),
}


class Server:
    """`launch.py serve` of a model, while the context lasts."""

    def __init__(self, model: str, options: list[str], folder: str) -> None:
        self._screen = os.path.join(folder, "server.txt")
        self._command = [sys.executable, os.path.join(ROOT, "launch.py"), "--model", model, "--port", "0", *options]

    def __enter__(self) -> str:
        with open(self._screen, "w") as screen:
            self._process = subprocess.Popen(self._command, stdout=screen, stderr=screen)
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self._process.poll() is None:
            with open(self._screen) as screen:
                text = screen.read()
            found = re.search(r"^  URL +(\S+)/v1$", text, re.M)
            if found and "\n  try" in text:
                return found[1]
            time.sleep(0.2)
        self.__exit__()
        raise RuntimeError(f"the server did not get ready:\n{text}")

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        self._process.wait(20)


def missing(client: Client, program: str) -> str:
    """Why this client cannot run here; "": it can."""
    if client.program == "node":
        probe = [program, "--version"]
    else:
        find = f"importlib.util.find_spec({client.module!r})"
        probe = [program, "-c", f"import importlib.util, sys; sys.exit(not {find})"]
    try:
        done = subprocess.run(probe, capture_output=True)
    except OSError as error:
        return f"{program}: {error.strerror}"
    return f"{program} has no {client.module or 'Node'}" if done.returncode else ""


def run_client(name: str, program: str, target: Target, extra: list[str]) -> str:
    """"ok", or "skipped: ..." or "failed: ..."; what the client says goes to standard error when it fails."""
    client = CLIENTS[name]
    if reason := missing(client, program):
        return f"skipped: {reason}"
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    if name == "aiperf":
        env.pop("HF_HUB_OFFLINE")  # with it aiperf takes a folder for a hub id
    try:
        done = subprocess.run([program, *client.command(target), *extra], env=env, cwd=target.scratch,
                              capture_output=True, text=True, timeout=CLIENT_S)
    except subprocess.TimeoutExpired:
        return f"failed: not done after {CLIENT_S:.0f} s"
    if done.returncode:
        print(done.stdout[-3000:], done.stderr[-3000:], file=sys.stderr)
        return f"failed: exit status {done.returncode}"
    said = [line for line in done.stdout.splitlines() if line.strip()]
    return f"ok ({said[-1].strip()})" if said and ": ok" in said[-1] else "ok"


def main(argv: list[str] | None = None) -> int:
    parser = OptionParser(prog="launch.py bench clients", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=CLIENTS, default=list(CLIENTS), metavar="NAME",
                        help=", ".join(CLIENTS))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--url", help="a running server; default: one is started")
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PATH",
                        help="interpreter of one client; repeatable")
    parser.add_argument("--node", default="node")
    parser.add_argument("--node-modules", default=".", help="folder in which npm installed openai")
    parser.add_argument("--server-option", action="append", default=["--max-model-len", "2k"],
                        help="of the server; repeatable")
    parser.add_argument("--no-skip", action="store_true", help="a client that is not installed is a failure")
    args = parser.parse_args(argv)
    programs = dict(entry.split("=", 1) for entry in args.python)
    results: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = os.path.join(folder, "tokenizer")
        subprocess.run([sys.executable, os.path.join(ROOT, "launch.py"), "tokenize", "--model", args.model, "--save",
                        tokenizer], check=True, capture_output=True)

        def run_all(url: str) -> None:
            target = Target(url, served_name(url), tokenizer, "-", folder)
            for client in args.only:
                is_node = CLIENTS[client].program == "node"
                program = args.node if is_node else programs.get(client, sys.executable)
                extra = [os.path.abspath(args.node_modules)] if is_node else []
                results[client] = run_client(client, program, target, extra)
                print(f"{client:<14} {results[client]}", flush=True)

        if args.url:
            run_all(args.url)
        else:
            with Server(args.model, args.server_option, folder) as url:
                run_all(url)
            if "lm-eval" in args.only and results["lm-eval"].startswith("ok"):
                results["lm-eval exact"] = run_exact(programs.get("lm-eval", sys.executable), folder)
                print(f"lm-eval exact  {results['lm-eval exact']}", flush=True)
    print_json(results)
    bad = ("failed", "skipped") if args.no_skip else ("failed",)
    return int(any(result.startswith(bad) for result in results.values()))


def run_exact(program: str, folder: str) -> str:
    """lm-eval on the tiny model in float32, its log-likelihoods against transformers' on the same weights."""
    place = Path(folder) / "weights"
    place.mkdir()
    weights = write_tiny_model(place)
    options = ["--dtype", "float32", "--attention-backend", "reference", "--num-gpu-blocks-override", "512"]
    with Server(weights, options, folder) as url:
        return run_client("lm-eval", program, Target(url, served_name(url), weights, weights, folder), [])


def served_name(url: str) -> str:
    """The name that the server's model goes by."""
    with urllib.request.urlopen(f"{url}/v1/models") as response:
        return str(json.load(response)["data"][0]["id"])


if __name__ == "__main__":
    raise SystemExit(main())
