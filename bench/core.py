"""`bench core`: what scheduling costs, without a model. CPU time in microseconds, medians; one JSON object last.

A whole decode step of the core and of the worker's host side: plan, encode, decode, batch preparation, write-back,
encode, decode, commit, with everything switched on (stop ids, statistics, flight recorder). Then growth with context,
wire sizes, a round trip through real sockets and two processes, admission, enqueueing, start and memory, and idle
cost of all processes. With --against vllm, vLLM's scheduler and input preparation are measured in the same run by
--vllm-python.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from bench.core_recorder import recording
from bench.stats import median, print_json
from engine_core.core import EngineCore
from engine_core.recorder import COMMIT, HANDLE, Recorder
from engine_core.snapshot import Origin
from ipc import codec
from ipc.config import CacheConfig, SchedulerConfig
from ipc.messages import AddRequest, SchedulerOutput, WorkerReady
from ipc.option_help import OptionParser
from ipc.sampling_params import SamplingParams
from worker.batch import BatchBuilder
from worker.request_state import RequestState

VOCAB = 151_936
MUST = {8: 300, 256: 600, 1024: 1500}
PARTS = ("plan", "wire_plan", "prepare", "write_back", "wire_result", "commit")


def cpu_us() -> float:
    """CPU time of this thread, so that neighbours on the machine do not count."""
    return time.thread_time_ns() / 1000


class Loop:
    """Core and worker's host side in one thread, joined by the codec; the model is a column of tokens."""

    def __init__(self, rows: int, context: int, *, spare_tokens: int = 4096, policy: str = "fcfs") -> None:
        max_len = context + spare_tokens + 64
        blocks = rows * (-(-max_len // 16) + 1)
        scheduler = SchedulerConfig(max_num_seqs=rows, max_num_batched_tokens=max(8192, rows), policy=policy)
        cache = CacheConfig()
        ready = WorkerReady(blocks, 0, max_len, VOCAB, [VOCAB - 1], "float32", "null")
        self.core = EngineCore(scheduler, cache, ready, b"k" * 32)
        self.origin = Origin(scheduler, cache, ready, b"k" * 32)
        self.recorder = Recorder(self.core, self.origin)
        self.state = RequestState(rows, max_len, 16)
        self.builder = BatchBuilder(self.state, max(8192, rows))
        self.rng = np.random.default_rng(0)
        self.clock = cpu_us
        self.times: dict[str, list[float]] = {name: [] for name in PARTS}
        self.plan_bytes = self.result_bytes = 0
        params = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=None, seed=1, stop_token_ids=[5])
        for i in range(rows):
            self.add(i, context + i % 16, params)
        while self.core.scheduler.prefilling or len(self.core.scheduler.waiting):
            self.step()
        self.step()
        self.times = {name: [] for name in PARTS}

    def add(self, number: int, length: int, params: SamplingParams) -> None:
        tokens = self.rng.integers(10, VOCAB - 10, length).astype(np.int32)
        frames = codec.encode(AddRequest(number, memoryview(tokens).cast("B"), params))
        self.recorder.note(HANDLE, 0, frames)
        self.core.handle(0, codec.decode(frames)[1])

    def step(self) -> None:
        """One step in window 1, timed part by part."""
        core, recorder, builder = self.core, self.recorder, self.builder
        t0 = cpu_us()
        recorder.turn()
        plan = core.plan(1)
        assert plan is not None
        t1 = cpu_us()
        frames = codec.encode(plan, 1, plan.step)
        recorder.note_plan(bytes(frames[0]))
        core.plan_sent(2)
        received: SchedulerOutput = codec.decode(frames)[1]
        t3 = cpu_us()
        self.state.apply(received)
        batch = builder.build(received)
        t4 = cpu_us()
        tokens = np.full(len(batch.sample_rows) if batch is not None else 0, 77, np.int32)
        t5 = cpu_us()
        column, _ = builder.advance(batch, tokens)
        t6 = cpu_us()
        result = codec.encode(_result(plan.step, column), 1, plan.step)
        t7 = cpu_us()
        recorder.note(COMMIT, 0, result)
        core.commit(codec.decode(result)[1], 3)
        for number, outputs in core.take_outputs(4):
            codec.encode(outputs)
            core.outbox.sent(number)
        t8 = cpu_us()
        self.plan_bytes, self.result_bytes = sum(map(len, frames)), sum(map(len, result))
        for name, took in zip(PARTS, (t1 - t0, t3 - t1, t4 - t3, t6 - t5, t7 - t6, t8 - t7)):
            self.times[name].append(took)

    def measure(self, steps: int) -> dict[str, float]:
        for _ in range(steps):
            self.step()
        parts = {name: median(values) for name, values in self.times.items()}
        totals = [sum(values) for values in zip(*self.times.values())]
        return {"total": median(totals), **parts}


def _result(step: int, column: np.ndarray) -> Any:
    from ipc.messages import ModelRunnerOutput

    return ModelRunnerOutput(
        step,
        memoryview(np.ascontiguousarray(column, np.int32)).cast("B"),
        received_ns=1,
        prepared_ns=2,
        launched_ns=3,
        done_ns=4,
        device_ns=5,
    )


def step_costs(rows: list[int], steps: int) -> dict[str, Any]:
    found: dict[str, Any] = {"step_us": {}, "parts_us": {}}
    for n in rows:
        loop = Loop(n, 512)
        parts = loop.measure(steps)
        found["step_us"][str(n)] = round(parts.pop("total"), 1)
        found["parts_us"][str(n)] = {name: round(value, 1) for name, value in parts.items()}
        if n == 256:
            found["plan_bytes"], found["result_bytes"] = loop.plan_bytes, loop.result_bytes
        del loop
        gc.collect()
    return found


def growth(steps: int) -> dict[str, float]:
    """64 rows at 512 and at 32k tokens of context, interleaved so that both see the same machine."""
    short, long = Loop(64, 512), Loop(64, 32_000)
    for _ in range(steps):
        short.step()
        long.step()
    core = ("plan", "wire_plan", "commit")
    worker = ("prepare", "write_back", "wire_result")

    def cost(loop: Loop, names: tuple[str, ...]) -> float:
        return median(sum(values) for values in zip(*(loop.times[name] for name in names)))

    return {
        "core": round(cost(long, core) / cost(short, core), 2),
        "worker": round(cost(long, worker) / cost(short, worker), 2),
    }


def admission(repeats: int) -> dict[str, float]:
    """A prompt's way into its first plan: bytes in, hashing included."""
    found = {}
    for length in (8192, 32_768):
        scheduler = SchedulerConfig(max_num_batched_tokens=65_536)
        core = EngineCore(scheduler, CacheConfig(), WorkerReady(40_000, 0, 65_536, VOCAB, [], "f", "null"), b"k" * 32)
        rng, times = np.random.default_rng(1), []
        for i in range(repeats):
            tokens = rng.integers(0, VOCAB, length).astype(np.int32)
            frames = codec.encode(AddRequest(i, memoryview(tokens).cast("B"), SamplingParams(max_tokens=4, seed=1)))
            begin = cpu_us()
            core.handle(0, codec.decode(frames)[1])
            plan = core.plan()
            times.append(cpu_us() - begin)
            assert plan is not None
            column = np.full(plan.num_rows, 3, np.int32)
            core.commit(_result(plan.step, column))
            core.handle(0, _abort(i))
            for number, _ in core.take_outputs(0):
                core.outbox.sent(number)
        found[str(length)] = round(median(times), 1)
    return found


def _abort(request_id: int) -> Any:
    from ipc.messages import Abort

    return Abort([request_id])


def enqueueing(count: int = 10_000) -> dict[str, float]:
    """Adding a request (16-token prompt) when `count` wait already."""
    found = {}
    for policy in ("fcfs", "priority", "lpm"):
        core = EngineCore(
            SchedulerConfig(policy=policy, max_num_seqs=1),
            CacheConfig(),
            WorkerReady(64, 0, 1024, VOCAB, [], "f", "null"),
            b"k" * 32,
        )
        params = SamplingParams(max_tokens=4, seed=1)
        tokens = memoryview(np.arange(16, dtype=np.int32)).cast("B")
        rng, times = np.random.default_rng(2), []
        for i in range(count + 2000):
            message = AddRequest(i, tokens, params, priority=int(rng.integers(0, 10)))
            begin = cpu_us()
            core.handle(0, message)
            times.append(cpu_us() - begin)
        found[policy] = round(median(times[count:]), 2)
    return found


def round_trip(rows: int, steps: int) -> dict[str, float]:
    """Core -> worker -> core over ipc sockets and two processes with a null model, wall time."""
    import zmq

    from ipc.messages import ModelRunnerOutput
    from ipc.sockets import Link

    with tempfile.TemporaryDirectory(prefix="tf-") as folder:
        address = f"ipc://{folder}/w"
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "bench.null_worker", address, str(rows)],
            env={**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(__file__))},
        )
        try:
            context = zmq.Context()
            link = Link(context, connect=address)
            link.hello("engine_core", 0, os.getpid())
            while (item := link.receive()) is None:
                link.socket.poll(1000)
            loop = Loop(rows, 512)  # brings its rows to the decode state against its own mirror
            core = loop.core
            core._needs_reset = True  # the other process learns all rows at once
            times, cpu = [], []
            for i in range(steps + 20):
                begin, begin_cpu = time.perf_counter_ns(), cpu_us()
                plan = core.plan(1)
                link.send(plan)
                core.plan_sent(2)
                while (item := link.receive()) is None:
                    link.socket.poll(1000)
                result = item[1]
                assert isinstance(result, ModelRunnerOutput)
                core.commit(result, 3)
                for number, _ in core.take_outputs(4):
                    core.outbox.sent(number)
                if i >= 20:
                    times.append((time.perf_counter_ns() - begin) / 1000)
                    cpu.append(cpu_us() - begin_cpu)
            link.close()
            context.term()
            return {"wall": round(median(times), 1), "core_cpu": round(median(cpu), 1)}
        finally:
            child.terminate()
            child.wait()


def core_process(repeats: int = 5) -> dict[str, float]:
    """Importing the core in a fresh interpreter: seconds and resident memory."""
    code = (
        "import time; t = time.perf_counter()\n"
        "import engine_core.main\n"
        "from engine_core.core import EngineCore\n"
        "from ipc.config import CacheConfig, SchedulerConfig\n"
        "from ipc.messages import WorkerReady\n"
        "EngineCore(SchedulerConfig(), CacheConfig(), WorkerReady(8192, 0, 8192, 151936, [1], 'f', 'x'), b'k' * 32)\n"
        "s = time.perf_counter() - t\n"
        "rss = next(l for l in open('/proc/self/status') if l.startswith('VmRSS')).split()[1]\n"
        "print(s, int(rss) / 1024)\n"
    )
    results = []
    for _ in range(repeats):
        begin = time.perf_counter()
        out = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(__file__))},
        ).stdout.split()
        results.append((time.perf_counter() - begin, float(out[1])))
    return {"start_s": round(median(r[0] for r in results), 3), "resident_mb": round(median(r[1] for r in results), 1)}


def idle(seconds: float) -> dict[str, Any]:
    """CPU and wake-ups of all processes of an idle engine."""
    import asyncio

    from bench.seed_workload import SEED_MODEL_CONFIG
    from frontend import AsyncLLM, SamplingParams

    def usage(pids: list[int]) -> tuple[float, dict[int, int]]:
        total, switches = 0.0, {}
        for pid in pids:
            with open(f"/proc/{pid}/stat") as file:
                fields = file.read().rsplit(")", 1)[1].split()
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            with open(f"/proc/{pid}/status") as file:
                switches[pid] = next(int(line.split()[1]) for line in file if line.startswith("voluntary_ctxt"))
        return total, switches

    async def run() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            with open(os.path.join(folder, "config.json"), "w") as file:
                json.dump(SEED_MODEL_CONFIG, file)
            async with AsyncLLM(folder, load_format="dummy", log_level="warning", num_gpu_blocks_override=512) as llm:
                async for _ in llm.generate([1, 2, 3], SamplingParams(max_tokens=8)):
                    pass
                await asyncio.sleep(2)
                pids = llm.pids
                cpu, switches = usage(pids)
                own = time.process_time()
                await asyncio.sleep(seconds)
                cpu2, switches2 = usage(pids)
                wakes = [(switches2[pid] - switches[pid]) / seconds for pid in pids[1:]]
                return {
                    "cpu_percent": round(100 * (cpu2 - cpu + time.process_time() - own) / seconds, 3),
                    "wakeups_per_s": [round(w, 2) for w in wakes],
                }

    return asyncio.run(run())


def against_vllm(python: str, steps: int) -> dict[str, Any] | None:
    """vLLM's scheduler, wire and input preparation at 256 rows, in its own interpreter; None: not importable."""
    script = os.path.join(os.path.dirname(__file__), "vllm_core.py")
    done = subprocess.run([python, script, "--rows", "256", "--steps", str(steps)], capture_output=True, text=True)
    if done.returncode:
        print(done.stderr[-800:], file=sys.stderr)
        return None
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def sections(args: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Any]]]:
    yield "round_trip_us", lambda: round_trip(256, args.steps)
    yield "growth_512_to_32k", lambda: growth(args.steps)
    yield "recorder", lambda: recording(Loop(256, 512, spare_tokens=4 * args.steps + 4096), args.steps)
    yield "admit_us", lambda: admission(15)
    yield "enqueue_us", enqueueing
    yield "core_process", core_process
    if args.idle_seconds:
        yield "idle", lambda: idle(args.idle_seconds)


def main(argv: list[str] | None = None) -> int:
    parser = OptionParser(prog="launch.py bench core", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 64, 256, 1024])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--idle-seconds", type=float, default=10.0, help="0: leave the idle measurement out")
    parser.add_argument("--against", choices=["vllm"])
    parser.add_argument("--vllm-python", default=sys.executable, help="an interpreter that imports vllm")
    args = parser.parse_args(argv)
    gc.disable()
    result: dict[str, Any] = step_costs(args.rows, args.steps)
    for n, value in result["step_us"].items():
        must = MUST.get(int(n))
        print(
            f"{n:>5} running: {value:8.1f} us a step"
            + (f" (must {must})" if must else "")
            + "   "
            + "  ".join(f"{k} {v}" for k, v in result["parts_us"][n].items())
        )
    print(f"wire at 256: plan {result.get('plan_bytes')} bytes, result {result.get('result_bytes')} bytes")
    for name, call in sections(args):
        result[name] = call()
        print(f"{name}: {result[name]}")
        gc.collect()
    result["ipc_round_trip_us"] = result["round_trip_us"]["wall"]
    if args.against:
        theirs = against_vllm(args.vllm_python, 60)
        result["vllm"] = theirs
        if theirs is not None and "256" in result["step_us"]:
            result["vllm_ratio"] = round(theirs["total_us"] / result["step_us"]["256"], 1)
        print(f"vllm: {theirs}, ratio {result.get('vllm_ratio')}")
    print_json(result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
