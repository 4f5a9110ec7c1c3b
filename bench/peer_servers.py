"""Which engines `bench peers` knows: how each is found, started and got. Adding one means one entry here.

Every engine gets the same cores, the same weights (peer_models.py) and room for the same number of cached tokens.
"""
from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from bench.peer_models import default_folder, gguf_file, hf_folder, random_folder
from ipc.model_source import resolve_model

ROOT = Path(__file__).resolve().parents[1]
KV_TOKENS, SEATS, MAX_LEN, BLOCK_SIZE = 16384, 32, 2048, 16
DEMO, SHAPE = "smollm2-135m", "qwen3-0.6b"
GET = {"llama.cpp": "bash bench/peers.sh install llama.cpp (needs g++ and cmake)",
       "vllm": "bash bench/peers.sh install vllm",
       "transformers": "bash bench/peers.sh install transformers"}
LIBRARIES = ("libtcmalloc_minimal.so.4", "libiomp5.so")   # vLLM's documentation has them preloaded


@dataclass(frozen=True)
class Peer:
    """One engine with one kind of weights. `command` gets a port; kind "library" ends by itself and prints JSON."""
    name: str
    engine: str                                 # threefold, llama.cpp, vllm or transformers
    weights: str
    like: bool                                  # mean KL to float32 of at most 0.005
    command: Callable[[int], list[str]]
    env: dict[str, str] = field(default_factory=dict)
    kind: str = "server"
    model: str = DEMO
    timeout_s: float = 240.0


def find(engine: str) -> Path | None:
    """The program of an engine: llama-server, or the Python that has the package."""
    folder = default_folder()
    if engine == "threefold":
        return Path(sys.executable)
    if engine == "llama.cpp":
        named, usual, program = os.environ.get("LLAMA_SERVER"), folder / "llama" / "llama-server", "llama-server"
        found = named or (str(usual) if usual.exists() else shutil.which(program))
        return Path(found) if found and Path(found).exists() else None
    named = os.environ.get(f"{engine.upper()}_PYTHON")
    usual = folder / engine / "bin" / "python"
    for python in (Path(named) if named else None, usual, Path(sys.executable)):
        if python is not None and python.exists() and _has(python, engine):
            return python
    return None


@functools.cache
def _has(python: Path, package: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec('{package}') is None)"
    return subprocess.run([python, "-c", code], capture_output=True).returncode == 0


def version(engine: str) -> str:
    """What the engine calls itself."""
    program = find(engine)
    if program is None:
        return "absent"
    if engine == "llama.cpp":
        done = subprocess.run([program, "--version"], capture_output=True, text=True)
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith(("version", "built"))]
        return "; ".join(lines) or "unknown"
    packages = ("torch", "numba", "numpy") if engine == "threefold" else (engine, "torch")
    code = f"from importlib.metadata import version as v; print(', '.join(p + ' ' + v(p) for p in {packages}))"
    return subprocess.run([program, "-c", code], capture_output=True, text=True).stdout.strip()


def threads() -> int:
    return len(os.sched_getaffinity(0))


def _threefold(model: str, *options: str) -> Callable[[int], list[str]]:
    return lambda port: [sys.executable, str(ROOT / "launch.py"), "serve", "--model", model, "--port", str(port),
                         "--max-model-len", str(MAX_LEN), "--max-num-seqs", str(SEATS), "--block-size",
                         str(BLOCK_SIZE), "--num-gpu-blocks-override", str(KV_TOKENS // BLOCK_SIZE), *options]


def _llama(ggml_type: str) -> Callable[[int], list[str]]:
    def command(port: int) -> list[str]:
        source = resolve_model(DEMO).path
        path = source if ggml_type == "as shipped" else str(gguf_file(source, ggml_type, default_folder()))
        count = str(threads())
        return [str(find("llama.cpp")), "-m", path, "--port", str(port), "-t", count, "-tb", count, "-np", str(SEATS),
                "-c", str(KV_TOKENS), "--no-kv-unified", "--no-webui"]
    return command


def _vllm(model: str, dtype: str, *options: str) -> Callable[[int], list[str]]:
    def command(port: int) -> list[str]:
        folder = default_folder()
        path = hf_folder(DEMO, folder) if model == DEMO else random_folder(model, resolve_model(DEMO).path, folder)
        return [str(find("vllm")), "-m", "vllm.entrypoints.cli.main", "serve", str(path), "--port", str(port),
                "--dtype", dtype, "--max-model-len", str(MAX_LEN), "--max-num-seqs", str(SEATS), *options]
    return command


def _vllm_env(gib: int) -> dict[str, str]:
    """Threads on all cores, the cache's size, and the libraries that its documentation has preloaded."""
    python = find("vllm")
    roots = [Path("/usr/lib"), *([python.parent.parent / "lib"] if python else [])]
    found = [next(iter(sorted(root.glob(f"**/{name}"))), None) for name in LIBRARIES for root in roots]
    return {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": str(gib), "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads() - 1}", "LD_PRELOAD": ":".join(str(p) for p in found if p)}


def _transformers(dtype: str) -> Callable[[int], list[str]]:
    return lambda port: [str(find("transformers")), str(ROOT / "bench" / "peer_transformers.py"),
                         str(hf_folder(DEMO, default_folder())), "--dtype", dtype, "--threads", str(threads())]


def all_peers() -> list[Peer]:
    """In the order in which they run."""
    demo, shape = _vllm_env(1), _vllm_env(4)    # float32 keys and values of KV_TOKENS tokens, in whole GiB
    eager, dummy = "--enforce-eager", ("--load-format", "dummy")
    int8 = ("--quantization", "int8")
    return [
        Peer("threefold", "threefold", "4-bit, the file's", True, _threefold(DEMO)),
        Peer("threefold-int8", "threefold", "int8", True, _threefold(DEMO, *int8)),
        Peer("threefold-f32", "threefold", "float32", True, _threefold(DEMO, "--quantization", "none")),
        Peer("llama-q4_1", "llama.cpp", "Q4_1, the file's", True, _llama("as shipped")),
        Peer("llama-q4_0", "llama.cpp", "Q4_0, lossy here", False, _llama("Q4_0")),
        Peer("llama-q8_0", "llama.cpp", "Q8_0", True, _llama("Q8_0")),
        Peer("llama-f32", "llama.cpp", "float32", True, _llama("F32")),
        Peer("vllm-f32", "vllm", "float32, eager", True, _vllm(DEMO, "float32", eager), demo),
        Peer("vllm-bf16", "vllm", "bfloat16, eager", True, _vllm(DEMO, "bfloat16", eager), demo),
        Peer("vllm-f32-compiled", "vllm", "float32, compiled", True, _vllm(DEMO, "float32"), demo, timeout_s=400),
        Peer("vllm-bf16-compiled", "vllm", "bfloat16, compiled", True, _vllm(DEMO, "bfloat16"), demo, timeout_s=400),
        Peer("transformers-f32", "transformers", "float32", True, _transformers("float32"), kind="library"),
        Peer("transformers-bf16", "transformers", "bfloat16", True, _transformers("bfloat16"), kind="library"),
        Peer("threefold-shape", "threefold", "bfloat16", True, _threefold(SHAPE, *dummy), model=SHAPE),
        Peer("threefold-shape-int8", "threefold", "int8", True, _threefold(SHAPE, *dummy, *int8), model=SHAPE),
        Peer("threefold-shape-f32", "threefold", "float32", True, _threefold(SHAPE, *dummy, "--dtype", "float32"),
             model=SHAPE),
        Peer("vllm-shape-f32", "vllm", "float32, eager", True, _vllm(SHAPE, "float32", eager, *dummy), shape,
             model=SHAPE),
        Peer("vllm-shape-bf16", "vllm", "bfloat16, eager", True, _vllm(SHAPE, "bfloat16", eager, *dummy), shape,
             model=SHAPE),
    ]
