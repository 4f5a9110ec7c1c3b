"""`bench frontend`: what text, HTTP and JSON cost, without a model. CPU time in microseconds; one JSON object last.

The real frontend process on real sockets. A null core sends it what a real one would after every decode step of that
many rows; for TTFT the real core takes part and only the model is missing. Exactly one event per token is demanded, so
nothing is saved by joining deltas. With --against vllm the same load goes to vLLM's API server over a null engine, by
--vllm-python, in --rounds of ours and theirs; the median of the rounds' ratios counts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import uvloop

from bench.frontend_load import Call, call, chat_request, cpu_us, steady_cost
from bench.null_engine import NULL_CORE, NULL_WORKER, NullEngine
from bench.stats import median, percentile, print_json
from frontend import SamplingParams
from frontend.chat_template import ChatTemplate
from frontend.openai.sse import ChunkEncoder
from frontend.request_stream import Choice, RequestStream
from frontend.tokenizer import Tokenizer
from frontend.tokenizer_files import save_tokenizer
from ipc.cli import build_config
from ipc.model_source import ModelFiles
from ipc.option_help import OptionParser

MUST = {"stream_us": 40.0, "text_us": 2.5, "growth": 1.1, "admit_1k": 1.3, "admit_32k": 1.3, "ttft_ms": 3.0}
STREAMS, RATE = 256, 20.0
TEXT = ("It was a bright day in the old town, and the market was full of people who had come to buy bread, fruit and "
        "cloth. They said \"good morning\", paid, and left.\n\tdef square(x): return x ** 2  # naive, but right\n")


def spoken(tokenizer: Tokenizer) -> np.ndarray:
    """Ids of a text, each of which shows as text by itself: then every token owes an event."""
    ids = tokenizer.encode_ids(TEXT * 20, False)
    return np.array([i for i in ids if tokenizer.decode([i]) and "\ufffd" not in tokenizer.decode([i])], np.int32)


def streaming(model: str, tokens: np.ndarray, seconds: float) -> dict[str, Any]:
    """256 chat streams of 20 tokens a second, through the whole frontend process."""
    first, last = int(3 * RATE), int((3 + seconds) * RATE)

    async def load(engine: NullEngine) -> tuple[float, int]:
        request = chat_request(engine.port, model, "Tell me a story.", last + int(2 * RATE))
        calls = [await call(engine.port, request) for _ in range(STREAMS)]
        cost = await steady_cost(calls, engine.pids["frontend"], first, last)
        await asyncio.gather(*(one.done for one in calls))
        return cost, min(one.num_events for one in calls) - last - int(2 * RATE)

    with NullEngine(model, NULL_CORE, tokens=tokens, rate=RATE) as engine:
        cost, spare = uvloop.run(load(engine))
    if spare < 0:
        raise RuntimeError(f"a stream had {-spare} events less than tokens: deltas were joined, the cost is of less")
    return {"us_per_token": round(cost, 2), "streams": STREAMS, "tokens_per_s": STREAMS * RATE}


def growth(model: str, tokens: np.ndarray, windows: int = 5) -> dict[str, Any]:
    """What a token beyond the ten-thousandth costs, in terms of one soon after the hundredth.

    Two frontends at the same time, so that whatever else the machine does happens to both: the streams of one grow, the
    other's begin anew in each window. First all are young, which tells the two processes apart.
    """
    streams, rate, width = 16, 400.0, 1_600

    async def load(old: NullEngine, young: NullEngine) -> dict[str, Any]:
        async def begin(engine: NullEngine) -> list[Call]:
            request = chat_request(engine.port, model, "Tell me a very long story.", 100_000)
            return [await call(engine.port, request) for _ in range(streams)]

        async def window(calls: list[Call], first: int) -> tuple[float, float]:
            fresh = await begin(young)
            costs = await asyncio.gather(steady_cost(calls, old.pids["frontend"], first, first + width),
                                         steady_cost(fresh, young.pids["frontend"], 100, 100 + width))
            for one in fresh:
                one.transport.close()
            return costs[0], costs[1]

        alike: list[tuple[float, float]] = []
        for number in range(windows):
            calls = await begin(old)
            alike.append(await window(calls, 100))
            for one in calls if number < windows - 1 else ():
                one.transport.close()
        while min(one.num_events for one in calls) < 10_000:
            await asyncio.sleep(0.2)
        late = [await window(calls, min(one.num_events for one in calls)) for _ in range(windows)]
        for one in calls:
            one.transport.close()
        base, grown = (median(ours / theirs for ours, theirs in pairs) for pairs in (alike, late))
        return {"early_us": round(median(cost for cost, _ in alike), 2), "late_us": round(median(
            cost for cost, _ in late), 2), "ratio": round(grown / base, 3),
                "windows": [round(ours / theirs / base, 3) for ours, theirs in late]}

    with (NullEngine(model, NULL_CORE, tokens=tokens, rate=rate) as old,
          NullEngine(model, NULL_CORE, tokens=tokens, rate=rate) as young):
        return uvloop.run(load(old, young))


def text_path(tokenizer: Tokenizer, tokens: np.ndarray) -> dict[str, float]:
    """Detokenize, look for stop strings, encode the event: the part that every token needs, alone."""
    ids = tokens.tolist()
    encoder = ChunkEncoder("chat", "chatcmpl-0123456789abcdef", 1_700_000_000, "model", "fp_0123456789", False)
    found: dict[str, float] = {}
    for name, stop in (("text_us", ["\n\n\n", "User:"]), ("text_without_stop_us", [])):
        runs = []
        for _ in range(7):
            stream = RequestStream("r", None, b"", SamplingParams(seed=1, stop=stop), "delta")
            choice = Choice(stream, 1, 0, tokenizer)
            begin = time.thread_time_ns()
            for token in ids * 10:
                choice.receive(token, False)
                if choice.new_text:
                    encoder.text(0, choice.new_text.pop())
            runs.append((time.thread_time_ns() - begin) / 1000 / len(ids) / 10)
        found[name] = round(median(runs), 3)
    return found


def admission(model: str, tokenizer: Tokenizer, tokens: np.ndarray, repeats: int) -> dict[str, Any]:
    """CPU of the frontend process that a long prompt adds to a chat call (reading, template, tokenizer, checks, message
    to the core), against the tokenizer alone on the same text."""
    template = ChatTemplate(tokenizer.chat_templates, tokenizer.special_tokens)
    found: dict[str, Any] = {}
    unit = len(tokenizer.encode_ids(TEXT, False))

    async def one(engine: NullEngine, content: str) -> float:
        request = chat_request(engine.port, model, content, 1)
        before = cpu_us(engine.pids["frontend"])
        made = await call(engine.port, request)
        await made.done
        made.check()
        return cpu_us(engine.pids["frontend"]) - before

    def alone(content: str) -> float:
        text = template.render([{"role": "user", "content": content}])
        begin = time.process_time_ns()
        tokenizer.encode(text, False)
        return (time.process_time_ns() - begin) / 1000

    with NullEngine(model, NULL_CORE, tokens=tokens, rate=500.0) as engine:
        short = median(uvloop.run(one(engine, f"Hello {i}!")) for i in range(4 * repeats))
        found["call_us"] = round(short)
        for name, length in (("1k", 1_000), ("32k", 32_000)):
            texts = [f"Number {i}. " + TEXT * (length // unit) for i in range(repeats)]
            pairs = [(uvloop.run(one(engine, text)), alone(text)) for text in texts][repeats // 4:]
            ours, theirs = median(pair[0] for pair in pairs) - short, median(pair[1] for pair in pairs)
            found[name] = {"us": round(ours), "tokenizer_us": round(theirs), "ratio": round(ours / theirs, 2)}
    return found


def ttft(model: str, repeats: int) -> dict[str, float]:
    """One call at a time through all our processes; the model is a worker that computes nothing."""

    async def load(engine: NullEngine) -> list[float]:
        request = chat_request(engine.port, model, "Hello!", 2)
        times = []
        for _ in range(repeats):
            made = await call(engine.port, request)
            await made.done
            made.check()
            times.append((made.first_text_s - made.start_s) * 1000)
            await asyncio.sleep(0.005)
        return times[repeats // 10:]

    with NullEngine(model, NULL_WORKER) as engine:
        times = uvloop.run(load(engine))
    return {"p50_ms": round(median(times), 3), "p90_ms": round(percentile(times, 90), 3)}


def vllm_streaming(python: str, files: ModelFiles, tokens: np.ndarray, seconds: float) -> dict[str, Any] | None:
    """The streaming load against vLLM's API server; None: it does not start, the reason is printed."""
    script = os.path.join(os.path.dirname(__file__), "vllm_frontend.py")
    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(Tokenizer.from_files(files), files.config, folder)
        np.asarray(tokens, np.int32).tofile(os.path.join(folder, "tokens.i32"))
        done = subprocess.run([python, script, folder, str(STREAMS), str(RATE), str(seconds)], capture_output=True,
                              text=True)
    if done.returncode:
        print(done.stderr[-1500:], file=sys.stderr)
        return None
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def against_vllm(args: argparse.Namespace, files: ModelFiles, tokens: np.ndarray) -> dict[str, Any] | None:
    """Rounds of both: a machine whose clock moves within minutes moves for a round's two alike. None: vLLM does not
    start."""
    rounds, version = [], ""
    for number in range(args.rounds):
        theirs = vllm_streaming(args.vllm_python, files, tokens, args.seconds)
        if theirs is None:
            return None
        ours = streaming(args.model, tokens, args.seconds)["us_per_token"]
        rounds.append({"ours_us": ours, "vllm_us": theirs["us_per_token"],
                       "ratio": round(theirs["us_per_token"] / ours, 2)})
        version = theirs["version"]
        print(f"round {number + 1}: {rounds[-1]}", flush=True)
    found = {"version": version, "ratio": median(one["ratio"] for one in rounds), "rounds": rounds}
    print(f"vLLM {found['version']}: {found['ratio']} times ours")
    return found


def sections(args: argparse.Namespace, tokenizer: Tokenizer, tokens: np.ndarray
             ) -> Iterator[tuple[str, Callable[[], Any]]]:
    yield "streaming", lambda: streaming(args.model, tokens, args.seconds)
    yield "text", lambda: text_path(tokenizer, tokens)
    yield "growth", lambda: growth(args.model, tokens)
    yield "admission", lambda: admission(args.model, tokenizer, tokens, args.repeats)
    yield "ttft", lambda: ttft(args.model, 10 * args.repeats)


def main(argv: list[str] | None = None) -> int:
    parser = OptionParser(prog="launch.py bench frontend", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m", help="whose tokenizer and template are used")
    parser.add_argument("--seconds", type=float, default=15.0, help="of the streaming measurement")
    parser.add_argument("--repeats", type=int, default=20, help="of the measurements of single calls")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="streaming, text, growth, admission, ttft")
    parser.add_argument("--against", choices=["vllm"])
    parser.add_argument("--rounds", type=int, default=3, help="of ours and theirs")
    parser.add_argument("--vllm-python", default=sys.executable, help="an interpreter that imports vllm")
    args = parser.parse_args(argv)
    files = build_config(args.model, {}).model.files
    tokenizer = Tokenizer.from_files(files)
    tokens = spoken(tokenizer)
    result: dict[str, Any] = {}
    for name, measure in sections(args, tokenizer, tokens):
        if args.only is None or name in args.only:
            result[name] = measure()
            print(f"{name}: {result[name]}", flush=True)
    if args.against:
        result["against_vllm"] = against_vllm(args, files, tokens)
    print_json({**result, "must": MUST})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
