"""What threads say to each other: ordered loads, stores, additions and exchanges of 64-bit words, and a pause."""
from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from worker.jit import features
from worker.jit.vector import I32, I64, call, constant, make, pointer

_ADDRESS = types.intp


def _compare_and_swap(builder: Any, address: Any, expected: Any, value: Any) -> Any:
    pair = builder.cmpxchg(pointer(builder, address, I64), expected, value, "seq_cst", "seq_cst")
    return builder.extract_value(pair, 0)


def _ordered_load(builder: Any, address: Any) -> Any:
    return builder.load_atomic(pointer(builder, address, I64), "seq_cst", 8)


def _ordered_store(builder: Any, address: Any, value: Any) -> None:
    builder.store_atomic(value, pointer(builder, address, I64), "seq_cst", 8)


def _store_after_others(builder: Any, address: Any, value: Any) -> None:
    builder.store_atomic(value, pointer(builder, address, I64), "release", 8)


def _pause(builder: Any) -> None:
    """Tell the core that this is a waiting loop."""
    if "sse2" in features.cpu_features():
        call(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])
    elif "neon" in features.cpu_features():
        call(builder, "llvm.aarch64.hint", ir.VoidType(), [constant(I32, 1)])


atomic_add = make(types.int64, (_ADDRESS, types.int64), lambda b, address, value: b.atomic_rmw(
    "add", pointer(b, address, I64), value, "seq_cst"))
compare_and_swap = make(types.int64, (_ADDRESS, types.int64, types.int64), _compare_and_swap)
atomic_load = make(types.int64, (_ADDRESS,), _ordered_load)
atomic_store = make(types.void, (_ADDRESS, types.int64), _ordered_store)
# Seen no earlier than what was stored before it; loads after it may overtake it, which saves the wait for the line.
set_ordered = make(types.void, (_ADDRESS, types.int64), _store_after_others)
pause = make(types.void, (), _pause)
