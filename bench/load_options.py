"""The command line of `bench serve`. Options go by the names of vLLM's benchmark too. Knows no server."""

import argparse
import json
import math
import os
from typing import Any

from bench.arrivals import Ramp
from bench.serving_report import GOODPUT_METRICS, TITLES, result_file
from bench.stats import output_file
from ipc.option_help import OptionParser

DATASETS = {"random": False, "prefix_repetition": False, "sharegpt": True, "custom": True}  # name -> needs a file
DEFAULT_CONCURRENCY = 8  # where nothing says how the load is bounded


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


def zero_or_more(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is below 0")
    return value


def number(text: str) -> float:
    """Neither nan nor infinite: JSON has none of them."""
    value = float(text)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number")
    return value


def seconds(text: str) -> float:
    value = number(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
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


def pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip() or not (name + value).isprintable():
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return name.strip(), value.strip()


def objective(text: str) -> tuple[str, float]:
    """`ttft:500`: a metric and its milliseconds."""
    name, _, value = text.partition(":")
    if name not in GOODPUT_METRICS:
        raise argparse.ArgumentTypeError(f"{text!r} names no metric of requests; use ttft, tpot or e2el, as ttft:500")
    limit = float(value)
    if not limit >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be at least 0 milliseconds")
    return name, limit


def metrics(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in TITLES]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(TITLES)}")
    return names


def percents(text: str) -> list[float]:
    values = [float(part) for part in text.split(",")]
    if not all(0 <= value <= 100 for value in values):
        raise argparse.ArgumentTypeError(f"{text} is outside 0 to 100")
    return values


def json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text[:60]} is no JSON object")
    return value


def ratios(text: str) -> tuple[float, float]:
    """`R` for prompts and outputs, or {"input": R, "output": R}."""
    value = json.loads(text)
    if isinstance(value, dict) and set(value) <= {"input", "output"}:
        found = float(value.get("input", 0)), float(value.get("output", 0))
    elif isinstance(value, (int, float)):
        found = float(value), float(value)
    else:
        raise argparse.ArgumentTypeError(f'{text} is neither a number nor {{"input": R, "output": R}}')
    if not all(0 <= ratio < 1 for ratio in found):
        raise argparse.ArgumentTypeError(f"{text}; allowed is 0 to below 1")
    return found


def make_parser() -> OptionParser:
    """Options; the second name of some is what other serving benchmarks call them."""
    parser = OptionParser(
        prog="launch.py bench serve", description="Streaming load for an OpenAI-compatible server."
    )
    add = parser.add_argument_group("server").add_argument
    add("--base-url", help="with or without /v1 (default: http://127.0.0.1:8000)")
    add("--host", default="127.0.0.1", help="with --port, in place of --base-url")
    add("--port", type=int, default=8000)
    add("--backend", choices=["openai", "vllm", "openai-chat"], default="openai", help="openai-chat: --endpoint chat")
    add("--endpoint", type=endpoint, help="completions or chat, or its path (default: completions)")
    add("--model", help="default: the first one the server lists")
    add("--served-model-name", help="what the server calls it, where that is another name")
    add("--api-key", help="sent as a bearer token (default: $OPENAI_API_KEY)")
    add("--header", type=pair, nargs="*", default=[], metavar="KEY=VALUE", help="sent with each request")
    add("--request-id-prefix", metavar="TEXT", help="send x-request-id: TEXT and the request's number")
    add("--insecure", action="store_true", help="take any certificate")
    add("--ready-check-timeout-sec", type=seconds, default=0.0, metavar="S", help="wait so long until a server answers")
    add("--timeout", type=seconds, default=600.0, help="seconds per request")
    add = parser.add_argument_group("prompts").add_argument
    add("--dataset-name", choices=list(DATASETS), default="random",
        help="random tokens; with several prefixes that repeat; a ShareGPT file; a .jsonl of your own: prompt, and "
        "output_tokens")
    add("--dataset-path", metavar="FILE", help="of sharegpt and custom")
    add("--prompt-tokens", "--random-input-len", "--input-len", type=length, default=(256, 256), help="N or LO-HI")
    add("--shared-prefix", "--random-prefix-len", type=zero_or_more, default=0,
        help="tokens in front that all prompts share")
    add("--output-tokens", "--random-output-len", "--output-len", type=length, metavar="N|LO-HI",
        help="N or LO-HI; --output-len also of the files (default: 128)")
    add("--random-range-ratio", type=ratios, default=(0.0, 0.0), metavar="R",
        help='lengths from N*(1-R) to N*(1+R); {"input": R, "output": R} sets both')
    add("--token-ids", type=length, default=(100, 3999), help="range to draw prompt ids from, LO-HI")
    add("--prompt-form", choices=["ids", "text"], default="ids", help="ids fall back to text where they are refused")
    for name, default in (("prefix-len", 256), ("suffix-len", 256), ("num-prefixes", 10)):
        add(f"--prefix-repetition-{name}", type=count, default=default, metavar="N", help=f"(default: {default})")
    add("--prefix-repetition-output-len", type=count, metavar="N", help="tokens of each answer (default: 128)")
    add("--sharegpt-output-len", type=count, metavar="N", help="tokens of each answer (default: as in the file)")
    add("--custom-output-len", type=int, metavar="N", help="tokens of each answer; -1: output_tokens of the line "
        "(default: 256)")
    add("--skip-chat-template", action="store_true", help="custom: send prompts to completions as they are")
    add("--chat-template-kwargs", type=json_object, metavar="JSON", help="variables of the chat template")
    add("--tokenizer", metavar="FOLDER", help="counts tokens of texts, or a hub id (default: the server's /tokenize)")
    add("--disable-shuffle", action="store_true", help="take a file in its order")
    add("--no-oversample", action="store_true", help="send fewer requests rather than some of the file twice")
    add("--seed", type=int, default=0, help="same seed, same prompts, lengths and arrivals")
    add = parser.add_argument_group("load").add_argument
    add("--num-requests", "--num-prompts", type=count, default=32)
    add("--concurrency", "--max-concurrency", type=counts, metavar="N", help="requests in flight at most; or 1,4,16 "
        f"(default: {DEFAULT_CONCURRENCY}, with --request-rate or a ramp-up no limit)")
    add("--request-rate", type=float, metavar="R", help="arrivals per second; inf: all at once (default: at once, as "
        "--concurrency allows)")
    add("--burstiness", type=float, default=1.0, metavar="B", help="shape of the gamma distribution of the gaps: 1: a "
        "Poisson process, below: bursts, above: more even")
    add("--ramp-up-strategy", choices=["linear", "exponential"], help="of the rate, in place of --request-rate")
    add("--ramp-up-start-rps", type=float, metavar="R")
    add("--ramp-up-end-rps", type=float, metavar="R")
    add("--repeats", type=count, default=1, help="of each load; the figures are medians, the noise is their spread")
    add("--warmup", "--num-warmups", type=zero_or_more, default=1, help="untimed requests before the run")
    add("--profile", action="store_true", help="POST /start_profile before the load and /stop_profile after it")
    add = parser.add_argument_group("request").add_argument
    add("--ignore-eos", action="store_true", help="answers of full length; with random prompts always so")
    add("--temperature", type=number, default=0.0, help="(default: 0)")
    for name in ("--top-p", "--min-p", "--frequency-penalty", "--presence-penalty", "--repetition-penalty"):
        add(name, type=number, metavar="X", help="default: the server's")
    add("--top-k", type=int, metavar="N", help="default: the server's")
    add("--logprobs", type=zero_or_more, metavar="N", help="ask for them")
    add("--extra-body", type=json_object, metavar="JSON", help="more fields of each request; these win")
    add = parser.add_argument_group("result").add_argument
    add("--percentile-metrics", type=metrics, default=["ttft", "tpot", "itl", "e2el"], metavar="NAMES",
        help=f"shown and saved, of {','.join(TITLES)} (default: ttft,tpot,itl,e2el)")
    add("--metric-percentiles", type=percents, default=[90.0, 99.0], metavar="P", help="of them (default: 90,99)")
    add("--goodput", type=objective, nargs="+", default=[], metavar="METRIC:MS",
        help="count requests per second that meet these, of ttft, tpot, e2el: ttft:500 tpot:50")
    add("--json", type=output_file, metavar="FILE", help="write the last line there too")
    add("--save-result", action="store_true", help="write the JSON object to a file")
    add("--save-detailed", action="store_true", help="with lists that have an entry per request")
    add("--append-result", action="store_true", help="as a line behind what the file has")
    add("--result-dir", metavar="FOLDER", help="of that file; made where it is missing")
    add("--result-filename", metavar="FILE", help="(default: of label, load, model and time)")
    add("--label", help="of the result and in front of its file's name (default: the backend)")
    add("--metadata", type=pair, nargs="*", default=[], metavar="KEY=VALUE", help="kept in the result")
    add("--disable-tqdm", action="store_true", help="no progress bar; none off a terminal anyway")
    add("--compare", metavar="FILE", help="an earlier result: say what changed by more than noise")
    add("--plot", type=output_file, metavar="FILE",
        help="PNG of TTFT and ITL against load; needs several concurrencies")
    return parser


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Options, checked and settled. `request_rate` 0 is no pauses, `ramp` a growing rate, `concurrency` one load each,
    `is_limited` whether it is what bounds the requests in flight."""
    parser = make_parser()
    args = parser.parse_args(argv)
    check_args(parser, args)
    args.base_url = args.base_url or f"http://{args.host}:{args.port}"
    args.endpoint = args.endpoint or ("chat" if args.backend == "openai-chat" else "completions")
    args.model = args.served_model_name or args.model
    args.api_key = args.api_key or os.environ.get("OPENAI_API_KEY")
    args.header = {name.lower(): value for name, value in args.header}
    args.metadata, args.goodput = dict(args.metadata), dict(args.goodput)
    args.ignore_eos = args.ignore_eos or args.dataset_name == "random"
    fixed = args.output_tokens[0] if args.output_tokens else None
    args.sharegpt_output_len = args.sharegpt_output_len or fixed
    args.custom_output_len = args.custom_output_len or fixed or 256
    args.prefix_repetition_output_len = args.prefix_repetition_output_len or fixed or 128
    args.output_tokens = args.output_tokens or (128, 128)
    args.prompt_tokens, args.output_tokens = (
        spread(ends, ratio) for ends, ratio in zip((args.prompt_tokens, args.output_tokens), args.random_range_ratio,
                                                   strict=True))
    has_rate = args.request_rate is not None or args.ramp_up_strategy is not None
    args.is_limited = args.concurrency is not None or not has_rate
    args.concurrency = args.concurrency or [args.num_requests if has_rate else DEFAULT_CONCURRENCY]
    args.request_rate = 0.0 if args.request_rate in (None, math.inf) else args.request_rate
    args.ramp = None
    if args.ramp_up_strategy is not None:
        args.ramp = Ramp(args.ramp_up_strategy, args.ramp_up_start_rps, args.ramp_up_end_rps)
    args.save_result = bool(args.save_result or args.append_result or args.result_filename)
    if args.save_result:
        check_result_file(parser, args)
    return args


def check_result_file(parser: OptionParser, args: argparse.Namespace) -> None:
    """Make --result-dir. Exits with 2 where nothing can be written: before minutes of load."""
    try:
        if args.result_dir:
            os.makedirs(args.result_dir, exist_ok=True)
        output_file(str(result_file(args, "model")))
    except OSError as error:
        parser.error(f"--result-dir {args.result_dir}: {error.strerror or error}")
    except argparse.ArgumentTypeError as error:
        parser.error(f"--result-filename: {error}")


def check_args(parser: OptionParser, args: argparse.Namespace) -> None:
    """Exits with 2 for what makes no sense together."""
    if (args.output_tokens and args.output_tokens[0] < 1) or args.prompt_tokens[0] + args.shared_prefix < 1:
        parser.error("a request needs at least one prompt token and one output token")
    if args.custom_output_len is not None and args.custom_output_len != -1 and args.custom_output_len < 1:
        parser.error(f"--custom-output-len is {args.custom_output_len}; it must be above 0, or -1")
    if args.plot and len(args.concurrency or ()) < 2:
        parser.error("--plot draws against load: name several, for example --concurrency 1,4,16")
    if args.dataset_name == "prefix_repetition" and args.num_requests < args.prefix_repetition_num_prefixes:
        parser.error(f"--num-prompts is {args.num_requests}, below --prefix-repetition-num-prefixes "
                     f"{args.prefix_repetition_num_prefixes}: each needs a request")
    if (args.dataset_path is not None) != DATASETS[args.dataset_name]:
        parser.error("--dataset-path goes with --dataset-name sharegpt or custom, and they with it")
    if args.request_rate is not None and not args.request_rate >= 0:
        parser.error(f"--request-rate is {args.request_rate}; it must be above 0, or inf")
    if not args.burstiness > 0:
        parser.error(f"--burstiness is {args.burstiness}; it must be above 0")
    ends = (args.ramp_up_start_rps, args.ramp_up_end_rps)
    if args.ramp_up_strategy is None and ends != (None, None):
        parser.error("--ramp-up-start-rps and --ramp-up-end-rps go with --ramp-up-strategy")
    if args.ramp_up_strategy is not None:
        if args.request_rate is not None:
            parser.error("--request-rate and --ramp-up-strategy exclude each other")
        if None in ends or not 0 < ends[0] <= ends[1]:
            parser.error("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps, above 0, the first not "
                         "above the second")


def spread(ends: tuple[int, int], ratio: float) -> tuple[int, int]:
    """The range around a length; at least one token where it is not 0 exactly."""
    if not ratio:
        return ends
    return max(1, math.floor(ends[0] * (1 - ratio))), math.ceil(ends[1] * (1 + ratio))
