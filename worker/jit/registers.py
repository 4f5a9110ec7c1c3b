"""How many sums are in registers at once, and two fences for the compiler, which otherwise computes too many."""
from __future__ import annotations

from typing import Any

from llvmlite import ir

from worker.jit import features

_FEW = 6                                        # vectors of sixteen floats in three quarters of sixteen AVX2 registers


def passes(rows: int, vectors: int, has_many: bool | None = None) -> list[tuple[range, range]]:
    """(rows, vectors) of each pass over `rows` rows of `vectors` vectors of sums: as many as registers hold. has_many:
    32 registers of sixteen floats, as AVX-512 has; None: what this processor has."""
    if has_many is None:
        has_many = "avx512f" in features.cpu_features()
    at_once, columns = rows, vectors
    if not has_many:
        at_once //= -(-rows // _FEW)
        while columns % 2 == 0 and columns * at_once > _FEW:
            columns //= 2
    return [(range(first, first + at_once), range(column, column + columns))
            for column in range(0, vectors, columns) for first in range(0, rows, at_once)]


def keep(b: Any, sums: list[list[Any]]) -> list[list[Any]]:
    """The same vectors, in registers: computed up to here before what follows is begun; so is what touches memory."""
    flat = [value for row in sums for value in row]
    kinds = [value.type for value in flat]
    names = ",".join(["=x"] * len(flat) + [str(i) for i in range(len(flat))] + ["~{memory}"])
    result = ir.LiteralStructType(kinds) if len(flat) > 1 else kinds[0]
    kept = b.asm(ir.FunctionType(result, kinds), "", names, flat, side_effect=True)
    values = iter([b.extract_value(kept, i) for i in range(len(flat))] if len(flat) > 1 else [kept])
    return [[next(values) for _ in row] for row in sums]


def opaque(b: Any, address: Any) -> Any:
    """A pointer of which the compiler does not know what it points at: what is stored there is read back."""
    return b.asm(ir.FunctionType(address.type, [address.type]), "", "=r,0", [address], side_effect=True)
