"""What this processor and this installation offer to the kernels, and where compiled code is kept.

Decided once per process. Does not know any kernel: a kernel asks `dot_form()` or nothing at all, because LLVM splits a
vector of sixteen floats into whatever registers there are.
"""
from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import platform
from pathlib import Path

# How four products of bytes are summed into an int32 lane: AVX-512 VNNI has one instruction, AVX2 three, and the
# generic form is what LLVM makes of shuffles and multiplications (NEON, SSE).
DOT_FORMS = ("vnni512", "avx2", "generic")
CACHE_ROOT = os.path.join("~", ".cache", "threefold", "jit")


def missing() -> str | None:
    """None if kernels can be compiled here, else why not, as one line for a log."""
    for name in ("numba", "llvmlite"):
        if importlib.util.find_spec(name) is None:
            return f"the package {name} is not installed (python launch.py setup)"
    if os.name != "posix":
        return f"the thread team needs a POSIX system, this is {os.name}"
    return None


@functools.cache
def cpu_features() -> frozenset[str]:
    """LLVM's names of what the processor can do: avx2, avx512vnni, avx512bf16, neon, ..."""
    import llvmlite.binding as llvm
    return frozenset(name for name, has in llvm.get_host_cpu_features().items() if has)


@functools.cache
def dot_form() -> str:
    """The best of DOT_FORMS here."""
    features = cpu_features()
    if {"avx512vnni", "avx512f", "avx512bw", "avx512vl"} <= features:
        return "vnni512"
    return "avx2" if "avx2" in features else "generic"


def describe() -> str:
    """One line for the log: what the kernels are compiled for."""
    import llvmlite.binding as llvm
    known = ("avx2", "avx512f", "avx512vnni", "avx512bf16", "neon", "dotprod")
    has = [name for name in known if name in cpu_features()]
    return f"{llvm.get_host_cpu_name()} ({platform.machine()}: {', '.join(has) or 'no vector extension known'}), " \
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
