"""`python launch.py simulate`: the real engine core against a worker whose pool stores what each slot means.

Random sizes, policies, preemption modes, aborts, resets, failed steps, lost workers, restarts of the core, late
results: all drawn from a seed. Any wrong read, leak, stall or wrong token ends the run with the seed that shows it
again. Prints progress and one JSON object last.
"""

from __future__ import annotations

import sys
import time

from bench.simulation import Options, SimulationError, Statistics, simulate
from bench.stats import print_json
from ipc.option_help import OptionParser


def main(argv: list[str] | None = None) -> int:
    parser = OptionParser(prog="launch.py simulate", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0, help="the first of consecutive seeds, one per engine")
    parser.add_argument("--fault-rate", type=float, default=0.05, help="share of steps that fail")
    args = parser.parse_args(argv)
    if args.steps < 1 or not 0 <= args.fault_rate < 1:
        parser.error("--steps must be at least 1 and --fault-rate in [0, 1)")
    options = Options(
        fault_rate=args.fault_rate,
        nan_rate=args.fault_rate / 5,
        loss_rate=args.fault_rate / 25,
        restart_rate=args.fault_rate / 25,
        late_rate=args.fault_rate / 5,
        gone_rate=args.fault_rate / 50,
        poison_rate=args.fault_rate / 10,
        grammar_rate=0.3,
    )
    total, seed = Statistics(), args.seed
    begin = last = time.monotonic()
    while total.num_steps < args.steps:
        try:
            total += simulate(seed, options)
        except SimulationError as error:
            print(
                f"FAILED: {error}\nrepeat with: python launch.py simulate --seed {seed} --steps 1 "
                f"--fault-rate {args.fault_rate}",
                file=sys.stderr,
            )
            return 1
        seed += 1
        if time.monotonic() - last > 5:
            last = time.monotonic()
            rate = total.num_steps / (last - begin)
            print(
                f"{total.num_steps:>9} steps, {rate:,.0f} a second, {total.num_preemptions} preemptions, "
                f"{total.num_failed} failed steps, {total.num_lost} lost workers",
                file=sys.stderr,
            )
    seconds = time.monotonic() - begin
    print_json(
        {
            "steps": total.num_steps,
            "seconds": round(seconds, 1),
            "steps_per_s": round(total.num_steps / seconds),
            "engines": seed - args.seed,
            "requests": total.num_requests,
            "preemptions": total.num_preemptions,
            "swapped_blocks": total.num_swapped_blocks,
            "failed_steps": total.num_failed,
            "bad_rows": total.num_bad_rows,
            "lost_workers": total.num_lost,
            "restarts": total.num_restarts,
            "kept_tokens": total.num_kept_tokens,
            "late_results": total.num_late,
            "aborted": total.num_aborted,
            "checked_slots": total.num_checked_slots,
            "wrong_reads": 0,
            "leaks": 0,
            "stalls": 0,
        }
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
