"""Compiles entry points of the kernels to machine code without running them, for the processor that numba is told:
`python -m tests.worker.compile_kernels NAME...` with their signatures on stdin."""
from __future__ import annotations

import importlib
import json
import pickle
import sys
from pathlib import Path
from typing import Any

from numba.core.caching import NullCache
from numba.core.dispatcher import Dispatcher

from worker.jit import features

WORKER = Path(features.__file__).parents[1]
FILES = [*sorted(WORKER.glob("jit/*.py")), *sorted(WORKER.glob("sampling/jit_*.py"))]


def entries() -> dict[str, Any]:
    """All that Python calls, by name."""
    found = {}
    for path in FILES:
        if path.stem != "__init__":
            name = ".".join(path.with_suffix("").relative_to(WORKER.parent).parts)
            for value in vars(importlib.import_module(name)).values():
                if isinstance(value, Dispatcher) and value.py_func.__module__ == name and not isinstance(
                        value._cache, NullCache):
                    found[value.py_func.__name__] = value
    return found


def main() -> None:
    signatures = pickle.load(sys.stdin.buffer)
    kernels = entries()
    for name in sys.argv[1:]:
        for signature in signatures[name]:
            kernels[name].compile(signature)
    assembly = "".join(kernels["penalise_rows"].inspect_asm().values())
    print(json.dumps(dict(processor=features.describe(), registers=[
        name for name in ("xmm", "ymm", "zmm") if f"%{name}" in assembly])))


if __name__ == "__main__":
    main()
