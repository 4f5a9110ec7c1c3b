"""The command line of `bench serve`. Options go by the names of vLLM's benchmark too. Knows no server."""

import argparse
import os

from ipc.option_help import OptionParser


def length(text: str) -> tuple[int, int]:
    """`N` or `LO-HI`, both ends included."""
    low, _, high = text.partition("-")
    ends = int(low), int(high or low)
    if not 0 <= ends[0] <= ends[1]:
        raise argparse.ArgumentTypeError(f"{text} is not N or LO-HI with LO <= HI")
    return ends


def count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


def counts(text: str) -> list[int]:
    """`8`, or several loads: `1,4,16`."""
    return [count(part) for part in text.split(",")]


def endpoint(text: str) -> str:
    """completions, chat, or their paths, which is how vLLM names them."""
    name = text.strip("/").removeprefix("v1/").removesuffix("/completions")
    if name not in ("completions", "chat"):
        raise argparse.ArgumentTypeError(f"{text} is not completions, chat, /v1/completions or /v1/chat/completions")
    return name


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Options; the second name of some is what other serving benchmarks call them."""
    parser = OptionParser(
        prog="launch.py bench serve", description="Streaming load for an OpenAI-compatible server."
    )
    add = parser.add_argument
    add("--base-url", help="with or without /v1 (default: http://127.0.0.1:8000)")
    add("--host", default="127.0.0.1", help="with --port, in place of --base-url")
    add("--port", type=int, default=8000)
    add("--backend", choices=["openai", "vllm", "openai-chat"], default="openai", help="openai-chat: --endpoint chat")
    add("--model", help="default: the first one the server lists")
    add("--served-model-name", help="what the server calls it, where that is another name")
    add("--api-key", help="sent as a bearer token")
    add("--endpoint", type=endpoint, help="completions or chat, or its path (default: completions)")
    add("--prompt-form", choices=["ids", "text"], default="ids", help="ids fall back to text where they are refused")
    add("--dataset-name", choices=["random"], default="random", help="prompts are random tokens")
    add("--prompt-tokens", "--random-input-len", "--input-len", type=length, default=(256, 256), help="N or LO-HI")
    add("--shared-prefix", "--random-prefix-len", type=int, default=0, help="tokens in front that all prompts share")
    add("--output-tokens", "--random-output-len", "--output-len", type=length, default=(128, 128), help="N or LO-HI")
    add("--random-range-ratio", type=float, default=0.0, help="R: lengths from N*(1-R) to N*(1+R)")
    add("--token-ids", type=length, default=(100, 3999), help="range to draw prompt ids from, LO-HI")
    add("--concurrency", "--max-concurrency", type=counts, default=[8], help="requests in flight at most; or 1,4,16")
    add("--num-requests", "--num-prompts", type=count, default=32)
    add("--request-rate", type=float, default=0.0, help="Poisson arrivals per second; default: no pauses")
    add("--repeats", type=count, default=1, help="of each load; the figures are medians, the noise is their spread")
    add("--warmup", "--num-warmups", type=int, default=1, help="untimed requests before the run")
    add("--ignore-eos", action="store_true", help="always so, where the server takes it")
    add("--seed", type=int, default=0, help="same seed, same prompts and lengths")
    add("--timeout", type=float, default=600.0, help="seconds per request")
    add("--json", "--result-filename", metavar="FILE", help="write the JSON object there too")
    add("--save-result", action="store_true", help="write it to a file, by default bench-serve.json")
    add("--result-dir", metavar="FOLDER", help="of that file; made where it is missing")
    add("--compare", metavar="FILE", help="an earlier result: say what changed by more than noise")
    add("--plot", metavar="FILE", help="PNG of TTFT and ITL against load; needs several concurrencies")
    args = parser.parse_args(argv)
    if args.output_tokens[0] < 1 or args.prompt_tokens[0] + args.shared_prefix < 1:
        parser.error("a request needs at least one prompt token and one output token")
    if not 0 <= args.random_range_ratio < 1:
        parser.error(f"--random-range-ratio is {args.random_range_ratio}; allowed is 0 to below 1")
    if args.plot and len(args.concurrency) < 2:
        parser.error("--plot draws against load: name several, for example --concurrency 1,4,16")
    if args.random_range_ratio:
        args.prompt_tokens = spread(args.prompt_tokens, args.random_range_ratio)
        args.output_tokens = spread(args.output_tokens, args.random_range_ratio)
    args.base_url = args.base_url or f"http://{args.host}:{args.port}"
    args.endpoint = args.endpoint or ("chat" if args.backend == "openai-chat" else "completions")
    args.model = args.served_model_name or args.model
    if args.result_dir or (args.save_result and not args.json):
        args.json = os.path.join(args.result_dir or "", args.json or "bench-serve.json")
    if args.result_dir:
        os.makedirs(args.result_dir, exist_ok=True)
    if args.request_rate == float("inf"):
        args.request_rate = 0.0
    return args


def spread(ends: tuple[int, int], ratio: float) -> tuple[int, int]:
    """The range around a length; at least one token."""
    return max(1, int(ends[0] * (1 - ratio))), int(ends[1] * (1 + ratio))
