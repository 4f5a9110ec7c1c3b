"""`bench overhead`: what the always-on records cost. All three parts of an engine in one process, records toggled.

Core, worker and AsyncLLM run in one loop over a real socket, so that one CPU clock sees all of them. --concurrency
requests decode; every --block-steps steps the records change between on and off, in the order on, off, off, on, so that
drifts cancel: blocks are short and many. Off: no clock is read for them, no stamps travel, no ring is written. A
block's figure is the CPU time that its fastest fifth of steps stays below, without the forward pass: every step has its
record, neighbours on the machine leave few alone, and the forward pass, which no record touches, would hide them. The
steps that send the stamps of many are kept apart: how much longer they take is measured where all steps have records,
and shared out among all. The result is the mean difference over pairs of blocks with its 95 % interval (bootstrap), and
its share of a whole step's CPU time, forward pass included. What each token adds, one append of the time it came, is in
both kinds of block and measured alone. One JSON object last. record_alone_us is the work of one record in a loop of its
own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import tempfile
import time
from array import array
from typing import Any

import numpy as np

from bench.seed_workload import SEED_MODEL_CONFIG
from bench.stats import median, percentile, print_json
from engine_core.core import EngineCore
from engine_core.outbox import Outbox
from frontend import AsyncLLM, SamplingParams
from frontend.timeline import Timeline
from ipc import codec
from ipc.cli import build_config
from ipc.config import EngineConfig, Peer, WorkerProcess
from ipc.messages import HELLO, EngineReady, ModelRunnerOutput, Outputs, SchedulerOutput
from ipc.option_help import OptionParser
from ipc.sockets import Router
from ipc.step_ring import StepRing
from worker.startup import build_runner

RESAMPLES = 10_000
WARM_STEPS = 50
TELLING_STEPS = 400


class Quiet:
    """Takes the phases of a start."""

    def begin(self, name: str) -> None: ...

    def advance(self, fraction: float, detail: str = "") -> None: ...

    def end(self, detail: str = "") -> None: ...


class NoRing(StepRing):
    """Keeps no step."""

    def put(self, step: int, stamps: tuple[int, ...]) -> None: ...

    def mark(self, step: int, column: int, value: int) -> None: ...

    def mark_two(self, step: int, column: int, value: int, next_value: int) -> None: ...


class OneProcess:
    """Core and worker in this process; a frontend connects to `address`."""

    def __init__(self, config: EngineConfig, folder: str) -> None:
        import zmq

        scheduler = config.scheduler
        worker = WorkerProcess(
            rank=0, listen="", epoch=1, model=config.model, cache=config.cache, max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens, device=config.device,
            num_speculative_tokens=scheduler.num_speculative_tokens, cuda_graphs=config.cuda_graphs,
            attention_backend=config.attention_backend, num_threads=config.num_threads, run_dir=folder,
            log_level="warning",
        )
        self.runner, ready = build_runner(worker, Quiet(), lambda: None)  # type: ignore[arg-type]
        self.core = EngineCore(scheduler, config.cache, ready, b"k" * 32)
        self.ready = EngineReady(ready.num_blocks, config.cache.block_size, ready.max_model_len, ready.vocab_size,
                                 ready.eos_token_ids, scheduler.max_num_seqs, ready.dtype, ready.detail)
        self.address = f"ipc://{folder}/core"
        self.frontends = Router(zmq.Context.instance(), self.address)
        self.frontends.epoch = 1
        self.is_stopping = False
        self.model = self.runner.model = TimedModel(self.runner.model)  # type: ignore[assignment]
        self._ring = self.runner.ring
        self.host_us: list[float] = []  # CPU time of each step without its forward pass
        self.whole_us: list[float] = []  # with it
        self.telling_us: list[float] = []  # as host_us, of the steps that sent stamps
        self._has_told = self.is_first = False  # is_first: what is accounted next began before the block
        self._last = (0, 0)

    def record(self, is_on: bool) -> None:
        self.core.outbox.is_recording = is_on
        self.runner.ring = self._ring if is_on else NoRing()

    async def run(self) -> None:
        """Step while there is work; between steps the loop belongs to the frontend."""
        while not self.is_stopping:
            for number, header, message in self.frontends.drain():
                if header.kind == HELLO:
                    self.frontends.send(number, self.ready)
                elif (reply := self.core.handle(number, message)) is not None:
                    self.frontends.send(number, reply)
            self.step()
            await asyncio.sleep(0 if self.core.requests else 0.001)
            await asyncio.sleep(0)

    def step(self) -> None:
        core = self.core
        clock = time.monotonic_ns if core.outbox.is_recording else _no_clock
        if core.can_plan() and (plan := core.plan(clock())) is not None:
            self._account()
            planned = clock()
            frames = codec.encode(plan, 1, plan.step)
            core.plan_sent(clock(), planned)
            received: SchedulerOutput = codec.decode(frames)[1]
            result: ModelRunnerOutput = codec.decode(codec.encode(self.runner.execute(received, clock()), 1, 1))[1]
            core.commit(result, clock())
            core.committed(clock())
        for number, outputs in core.take_outputs(clock()):
            self._has_told |= bool(outputs.stamps)
            if self.frontends.send(number, outputs):
                core.outbox.sent(number)

    def _account(self) -> None:
        """From one step to the next, what the frontend did in between included."""
        now, forward = time.process_time_ns(), self.model.cpu_ns
        whole, inside = now - self._last[0], forward - self._last[1]
        self._last = now, forward
        if not self.is_first:
            (self.telling_us if self._has_told else self.host_us).append((whole - inside) / 1000)
            self.whole_us.append(whole / 1000)
        self._has_told = self.is_first = False


class TimedModel:
    """The model, with the CPU time that its forward passes took."""

    def __init__(self, model: Any) -> None:
        self.inner = model
        self.cpu_ns = 0

    def __call__(self, *arguments: Any) -> Any:
        begin = time.process_time_ns()
        hidden = self.inner(*arguments)
        self.cpu_ns += time.process_time_ns() - begin
        return hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def _no_clock() -> int:
    return 0


async def measure(name: str, config: EngineConfig, args: argparse.Namespace) -> dict[str, Any]:
    """The difference, for one model."""
    with tempfile.TemporaryDirectory(prefix="tf-") as folder:
        engine = OneProcess(config, folder)
        stepping = asyncio.create_task(engine.run())
        llm = await AsyncLLM.attach(Peer(engine.address, 1), 1, config.model)
        cpu: dict[bool, list[float]] = {True: [], False: []}
        whole: list[float] = []
        plain: list[float] = []                 # of a stretch with records
        telling: list[float] = []               # its steps that sent stamps
        for group in range(args.groups):
            async with load(llm, args, seed=group):
                await run_steps(engine, WARM_STEPS)
                before = llm.timeline.num_steps
                for is_on in (True, False, False, True) * args.turns:
                    engine.record(is_on)
                    llm.timeline.is_recording = is_on
                    await run_steps(engine, args.block_steps)
                    cpu[is_on].append(percentile(engine.host_us, 20))
                    whole += [] if is_on else engine.whole_us
                recorded, expected = llm.timeline.num_steps - before, 2 * args.turns * args.block_steps
                if abs(recorded - expected) > expected // 4:
                    raise RuntimeError(f"{recorded} steps were recorded where {expected} had records on")
                await run_steps(engine, TELLING_STEPS)      # records are on
                plain += engine.host_us
                telling += engine.telling_us
        engine.is_stopping = True
        await stepping
        await llm.close()
        engine.frontends.close()
    tell = max(0.0, median(telling) - median(plain)) * len(telling) / (len(telling) + len(plain))
    return summary(name, np.array(cpu[True]), np.array(cpu[False]), tell, median(whole), args)


@contextlib.asynccontextmanager
async def load(llm: AsyncLLM, args: argparse.Namespace, seed: int) -> Any:
    """Requests that outlive the group, decoding once this begins."""
    steps = 4 * args.turns * args.block_steps + TELLING_STEPS + 4 * WARM_STEPS
    params = SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True)
    first = asyncio.Semaphore(0)

    async def one(number: int) -> None:
        prompt = [1 + (seed * 977 + number * 7919 + i * 31) % (llm.vocab_size - 1) for i in range(args.prompt_tokens)]
        async for _ in llm.generate(prompt, params, output_kind="delta"):
            first.release()

    tasks = [asyncio.create_task(one(number)) for number in range(args.concurrency)]
    for _ in range(8 * args.concurrency):
        await first.acquire()
    yield
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    while (await llm.stats())["num_running"]:
        await asyncio.sleep(0.01)


async def run_steps(engine: OneProcess, count: int) -> None:
    """Afterwards the engine's lists hold those of these steps but the first."""
    begin, engine.is_first = engine.core.committed_step, True
    engine.host_us.clear()
    engine.whole_us.clear()
    engine.telling_us.clear()
    while engine.core.committed_step < begin + count:
        await asyncio.sleep(0)


def summary(name: str, on: np.ndarray, off: np.ndarray, tell: float, base: float,
            args: argparse.Namespace) -> dict[str, Any]:
    """Pairs of neighbours: (on, off) and (off, on) of each group. tell: what sending stamps adds to a mean step."""
    gain = on - off + tell
    means = np.random.default_rng(0).choice(gain, (RESAMPLES, len(gain))).mean(1)
    low, high = np.percentile(means, [2.5, 97.5])
    append, alone = per_token_us(), per_record_us()
    return {
        "model": name, "concurrency": args.concurrency, "pairs": len(gain), "block_steps": args.block_steps,
        "step_us": round(base, 1), "off_us": round(float(off.mean()), 1), "on_us": round(float(on.mean()), 1),
        "record_us": round(float(gain.mean()), 2), "record_us_95": [round(float(low), 2), round(float(high), 2)],
        "of_it_sending_us": round(tell, 2),
        "overhead_percent": round(100 * float(gain.mean()) / base, 3),
        "overhead_percent_95": [round(100 * float(edge) / base, 3) for edge in (low, high)],
        "record_alone_us": round(alone, 2), "record_alone_percent": round(100 * alone / base, 3),
        "token_us": round(append, 3), "tokens_percent": round(100 * append * args.concurrency / base, 3),
    }


def per_record_us(count: int = 20_000) -> float:
    """Making, sending along and keeping the record of one step, by itself: what the difference must be about."""
    outbox, ring, timeline, clock = Outbox(), StepRing(), Timeline(), time.monotonic_ns
    begin = time.process_time_ns()
    for step in range(1, count + 1):
        moments = [clock() for _ in range(10)]
        plan = (*moments[:3], 0, 0, 0, 0, 0, 0, 0, 0, step, 16, 16, 0)
        outbox.planned(step, plan)
        ring.put(step, plan)     # the worker's: it has the plan, has prepared it, has computed it, has the tokens
        for _ in range(2):
            ring.mark(step, 4, moments[3])
        ring.mark_two(step, 6, moments[4], 0)
        outbox.step(step, (*moments[:9], 0, 0, step, 16, 16, 0))
        outbox.commit_ended(moments[9])
        outputs = Outputs(step, num_running=16, num_free_blocks=100)
        if not step % 100:
            outputs.stamps = outbox.steps_for(1, clock())
            outbox.told(1, clock())
        if timeline.hear(outputs, clock()):
            timeline.written()
    return (time.process_time_ns() - begin) / 1000 / count


def per_token_us(count: int = 200_000) -> float:
    """Keeping the moment of one token."""
    times, now = array("q"), time.monotonic_ns()
    begin = time.process_time_ns()
    for _ in range(count):
        times.append(now)
    return (time.process_time_ns() - begin) / 1000 / count


def main(argv: list[str] | None = None) -> int:
    parser = OptionParser(prog="launch.py bench overhead", description="What the always-on records cost.")
    parser.add_argument("--model", default="seed", help="seed: that of bench seed; or as for launch.py")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--block-steps", type=int, default=25)
    parser.add_argument("--turns", type=int, default=8, help="of four blocks, within a load")
    parser.add_argument("--groups", type=int, default=8, help="loads")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args(argv)
    # batch_invariant: the start waits until the compiled kernels are there
    options: dict[str, Any] = dict(num_threads=args.threads, log_level="warning", max_num_seqs=args.concurrency,
                                   batch_invariant=True)
    with tempfile.TemporaryDirectory() as folder:
        model = args.model
        if model == "seed":
            with open(os.path.join(folder, "config.json"), "w") as file:
                json.dump(SEED_MODEL_CONFIG, file)
            model, options["load_format"] = folder, "dummy"
        config = build_config(model, options, serve=False)
        print_json(asyncio.run(measure(args.model, config, args)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
