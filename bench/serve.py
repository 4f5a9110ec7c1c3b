"""Load generator for any OpenAI-compatible server: `python -m bench.serve --base-url ... --concurrency 8`.

Streams completions (or chat completions), times every chunk, and reports TTFT, ITL, TPOT, end-to-end time and
throughput; its last output line is one JSON object. It exits with 1 when a request failed. Several concurrencies
(`--concurrency 1,4,16`) are run one after another; `--compare old.json` says what changed beyond noise, `--plot` draws.
Options go by the names of vLLM's benchmark too, and the result has the keys of its result files beside its own.

It knows nothing of the server's inside: no metrics endpoint, no process ids.
"""

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

import uvloop
from tqdm import tqdm

from bench.arrivals import arrival_times
from bench.compare import compare_results, join_repeats, noise, read_result, runs_of
from bench.load_client import Client, Refused
from bench.load_options import parse_args
from bench.load_prompts import Prompt, guessed_tokens, make_prompts
from bench.plot import plot_load
from bench.serving_report import (
    finite,
    flat_figures,
    print_serving_report,
    print_traffic,
    result_file,
    save_result,
    without_details,
)
from bench.stats import RequestRecord, print_json, serving_figures

PROBE_TOKENS = 8
RETRY_S = 1.0  # of a server that is not ready yet


async def run_load(
    client: Client,
    prompts: Sequence[Prompt],
    concurrency: int,
    due: Sequence[float] | None = None,
    bar: Any = None,
) -> list[RequestRecord]:
    """All requests, `due` seconds after the start (None: at once), at most `concurrency` in flight. A request that is
    due and has to wait for others keeps nobody else from becoming due; its waiting is its `queue_s`. With `due` the
    requests are measured ones, which have a number."""
    requests = [
        client.encode(prompt, max_tokens, None if due is None else number)
        for number, (prompt, max_tokens) in enumerate(prompts)
    ]
    seats = asyncio.Semaphore(concurrency)

    async def send(number: int, arrival: float) -> RequestRecord:
        prompt, max_tokens = prompts[number]
        num_tokens = guessed_tokens(prompt) if isinstance(prompt, str) else len(prompt)
        async with seats:
            record = await client.run(requests[number], num_tokens, max_tokens)
        record.queue_s = record.start - arrival
        if bar is not None:
            bar.update()
        return record

    tasks = []
    begin = time.monotonic()
    for number, delay in enumerate(due or [0.0] * len(prompts)):
        if (wait_s := begin + delay - time.monotonic()) > 0:
            await asyncio.sleep(wait_s)
        tasks.append(asyncio.create_task(send(number, time.monotonic())))
    return await asyncio.gather(*tasks)


async def find_form(client: Client, args: argparse.Namespace, probe_ids: list[int]) -> None:
    """Settle model and form of the requests; a server may take --ready-check-timeout-sec until it answers. Raises what
    Client.probe raises."""
    end = time.monotonic() + args.ready_check_timeout_sec
    while True:
        try:
            if not args.model:
                client.model = await client.find_model()
            return await client.probe(probe_ids)
        except (OSError, ValueError, Refused):
            if time.monotonic() + RETRY_S > end:
                raise
            await asyncio.sleep(RETRY_S)


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Probe, warm up, run each concurrency, report: the JSON result."""
    client = Client(args)
    generator = random.Random(args.seed + 2)
    spare = [generator.randint(*args.token_ids) for _ in range(max(PROBE_TOKENS, args.prompt_tokens[1]))]
    wanted_form, wanted_extras = client.prompt_form, client.has_extras
    await find_form(client, args, spare[:PROBE_TOKENS])
    if client.prompt_form != wanted_form:
        print("the server refuses token ids; sending words, so prompt lengths are approximate")
    if client.has_extras != wanted_extras:
        print("the server refuses ignore_eos; outputs may be shorter than asked")
    runs = []
    for number, concurrency in enumerate(args.concurrency):
        seeds = [args.seed + 1000 * number + 100 * repeat for repeat in range(args.repeats)]
        runs.append(join_repeats([await measure_one(client, args, concurrency, spare, seed) for seed in seeds]))
    if len(runs) == 1:
        return runs[0]
    sums = {name: sum(run[name] for run in runs) for name in ("successful_requests", "failed_requests")}
    first_error = next((run["first_error"] for run in runs if run["first_error"]), None)
    return {"base_url": args.base_url, "model": client.model, **sums, "first_error": first_error, "runs": runs}


async def profile(client: Client, route: str) -> None:
    try:
        await client.call(route, {})
        print(f"Profiler: {route}")
    except (OSError, ValueError, Refused) as error:
        print(f"{route} is refused, so there is no profile: {error}", file=sys.stderr)


async def measure_one(
    client: Client, args: argparse.Namespace, concurrency: int, spare: list[int], seed: int
) -> dict[str, Any]:
    """One load: its report, and its part of the result. A later load has a seed of its own: prompts of the one before
    would be in the server's prefix cache."""
    num_warm_tokens = min(PROBE_TOKENS, args.output_tokens[1])
    generator = random.Random(seed + 3)
    warm_up: list[Prompt] = [(generator.sample(spare, len(spare)), num_warm_tokens) for _ in range(args.warmup)]
    await run_load(client, warm_up, concurrency)
    prompts = await make_prompts(args, client, seed)
    due = arrival_times(len(prompts), args.request_rate, args.burstiness, args.ramp, seed + 1)
    print_traffic(args, concurrency)
    if args.profile:
        await profile(client, "/start_profile")
    cpu = time.process_time()
    with tqdm(total=len(prompts), disable=True if args.disable_tqdm else None) as bar:
        records = await run_load(client, prompts, concurrency, due, bar)
    cpu = time.process_time() - cpu
    if args.profile:
        await profile(client, "/stop_profile")
    figures = serving_figures(records, concurrency, bool(args.request_rate or args.ramp))
    flat = flat_figures(args, client.model, records, concurrency, figures.get("duration_s") or 1e-9)
    print_serving_report(args, figures, flat)
    shown = ("num_requests", "prompt_tokens", "output_tokens", "shared_prefix", "request_rate", "seed", "burstiness",
             "ramp", "dataset_name")
    load = {"concurrency": concurrency} | {name: getattr(args, name) for name in shown}
    load["burstiness"] = finite(args.burstiness)
    form = {"endpoint": args.endpoint, "prompt_form": client.prompt_form, "ignore_eos": client.has_extras,
            "fields": client.fields}
    head = {"base_url": args.base_url, "model": client.model, "load": load | form, "client_cpu_s": round(cpu, 3)}
    return head | flat | figures | {"noise": noise(records)}


def main(argv: list[str] | None = None) -> int:
    """Run the load and print the report; 0 when every request succeeded, else 1."""
    args = parse_args(argv)
    try:
        old = read_result(args.compare) if args.compare else None    # before minutes of load
    except ValueError as error:
        print(f"bench serve: {error}", file=sys.stderr)
        return 2
    try:
        result = uvloop.run(measure(args))
    except (OSError, ValueError, Refused) as error:
        text = f"{args.base_url}: {str(error) or type(error).__name__}"
        print(f"no load was sent: {text}", file=sys.stderr)
        result = {"base_url": args.base_url, "successful_requests": 0, "failed_requests": 0, "first_error": text}
    if old is not None and result["successful_requests"]:
        result["compare"] = {"file": args.compare, "rows": compare_results(old, result)}
    if args.plot and result["successful_requests"]:
        try:
            plot_load(runs_of(result), args.plot)
            print(f"plot: {args.plot}")
        except ValueError as error:
            print(f"bench serve: {error}", file=sys.stderr)
    file = result_file(args, result["model"]) if "model" in result else None
    if file is not None:
        try:
            save_result(args, result, file)
            print(f"result: {file}")
        except OSError as error:
            print(f"bench serve: {file}: {error.strerror or error}", file=sys.stderr)
    print_json(without_details(result), args.json)
    return 0 if result["successful_requests"] and not result["failed_requests"] else 1


if __name__ == "__main__":
    sys.exit(main())
