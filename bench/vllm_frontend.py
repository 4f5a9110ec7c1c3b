"""vLLM's API server over an engine that computes nothing, for `bench frontend --against vllm`.

Runs in an interpreter that has vllm (0.32) installed. The server is vLLM's own process with its own sockets and
defaults; this process plays its engine core, in vLLM's messages, and the clients. The folder holds tokenizer files and
tokens.i32, the ids that every stream repeats. CPU per token of the server process; one JSON object as its last line.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
import threading
import time
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
START_S = 180.0
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
          "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "torch_dtype": "bfloat16",
          "max_position_embeddings": 131_072, "rms_norm_eps": 1e-6}


def serve(folder: str, port: str) -> None:
    """The server process."""
    import uvloop
    from vllm.entrypoints.launchers.api_server.entry import run_server_worker
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.launchers.launcher import setup_server
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args = make_arg_parser(FlexibleArgumentParser()).parse_args(
        ["--model", folder, "--served-model-name", "model", "--host", "127.0.0.1", "--port", port,
         "--disable-uvicorn-access-log"])
    validate_parsed_serve_args(args)
    address, sock = setup_server(args, reuse_port=False)
    print(sock.getsockname()[1], flush=True)
    uvloop.run(run_server_worker(address, sock, args, client_config={
        "input_address": f"ipc://{folder}/in", "output_address": f"ipc://{folder}/out"}))


def play_core(folder: str, rate: float) -> None:
    """One token per beat for every live request, as vLLM's engine core would send it."""
    import numpy as np
    import zmq
    from vllm.v1.engine import (
        EngineCoreOutput,
        EngineCoreOutputs,
        EngineCoreRequest,
        FinishReason,
        UtilityOutput,
    )
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder, UtilityResult

    tokens = np.fromfile(os.path.join(folder, "tokens.i32"), np.int32).tolist()
    context = zmq.Context()
    inputs, outputs = context.socket(zmq.DEALER), context.socket(zmq.PUSH)
    inputs.setsockopt(zmq.IDENTITY, (0).to_bytes(2, "little"))
    inputs.connect(f"ipc://{folder}/in")
    outputs.connect(f"ipc://{folder}/out")
    inputs.send(b"")
    requests, anything, encoder = MsgpackDecoder(EngineCoreRequest), MsgpackDecoder(), MsgpackEncoder()
    live: dict[str, list[int]] = {}
    due = time.monotonic()
    while True:
        inputs.poll(max(0, math.ceil((due - time.monotonic()) * 1000)))
        while inputs.poll(0):
            kind, *frames = inputs.recv_multipart()
            if kind == b"\x00":
                request = requests.decode(frames)
                live[request.request_id] = [0, request.sampling_params.max_tokens]
            elif kind == b"\x01":
                for name in anything.decode(frames):
                    live.pop(name, None)
            elif kind == b"\x03":
                _, call, method, _ = anything.decode(frames)
                answer = ("generate",) if method == "get_supported_tasks" else None
                outputs.send_multipart(encoder.encode(EngineCoreOutputs(
                    utility_output=UtilityOutput(call, result=UtilityResult(answer)))), copy=False)
        if time.monotonic() < due:
            continue
        due = max(due + 1 / rate, time.monotonic())
        news, ended = [], set()
        for name, entry in list(live.items()):
            entry[0] += 1
            is_last = entry[0] >= entry[1]
            news.append(EngineCoreOutput(name, [tokens[entry[0] % len(tokens)]],
                                         finish_reason=FinishReason.LENGTH if is_last else None))
            if is_last:
                del live[name]
                ended.add(name)
        if news:
            outputs.send_multipart(encoder.encode(EngineCoreOutputs(outputs=news, finished_requests=ended)), copy=False)


async def measure(port: int, pid: int, streams: int, rate: float, seconds: float) -> dict[str, Any]:
    from bench.frontend_load import call, chat_request, steady_cost

    first, last = int(3 * rate), int((3 + seconds) * rate)
    tokens = last + int(2 * rate)
    request = chat_request(port, "model", "Tell me a story.", tokens, ignore_eos=True)
    calls = [await call(port, request) for _ in range(streams)]
    cost = await steady_cost(calls, pid, first, last)
    await asyncio.gather(*(one.done for one in calls))
    events = min(one.num_events for one in calls)
    if events < tokens:
        raise RuntimeError(f"a stream had {events} events for {tokens} tokens: deltas were joined, the cost is of less")
    return {"us_per_token": round(cost, 2), "streams": streams, "tokens": tokens, "min_events": events}


async def wait_for(port: int) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /health HTTP/1.0\r\n\r\n")
            answer = await _.read(64)
            writer.close()
            if b" 200" in answer:
                return
        except OSError:
            pass
        if time.monotonic() > deadline:
            raise TimeoutError("vLLM's server did not get ready")
        await asyncio.sleep(0.5)


def main() -> int:
    argv = sys.argv[1:]
    if argv[0] == "--serve":
        serve(argv[1], argv[2])
        return 0
    import vllm

    sys.path.insert(0, ROOT)
    folder, streams, rate, seconds = argv[0], int(argv[1]), float(argv[2]), float(argv[3])
    with open(os.path.join(folder, "tokenizer.json")) as file:
        vocab_size = len(json.load(file)["model"]["vocab"]) + 64
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump({**CONFIG, "vocab_size": vocab_size}, file)
    server = subprocess.Popen([sys.executable, os.path.abspath(__file__), "--serve", folder, "0"], text=True,
                              stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        port = int(next(line for line in server.stdout if line.strip().isdigit()))
        threading.Thread(target=play_core, args=(folder, rate), daemon=True).start()
        asyncio.run(wait_for(port))
        result = asyncio.run(measure(port, server.pid, streams, rate, seconds))
        print(json.dumps({"version": vllm.__version__, **result}), flush=True)
    finally:
        server.kill()
        server.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
