"""What this processor and this installation offer to the kernels, and where compiled code is kept.

Decided once per process; only `give_up` changes it. Does not know any kernel: a kernel asks `dot_form()` or nothing at
all, because LLVM splits a vector of sixteen floats into whatever registers there are.
"""
from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import platform
import tempfile
from pathlib import Path

# How four products of bytes are summed into an int32 lane: AVX-512 VNNI has one instruction, AVX2 three, and the
# generic form is what LLVM makes of shuffles and multiplications (NEON, SSE).
DOT_FORMS = ("vnni512", "avx2", "generic")
CACHE_ROOT = os.path.join("~", ".cache", "threefold", "jit")

_failure: str | None = None                     # why compiling failed


def give_up(reason: str) -> None:
    """The compiler failed: this process compiles nothing from now on. The next one tries again."""
    global _failure
    _failure = reason


def missing() -> str | None:
    """None if kernels can be compiled here, else why not, as one line for a log."""
    if _failure is not None:
        return _failure
    for name in ("numba", "llvmlite"):
        if importlib.util.find_spec(name) is None:
            return f"the package {name} is not installed (python launch.py setup)"
    if os.name != "posix":
        return f"the thread team needs a POSIX system, this is {os.name}"
    return None


@functools.cache
def cpu_name() -> str:
    """LLVM's name of the processor that code is generated for: this one, unless NUMBA_CPU_NAME names another."""
    import llvmlite.binding as llvm
    from numba.core import config
    return config.CPU_NAME or llvm.get_host_cpu_name()  # type: ignore[attr-defined]


@functools.cache
def cpu_features() -> frozenset[str]:
    """LLVM's names of what that processor can do: avx2, avx512vnni, avx512bf16, neon, ... With NUMBA_CPU_FEATURES those
    it lists; what else the processor's name implies is used by LLVM alone."""
    from numba.core import config
    from numba.core.codegen import get_host_cpu_features
    listed = config.CPU_FEATURES  # type: ignore[attr-defined]
    names = (get_host_cpu_features() if listed is None else listed).split(",")
    return frozenset(name[1:] for name in names if name.startswith("+")) - {
        name[1:] for name in names if name.startswith("-")}


@functools.cache
def dot_form() -> str:
    """The best of DOT_FORMS here."""
    features = cpu_features()
    if {"avx512vnni", "avx512f", "avx512bw", "avx512vl"} <= features:
        return "vnni512"
    return "avx2" if "avx2" in features else "generic"


def describe() -> str:
    """One line for the log: what the kernels are compiled for."""
    known = ("avx2", "avx512f", "avx512vnni", "avx512bf16", "neon", "dotprod")
    has = [name for name in known if name in cpu_features()]
    return f"{cpu_name()} ({platform.machine()}: {', '.join(has) or 'no vector extension known'}), " \
           f"int8 products by {dot_form()}"


@functools.cache
def cache_folder() -> Path:
    """Where compiled code lies. numba notices a change of the file that holds a function, not of the files it calls, so
    the folder's name is a digest of all files with compiled functions; it keys by processor itself."""
    digest = hashlib.blake2b(digest_size=8)
    here = Path(__file__).parent
    for path in [*sorted(here.glob("*.py")), *sorted((here.parent / "sampling").glob("jit_*.py"))]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return Path(CACHE_ROOT).expanduser() / digest.hexdigest()


@functools.cache
def is_cache_writable() -> bool:
    """Whether compiled code can be kept. If not, it is compiled in every process that uses it."""
    try:
        cache_folder().mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=cache_folder()).close()
    except OSError:
        return False
    return True


def drop_stale_caches(keep: int = 3) -> None:
    """Remove the folders of older versions, the least recently used first; the newest `keep` stay."""
    import shutil
    try:
        folders = sorted((path for path in cache_folder().parent.iterdir() if path.is_dir()),
                         key=lambda path: path.stat().st_mtime, reverse=True)
    except OSError:
        return
    for path in folders[keep:]:
        shutil.rmtree(path, ignore_errors=True)
