"""Kill the process that embeds an engine, or the engine's supervisor, and look for what is left after two seconds.

Each round starts a host program in a folder of its own, lets it reach one phase (load, prefill, decode, idle, closing),
and kills. Left may be nothing that lives, and no shared memory; a killed supervisor cannot remove its directory, which
the next start does.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.server_process import engine_environment, run_dirs, survivors

HOST = """
import asyncio, sys, threading
from frontend import AsyncLLM, SamplingParams

async def main(model, phase):
    print("load", flush=True)
    async with AsyncLLM(model, num_gpu_blocks_override=512, attention_backend="cpu", num_threads=1,
                        log_level="error") as llm:
        print("idle", llm.pids[0], flush=True)
        if phase == "idle":
            await asyncio.sleep(60)
        params = SamplingParams(max_tokens=3000, ignore_eos=True)
        prompt = [5] * (900 if phase == "prefill" else 5)
        async for output in llm.generate(prompt, params):
            if phase != "closing":
                print(phase, flush=True)
                continue
            break
        print("closing", flush=True)

asyncio.run(main(*sys.argv[1:]))
"""
PHASES = ("load", "idle", "prefill", "decode", "closing")
GONE_S = 2.0


async def kill_hosts(model: str, folder: str, count: int, rng: random.Random) -> dict[str, Any]:
    left: list[str] = []
    slowest = 0.0
    before = set(os.listdir("/dev/shm"))
    for number in range(count):
        temp = Path(folder, f"h{number}")
        temp.mkdir()
        phase = PHASES[number % len(PHASES)]
        victim = "supervisor" if number % 2 and phase != "load" else "host"
        seconds = await asyncio.to_thread(_one, model, str(temp), phase, victim, rng.random())
        slowest = max(slowest, seconds)
        if seconds > GONE_S:
            left.append(f"round {number}: {victim} killed in {phase}: {survivors(str(temp))} after {seconds:.1f} s")
        if victim == "host" and run_dirs(str(temp)):
            left.append(f"round {number}: {run_dirs(str(temp))}")
    left += [f"shared memory {name}" for name in sorted(set(os.listdir("/dev/shm")) - before) if "threefold" in name]
    return {"kills": count, "gone_max_s": round(slowest, 2), "left": left}


def _one(model: str, temp: str, phase: str, victim: str, share: float) -> float:
    """Seconds from the kill until nothing lives."""
    host = subprocess.Popen([sys.executable, "-c", HOST, model, phase], env=engine_environment(temp),
                            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    supervisor = 0
    try:
        for line in host.stdout or ():
            word, _, pid = line.strip().partition(" ")
            supervisor = int(pid) if pid else supervisor
            if word == phase:
                break
        time.sleep(share * (2.0 if phase == "load" else 0.3 if phase != "closing" else 0.02))
        begin = time.monotonic()
        try:
            os.kill(supervisor if victim == "supervisor" else host.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it had just ended by itself
        if victim == "supervisor":
            host_pid = host.pid
            while any(pid != host_pid for pid in survivors(temp)) and time.monotonic() - begin < 10:
                time.sleep(0.02)
            seconds = time.monotonic() - begin
            host.kill()
        else:
            host.wait(10)
            while survivors(temp) and time.monotonic() - begin < 10:
                time.sleep(0.02)
            seconds = time.monotonic() - begin
        return seconds
    finally:
        if host.poll() is None:
            host.kill()
        host.wait(10)
        if host.stdout is not None:
            host.stdout.close()
